"""Draws panels of the chart's dashboard from a real Prometheus while rooms move between two real agents in pods.

    make dashboard    # PYTHONPATH=e2e:tests/agent python e2e/draw_dashboard.py docs/images/dashboard.png

Called by hand, to make the picture of docs/how-to/monitoring.md. Needs root, and measures nothing: agents, engines and
control plane share the processors.
"""

from __future__ import annotations

import argparse
import datetime as dt
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from controlplane.cluster import ControlPlane
from deployments import install_definition
from monitored import Scene, scene
from prometheus_server import Prometheus, panels, plain

mpl.use("Agg")
from matplotlib import dates
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, FuncFormatter, PercentFormatter

# The rates cover 10 s.
STEP_S = 1.0
WARM_S = 10.0
# The largest prompt takes half of the engines' pages.
TOKENS_MAX = 700
# One room of this many fails.
FAILS_EVERY = 12
COLUMNS = 4
# Each is 0 or empty here, or says the same as a panel that is drawn.
OMITTED = {"Claims by reason of their way", "Digests", "Barred peers and refused keys", "Agents", "Absence", "Refusals"}
FORMATS = {
    "s": EngFormatter("s", sep=" "),
    "Bps": EngFormatter("B/s", sep=" "),
    "ops": FuncFormatter(lambda value, _: f"{value:g}/s"),
    "none": FuncFormatter(lambda value, _: f"{value:g}"),
    "percentunit": PercentFormatter(1),
}
# The smallest upper ends of axes, so that a graph at 0 is readable.
LEAST_TOP = {"ops": 1.0, "none": 1.0, "percentunit": 0.02}


def move(made: Scene, seconds: float) -> None:
    """Move rooms of random lengths for some time; a few fail."""
    lengths = random.Random(1)
    end_s = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end_s:
        count += 1
        # In the middle of the time the prompts are short, so that graphs have a shape.
        quiet = seconds / 3 < end_s - time.monotonic() < 2 * seconds / 3
        made.moves(lengths.randint(16, TOKENS_MAX // (8 if quiet else 1)))
        if count % FAILS_EVERY == 0:
            made.fails()


def legend(template: str, labels: dict[str, str]) -> str:
    """Return a series' name as Grafana makes it."""
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def draw(axes: Any, panel: dict[str, Any], prometheus: Prometheus, start_s: float, end_s: float) -> None:
    """Draw one panel."""
    for target in panel["targets"]:
        for series in prometheus.query_range(plain(target["expr"]), start_s, end_s, STEP_S):
            times = [dt.datetime.fromtimestamp(at, dt.UTC) for at, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            axes.plot(times, values, linewidth=1, label=legend(target["legendFormat"], series["metric"]))
    axes.set_title(panel["title"], fontsize=9)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.set_ylim(0, max(axes.get_ylim()[1], LEAST_TOP.get(unit, 0)))
    axes.yaxis.set_major_formatter(FORMATS[unit])
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
    axes.xaxis.set_major_locator(dates.AutoDateLocator(minticks=2, maxticks=5))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=6, loc="best")


def chosen() -> list[dict[str, Any]]:
    """Return the graphs to draw."""
    found = [panel for panel in panels() if panel["type"] == "timeseries"]
    vllm = {panel["title"] for panel in found if any("vllm:" in target["expr"] for target in panel["targets"])}
    operator = {panel["title"] for panel in found if any("_operator_" in target["expr"] for target in panel["targets"])}
    return [panel for panel in found if panel["title"] not in OMITTED | vllm | operator]


def main() -> None:
    """Run the scene and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dashboard-") as name, ControlPlane(Path(name)) as plane:
        install_definition(plane)
        with scene(plane, Path(name)) as made:
            move(made, WARM_S)
            start_s = time.time()
            move(made, options.seconds)
            drawn = chosen()
            lines = -(-len(drawn) // COLUMNS)
            figure, grid = plt.subplots(lines, COLUMNS, figsize=(3.4 * COLUMNS, 2.1 * lines), squeeze=False)
            for axes, panel in zip(grid.flat, drawn, strict=False):
                draw(axes, panel, made.prometheus, start_s, time.time())
            for axes in list(grid.flat)[len(drawn) :]:
                axes.set_axis_off()
            figure.tight_layout()
            figure.savefig(options.picture, dpi=90)
    sys.stdout.write(f"{options.picture}: {', '.join(panel['title'] for panel in drawn)}\n")


if __name__ == "__main__":
    main()
