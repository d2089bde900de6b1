"""Measures how much an agent's copies and an engine that computes without pause on the same GPU slow each other down.

    python benchmarks/busy_engine_gpu.py --json FILE

It runs three processes. The engine runs large matrix products (`gemm`) or a loop of small kernels with the reads of a
decode step (`decode`), and always has steps queued. The agent gathers or scatters slabs of 84 MB of a 70B model at TP4 at
a fixed rate. The third process controls the two.

The processes share the GPU by time slicing, the default, and by NVIDIA's MPS if its daemon is installed. The benchmark
starts the daemon with its own pipes and ends it; it changes no setting of the GPU. The copying kernel runs with and
without a cap on its programs; each program stays on one streaming multiprocessor. The copy engines are also measured, if
a page's slice is contiguous, as in TP4's own pages.

A copy's time is from the call to its end. The engine's loss is its rate of steps during copies, compared with the pauses
before and after. Every slab is compared before and after its series.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

MEGABYTES = 84
CAPS = (0, 16, 64)
# Caps to measure at every rate. Other caps are measured at the highest rate only.
CAPS_ALWAYS = (0, 16)
# A launch with few programs uses large tiles; see benchmarks/gather_scatter_gpu.py --sweep.
CAPPED_TILE_BYTES, CAPPED_WARPS = 32768, 16
PAUSE_S = 1.2
# Steps that the engine has queued beyond the running one, so that the GPU never waits for the host.
STEPS_AHEAD = 2
MPS_START_S = 10.0


def run_engine(kind: str, stop: Path, out: Path) -> None:
    """The engine: run steps until `stop` exists, then write the end of each step (monotonic seconds)."""
    import torch

    step = make_gemm(torch) if kind == "gemm" else make_decode(torch)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    print("ready", flush=True)
    ends: list[float] = []
    events = [torch.cuda.Event() for _ in range(STEPS_AHEAD)]  # type: ignore[no-untyped-call]
    for number in itertools.count():
        event = events[number % STEPS_AHEAD]
        if number >= STEPS_AHEAD:
            event.synchronize()
            ends.append(time.monotonic())
        step()
        event.record()
        if number % 64 == 0 and stop.exists():
            break
    torch.cuda.synchronize()
    out.write_text(json.dumps(ends))


def make_gemm(torch: Any) -> Callable[[], object]:
    """One product of 8192 x 8192 x 8192 in bfloat16, about 1.4 ms."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)


