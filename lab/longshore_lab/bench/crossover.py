"""Finds the run lengths and request sizes from which pages are faster written in place than staged.

Moves requests between equal layouts through real agents, with pages of growing size: once gathered, sent and scattered,
and once run by run (a page is one run; slices are shorter runs). A time counts only if all bytes were compared and are
right. `--write` puts the numbers into the file from which agents choose the way: that of `LONGSHORE_CROSSOVER_FILE`, or the
shipped one. Measure on an idle machine of the kind that will serve.

On GPUs (`--devices`) no transport writes pages in place. There the other way is `direct`, between engines of one agent, and
`--write` is refused, because agents have no choice there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from longshore_cli.aligned import aligned
from longshore_cli.arguments import BACKENDS, new_file, whole, wholes
from longshore_cli.local_agents import LocalAgent
from longshore_client import Half
from longshore_lab import devices
from longshore_lab.bench import report
from longshore_lab.bench.errors import BenchError
from longshore_lab.bench.scene import UNKNOWN_WIRE, Course, Scene, Stage, check_direct, open_stage
from longshore_lab.devices import HOST, Placement
from longshore_wire.crossover import WHOLE_PAGES, Crossover, Measured, Row, read, write
from longshore_wire.errors import ConfigError
from longshore_wire.layout import PAGE_SIZE_MAX, ModelShape

KIB = 1 << 10
# One head of 512 bytes in 16 layers: a page of one token is the shortest run, and K and V of all layers 32 runs.
MODEL = ModelShape.kv(layers=16, kv_heads=1, head_dim=256, element_bytes=2)
_TOKEN_RUN_BYTES = MODEL.head_bytes
_PLANES = 2 * MODEL.layers
STAGED = Course("staged", "Staged", 1, 1)
IN_PLACE = Course("in place", "Contiguous", 1, 1)
DIRECT = Course("direct", "Direct", 1, 1)


@dataclass(frozen=True)
class Point:
    """One length of runs and number of bytes: seconds of every repetition, both ways; on GPUs `in_place_s` are direct's."""

    run_bytes: int
    total_bytes: int
    staged_s: list[float]
    in_place_s: list[float]

    @property
    def fastest(self) -> tuple[float, float]:
        """Seconds of (staged, in place) of the fastest repetition, since other load on the machine only adds time."""
        return min(self.staged_s), min(self.in_place_s)

    @property
    def ratio(self) -> float:
        """Time in place / time staged; below 1, in place is faster."""
        staged_s, in_place_s = self.fastest
        return in_place_s / staged_s


