"""How close do gather and scatter on a GPU come to a plain device copy of as many bytes?

    python benchmarks/gather_scatter_gpu.py --json FILE           the table
    python benchmarks/gather_scatter_gpu.py --sweep --json FILE   first try block shapes, warps and cache hints; then the table

80 layers, 8 KV heads of 128, 2 bytes an element, pages of 64 tokens in random order; a slab is the two heads that one
rank of TP4 has. Medians of interleaved repetitions on one stream, by CUDA events. Before each repetition a gigabyte is
overwritten: the caches are cold, and the host has queued everything before the device begins. `kernel` is the
launch alone, `call` has the upload of page ids before it, `host` is the call's time on an idle device. Every size is
checked against indexing in the same run, before and after it is measured; a wrong byte ends the run.

Needs no network and, beside the package, torch and Triton. `--device cpu` with TRITON_INTERPRET=1 tries the script
itself, with `--layers 2 --sizes 0.1`; its times mean nothing.
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton

from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.gather import device_launch as gather_launch
from longshore_agent.kernels.scatter import device_launch as scatter_launch
from longshore_agent.kernels.slab import Pages
from longshore_agent.memory.ipc import create_memfd
from longshore_agent.memory.pools import KVPool
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, PlaneGeometry, PoolGeometry
from longshore_wire.trailer import Trailer, slab_bytes

HEAD_DIM, ELEMENT_BYTES, PAGE_SIZE, SLICE_HEADS = 128, 2, 64, 2
OPERATIONS = ("gather", "scatter")
# Best shapes of a sweep that are tried with every hint.
HINTED_SHAPES = 3
FLUSH_BYTES = 1 << 30

Mark = torch.cuda.Event | float
Moment = Callable[[], Mark]


@dataclass(frozen=True)
class Case:
    """Pages of one engine rank: their order, how many heads it has, and the first of those that travel."""

    name: str
    order: PageOrder
    heads: int
    first: int


CASES = (
    Case("NHD, 2 of 8 heads", PageOrder.NHD, 8, 2),
    Case("HND, 2 of 8 heads", PageOrder.HND, 8, 2),
    Case("NHD, both of 2 heads", PageOrder.NHD, 2, 0),
)


class TimedStream(CopyStream):
    """A stream that marks when the page ids are there."""

    uploaded: Mark = 0.0

    def upload(self, pages: Pages, trailer: Trailer | None) -> torch.Tensor:
        """Upload, then mark."""
        table = super().upload(pages, trailer)
        self.uploaded = self.mark()
        return table

    def mark(self) -> Mark:
        """Return a mark in the stream's order."""
        if self.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def settle(self) -> None:
        """Wait for the device."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)


def milliseconds(begin: Mark, end: Mark) -> float:
    """Return the time between two marks of a stream that has passed both."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)  # noqa: PT018 - one fact
        return (end - begin) * 1e3
    return begin.elapsed_time(end)


