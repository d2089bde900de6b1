"""Measures how long a request's KV takes when many requests move concurrently. Staged rooms between unequal layouts are
compared with the same bytes between equal layouts (whole pages in place) and slice by slice. On GPUs (`--devices`) staged
and direct are each compared with the same way between equal layouts.

Each time is that of a room through real agents between engines' pages in shared memory or on GPUs, from `send` to the
last byte in decode's pages. It counts only if all bytes of all rooms were compared and are right. The ways alternate;
percentiles cover all rooms of all repetitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from longshore_cli.aligned import aligned
from longshore_cli.arguments import BACKENDS, new_file, whole, wholes
from longshore_lab import devices
from longshore_lab.bench import report
from longshore_lab.bench.errors import BenchError
from longshore_lab.bench.results import MIB
from longshore_lab.bench.scene import Course, check_direct, open_scenes
from longshore_lab.bench.transfer import MODEL
from longshore_lab.devices import HOST, Placement

# Dropped runs: the first run of each way loads code and connects, the first of each count touches memory.
_WARM_UPS = 1
STAGED = Course("staged 2→1", "Staged", 2, 1)
EQUAL = Course("contiguous 1→1", "Contiguous", 1, 1)
SLICES = Course("slices 2→1", "Slices", 2, 1)
STAGED_EQUAL = Course("staged 1→1", "Staged", 1, 1)
DIRECT = Course("direct 2→1", "Direct", 2, 1)
DIRECT_EQUAL = Course("direct 1→1", "Direct", 1, 1)
ON_HOST = (STAGED, EQUAL, SLICES)
ON_GPUS = (STAGED, STAGED_EQUAL, DIRECT, DIRECT_EQUAL)
# Divisors of the table's last columns on GPUs: the same way between equal layouts.
_BESIDE = {
    STAGED.name: STAGED_EQUAL.name,
    STAGED_EQUAL.name: STAGED_EQUAL.name,
    DIRECT.name: DIRECT_EQUAL.name,
    DIRECT_EQUAL.name: DIRECT_EQUAL.name,
}


@dataclass(frozen=True)
class Load:
    """One way with one number of rooms at once: seconds of every room of all runs, and of each whole run."""

    course: str
    rooms: int
    room_bytes: int
    seconds: list[float]
    whole_s: list[float]

    def percentile(self, percent: int) -> float:
        """Return this percentile of the rooms' times in seconds."""
        return (
            statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]
            if self.rooms > 1
            else (statistics.median(self.seconds))
        )

    @property
    def gb_per_s(self) -> float:
        """All rooms' bytes over the median time of a whole run."""
        return self.rooms * self.room_bytes / statistics.median(self.whole_s) / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    parser.add_argument("--rooms", type=wholes, default=[1, 8, 32, 128, 512], help="rooms at once, by commas")
    parser.add_argument("--tokens", type=whole(1), default=16, help="tokens of one request, 128 KiB each (16)")
    parser.add_argument("--page-size", type=whole(1), default=16, help="tokens of a page on both sides (16)")
    parser.add_argument("--repeats", type=whole(1), default=3, help="repetitions of each way and number (3)")
    parser.add_argument("--backend", choices=BACKENDS, default="NIXL", help="what moves the bytes (NIXL)")
    parser.add_argument(
        "--slices-limit", type=whole(0), default=512, help="rooms above which slices are left out (512)"
    )
    devices.add_argument(parser)
    parser.add_argument("--json", type=new_file, help="write all numbers to this file")
    parser.add_argument("--plot", type=new_file, help="draw the percentiles into this PNG file")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the requested files; return 0. Raises BenchError."""
    if arguments.tokens % arguments.page_size:
        raise BenchError(f"--tokens is {arguments.tokens}: give a multiple of the page size, {arguments.page_size}")
    placement = devices.check(arguments.devices, [arguments.backend])
    loads, wire = measure(arguments, placement)
    over = f"{arguments.backend} over {wire}"
    print(table(loads, over))
    if placement.on_gpus:
        print(f"\n{devices.describe(placement)}; left out there: {devices.WAYS_LEFT_OUT}")
    if arguments.json:
        arguments.json.write_text(as_json(loads, arguments.backend, wire, placement))
    if arguments.plot:
        plot(loads, over, arguments.plot)
    return 0


def measure(arguments: argparse.Namespace, placement: Placement) -> tuple[list[Load], str]:
    """Measure all loads; return them and the wire. Reports progress on standard error. Raises BenchError."""
    room_bytes = arguments.tokens * 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_bytes
    settings = {"backend": arguments.backend, "deployment": "bench/rooms", "log_level": "warning"}
    tokens = max(arguments.rooms) * arguments.tokens
    found: dict[tuple[str, int], Load] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        open_scenes(
            ON_GPUS if placement.on_gpus else ON_HOST,
            MODEL,
            arguments.page_size,
            tokens,
            settings,
            Path(directory),
            placement,
        ) as scenes,
    ):
        for count in arguments.rooms:
            sys.stderr.write(f"{count} rooms at once\n")
            for repetition in range(arguments.repeats + _WARM_UPS):
                for scene in scenes:
                    if scene.course is SLICES and count > arguments.slices_limit:
                        continue
                    crowd = scene.move_many(count, arguments.tokens)
                    if repetition < _WARM_UPS:
                        continue
                    key = (scene.course.name, count)
                    load = found.setdefault(key, Load(scene.course.name, count, room_bytes, [], []))
                    load.seconds.extend(crowd.seconds)
                    load.whole_s.append(crowd.whole_s)
        wire = scenes[0].wire()
        check_direct(scenes)
    return list(found.values()), wire


def table(loads: list[Load], over: str) -> str:
    """Return aligned tables: milliseconds of a room, and the ratio to equal layouts."""
    rows = [["rooms", "way", "p50 ms", "p99 ms", "GB/s", "p50 / equal", "p99 / equal"]]
    known = {(load.course, load.rooms): load for load in loads}
    host = any(load.course == EQUAL.name for load in loads)
    for load in sorted(loads, key=lambda load: load.rooms):
        beside = known[EQUAL.name if host else _BESIDE[load.course], load.rooms]
        values = [load.percentile(50) * 1e3, load.percentile(99) * 1e3, load.gb_per_s]
        ratios = [load.percentile(percent) / beside.percentile(percent) for percent in (50, 99)]
        rows.append([str(load.rooms), load.course, *(f"{value:.2f}" for value in (*values, *ratios))])
    size = loads[0].room_bytes / MIB
    head = [report.machine(), f"{over}; {size:g} MiB a room; every byte compared", ""]
    return "\n".join([*head, *aligned(rows)])


def as_json(loads: list[Load], backend: str, wire: str, placement: Placement = HOST) -> str:
    """Return every number of the run."""
    lines = [
        {
            "way": load.course,
            "rooms": load.rooms,
            "room_bytes": load.room_bytes,
            "p50_s": load.percentile(50),
            "p99_s": load.percentile(99),
            "gb_per_s": load.gb_per_s,
            "whole_s": load.whole_s,
            "room_s": load.seconds,
        }
        for load in loads
    ]
    whole = {"machine": report.machine(), "backend": backend, "wire": wire, "bytes_equal": True, "loads": lines}
    if placement.on_gpus:
        whole |= {"devices": placement._asdict()}
    return json.dumps(whole, indent=2) + "\n"


def plot(loads: list[Load], over: str, path: Path) -> None:
    """Draw p50 and p99 over the number of rooms, both logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=120)
    for index, course in enumerate(dict.fromkeys(load.course for load in loads)):
        mine = [load for load in loads if load.course == course]
        rooms = [load.rooms for load in mine]
        for percent, style in ((50, "-"), (99, "--")):
            values = [load.percentile(percent) * 1e3 for load in mine]
            axes.plot(rooms, values, style, color=f"C{index}", marker="o", label=f"{course}, p{percent}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(sorted({load.rooms for load in loads}))
    axes.set_xlabel("rooms at once")
    axes.set_ylabel("ms from send to the last byte in decode's pages")
    axes.set_title(f"Requests of {loads[0].room_bytes / MIB:g} MiB at once, {over}")
    axes.grid(visible=True, which="major", color="0.88")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
