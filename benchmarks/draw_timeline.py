"""Draws a timeline of `longshore bench transfer --trace`: the gather, write and scatter of each slab, one panel a mode.

    python benchmarks/draw_timeline.py TRACE PICTURE --ways "staged 1→1,direct 1→1"

Called by hand, to make pictures for documents. Perfetto shows the same trace with more details.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

# Stage -> (offset below the slab's line, color).
STAGES = {"gather": (-0.28, "#4c78a8"), "wire": (0.0, "#f58518"), "scatter": (0.28, "#54a24b")}
BAR_HEIGHT = 0.26


def spans_of(trace: dict[str, Any], way: str) -> list[dict[str, Any]]:
    """Return the spans of one mode. Raises SystemExit if the trace has none."""
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = [event for event in events if event["ph"] == "X" and names[event["pid"]].startswith(f"{way}:")]
    if not found:
        raise SystemExit(
            f"the trace has no {way!r}: choose from {sorted({name.split(':')[0] for name in names.values()})}"
        )
    return found


def draw(axes: Any, way: str, spans: list[dict[str, Any]]) -> None:
    """Draw one mode: one line for each slab, in the order of their start."""
    begin_us = min(span["ts"] for span in spans)
    slabs: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span["ts"]):
        stage, slab = span["name"].split(" ", 1)
        below, color = STAGES[stage]
        line = slabs.setdefault(slab, len(slabs))
        axes.barh(line + below, span["dur"], left=span["ts"] - begin_us, height=BAR_HEIGHT, color=color)
    axes.set(title=way, xlabel="microseconds", yticks=range(len(slabs)), yticklabels=list(slabs))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--ways", default="staged 1→1,direct 1→1", help="separated by commas")
    options = parser.parse_args()
    trace = json.loads(options.trace.read_text(encoding="utf-8"))
    ways = options.ways.split(",")
    figure, axes = plt.subplots(1, len(ways), figsize=(7.5 * len(ways), 3.6), squeeze=False)
    for part, way in zip(axes[0], ways, strict=True):
        draw(part, way, spans_of(trace, way))
    axes[0][0].legend(handles=[Patch(color=color, label=stage) for stage, (_, color) in STAGES.items()], fontsize=8)
    figure.tight_layout()
    figure.savefig(options.picture, dpi=100)


if __name__ == "__main__":
    main()