class Bench:
    """One case at one size, checked and ready to be measured."""

    def __init__(self, case: Case, layers: int, megabytes: float, device: torch.device) -> None:
        plane_token_bytes = SLICE_HEADS * HEAD_DIM * ELEMENT_BYTES
        page_slice_bytes = 2 * layers * plane_token_bytes * PAGE_SIZE
        count = max(1, round(megabytes * 1e6 / page_slice_bytes))
        self.case, self.tokens = case, count * PAGE_SIZE
        self.payload_bytes = count * page_slice_bytes
        self.layers, self.heads = range(layers), range(case.first, case.first + SLICE_HEADS)
        page_count = count + count // 4 + 1
        self._pool = open_pool(case, layers, page_count)
        self.memory = random_bytes(self._pool.geometry.region_bytes[0], device)
        self.pages = np.random.default_rng(0).permutation(page_count)[:count].astype(np.int32)
        self.device_pages = DevicePages(self._pool, [self.memory.data_ptr()], device)
        self.stream = TimedStream(device, count)
        self.trailer = Trailer(1, 2, 3, 4, 5, 6, 7, 8, self.payload_bytes)
        self.slab = random_bytes(slab_bytes(self.payload_bytes), device)
        self.other = torch.zeros_like(self.slab)
        # Dimensions: planes, pages, then tokens and heads in the order of a page, then bytes.
        middle = (PAGE_SIZE, case.heads) if case.order is PageOrder.NHD else (case.heads, PAGE_SIZE)
        self._view = (2 * layers, page_count, *middle, HEAD_DIM * ELEMENT_BYTES)
        self._ids = torch.from_numpy(self.pages.astype(np.int64)).to(device)

    def gather(self, tuning: Tuning) -> None:
        """Queue one gather into `other`."""
        request = (self.pages, (0, self.tokens), self.layers, self.heads)
        gather_launch.gather_slices(self.device_pages, *request, self.other, self.trailer, self.stream, tuning)

    def scatter(self, tuning: Tuning) -> None:
        """Queue one scatter of `slab`."""
        request = (self.pages, (0, self.tokens), self.layers, self.heads)
        scatter_launch.scatter_slices(self.device_pages, *request, self.slab, self.stream, tuning)

    def copy(self) -> None:
        """Queue a plain copy of as many bytes."""
        with self.stream.entered():
            self.other[: self.payload_bytes].copy_(self.slab[: self.payload_bytes], non_blocking=True)

    def check(self, operation: str, tuning: Tuning) -> None:
        """Raise AssertionError unless every byte is where indexing puts it, and no other byte has changed."""
        if operation == "gather":
            expected = torch.cat([self._selected().reshape(-1), self._tail()])
            self.other.fill_(0xA5)
            self.stream.settle()
            self.gather(tuning)
            self.stream.settle()
            assert torch.equal(self.other, expected), f"gather of {self.case.name} is wrong with {tuning}"
            return
        expected = self.memory.clone()
        head_axis = 3 if self.case.order is PageOrder.NHD else 2
        expected.view(self._view).narrow(head_axis, self.case.first, SLICE_HEADS)[:, self._ids] = self._slab_pages()
        self.stream.settle()
        self.scatter(tuning)
        self.stream.settle()
        assert torch.equal(self.memory, expected), f"scatter of {self.case.name} is wrong with {tuning}"

    def close(self) -> None:
        """Let the pool go."""
        self._pool.close()

    def _selected(self) -> torch.Tensor:
        """The slices, as [planes, pages, tokens, heads, bytes]."""
        pages = self.memory.view(self._view)[:, self._ids]
        if self.case.order is PageOrder.HND:
            pages = pages.transpose(2, 3)
        return pages[:, :, :, self.case.first : self.case.first + SLICE_HEADS].contiguous()

    def _slab_pages(self) -> torch.Tensor:
        """The slab in the order of the pages' dimensions."""
        shape = (self._view[0], len(self._ids), PAGE_SIZE, SLICE_HEADS, self._view[4])
        slab = self.slab[: self.payload_bytes].view(shape)
        return slab.transpose(2, 3) if self.case.order is PageOrder.HND else slab

    def _tail(self) -> torch.Tensor:
        gap = len(self.slab) - self.payload_bytes - 64
        return torch.tensor(list(bytes(gap) + self.trailer.pack()), dtype=torch.uint8, device=self.slab.device)


def open_pool(case: Case, layers: int, page_count: int) -> KVPool:
    """Return the geometry as a pool; its own memory is never touched, the device's is elsewhere."""
    row = HEAD_DIM * ELEMENT_BYTES
    page = PAGE_SIZE * case.heads * row
    strides = (case.heads * row, row) if case.order is PageOrder.NHD else (row, PAGE_SIZE * row)
    planes = tuple(PlaneGeometry(0, i * page * page_count, page, *strides) for i in range(2 * layers))
    geometry = PoolGeometry(page_count, (2 * layers * page * page_count,), planes)
    layout = KVLayout(ModelShape(layers, case.heads, HEAD_DIM, ELEMENT_BYTES), Parallel(), PAGE_SIZE, case.order)
    descriptor = create_memfd("longshore-bench", geometry.region_bytes[0])
    try:
        return KVPool(layout, geometry, [descriptor])
    finally:
        os.close(descriptor)


def random_bytes(length: int, device: torch.device) -> torch.Tensor:
    """Return bytes of a fixed seed."""
    generator = torch.Generator(device)
    generator.manual_seed(length)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, device=device, generator=generator)


def measure(bench: Bench, tunings: dict[str, Tuning], repetitions: int, flush: torch.Tensor) -> dict[str, float]:
    """Return median milliseconds of `copy`, and of `kernel` and `call` of each operation."""
    samples: dict[str, list[float]] = {}
    stream = bench.stream
    jobs: list[tuple[str, Callable[[], None]]] = [("copy", bench.copy)]
    jobs += [(name, partial(getattr(bench, name), tuning)) for name, tuning in tunings.items()]
    for _, job in jobs:
        job()  # compiles
    for _ in range(repetitions):
        for name, job in jobs:
            stream.settle()
            with stream.entered():
                flush.zero_()
            begin = stream.mark()
            job()
            end = stream.mark()
            stream.settle()
            if name == "copy":
                samples.setdefault("copy", []).append(milliseconds(begin, end))
            else:
                samples.setdefault(f"{name} call", []).append(milliseconds(begin, end))
                samples.setdefault(f"{name} kernel", []).append(milliseconds(stream.uploaded, end))
    return {name: statistics.median(values) for name, values in samples.items()}


