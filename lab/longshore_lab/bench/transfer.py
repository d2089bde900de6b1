"""Measures how fast one request's KV moves from prefill to decode by every way, and how fast the bare transport is.

Each time is that of a transfer through real agents between engines' pages in shared memory. It counts only if all bytes
were compared and are right. Repetitions alternate between the ways and the bare transport; the table shows medians.

Two lines bound a staged transfer. The bare path does the same gathers, writes and scatters with the same processes,
threads and slabs, and nothing else: the difference is the cost of the protocol's messages. The other bound is computed:
cores / (the transport's processor time for a gigabyte, plus that of two plain copies), each measured alone.

On GPUs (`--devices`) the ways are staged and direct, each also between equal layouts, compared with torch's plain copy
between the first GPUs of the two sides.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longshore_cli.arguments import BACKENDS, new_file, tp_pair, whole, wholes
from longshore_lab import devices
from longshore_lab.bench import report
from longshore_lab.bench.errors import BenchError
from longshore_lab.bench.rate import BarePath, TransportRate
from longshore_lab.bench.results import MIB, Report, Series, SizeResult
from longshore_lab.bench.scene import Course, Scene, check_direct, open_scenes
from longshore_lab.bench.timeline import Timeline
from longshore_lab.devices import Placement
from longshore_wire.layout import ModelShape

# The model of the request: 128 KiB a token, as a 32-layer model of 8 KV heads in bfloat16 has.
MODEL = ModelShape.kv(layers=32, kv_heads=8, head_dim=128, element_bytes=2)
_BATCHES = (100, 300, 1000)
_BATCH_PROBE_BYTES = 16 * MIB
_WAYS = ["staged", "direct", "contiguous", "slices"]
_WAYS_ON_GPUS = ["staged", "staged-equal", "direct", "direct-equal"]
_WITH_DIGESTS = ["staged-digest", "direct-digest"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    parser.add_argument("--sizes", type=wholes, default=[1, 4, 16, 64, 256, 1024], help="MiB, separated by commas")
    parser.add_argument(
        "--pair",
        type=lambda text: tp_pair(text, MODEL.kv_heads),
        default=(2, 1),
        help="prefill TP:decode TP of staged, direct and slices (2:1)",
    )
    parser.add_argument(
        "--ways",
        type=lambda text: text.split(","),
        help="any of staged, direct (engines of one agent), contiguous, slices, staged-equal and direct-equal (equal layouts), "
        "staged-digest and direct-digest (digests are compared); "
        f"default: {','.join(_WAYS)}; on GPUs: {','.join(_WAYS_ON_GPUS)}",
    )
    parser.add_argument("--repeats", type=whole(1), default=5, help="repetitions of each size and way (5)")
    parser.add_argument("--page-size", type=whole(1), default=64, help="tokens of a page on both sides (64)")
    parser.add_argument("--backend", choices=BACKENDS, default="NIXL", help="what moves the bytes (NIXL)")
    devices.add_argument(parser)
    parser.add_argument(
        "--slices-limit", type=whole(0), default=1024, help="MiB above which slices are left out (1024)"
    )
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="a setting of all agents"
    )
    parser.add_argument("--json", type=new_file, help="write all numbers to this file")
    parser.add_argument("--plot", type=new_file, help="draw the rates into this PNG file")
    parser.add_argument(
        "--trace",
        type=new_file,
        help="after all samples, write a timeline of one transfer of the largest size by each way to this file, for Perfetto",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the requested files; return 0."""
    found = measure(arguments, lambda text: sys.stderr.write(f"{text}\n"))
    print(report.table(found))
    if arguments.json:
        arguments.json.write_text(report.as_json(found))
    if arguments.plot:
        report.plot(found, arguments.plot)
    return 0