@dataclass(frozen=True)
class Report:
    """A whole run."""

    backend: str
    wire: str
    repeats: int
    points: list[Point]
    placement: Placement = HOST

    @property
    def other(self) -> str:
        """The way that is compared with staged."""
        return DIRECT.name if self.placement.on_gpus else IN_PLACE.name

    def entry(self) -> Measured:
        """Return the table's part of this backend and wire, with three digits a number."""
        rows = []
        for run_bytes in sorted({point.run_bytes for point in self.points}):
            mine = [point for point in self.points if point.run_bytes == run_bytes]
            staged, in_place = zip(*(point.fastest for point in mine), strict=True)
            rows.append(Row(run_bytes, tuple(point.total_bytes for point in mine), _short(staged), _short(in_place)))
        return Measured(self.backend, self.wire, tuple(rows), report.machine(), time.strftime("%Y-%m-%d"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    runs = [512, 2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 1024 * KIB]
    totals = [64, 256, 1024, 4096, 16384, 65536]
    parser.add_argument(
        "--runs", type=wholes, default=runs, help="bytes of a run, powers of two from 512 on, by commas"
    )
    parser.add_argument("--totals", type=wholes, default=totals, help="KiB of a request, by commas")
    parser.add_argument("--repeats", type=whole(1), default=5, help="repetitions of each point and way (5)")
    parser.add_argument("--backend", choices=BACKENDS, default="NIXL", help="what moves the bytes (NIXL)")
    devices.add_argument(parser)
    parser.add_argument("--write", type=new_file, help="add the numbers to this crossover file")
    parser.add_argument("--json", type=new_file, help="write all numbers to this file")
    parser.add_argument("--plot", type=new_file, help="draw the ratios into this PNG file")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the requested files; return 0. Raises BenchError."""
    if arguments.devices and arguments.write:
        raise BenchError(
            "--write with --devices: agents choose by that file between staged and in place, and on GPUs nothing moves in place: leave --write out"
        )
    before = _table_at(arguments.write)
    found = measure(arguments, lambda text: sys.stderr.write(f"{text}\n"))
    print(table(found))
    if arguments.json:
        arguments.json.write_text(as_json(found))
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.write:
        arguments.write.write_bytes(write(before.put(found.entry())))
    return 0


def measure(arguments: argparse.Namespace, say: Callable[[str], object]) -> Report:
    """Measure all points; report progress by `say`. Raises BenchError."""
    _check(arguments)
    placement = devices.check(arguments.devices, [arguments.backend])
    settings = {"backend": arguments.backend, "deployment": "bench/crossover", "log_level": "warning"}
    points: list[Point] = []
    wires: set[str] = set()
    with tempfile.TemporaryDirectory() as directory, open_stage(settings, Path(directory)) as stage:
        prefill = stage.agent("prefill")
        decodes = {
            course: stage.agent(f"decode-{number}", force_way=course.way, ring_bytes=course.ring)
            for number, course in enumerate((STAGED,) if placement.on_gpus else (STAGED, IN_PLACE))
        }
        if placement.on_gpus:
            decodes[DIRECT] = prefill
        for agent in (prefill, *decodes.values()):
            agent.wait_ready()
        for run_bytes in arguments.runs:
            totals = [total * KIB for total in arguments.totals if total * KIB >= _PLANES * run_bytes]
            if not totals:
                continue
            say(f"runs of {run_bytes} bytes")
            with ExitStack() as stack:
                scenes = _scenes(stage.beside(stack), prefill, decodes, run_bytes, totals[-1], placement)
                points += [_point(scenes, run_bytes, total, arguments.repeats) for total in totals]
                check_direct(scenes)
                # Engines of one agent use no transport's wire.
                wires |= {scene.wire() for scene in scenes if scene.course.way != DIRECT.way}
    if len(wires) != 1 or UNKNOWN_WIRE in wires:
        raise BenchError(
            f"the wire was found to be {', '.join(sorted(wires)) or UNKNOWN_WIRE}: one table is of one known wire"
        )
    return Report(arguments.backend, wires.pop(), arguments.repeats, points, placement)


def _check(arguments: argparse.Namespace) -> None:
    """Raise BenchError for arguments that cannot be measured."""
    for run_bytes in arguments.runs:
        tokens, rest = divmod(run_bytes, _TOKEN_RUN_BYTES)
        if rest or not 1 <= tokens <= PAGE_SIZE_MAX or run_bytes & (run_bytes - 1):
            raise BenchError(
                f"--runs names {run_bytes}: give powers of two from {_TOKEN_RUN_BYTES} to {_TOKEN_RUN_BYTES * PAGE_SIZE_MAX}"
            )
    if not any(total * KIB >= _PLANES * run_bytes for total in arguments.totals for run_bytes in arguments.runs):
        raise BenchError(f"--totals: a request has at least {_PLANES} runs: give more than {max(arguments.totals)} KiB")
    bad = [total for total in arguments.totals if total & (total - 1) or total * KIB < _PLANES * _TOKEN_RUN_BYTES]
    if bad:
        raise BenchError(f"--totals names {bad[0]}: give powers of two from {_PLANES * _TOKEN_RUN_BYTES // KIB} on")


def _scenes(
    stage: Stage,
    prefill: LocalAgent,
    decodes: dict[Course, LocalAgent],
    run_bytes: int,
    bytes_max: int,
    placement: Placement,
) -> list[Scene]:
    """Start engines whose pages are one run each, with a sequence of `bytes_max` at prefill."""
    page_size = run_bytes // _TOKEN_RUN_BYTES
    tokens = bytes_max // (_PLANES * _TOKEN_RUN_BYTES)
    near = stage.pages(MODEL, 1, page_size, tokens, 200, placement.prefill)
    far = stage.pages(MODEL, 1, page_size, tokens, 100, placement.decode)
    near[0].fill(tokens)
    source = stage.engine(f"prefill-{run_bytes}", prefill, near, Half.SOURCE)
    return [
        stage.scene(course, source, stage.engine(f"decode-{number}-{run_bytes}", agent, far, Half.TARGET))
        for number, (course, agent) in enumerate(decodes.items())
    ]


def _point(scenes: Sequence[Scene], run_bytes: int, total_bytes: int, repeats: int) -> Point:
    """Measure both ways in turns; drop the first repetition."""
    tokens = total_bytes // (_PLANES * _TOKEN_RUN_BYTES)
    found: dict[str, list[float]] = {scene.course.name: [] for scene in scenes}
    for repetition in range(repeats + 1):
        for scene in scenes:
            seconds = scene.move(tokens).seconds
            if repetition:
                found[scene.course.name].append(seconds)
    staged_s, other_s = found.values()
    return Point(run_bytes, total_bytes, staged_s, other_s)


def table(found: Report) -> str:
    """Return an aligned table with one line a point: milliseconds of both ways and their ratio."""
    other = found.other
    rows = [["run B", "runs", "total KiB", "staged ms", f"{other} ms", f"{other}/staged", "cheaper"]]
    for point in found.points:
        staged_s, in_place_s = point.fastest
        rows.append(
            [
                str(point.run_bytes),
                str(point.total_bytes // point.run_bytes),
                str(point.total_bytes // KIB),
                f"{staged_s * 1e3:.2f}",
                f"{in_place_s * 1e3:.2f}",
                f"{point.ratio:.2f}",
                other if point.ratio < 1 else "staged",
            ]
        )
    head = [
        report.machine(),
        f"{found.backend} over {found.wire}; fastest of {found.repeats}; every byte compared",
        *([devices.describe(found.placement)] if found.placement.on_gpus else []),
        "",
    ]
    return "\n".join([*head, *aligned(rows)])


def as_json(found: Report) -> str:
    """Return every number of the run."""
    points = [
        {
            "run_bytes": point.run_bytes,
            "total_bytes": point.total_bytes,
            "staged_s": point.staged_s,
            f"{found.other.replace(' ', '_')}_s": point.in_place_s,
            "ratio": point.ratio,
        }
        for point in found.points
    ]
    whole = {
        "machine": report.machine(),
        "backend": found.backend,
        "wire": found.wire,
        "repeats": found.repeats,
        "bytes_equal": True,
        "points": points,
    }
    if found.placement.on_gpus:
        whole["devices"] = found.placement._asdict()
    return json.dumps(whole, indent=2) + "\n"


def plot(found: Report, path: Path) -> None:
    """Draw the ratios over the bytes, one line for each run length. Below 1, in place is faster."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=120)
    runs = sorted({point.run_bytes for point in found.points})
    for index, run_bytes in enumerate(runs):
        mine = [point for point in found.points if point.run_bytes == run_bytes]
        label = f"runs of {run_bytes} B" if run_bytes < KIB else f"runs of {run_bytes // KIB} KiB"
        color = plt.get_cmap("viridis")(index / max(len(runs) - 1, 1) * 0.9)
        axes.plot(
            [point.total_bytes / KIB for point in mine],
            [point.ratio for point in mine],
            marker="o",
            color=color,
            label=label,
        )
    axes.axhline(1.0, color="black", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("KiB of one request")
    axes.set_ylabel(f"time {found.other} / time staged")
    written = "copied directly" if found.placement.on_gpus else "written in place"
    axes.set_title(f"Below the line pages are better {written}: {found.backend} over {found.wire}")
    axes.grid(visible=True, which="both", color="0.9")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _table_at(path: Path | None) -> Crossover:
    """Return the table to update; an empty one if the file does not exist."""
    if path is None or not path.exists():
        return WHOLE_PAGES
    try:
        return read(path.read_bytes(), str(path))
    except ConfigError as error:
        raise BenchError(f"--write: {'; '.join(error.faults)}") from error


def _short(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.3g}") for value in values)
