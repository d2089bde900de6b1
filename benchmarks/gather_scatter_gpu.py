"""Compares gather and scatter on a GPU with a plain device copy of as many bytes.

    python benchmarks/gather_scatter_gpu.py --json FILE           the table
    python benchmarks/gather_scatter_gpu.py --sweep --json FILE   first try tile shapes, warps and caps on programs
    python benchmarks/gather_scatter_gpu.py --rival --json FILE   also the kernels of SGLang's staging buffer

The models have 80 layers and 8 KV heads ("70B"), or 94 layers and 4 KV heads ("235B"). A head is 128 elements of 2 bytes.
Pages have 64 tokens and are in random order. A slab is the slice that one pair of ranks moves.

It prints medians of interleaved repetitions on one stream, by CUDA events. `piece` is a kernel of the same compiler that
copies as many bytes in one piece: its distance to a plain copy is not due to pages. Before each repetition the device
overwrites a gigabyte, so that caches are cold and the host has queued everything before the copy begins. `host` is the time
of a call on an idle device. `bound` is the time of a worker's call, whose launch is bound to its shape once: page checks,
trailer, launch and event. Every size is compared with indexing before and after it is measured; a wrong byte ends the run.

`rival` is SGLang's kernel on the same pages, heads and slab (`sglang_staging`); SGLang has none for HND pages. `done` is the
time from a call on an idle device to the end of the copy: of a worker's call, and of SGLang's function, which also copies
page ids and addresses to the device.

Needs torch, Triton and llvmlite besides the package, and no network. To try the script without a GPU, use
`--device cpu --layers 2 --sizes 0.1` with TRITON_INTERPRET=1; its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from sglang_staging import StagedCopy, Staging, load_staging

from longshore_agent.kernels.copier import Slab, pool_view
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_kernel import CopyStream
from longshore_agent.kernels.device_launch import TUNINGS, BoundCopy, Paged, PageIds, PlaneTable
from longshore_agent.memory import cuda
from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.memory.pools import KVPool
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, PlaneGeometry, PoolGeometry
from longshore_wire.slabs import Trailer, slab_bytes

HEAD_DIM, ELEMENT_BYTES, PAGE_SIZE = 128, 2, 64
OPERATIONS = ("gather", "scatter")
# The worker's tuning of each operation.
WORKER_TUNINGS = {"gather": TUNINGS[False, True], "scatter": TUNINGS[True, False], "direct": TUNINGS[False, False]}
FLUSH_BYTES = 1 << 30
PIECE_WORDS, PIECE_WARPS = 2048, 4
TITLES = f"{'pages':14}{'':8}{'MB':>8}   copy us piece us kernel us of copy of piece host us bound us"
RIVAL_TITLES = "  rival us of copy rival/kernel  done us rival us"

Mark = torch.cuda.Event | float
Moment = Callable[[], Mark]


@dataclass(frozen=True)
class Case:
    """The slice of one pair of ranks: heads in each side's pages, moved heads, and the first of them on the wider side."""

    name: str
    layers: int
    source_heads: int
    target_heads: int
    slice_heads: int
    order: PageOrder = PageOrder.NHD


CASES = (
    Case("70B 4->1", 80, 2, 8, 2),
    Case("70B 1->4", 80, 8, 2, 2),
    Case("70B 1->4 HND", 80, 8, 2, 2, PageOrder.HND),
    Case("70B 8->1", 80, 1, 8, 1),
    Case("70B 4->2", 80, 2, 4, 2),
    Case("235B 4->1", 94, 1, 4, 1),
    Case("235B 1->4", 94, 4, 1, 1),
    Case("235B 4->2", 94, 1, 2, 1),
)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def copy_words(
    source: tl.tensor, target: tl.tensor, count: tl.tensor, words: tl.constexpr, hint: tl.constexpr = ""
) -> None:
    """Copy one block of `count` words of 8 bytes by loads and stores."""
    place = tl.program_id(0).to(tl.int64) * words + tl.arange(0, words)
    tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count, cache_modifier=hint)


