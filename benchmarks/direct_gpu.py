"""Compares the direct copy, from one GPU's pages into another's, with a plain copy between the two GPUs.

    python benchmarks/direct_gpu.py --json FILE             the kernel's table, then agents
    python benchmarks/direct_gpu.py --sweep --json FILE     first try tile shapes, numbers of warps and caps on programs
    python benchmarks/direct_gpu.py --trace FILE            also write a timeline of one transfer of the largest size

`kernel`: the kernel runs on the first GPU and writes pages on the last, with layouts and sizes as in
`gather_scatter_gpu.py`. It prints medians of interleaved repetitions by CUDA events, with cold caches. Every byte of the
target's pool is compared before and after. `agents`: real engines of one real agent, from the first `send` to DONE at the
target, measured as in `gpu_path.py`; every byte is compared.

Needs torch and Triton besides the package, and no network. With one GPU both pools are on it. To try the script without a
GPU, use `--device cpu --layers 2 --sizes 0.1` with TRITON_INTERPRET=1; its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from gather_scatter_gpu import (
    CASES,
    ELEMENT_BYTES,
    FLUSH_BYTES,
    HEAD_DIM,
    PAGE_SIZE,
    TITLES,
    WORKER_TUNINGS,
    Case,
    TimedStream,
    measure,
    open_pool,
    random_bytes,
    table_row,
)

from longshore_agent.kernels.copier import pool_view
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_launch import BoundCopy, Paged, PageIds, PlaneTable
from longshore_agent.memory import cuda
from longshore_wire.layout import PageOrder


class DirectBench:
    """The copy of one case at one size, checked and ready to be measured, like `gather_scatter_gpu.Bench`."""

    operation = "direct"

    def __init__(self, case: Case, layers: int, megabytes: float, home: torch.device, other: torch.device) -> None:
        page_slice_bytes = 2 * layers * case.slice_heads * HEAD_DIM * ELEMENT_BYTES * PAGE_SIZE
        count = max(1, round(megabytes * 1e6 / page_slice_bytes))
        self.case, self.tokens, self.payload_bytes = case, count * PAGE_SIZE, count * page_slice_bytes
        self.stream = TimedStream(home)
        self._pools, self.memories, self._views, self._ids, self._sides = [], [], [], [], []
        self._lists = []
        page_count = count + count // 4 + 1
        for seed, (heads, device) in enumerate(((case.source_heads, home), (case.target_heads, other))):
            pool = open_pool(case.order, heads, layers, page_count)
            self._pools.append(pool)
            self.memories.append(random_bytes(pool.geometry.region_bytes[0], device))
            middle = (PAGE_SIZE, heads) if case.order is PageOrder.NHD else (heads, PAGE_SIZE)
            self._views.append((2 * layers, page_count, *middle, HEAD_DIM * ELEMENT_BYTES))
            pages = np.random.default_rng(seed).permutation(page_count)[:count].astype(np.int32)
            self._ids.append(torch.from_numpy(pages.astype(np.int64)).to(device))
            first = heads // 2 if heads > case.slice_heads else 0
            view = pool_view(pool, pages, 0, range(layers), range(first, first + case.slice_heads))
            self._sides.append(Paged(view, PlaneTable(pool, [self.memories[-1].data_ptr()], home)))
            self._lists.append((PageIds(pool, pages, home), 0))
        self._near = random_bytes(self.payload_bytes, home)
        self._far = torch.zeros(self.payload_bytes, dtype=torch.uint8, device=other)
        # torch's first copy between two devices enables peer access, which the kernel needs.
        self.copy()
        self.stream.settle()

    def run(self, tuning: Tuning) -> None:
        """Queue one direct copy."""
        self._queued(self._bound(tuning))

    def _bound(self, tuning: Tuning) -> BoundCopy:
        return BoundCopy(self._sides[0], self._sides[1], (0, self.tokens), self.stream, tuning)

    def _queued(self, copy: BoundCopy) -> None:
        copy.queue(self._lists[0], self._lists[1], (0, self.tokens))

    def copy(self) -> None:
        """Queue a plain copy of as many bytes to the other device."""
        with self.stream.entered():
            self._far.copy_(self._near, non_blocking=True)

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return source and target of a copy of as many bytes in one piece."""
        return self._near, self._far

    def bound(self) -> Callable[[], None] | None:
        """Return the copy as a worker's control thread queues it, with its event; None if the launch cannot be bound."""
        if self.stream.context is None:
            return None
        copy, event = self._bound(WORKER_TUNINGS[self.operation]), cuda.Event(self.stream.context)

        def queue() -> None:
            self._queued(copy)
            event.record(self.stream.handle)

        return queue

    def check(self, job: Callable[[], None], name: str) -> None:
        """Raise AssertionError unless every byte is where indexing puts it after `job`, and no other byte has changed."""
        target = self.memories[1]
        expected = target.clone()
        axis = 3 if self.case.order is PageOrder.NHD else 2
        heads = [side.view.heads for side in self._sides]
        slices = [
            memory.view(view).narrow(axis, chosen.start, len(chosen))
            for memory, view, chosen in zip(self.memories, self._views, heads, strict=True)
        ]
        chosen = slices[0][:, self._ids[0]].to(target.device)
        expected.view(self._views[1]).narrow(axis, heads[1].start, len(heads[1]))[:, self._ids[1]] = chosen
        for memory in self.memories:
            if memory.is_cuda:
                torch.cuda.synchronize(memory.device)
        job()
        # Wait for the end of the stream only, as a worker does before it reports the bytes.
        self.stream.synchronize()
        assert torch.equal(target, expected), f"direct copy of {self.case.name} is wrong with {name}"
        # So that the next check detects bytes that are not written again.
        target.bitwise_xor_(0x5A)

    def close(self) -> None:
        """Free the pools."""
        for pool in self._pools:
            pool.close()