def host_microseconds(bench: Bench, operation: str, tuning: Tuning, repetitions: int) -> float:
    """Return the median time of a call while the device has nothing else to do."""
    samples = []
    for _ in range(repetitions):
        bench.stream.settle()
        begin = time.perf_counter()
        getattr(bench, operation)(tuning)
        samples.append(time.perf_counter() - begin)
    bench.stream.settle()
    return statistics.median(samples) * 1e6


def candidates() -> list[Tuning]:
    """Return block shapes and warps, none with less than 16 bytes a thread."""
    shapes = itertools.product((4096, 8192, 16384, 32768), (2, 4, 8, 16))
    return [Tuning(tile, warps) for tile, warps in shapes if 16 <= tile // (32 * warps) <= 256]


def hints_of(tuning: Tuning) -> list[Tuning]:
    """Return `tuning` with every other combination of cache hints that the assembler takes."""
    hints = itertools.product(("", ".cg"), ("", "evict_first"), ("", ".cs", ".cg"))
    return [
        replace(tuning, load_cache=load, load_eviction=eviction, store_cache=store)
        for load, eviction, store in hints
        if (load or eviction or store) and not (load and eviction)
    ]


def sweep(
    bench: Bench, operation: str, repetitions: int, flush: torch.Tensor
) -> tuple[Tuning, list[dict[str, object]]]:
    """Try all candidates, then all hints on the best; print the best five; return the best and every time."""

    def timed(tuning: Tuning) -> tuple[float, Tuning]:
        bench.check(operation, tuning)
        return measure(bench, {operation: tuning}, repetitions, flush)[f"{operation} kernel"], tuning

    found = sorted(map(timed, candidates()), key=operator.itemgetter(0))
    for _, tuning in found[:HINTED_SHAPES]:
        found += map(timed, hints_of(tuning))
    found.sort(key=operator.itemgetter(0))
    print(f"best for {operation} of {bench.payload_bytes / 1e6:.0f} MB, {bench.case.name}:")
    for taken_ms, tuning in found[:5]:
        print(f"  {taken_ms * 1e3:8.1f} us  {tuning}")
    return found[0][1], [{"operation": operation, "ms": taken_ms} | asdict(tuning) for taken_ms, tuning in found]


def table_row(bench: Bench, tunings: dict[str, Tuning], repetitions: int, flush: torch.Tensor) -> dict[str, object]:
    """Check, measure, check again; print and return one row."""
    for operation in OPERATIONS:
        bench.check(operation, tunings[operation])
    times = measure(bench, tunings, repetitions, flush)
    hosts = {name: host_microseconds(bench, name, tunings[name], repetitions) for name in OPERATIONS}
    for operation in OPERATIONS:
        bench.check(operation, tunings[operation])
    cells = [f"{times['copy'] * 1e3:8.1f}"]
    for name in OPERATIONS:
        kernel, call = times[f"{name} kernel"], times[f"{name} call"]
        cells.append(f"{kernel * 1e3:8.1f} {100 * times['copy'] / kernel:4.0f} % {call * 1e3:8.1f} {hosts[name]:5.0f}")
    print(f"{bench.case.name:22}{bench.payload_bytes / 1e6:6.1f}  {'   '.join(cells)}", flush=True)
    return {"case": bench.case.name, "bytes": bench.payload_bytes, "ms": times, "host_us": hosts}


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--sweep", action="store_true", help="try block shapes, warps and cache hints first")
    parser.add_argument("--sweep-size", type=float, default=84, help="MB of the sweep's slab")
    parser.add_argument("--sizes", default="64,84,256,512", help="MB of a slab, separated by commas")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark needs one")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter: times mean nothing"
    print(f"{name}, torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}")
    flush = torch.zeros(FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    result: dict[str, object] = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    tunings = {"gather": gather_launch.TUNING, "scatter": scatter_launch.TUNING}
    if options.sweep:
        bench = Bench(CASES[0], options.layers, options.sweep_size, device)
        swept: list[dict[str, object]] = []
        for operation in OPERATIONS:
            tunings[operation], tried = sweep(bench, operation, options.repetitions, flush)
            swept += tried
        bench.close()
        result["sweep"] = swept
    result["tuning"] = {operation: asdict(tuning) for operation, tuning in tunings.items()}
    print(f"{'':28}      copy   gather                         scatter")
    print(f"{'pages':22}{'MB':>6}        us   kernel of copy    call us  host   kernel of copy    call us  host")
    rows = []
    for case in CASES:
        for megabytes in map(float, options.sizes.split(",")):
            bench = Bench(case, options.layers, megabytes, device)
            rows.append(table_row(bench, tunings, options.repetitions, flush))
            bench.close()
    result["rows"] = rows
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