class TimedStream(CopyStream):
    """A CUDA stream with events, or a clock on the CPU."""

    def mark(self) -> Mark:
        """Record an event in the stream's order."""
        if self.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def settle(self) -> None:
        """Wait for the device."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)


def milliseconds(begin: Mark, end: Mark) -> float:
    """Return the time between two completed events."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)  # noqa: PT018 - one fact
        return (end - begin) * 1e3
    return float(begin.elapsed_time(end))


def queue_piece(ends: tuple[torch.Tensor, torch.Tensor], stream: TimedStream) -> None:
    """Queue a kernel that copies one piece, a multiple of 8 bytes, from the first tensor to the second."""
    source, target = (end.view(torch.int64) for end in ends)
    grid = (triton.cdiv(len(source), PIECE_WORDS),)
    with stream.entered():
        copy_words[grid](source, target, len(source), PIECE_WORDS, num_warps=PIECE_WARPS)


class Bench:
    """One operation of one case at one size, checked and ready to be measured."""

    def __init__(
        self,
        case: Case,
        operation: str,
        layers: int,
        megabytes: float,
        device: torch.device,
        staging: Staging | None = None,
    ) -> None:
        page_slice_bytes = 2 * layers * case.slice_heads * HEAD_DIM * ELEMENT_BYTES * PAGE_SIZE
        count = max(1, round(megabytes * 1e6 / page_slice_bytes))
        self.case, self.operation, self.tokens = case, operation, count * PAGE_SIZE
        self.payload_bytes = count * page_slice_bytes
        heads = case.source_heads if operation == "gather" else case.target_heads
        self._first = heads // 2 if heads > case.slice_heads else 0
        self.layers, self.heads = range(layers), range(self._first, self._first + case.slice_heads)
        page_count = count + count // 4 + 1
        self._pool = open_pool(case.order, heads, layers, page_count)
        self.memory = random_bytes(self._pool.geometry.region_bytes[0], device)
        pages = np.random.default_rng(0).permutation(page_count)[:count].astype(np.int32)
        self._pages = (PageIds(self._pool, pages, device), 0)
        table = PlaneTable(self._pool, [self.memory.data_ptr()], device)
        self._paged = Paged(pool_view(self._pool, pages, 0, self.layers, self.heads), table)
        self.stream = TimedStream(device)
        self.trailer = Trailer(1, 2, 3, 4, 5, 6, 7, 8, self.payload_bytes).seal(bytes(16))
        self.slab = random_bytes(slab_bytes(self.payload_bytes), device)
        self.other = torch.zeros_like(self.slab)
        memory = self.other if operation == "gather" else self.slab
        self._slab = Slab(StagingRange(memory.data_ptr(), memory.numel(), memory.numel()), 0, self.payload_bytes)
        # Dimensions: planes, pages, then tokens and heads in the order of a page, then bytes.
        middle = (PAGE_SIZE, heads) if case.order is PageOrder.NHD else (heads, PAGE_SIZE)
        self._view = (2 * layers, page_count, *middle, HEAD_DIM * ELEMENT_BYTES)
        self._ids = torch.from_numpy(pages.astype(np.int64)).to(device)
        self.rival: StagedCopy | None = None
        if staging is not None and case.order is PageOrder.NHD:
            planes = self.memory.view(torch.bfloat16).view(*self._view[:4], HEAD_DIM)
            self.rival = StagedCopy(staging, operation, planes, pages, self.heads, memory, self.stream)

    def run(self, tuning: Tuning) -> None:
        """Queue one gather into `other`, or one scatter of `slab`."""
        self._queued(self._bound(tuning))

    def _bound(self, tuning: Tuning) -> BoundCopy:
        source, target = (self._paged, self._slab) if self.operation == "gather" else (self._slab, self._paged)
        return BoundCopy(source, target, (0, self.tokens), self.stream, tuning)

    def _queued(self, copy: BoundCopy) -> None:
        if self.operation == "gather":
            copy.queue(self._pages, self._slab, (0, self.tokens), self.trailer)
        else:
            copy.queue(self._slab, self._pages, (0, self.tokens))

    def bound(self) -> Callable[[], None] | None:
        """Return the copy as a worker's control thread queues it, with its event; None if the launch cannot be bound."""
        if self.stream.context is None:
            return None
        copy, event = self._bound(WORKER_TUNINGS[self.operation]), cuda.Event(self.stream.context)

        def queue() -> None:
            self._queued(copy)
            event.record(self.stream.handle)

        return queue

    def copy(self) -> None:
        """Queue a plain copy of as many bytes."""
        with self.stream.entered():
            self.other[: self.payload_bytes].copy_(self.slab[: self.payload_bytes], non_blocking=True)

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return source and target of a copy of as many bytes in one piece."""
        return self.slab[: self.payload_bytes], self.other[: self.payload_bytes]

    def check(self, job: Callable[[], object], name: str, *, sealed: bool = True) -> None:
        """Raise AssertionError unless every byte is where indexing puts it after `job`, and no other byte has changed.

        Args:
            sealed: the job writes a trailer behind the payload of a gather.
        """
        if self.operation == "gather":
            self.other.fill_(0xA5)
            tail = self._tail() if sealed else self.other[self.payload_bytes :]
            expected = torch.cat([self._selected().reshape(-1), tail])
            self.stream.settle()
            job()
            self.stream.settle()
            assert torch.equal(self.other, expected), f"gather of {self.case.name} is wrong with {name}"
            return
        expected = self.memory.clone()
        head_axis = 3 if self.case.order is PageOrder.NHD else 2
        expected.view(self._view).narrow(head_axis, self._first, len(self.heads))[:, self._ids] = self._slab_pages()
        self.stream.settle()
        job()
        self.stream.settle()
        assert torch.equal(self.memory, expected), f"scatter of {self.case.name} is wrong with {name}"
        # So that the next check detects bytes that are not written again.
        self.memory.bitwise_xor_(0x5A)

    def close(self) -> None:
        """Free the pool."""
        self._pool.close()

    def _selected(self) -> torch.Tensor:
        """The slices, as [planes, pages, tokens, heads, bytes]."""
        pages = self.memory.view(self._view)[:, self._ids]
        if self.case.order is PageOrder.HND:
            pages = pages.transpose(2, 3)
        return pages[:, :, :, self._first : self._first + len(self.heads)].contiguous()

    def _slab_pages(self) -> torch.Tensor:
        """The slab in the order of the pages' dimensions."""
        shape = (self._view[0], len(self._ids), PAGE_SIZE, len(self.heads), self._view[4])
        slab = self.slab[: self.payload_bytes].view(shape)
        return slab.transpose(2, 3) if self.case.order is PageOrder.HND else slab

    def _tail(self) -> torch.Tensor:
        gap = len(self.slab) - self.payload_bytes - 64
        return torch.tensor(list(bytes(gap) + self.trailer.data), dtype=torch.uint8, device=self.slab.device)