def candidates() -> list[Tuning]:
    """Return the candidates: block shapes with numbers of warps, then caps on programs, which then loop."""
    shapes = [(2048, 2), (4096, 2), (4096, 4), (8192, 2), (8192, 4), (16384, 4), (16384, 8), (32768, 8)]
    looping = itertools.product(((4096, 4), (8192, 4), (16384, 8)), (16, 32, 66, 132, 264))
    return [Tuning(*shape) for shape in shapes] + [Tuning(*shape, programs_max=count) for shape, count in looping]


def sweep(bench: DirectBench, repetitions: int, flush: torch.Tensor) -> list[dict[str, object]]:
    """Measure all candidates; print and return their rates as shares of a plain copy's."""
    found = []
    for tuning in candidates():
        bench.check(partial(bench.run, tuning), str(tuning))
        times = measure(bench, tuning, repetitions, flush)  # type: ignore[arg-type]
        found.append((statistics.median(times["copy"]) / statistics.median(times["kernel"]), tuning))
    print(f"{bench.payload_bytes / 1e6:.0f} MB, {bench.case.name}, share of a plain copy:")
    for share, tuning in sorted(found, key=lambda each: -each[0]):
        print(f"  {100 * share:6.1f} %  {tuning}", flush=True)
    return [{"case": bench.case.name, "bytes": bench.payload_bytes, "share": share} | asdict(t) for share, t in found]


def run_kernel(options: argparse.Namespace, home: torch.device, other: torch.device) -> dict[str, Any]:
    """Measure the kernel against a plain copy."""
    flush = torch.zeros(FLUSH_BYTES if home.type == "cuda" else 1, dtype=torch.uint8, device=home)
    result: dict[str, Any] = {"tuning": asdict(WORKER_TUNINGS["direct"])}
    if options.sweep:
        bench = DirectBench(CASES[0], options.layers or CASES[0].layers, 256, home, other)
        result["sweep"] = sweep(bench, options.repetitions, flush)
        bench.close()
    print(TITLES)
    rows = []
    cases = [case for case in CASES if not options.cases or case.name in options.cases.split(",")]
    for case, megabytes in itertools.product(cases, map(float, options.sizes.split(","))):
        bench = DirectBench(case, options.layers or case.layers, megabytes, home, other)
        rows.append(table_row(bench, WORKER_TUNINGS["direct"], options.repetitions, flush))  # type: ignore[arg-type]
        bench.close()
    return result | {"rows": rows}


def run_agents(
    sizes: list[int], repetitions: int, target_device: int, source_tp: int, trace: Path | None
) -> list[dict[str, Any]]:
    """Move rooms of each size between engines of one agent, with the two clocks of `gpu_path`; return a row for each."""
    # gpu_path extends sys.path, so that gpu_world is found.
    from gpu_path import Scene, measure_room_sizes, start
    from gpu_world import GPUAgent, writes_by_way

    page_count = -(-max(sizes) // PAGE_SIZE)
    with ExitStack() as stack:
        agent = stack.enter_context(GPUAgent(LONGSHORE_RING_BYTES="256Mi"))
        prefill = start(stack, agent, "SOURCE", source_tp, 0, page_count)
        decode = start(stack, agent, "TARGET", 1, target_device, 2 * page_count)[0]
        scene = Scene(agent, agent, prefill, decode, prefill[0].ask("endpoint"), page_count)
        rows = measure_room_sizes(scene, sizes, repetitions, f"direct TP{source_tp}->TP1")
        ways = {way for way, count in writes_by_way(agent).items() if count}
        if ways != {"direct"}:
            raise SystemExit(f"not every write was direct: {ways}")
        if trace is not None:
            write_timeline(trace, f"direct TP{source_tp}→TP1", scene.spans(scene.room))
    return rows


def write_timeline(path: Path, name: str, spans: list[dict[str, Any]]) -> None:
    """Write a transfer's timeline, as `longshore bench transfer --trace` does."""
    from longshore_lab.bench.timeline import Timeline

    timeline = Timeline()
    timeline.add(name, spans, staged=False)
    timeline.write(path)


def main() -> None:
    """Print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--trace", type=Path, help="file for the timeline")
    parser.add_argument(
        "--sweep", action="store_true", help="first try tile shapes, numbers of warps and caps on programs"
    )
    parser.add_argument("--sizes", default="64,256,1300", help="MB of the kernel's copies, separated by commas")
    parser.add_argument("--cases", default="", help="names of cases, separated by commas; empty: all")
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's")
    parser.add_argument("--tokens", default="256,1024,4096,8192", help="sizes of rooms between agents; empty: none")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    home = other = torch.device(options.device)
    if home.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device: this benchmark needs one")
        other = torch.device("cuda", torch.cuda.device_count() - 1)
    name = torch.cuda.get_device_name(home) if home.type == "cuda" else "Triton's interpreter: times mean nothing"
    print(f"{name}, from {home} to {other}, torch {torch.__version__}, Triton {triton.__version__}")
    result: dict[str, Any] = {"device": name, "devices": [str(home), str(other)], "torch": torch.__version__}
    result |= {"python": platform.python_version(), "kernel": run_kernel(options, home, other)}
    torch.cuda.empty_cache()
    sizes = [int(size) for size in options.tokens.split(",") if size]
    if sizes and home.type == "cuda":
        result["agents"] = [
            row
            for tp in (1, 2)
            for row in run_agents(sizes, options.repetitions, other.index, tp, options.trace if tp == 1 else None)
        ]
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