def measure(arguments: argparse.Namespace, say: Callable[[str], object]) -> Report:
    """Measure all sizes; report progress by `say`. Raises BenchError."""
    placement = devices.check(arguments.devices, [arguments.backend])
    courses = _courses(arguments.ways, placement, *arguments.pair)
    if placement.on_gpus:
        return _measure_on_gpus(arguments, placement, courses, say)
    sizes = sorted({size * MIB for size in arguments.sizes})
    token_bytes = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_bytes
    slice_bytes = MODEL.kv_heads // max(arguments.pair) * MODEL.head_bytes
    with TransportRate(arguments.backend, sizes[-1]) as rate, tempfile.TemporaryDirectory() as directory:
        wire, batch = _choose_batch(rate, min(sizes[-1], _BATCH_PROBE_BYTES), slice_bytes)
        settings = _settings(arguments) | {"slices_batch": str(batch)} | dict(arguments.set)
        say(f"wire {wire}, slices in batches of {batch}; starting {1 + len(courses)} agents")
        tokens = sizes[-1] // token_bytes
        path = BarePath(arguments.backend, MODEL, arguments.page_size, tokens, *arguments.pair)
        with path, open_scenes(courses, MODEL, arguments.page_size, tokens, settings, Path(directory)) as scenes:
            results = []
            for length_bytes in sizes:
                say(f"{length_bytes // MIB} MiB")
                slices = length_bytes <= arguments.slices_limit * MIB
                sample = _Sampler(
                    rate, path, scenes, length_bytes, length_bytes // token_bytes, slice_bytes, batch, slices
                )
                results.append(sample.run(arguments.repeats))
            if arguments.trace:
                _trace(scenes, tokens, arguments.trace)
    return Report(courses, results, arguments.backend, wire, slice_bytes, batch, arguments.page_size, arguments.repeats)


