"""Compares gather and scatter on a CPU with a plain copy of as many bytes, on one thread.

Prints for every layout the rate of a plain copy between two staging buffers and the ratios to it: medians of interleaved
repetitions. It also prints the speedup of two threads, the time of a small slab, and the time to allocate a buffer with and
without huge pages. Each slab is first checked against the reference, and each scatter by gathering it again.

Ordinary stores read each cache line before they overwrite it, which limits slices of some heads. The compiled loop
(`kernels/cpu_copy.py`) uses streaming stores if rows are whole lines. See docs/design/2026-11-23-copies.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longshore_agent.kernels import reference
from longshore_agent.kernels.copier import Bytes, Pages, View, pool_view, slab_view
from longshore_agent.kernels.cpu_copy import copy_rows
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, PlaneGeometry, PoolGeometry
from longshore_wire.slabs import slab_bytes

LAYERS, HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    order: PageOrder
    element_bytes: int
    page_size: int
    heads: range
    scattered: bool


def open_pool(order: PageOrder, element_bytes: int, page_size: int, page_count: int) -> KVPool:
    """Return a pool of random bytes in shared memory, as an engine would offer it."""
    row = HEAD_DIM * element_bytes
    page = page_size * HEADS * row
    strides = (HEADS * row, row) if order is PageOrder.NHD else (row, page_size * row)
    planes = tuple(PlaneGeometry(0, i * page * page_count, page, *strides) for i in range(2 * LAYERS))
    geometry = PoolGeometry(page_count, (2 * LAYERS * page * page_count,), planes)
    layout = KVLayout(ModelShape.kv(LAYERS, HEADS, HEAD_DIM, element_bytes), Parallel(), page_size, order)
    descriptor = os.memfd_create("longshore-bench", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, geometry.region_bytes[0])
    try:
        pool = KVPool(layout, geometry, [descriptor])
    finally:
        os.close(descriptor)
    pool.region(0)[:] = np.random.default_rng(1).integers(0, 256, geometry.region_bytes[0], np.uint8)
    return pool


def page_ids(page_count: int, count: int, *, scattered: bool) -> npt.NDArray[np.int32]:
    """Return pages in random order, or one run of consecutive pages."""
    if scattered:
        return np.random.default_rng(0).permutation(page_count)[:count].astype(np.int32)
    return np.arange(count, dtype=np.int32)


def medians_s(jobs: list[Callable[[], object]], repetitions: int) -> list[float]:
    """Return the median seconds of each job. The jobs alternate, so that other load on the machine slows all of them."""
    seconds: list[list[float]] = [[] for _ in jobs]
    for _ in range(repetitions):
        for job, taken in zip(jobs, seconds, strict=True):
            begin = time.perf_counter()
            job()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in seconds]


def sides(
    pool: KVPool, pages: Pages, tokens: tuple[int, int], layers: range, heads: range, slab: Bytes
) -> tuple[View, View]:
    """Return both sides of a gather into `slab`, as a worker makes them for each slab."""
    view = pool_view(pool, pages, 0, layers, heads)
    return view, slab_view(slab, view, tokens)


def check_bytes(pool: KVPool, pages: Pages, heads: range, source: Bytes, target: Bytes) -> None:
    """Raise AssertionError unless a few pages gather as in the reference and scatter back to the same bytes."""
    count = min(2, len(pages))
    tokens = (min(1, pool.layout.page_size - 1), count * pool.layout.page_size)
    near, into_source = sides(pool, pages[:count], tokens, range(LAYERS), heads, source)
    into_target = slab_view(target, near, tokens)
    length = copy_rows(near, into_source, tokens)
    reference.copy(near, into_target, tokens)
    assert np.array_equal(source[:length], target[:length])
    source[:] = np.random.default_rng(2).integers(0, 256, source.size, np.uint8)
    copy_rows(into_source, near, tokens)
    copy_rows(near, into_target, tokens)
    assert np.array_equal(source[:length], target[:length])


def measure(case: Case, tokens: int, repetitions: int) -> None:
    """Check one case and print its row."""
    count = tokens // case.page_size
    pool = open_pool(case.order, case.element_bytes, case.page_size, count + count // 4)
    pages = page_ids(pool.page_count, count, scattered=case.scattered)
    length = 2 * LAYERS * tokens * len(case.heads) * HEAD_DIM * case.element_bytes
    buffers = [StagingBuffer(slab_bytes(length)) for _ in range(2)]
    source, target = (buffer.view(0, buffer.length_bytes) for buffer in buffers)
    check_bytes(pool, pages, case.heads, source, target)

    def gather() -> None:
        copy_rows(*sides(pool, pages, (0, tokens), range(LAYERS), case.heads, target), (0, tokens))

    def scatter() -> None:
        pages_view, slab = sides(pool, pages, (0, tokens), range(LAYERS), case.heads, source)
        copy_rows(slab, pages_view, (0, tokens))

    def plain() -> None:
        np.copyto(target[:length], source[:length])

    plain_s, gather_s, scatter_s = medians_s([plain, gather, scatter], repetitions)
    print(
        f"{case.order.name:5} {case.element_bytes:5} {case.page_size:5} {len(case.heads):3}/{HEADS}"
        f" {'random' if case.scattered else 'one run':8} {length / 1e6:6.0f} {length / plain_s / 1e9:6.1f}"
        f" {plain_s / gather_s:7.2f} {plain_s / scatter_s:8.2f}",
        flush=True,
    )
    pool.close()
    for buffer in buffers:
        buffer.close()


def measure_parallel(tokens: int, repetitions: int) -> None:
    """Print the speedup of two threads over one thread with twice the work, for gathers and for plain copies."""
    pools = [open_pool(PageOrder.NHD, 2, 16, tokens // 16) for _ in range(2)]
    pages = page_ids(tokens // 16, tokens // 16, scattered=True)
    length = 2 * LAYERS * tokens * 2 * HEAD_DIM * 2
    slabs = [np.ones(length, dtype=np.uint8) for _ in range(4)]

    def gather(index: int) -> None:
        copy_rows(*sides(pools[index], pages, (0, tokens), range(LAYERS), range(2, 4), slabs[index]), (0, tokens))

    def plain(index: int) -> None:
        np.copyto(slabs[index], slabs[index + 2])

    def both(job: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=job, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    plain_s, plains_s, gather_s, gathers_s = medians_s(
        [lambda: plain(0), lambda: both(plain), lambda: gather(0), lambda: both(gather)], repetitions
    )
    print(
        f"two threads against one: {2 * gather_s / gathers_s:.2f} for gathers, "
        f"{2 * plain_s / plains_s:.2f} for plain copies of {length / 1e6:.0f} MB"
    )
    for pool in pools:
        pool.close()


def measure_call(repetitions: int) -> None:
    """Print the time of a call that copies almost nothing."""
    pool = open_pool(PageOrder.NHD, 2, 16, 8)
    slab = np.zeros(1 << 20, dtype=np.uint8)
    page = np.zeros(1, dtype=np.int32)

    def one(tokens: tuple[int, int]) -> Callable[[], object]:
        return lambda: copy_rows(*sides(pool, page, tokens, range(1), range(2), slab), tokens)

    token_s, page_s = medians_s([one((3, 4)), one((0, 16))], 100 * repetitions)
    print(f"one call, 1 layer: {token_s * 1e6:.0f} us for one token, {page_s * 1e6:.0f} us for one page of 16")
    pool.close()


def measure_allocation(length_bytes: int, repetitions: int) -> None:
    """Print the seconds to allocate and touch a buffer with small and with huge pages."""

    def allocate(huge_pages: bool) -> None:
        StagingBuffer(length_bytes, huge_pages=huge_pages).close()

    small_s, huge_s = medians_s([lambda: allocate(False), lambda: allocate(True)], repetitions)
    print(f"allocate {length_bytes >> 20} MiB: {small_s * 1e3:.0f} ms, with huge pages {huge_s * 1e3:.0f} ms")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a slab, a multiple of 64")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, one thread a copy, {LAYERS} layers, {HEADS} heads of {HEAD_DIM}")
    print("order bytes  page heads pages        MB  plain  gather  scatter")
    print("                                          GB/s  /plain   /plain")
    for order in (PageOrder.NHD, PageOrder.HND):
        for element_bytes in (2, 4):
            for page_size in (16, 64):
                for heads in (range(2, 4), range(4, 8), range(8)):
                    for scattered in (False, True):
                        case = Case(order, element_bytes, page_size, heads, scattered)
                        measure(case, options.tokens, options.repetitions)
    for order in (PageOrder.NHD, PageOrder.HND):
        measure(Case(order, 2, 1, range(8), scattered=True), options.tokens, options.repetitions)
    measure_parallel(options.tokens, options.repetitions)
    measure_call(options.repetitions)
    measure_allocation(256 << 20, 3)


if __name__ == "__main__":
    main()