def open_pool(order: PageOrder, heads: int, layers: int, page_count: int) -> KVPool:
    """Return a pool with this geometry. Its own memory is not used; the pages are on the device."""
    row = HEAD_DIM * ELEMENT_BYTES
    page = PAGE_SIZE * heads * row
    strides = (heads * row, row) if order is PageOrder.NHD else (row, PAGE_SIZE * row)
    planes = tuple(PlaneGeometry(0, i * page * page_count, page, *strides) for i in range(2 * layers))
    geometry = PoolGeometry(page_count, (2 * layers * page * page_count,), planes)
    layout = KVLayout(ModelShape.kv(layers, heads, HEAD_DIM, ELEMENT_BYTES), Parallel(), PAGE_SIZE, order)
    descriptor = os.memfd_create("longshore-bench", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, geometry.region_bytes[0])
    try:
        return KVPool(layout, geometry, [descriptor])
    finally:
        os.close(descriptor)


def random_bytes(length: int, device: torch.device) -> torch.Tensor:
    """Return random bytes from a fixed seed."""
    generator = torch.Generator(device)
    generator.manual_seed(length)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, device=device, generator=generator)


def measure(bench: Bench, tuning: Tuning, repetitions: int, flush: torch.Tensor) -> dict[str, list[float]]:
    """Return milliseconds of every `copy`, `piece` and `kernel`."""
    samples: dict[str, list[float]] = {}
    stream = bench.stream
    jobs: list[tuple[str, Callable[[], None]]] = [
        ("copy", bench.copy),
        ("piece", partial(queue_piece, bench.ends(), stream)),
        ("kernel", partial(bench.run, tuning)),
    ]
    if bench.rival is not None:
        jobs.append(("rival", bench.rival.launch))
    source, target = bench.ends()
    for name, job in jobs:
        target.zero_()
        if target.is_cuda:
            torch.cuda.synchronize(target.device)
        job()  # compiles
        stream.settle()
        assert name in {"kernel", "rival"} or torch.equal(target.to(source.device), source), (
            f"the bytes of the {name} are wrong"
        )
    for _ in range(repetitions):
        for name, job in jobs:
            stream.settle()
            with stream.entered():
                flush.zero_()
            begin = stream.mark()
            job()
            end = stream.mark()
            stream.settle()
            samples.setdefault(name, []).append(milliseconds(begin, end))
    return samples