def _measure_on_gpus(
    arguments: argparse.Namespace, placement: Placement, courses: list[Course], say: Callable[[str], object]
) -> Report:
    """Measure with pages on GPUs, compared with a plain copy only."""
    # Imported here because it loads torch, which a run in host memory does not need.
    from longshore_lab.engine.device_memory import PlainCopy

    sizes = sorted({size * MIB for size in arguments.sizes})
    token_bytes = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_bytes
    tokens = sizes[-1] // token_bytes
    settings = _settings(arguments) | dict(arguments.set)
    say(f"{devices.describe(placement)}; starting agents")
    with (
        tempfile.TemporaryDirectory() as directory,
        open_scenes(courses, MODEL, arguments.page_size, tokens, settings, Path(directory), placement) as scenes,
    ):
        copy = PlainCopy(sizes[-1], placement.prefill[0], placement.decode[0])
        results = []
        for length_bytes in sizes:
            say(f"{length_bytes // MIB} MiB")
            jobs = {scene.course.name: partial(_moved, scene, length_bytes // token_bytes) for scene in scenes}
            jobs["copy"] = partial(_copied, copy.seconds, length_bytes)
            results.append(_sampled(jobs, length_bytes, arguments.repeats))
        staged = next((scene for scene in scenes if scene.course.way == "Staged"), None)
        wire = "no wire" if staged is None else staged.wire()
        check_direct(scenes)
        if arguments.trace:
            _trace(scenes, tokens, arguments.trace)
    return Report(courses, results, arguments.backend, wire, 0, 0, arguments.page_size, arguments.repeats, placement)


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    return {"backend": arguments.backend, "deployment": "bench/transfer", "log_level": "warning"}


def _moved(scene: Scene, tokens: int) -> tuple[float, float]:
    moved = scene.move(tokens)
    return moved.seconds, moved.core_s


def _copied(copy: Callable[[int], float], length_bytes: int) -> tuple[float, float]:
    return copy(length_bytes), 0.0


def _sampled(jobs: Mapping[str, Callable[[], tuple[float, float]]], length_bytes: int, repeats: int) -> SizeResult:
    """Run every job once as a warm-up, then `repeats` times in turns."""
    lines: dict[str, Series] = {}
    for repetition in range(repeats + 1):
        for name, job in jobs.items():
            seconds, core_s = job()
            if repetition:
                lines.setdefault(name, Series()).add(seconds, core_s)
    return SizeResult(length_bytes, lines, os.cpu_count() or 1)


def _trace(scenes: list[Scene], tokens: int, path: Path) -> None:
    """Move once more by every way and write the workers' spans. Called after all samples, so that it cannot affect them."""
    timeline = Timeline()
    for scene in scenes:
        scene.move(tokens)
        timeline.add(scene.course.name, scene.spans(scene.last_room), staged=scene.course.way == "Staged")
    timeline.write(path)


@dataclass
class _Sampler:
    """Measures one size."""

    rate: TransportRate
    path: BarePath
    scenes: list[Scene]
    length_bytes: int
    tokens: int
    slice_bytes: int
    batch: int
    slices: bool

    def run(self, repeats: int) -> SizeResult:
        """Measure all lines."""
        return _sampled(self._jobs(), self.length_bytes, repeats)

    def _jobs(self) -> dict[str, Callable[[], tuple[float, float]]]:
        jobs: dict[str, Callable[[], tuple[float, float]]] = {}
        for scene in self.scenes:
            if self.slices or scene.course.way != "Slices":
                jobs[scene.course.name] = partial(_moved, scene, self.tokens)
        jobs["bare path"] = self._bare
        jobs["transport"] = self._write
        if self.slices:
            jobs["transport slices"] = self._slices
        jobs["copy"] = self._copy
        return jobs

    def _bare(self) -> tuple[float, float]:
        sample = self.path.move(self.tokens)
        return sample.seconds, sample.core_s

    def _write(self) -> tuple[float, float]:
        sample = self.rate.write(self.length_bytes)
        return sample.seconds, sample.core_s

    def _slices(self) -> tuple[float, float]:
        sample = self.rate.slices(self.length_bytes, self.slice_bytes, self.batch)
        return sample.seconds, sample.core_s

    def _copy(self) -> tuple[float, float]:
        sample = self.rate.copy(self.length_bytes)
        return sample.seconds, sample.core_s


def _courses(ways: list[str] | None, placement: Placement, source_tp: int, target_tp: int) -> list[Course]:
    ways = ways or (_WAYS_ON_GPUS if placement.on_gpus else _WAYS)
    known = {
        "staged": Course(f"staged {source_tp}→{target_tp}", "Staged", source_tp, target_tp),
        "staged-equal": Course(f"staged {target_tp}→{target_tp}", "Staged", target_tp, target_tp),
        "contiguous": Course(f"contiguous {target_tp}→{target_tp}", "Contiguous", target_tp, target_tp),
        "direct": Course(f"direct {source_tp}→{target_tp}", "Direct", source_tp, target_tp),
        "direct-equal": Course(f"direct {target_tp}→{target_tp}", "Direct", target_tp, target_tp),
        "staged-digest": Course(
            f"staged {source_tp}→{target_tp}, digests", "Staged", source_tp, target_tp, digest=True
        ),
        "direct-digest": Course(
            f"direct {source_tp}→{target_tp}, digests", "Direct", source_tp, target_tp, digest=True
        ),
        "slices": Course(f"slices {source_tp}→{target_tp}", "Slices", source_tp, target_tp),
    }
    unknown = [way for way in ways if way not in known]
    if unknown:
        raise BenchError(f"--ways names {unknown[0]!r}: use {', '.join(known)}")
    on_gpus = _WAYS_ON_GPUS + _WITH_DIGESTS
    missing = [way for way in ways if placement.on_gpus and way not in on_gpus]
    if missing:
        raise BenchError(
            f"--ways names {missing[0]!r}, and on GPUs there are no {devices.WAYS_LEFT_OUT}: use {', '.join(on_gpus)}"
        )
    return [known[way] for way in ways]


def _choose_batch(rate: TransportRate, length_bytes: int, slice_bytes: int) -> tuple[str, int]:
    """Return the wire and the batch size that makes slices fastest over the bare transport."""
    wire = rate.write(length_bytes).wire
    times = {batch: min(rate.slices(length_bytes, slice_bytes, batch).seconds for _ in range(3)) for batch in _BATCHES}
    return wire, min(times, key=lambda batch: times[batch])


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError("give NAME=VALUE, as docs/reference/settings.md has them")
    return name.lower(), value