def make_decode(torch: Any) -> Callable[[], object]:
    """A decode step of 32 sequences as one CUDA graph: 32 layers of two thin products and three small kernels."""
    layers, width, inner = 32, 4096, 14336
    up = [torch.randn(width, inner, dtype=torch.bfloat16, device="cuda") / 64 for _ in range(layers)]
    down = [torch.randn(inner, width, dtype=torch.bfloat16, device="cuda") / 120 for _ in range(layers)]
    state = torch.randn(32, width, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        found = state
        for first, second in zip(up, down, strict=True):
            normal = torch.nn.functional.layer_norm(found, (width,))
            found = found + torch.nn.functional.gelu(normal @ first) @ second
        state.copy_(torch.nn.functional.layer_norm(found, (width,)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], object] = graph.replay
    return replay


class CopyEngine:
    """The same gather by the driver's batched copies, without a kernel: one piece for each page of each plane."""

    class _Attributes(ctypes.Structure):
        _fields_ = (
            ("order", ctypes.c_int),
            ("source", ctypes.c_int * 2),
            ("target", ctypes.c_int * 2),
            ("flags", ctypes.c_uint),
        )

    def __init__(self, bench: Any) -> None:
        page_bytes = bench.payload_bytes // (bench._view[0] * len(bench._ids))  # noqa: SLF001 - benchmarks share their insides
        planes = range(bench._view[0])  # noqa: SLF001
        plane_bytes = bench.memory.numel() // len(planes)
        ids = bench._ids.tolist()  # noqa: SLF001
        base = bench.memory.data_ptr()
        sources = [base + plane * plane_bytes + page * page_bytes for plane in planes for page in ids]
        targets = [bench.other.data_ptr() + number * page_bytes for number in range(len(sources))]
        count = len(sources)
        self._arguments = (
            (ctypes.c_uint64 * count)(*targets),
            (ctypes.c_uint64 * count)(*sources),
            (ctypes.c_size_t * count)(*[page_bytes] * count),
            ctypes.c_size_t(count),
        )
        # In the stream's order; prefer copy engines to multiprocessors.
        self._attributes = self._Attributes(1, (0, 0), (0, 0), 1)
        self._index = ctypes.c_size_t(0)
        self._function = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
        self._stream = bench.stream

    def run(self) -> None:
        """Queue the copies."""
        code = self._function(
            *self._arguments,
            ctypes.byref(self._attributes),
            ctypes.byref(self._index),
            ctypes.c_size_t(1),
            ctypes.c_void_p(self._stream.handle),
        )
        if code:
            raise SystemExit(f"cuMemcpyBatchAsync: error {code}")


def run_agent(rates: list[float], seconds: float, out: Path) -> None:
    """The agent: run series of copies with pauses between them; write the interval of each series and the copies' times."""
    import torch
    from gather_scatter_gpu import CASES, OPERATIONS, WORKER_TUNINGS, Bench

    from longshore_agent.kernels.device_grid import Tuning

    device = torch.device("cuda:0")
    benches = {name: Bench(CASES[0], name, CASES[0].layers, MEGABYTES, device) for name in OPERATIONS}
    series: list[dict[str, Any]] = []
    plan = [("gather", cap, rate) for rate in rates for cap in (CAPS if rate == rates[-1] else CAPS_ALWAYS)]
    plan += [("copy engine", 0, rate) for rate in rates[-1:]] + [("scatter", cap, rates[-1]) for cap in CAPS]
    for name, cap, rate in plan:
        operation = "gather" if name == "copy engine" else name
        bench = benches[operation]
        tuning = Tuning(CAPPED_TILE_BYTES, CAPPED_WARPS, programs_max=cap) if cap else WORKER_TUNINGS[operation]
        if name == "copy engine":
            run = CopyEngine(bench).run
            bench.other.fill_(0xA5)
        else:
            bench.check(partial(bench.run, tuning), name)

            def run(bench: Any = bench, tuning: Any = tuning) -> None:
                bench.run(tuning)

        run()
        bench.stream.synchronize()
        time.sleep(PAUSE_S)
        begin = time.monotonic()
        samples = [timed(run, bench.stream, begin + number / rate) for number in range(max(4, round(seconds * rate)))]
        end = time.monotonic()
        time.sleep(PAUSE_S)
        if name == "copy engine":
            expected = bench._selected().reshape(-1)  # noqa: SLF001
            assert torch.equal(bench.other[: bench.payload_bytes], expected), "batched copies are wrong"
        else:
            bench.check(partial(bench.run, tuning), name)
        series.append({"name": name, "cap": cap, "rate": rate, "begin": begin, "end": end, "seconds": samples})
    out.write_text(json.dumps(series))


def timed(run: Callable[[], None], stream: Any, due_s: float) -> float:
    """Wait until the copy is due, then copy; return the copy's time."""
    time.sleep(max(0.0, due_s - time.monotonic()))
    begin = time.monotonic()
    run()
    stream.synchronize()
    return time.monotonic() - begin


def share(kind: str, rates: list[float], seconds: float, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Let one engine and one agent share the GPU; return a row for each series."""
    with tempfile.TemporaryDirectory() as folder:
        stop, steps, copies = (Path(folder) / name for name in ("stop", "steps.json", "copies.json"))
        command = [sys.executable, __file__, "--out"]
        engine = subprocess.Popen(
            [*command, str(steps), "--engine", kind, "--stop", str(stop)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert engine.stdout is not None
            if engine.stdout.readline().strip() != "ready":
                raise SystemExit(f"the engine ended with {engine.wait(30)} before its first step")
            wanted = ["--agent", "--rates", ",".join(map(str, rates)), "--seconds", str(seconds)]
            subprocess.run([*command, str(copies), *wanted], env=environment, check=True)
        finally:
            stop.touch()
            engine.wait(60)
        ends = json.loads(steps.read_text())
        return [row(each, ends) for each in json.loads(copies.read_text())]


def row(series: dict[str, Any], ends: list[float]) -> dict[str, Any]:
    """Return one series with its quantiles and the engine's loss."""

    def rate(first: float, last: float) -> float:
        inside = [end for end in ends if first <= end <= last]
        return (len(inside) - 1) / (inside[-1] - inside[0])

    begin, end = series["begin"], series["end"]
    # Drop the edges, where a copy of the preceding check may still run.
    calm = statistics.fmean([rate(begin - PAUSE_S + 0.2, begin), rate(end, end + PAUSE_S - 0.2)])
    steps = [last - first for first, last in itertools.pairwise(e for e in ends if begin <= e <= end)]
    times = sorted(series["seconds"])
    return series | {
        "p50_ms": statistics.median(times) * 1e3,
        "p99_ms": times[min(len(times) - 1, round(0.99 * (len(times) - 1)))] * 1e3,
        "lost": 1 - rate(begin, end) / calm,
        "calm_steps_a_second": calm,
        "step_p50_ms": statistics.median(steps) * 1e3,
        "step_p99_ms": sorted(steps)[round(0.99 * (len(steps) - 1))] * 1e3,
        "calm_step_p99_ms": sorted(b - a for a, b in itertools.pairwise(e for e in ends if end <= e <= end + PAUSE_S))[
            -2
        ]
        * 1e3,
    }


@contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """Start MPS with its own pipes; yield the environment of its clients, or None if it cannot be started."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("MPS left out: nvidia-cuda-mps-control is not installed")
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = subprocess.run([control, "-d"], env=environment, capture_output=True, text=True, check=False)
        if started.returncode:
            print(f"MPS left out: it did not start: {started.stdout} {started.stderr}")
            yield None
            return
        try:
            yield environment
        finally:
            subprocess.run([control], input="quit\n", env=environment, text=True, check=False, timeout=MPS_START_S)
            for log in sorted(Path(folder).glob("*.log")):
                print(f"MPS {log.name}: {log.read_text()[-300:]}")


def show(sharing: str, kind: str, found: list[dict[str, Any]]) -> None:
    """Print rows."""
    for each in found:
        print(
            f"{sharing:12}{kind:8}{each['name']:12}{each['cap'] or '-':>4}{each['rate']:6.0f}/s {len(each['seconds']):4} "
            f"p50 {each['p50_ms']:6.2f} p99 {each['p99_ms']:6.2f} ms   engine {-100 * each['lost']:+6.2f} %  "
            f"step p50 {each['step_p50_ms']:.2f} p99 {each['step_p99_ms']:.2f} ms (calm {each['calm_step_p99_ms']:.2f})",
            flush=True,
        )


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--rates", default="1,5,20", help="copies a second")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each series")
    parser.add_argument("--engines", default="gemm,decode")
    for hidden in ("--engine", "--stop", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rates = [float(rate) for rate in options.rates.split(",")]
    if options.engine:
        run_engine(options.engine, Path(options.stop), Path(options.out))
        return
    if options.agent:
        run_agent(rates, options.seconds, Path(options.out))
        return
    result: dict[str, Any] = {"time-sliced": {}, "MPS": {}}
    for kind in options.engines.split(","):
        result["time-sliced"][kind] = share(kind, rates, options.seconds, dict(os.environ))
        show("time-sliced", kind, result["time-sliced"][kind])
    with mps() as environment:
        for kind in options.engines.split(",") if environment else ():
            result["MPS"][kind] = share(kind, rates, options.seconds, dict(environment or {}))
            show("MPS", kind, result["MPS"][kind])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