def host_microseconds(bench: Bench, job: Callable[[], object], repetitions: int, *, done: bool = False) -> float:
    """Return the median time of a call on an idle device; `done`: and of the copy that it queues."""
    samples = []
    for _ in range(repetitions):
        bench.stream.settle()
        begin = time.perf_counter()
        job()
        if done:
            bench.stream.settle()
        samples.append(time.perf_counter() - begin)
    bench.stream.settle()
    return statistics.median(samples) * 1e6


def candidates() -> list[Tuning]:
    """Return block shapes with numbers of warps, at least 16 bytes a thread; then caps on programs, which then loop."""
    shapes = itertools.product((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
    looping = itertools.product(
        ((4096, 4), (8192, 4), (16384, 8), (32768, 16), (65536, 32)), (132, 264, 528, 1056, 2112)
    )
    return [Tuning(tile, warps) for tile, warps in shapes if 32 <= tile // (32 * warps) <= 128] + [
        Tuning(*shape, programs_max=count) for shape, count in looping
    ]


def sweep(bench: Bench, repetitions: int, flush: torch.Tensor) -> list[dict[str, object]]:
    """Measure all candidates; print the best; return every time."""

    def timed(tuning: Tuning) -> tuple[float, Tuning]:
        bench.check(partial(bench.run, tuning), str(tuning))
        times = measure(bench, tuning, repetitions, flush)
        return statistics.median(times["kernel"]) / statistics.median(times["copy"]), tuning

    found = sorted(map(timed, candidates()), key=operator.itemgetter(0))
    print(f"best for {bench.operation} of {bench.payload_bytes / 1e6:.0f} MB, {bench.case.name}, share of a copy:")
    for ratio, tuning in found[:8]:
        print(f"  {100 / ratio:6.1f} %  {tuning}", flush=True)
    for limit in (132, 264, 528):
        ratio, tuning = min((each for each in found if each[1].programs_max == limit), key=operator.itemgetter(0))
        print(f"  {100 / ratio:6.1f} %  {tuning}", flush=True)
    return [
        {"operation": bench.operation, "case": bench.case.name, "bytes": bench.payload_bytes, "copies": ratio}
        | asdict(tuning)
        for ratio, tuning in found
    ]


def table_row(bench: Bench, tuning: Tuning, repetitions: int, flush: torch.Tensor) -> dict[str, object]:
    """Check, measure, check again; print and return one row."""
    jobs = {"host": partial(bench.run, tuning), "bound": bench.bound()}
    there = {name: job for name, job in jobs.items() if job is not None}
    check_all(bench, there)
    samples = measure(bench, tuning, repetitions, flush)
    host_us = {name: host_microseconds(bench, job, repetitions) for name, job in there.items()}
    done_us = {}
    if bench.rival is not None:
        calls = {"done": there.get("bound", there["host"]), "rival_done": bench.rival.call}
        done_us = {name: host_microseconds(bench, job, repetitions, done=True) for name, job in calls.items()}
    check_all(bench, there)
    device_us = {name: statistics.median(times) * 1e3 for name, times in samples.items()}
    print_row(bench, device_us, host_us, done_us)
    return {
        "case": bench.case.name,
        "operation": bench.operation,
        "bytes": bench.payload_bytes,
        **{f"{name}_us": us for name, us in (device_us | host_us | done_us).items()},
        "ms": samples,
    }


def check_all(bench: Bench, jobs: dict[str, Callable[[], None]]) -> None:
    """Check our calls, and SGLang's function and its kernel. Raises AssertionError."""
    for name, job in jobs.items():
        bench.check(job, name)
    if bench.rival is not None:
        bench.check(bench.rival.call, "SGLang's function", sealed=False)
        bench.check(bench.rival.launch, "SGLang's kernel", sealed=False)


def print_row(bench: Bench, device_us: dict[str, float], host_us: dict[str, float], done_us: dict[str, float]) -> None:
    """Print the medians of a row."""
    copy, piece, kernel = (device_us[name] for name in ("copy", "piece", "kernel"))
    shares = f"{100 * copy / kernel:5.1f} % {100 * piece / kernel:8.1f} %"
    cells = f"{copy:8.1f} {piece:8.1f} {kernel:9.1f} {shares} " + " ".join(f"{us:6.1f}" for us in host_us.values())
    if done_us:
        rival = device_us["rival"]
        cells += f"  {rival:9.1f} {100 * copy / rival:5.1f} % {rival / kernel:12.2f} "
        cells += " ".join(f"{us:8.1f}" for us in done_us.values())
    print(f"{bench.case.name:14}{bench.operation:8}{bench.payload_bytes / 1e6:8.1f}  {cells}", flush=True)


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument(
        "--sweep", action="store_true", help="first try tile shapes, numbers of warps and caps on programs"
    )
    parser.add_argument("--rival", action="store_true", help="also SGLang's, of the folders in SGLANG_PATH")
    parser.add_argument("--sweep-sizes", default="84,256", help="MB of the sweep's slabs")
    parser.add_argument("--sizes", default="1,4,16,64,84,256,512,1500", help="MB of a slab, separated by commas")
    parser.add_argument("--cases", default="", help="names of cases, separated by commas; empty: all")
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark needs one")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter: times mean nothing"
    print(f"{name}, torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}")
    staging = load_staging() if options.rival else None
    flush = torch.zeros(FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    result: dict[str, object] = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    tunings = {operation: WORKER_TUNINGS[operation] for operation in OPERATIONS}
    cases = [case for case in CASES if not options.cases or case.name in options.cases.split(",")]
    if options.sweep:
        swept: list[dict[str, object]] = []
        for operation, megabytes in itertools.product(OPERATIONS, map(float, options.sweep_sizes.split(","))):
            bench = Bench(CASES[operation == "gather"], operation, options.layers or CASES[0].layers, megabytes, device)
            swept += sweep(bench, options.repetitions, flush)
            bench.close()
        result["sweep"] = swept
    result["tuning"] = {operation: asdict(tuning) for operation, tuning in tunings.items()}
    if staging is not None:
        print(f"rival: the staging buffer of SGLang {staging.version}")
        result["rival"] = f"SGLang {staging.version}"
    print(TITLES + (RIVAL_TITLES if staging else ""))
    rows = []
    for case, operation, megabytes in itertools.product(cases, OPERATIONS, map(float, options.sizes.split(","))):
        bench = Bench(case, operation, options.layers or case.layers, megabytes, device, staging)
        rows.append(table_row(bench, tunings[operation], options.repetitions, flush))
        bench.close()
    result["rows"] = rows
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
