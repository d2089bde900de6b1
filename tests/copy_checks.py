"""Compares the copy kernel with the reference, bit for bit, on a GPU or in Triton's interpreter on a CPU.

Each check raises AssertionError or returns its observations. Importing this module loads torch and Triton, so its process
must set TRITON_INTERPRET, if wanted, before the import.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from page_shapes import (
    GUARD_BYTES,
    POISON,
    Shape,
    chosen_of,
    contents,
    create_memfd,
    opened,
    page_ids,
    plane_of,
    trailer_for,
)

from longshore_agent.kernels import reference
from longshore_agent.kernels.copier import Pages, Slab, View, pool_view
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_kernel import CopyStream
from longshore_agent.kernels.device_launch import BoundCopy, Paged, PageIds, Place, PlaneTable, Side, shape_of
from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.memory.pools import KVPool
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, PlaneGeometry, PoolGeometry
from longshore_wire.slabs import SealedTrailer, slab_bytes

Request = tuple[tuple[int, int], range, range]
# Tokens; then layers and first head of the source, and of the target; then how many heads.
DirectRequest = tuple[tuple[int, int], range, int, range, int, int]

CPU = torch.device("cpu")
_LIBC = ctypes.CDLL(None, use_errno=True)


class End(NamedTuple):
    """One side of a copy on a device: the shape, common to many copies, and this copy's addresses."""

    side: Side
    place: Place


def paged(view: View, table: PlaneTable, device: torch.device) -> End:
    """Return a side of pages; copies their ids to the device."""
    return End(Paged(view, table), (PageIds(view.own_pool, view.pages, device), view.first_page))


def packed(memory: torch.Tensor, payload_bytes: int) -> End:
    """Return a side that is a slab over a whole tensor of bytes."""
    slab = Slab(StagingRange(memory.data_ptr(), memory.numel(), 1 << 40), 0, payload_bytes)
    return End(slab, slab)


def copied(
    source: End,
    target: End,
    tokens: tuple[int, int],
    stream: CopyStream,
    trailer: SealedTrailer | None = None,
    tuning: Tuning | None = None,
) -> None:
    """Queue one copy."""
    BoundCopy(source.side, target.side, tokens, stream, tuning).queue(source.place, target.place, tokens, trailer)


def table_of(pool: KVPool, regions: Sequence[torch.Tensor], device: torch.device, section: int = 0) -> PlaneTable:
    return PlaneTable(pool, [region.data_ptr() for region in regions], device, section)


def on_device(pool: KVPool, device: torch.device, shift: int = 0) -> tuple[PlaneTable, list[torch.Tensor]]:
    """Copies of the pool's regions on the device, each `shift` bytes behind an aligned address, and their table."""
    regions = []
    for index, length in enumerate(pool.geometry.region_bytes):
        memory = torch.empty(length + shift, dtype=torch.uint8, device=device)[shift:]
        memory.copy_(torch.from_numpy(pool.region(index).copy()))
        regions.append(memory)
    return table_of(pool, regions, device), regions


def reached(pool: KVPool, home: torch.device, other: torch.device) -> tuple[PlaneTable, list[torch.Tensor]]:
    """Copies of the pool's regions on `other`, and their table on `home`, which reaches them."""
    table, regions = on_device(pool, other)
    if home == other:
        return table, regions
    # torch's first copy to the other device enables peer access, which the kernel needs.
    torch.empty(1, device=other).copy_(torch.empty(1, device=home))
    settle(home)
    settle(other)
    return table_of(pool, regions, home), regions


def settle(device: torch.device) -> None:
    """Wait for all streams, because tests prepare and compare data on other streams than the tested ones."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def poisoned(length: int, device: torch.device) -> torch.Tensor:
    return torch.full((length,), POISON, dtype=torch.uint8, device=device)


def same(regions: Sequence[torch.Tensor], expected: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(region.cpu().numpy(), one) for region, one in zip(regions, expected, strict=True))


def check_gather(
    shape: Shape,
    requests: list[Request],
    device_name: str,
    *,
    pool_shift: int = 0,
    slab_shift: int = 0,
    tuning: Tuning | None = None,
) -> int:
    """Gather each request and compare the whole buffer, guards included; return the payloads' bytes."""
    device = torch.device(device_name)
    total = 0
    with opened(shape, seed=1) as pool:
        table, regions = on_device(pool, device, pool_shift)
        stream = CopyStream(device)
        for seed, (tokens, layers, heads) in enumerate(requests):
            pages = page_ids(shape, tokens, seed, repeats=True)
            view = pool_view(pool, pages, tokens[0] // shape.page_size, layers, heads)
            payload = view.payload_bytes(tokens)
            trailer = trailer_for(payload) if seed % 4 != 3 else None
            length = slab_bytes(payload)
            buffer = poisoned(length + 2 * GUARD_BYTES + slab_shift, device)
            target = buffer[GUARD_BYTES + slab_shift :][:length]
            expected = np.full(buffer.numel(), POISON, dtype=np.uint8)
            slab = expected[GUARD_BYTES + slab_shift :][:length]
            reference.copy(*chosen_of(pool, pages, tokens, layers, heads, slab), tokens, trailer)
            source = paged(view, table, device)
            settle(device)
            copied(source, packed(target, payload), tokens, stream, trailer, tuning)
            settle(device)
            assert np.array_equal(buffer.cpu().numpy(), expected), (tokens, layers, heads, pages)
            total += payload
        assert same(regions, contents(pool)), "the gather wrote to the pages"
    return total


def check_scatter(
    shape: Shape,
    requests: list[Request],
    device_name: str,
    *,
    pool_shift: int = 0,
    slab_shift: int = 0,
    tuning: Tuning | None = None,
) -> int:
    """Scatter each request and compare all regions, guards included; return the payloads' bytes."""
    device = torch.device(device_name)
    total = 0
    with opened(shape, seed=None) as pool:
        table, regions = on_device(pool, device, pool_shift)
        stream = CopyStream(device)
        for seed, (tokens, layers, heads) in enumerate(requests):
            pages = page_ids(shape, tokens, seed, repeats=False)
            view = pool_view(pool, pages, tokens[0] // shape.page_size, layers, heads)
            payload = view.payload_bytes(tokens)
            slab = np.random.default_rng(seed).integers(0, 256, payload + slab_shift, np.uint8)
            source = torch.from_numpy(slab.copy()).to(device)[slab_shift:]
            target = paged(view, table, device)
            settle(device)
            copied(packed(source, payload), target, tokens, stream, tuning=tuning)
            settle(device)
            reference.copy(*chosen_of(pool, pages, tokens, layers, heads, slab[slab_shift:])[::-1], tokens)
            assert np.array_equal(source.cpu().numpy(), slab[slab_shift:]), "the scatter wrote to the slab"
            assert same(regions, contents(pool)), (tokens, layers, heads, pages)
            total += payload
    return total


def check_direct(
    near: Shape, far: Shape, requests: list[DirectRequest], devices: tuple[str, str], tuning: Tuning | None = None
) -> int:
    """Copy each request and compare all of both sides, guards included; return the copied bytes.

    Args:
        devices: of the source, where the kernel runs, and of the target.
    """
    home, other = (torch.device(name) for name in devices)
    total = 0
    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        source_table, source_regions = on_device(source, home)
        target_table, target_regions = reached(target, home, other)
        stream = CopyStream(home)
        for seed, (tokens, near_layers, near_head, far_layers, far_head, heads) in enumerate(requests):
            ids = page_ids(near, tokens, seed, repeats=True), page_ids(far, tokens, seed + 1, repeats=False)
            first = [tokens[0] // shape.page_size for shape in (near, far)]
            views = (
                pool_view(source, ids[0], first[0], near_layers, range(near_head, near_head + heads)),
                pool_view(target, ids[1], first[1], far_layers, range(far_head, far_head + heads)),
            )
            ends = paged(views[0], source_table, home), paged(views[1], target_table, home)
            settle(home)
            copied(*ends, tokens, stream, tuning=tuning)
            # Rely on the launch alone: the bytes are written when its stream has completed it.
            stream.synchronize()
            found = [region.cpu() for region in target_regions]
            total += reference.copy(*views, tokens)
            assert same(found, contents(target)), (tokens, near_layers, far_layers, ids)
        assert same(source_regions, contents(source)), "the copy wrote to the source"
    return total


def check_bound(near: Shape, far: Shape, heads: int, devices: tuple[str, str], *, staged: bool) -> tuple[int, int]:
    """Copy rooms slab by slab with launches bound to their shapes, and compare all of the target.

    Args:
        devices: as of `check_direct`.
        staged: by a gather and a scatter.
    Returns:
        How many launches were bound, and how many copies were queued.
    """
    home, other = (torch.device(name) for name in devices)
    size = max(near.page_size, far.page_size)
    slab_tokens, count = 3 * size // 2, 0
    # Slabs of two shapes and a last one in each room; the second room begins many pages later, the third within a page.
    whole = 2 * size if size > 100 else 4 * size
    rooms = [(0, whole), (64 * near.page_size * far.page_size, whole), (size + size // 3, 2 * size)]
    bound: dict[tuple[object, ...], BoundCopy] = {}
    stream = CopyStream(home)

    def queue(source: End, target: End, tokens: tuple[int, int]) -> None:
        views = [end.side.view for end in (source, target) if isinstance(end.side, Paged)]
        key = (*(view.pool for view in views), *(shape_of(view, tokens) for view in views))
        if key not in bound:
            bound[key] = BoundCopy(source.side, target.side, tokens, stream)
        bound[key].queue(source.place, target.place, tokens)

    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        source_table, _ = on_device(source, home)
        target_table, target_regions = reached(target, home, other)
        for seed, (first, length) in enumerate(rooms):
            # The source's list begins with pages that are not copied, as if the target held a prefix.
            begin, end = max(first - near.page_size, 0), first + length
            chosen = range(near.layers), range(near.heads - heads, near.heads)
            near_ids = page_ids(near, (begin, end), seed, repeats=True)
            far_ids = page_ids(far, (first, end), seed + 1, repeats=False)
            views = (
                pool_view(source, near_ids, begin // near.page_size, *chosen),
                pool_view(target, far_ids, first // far.page_size, range(near.layers), range(heads)),
            )
            ends = paged(views[0], source_table, home), paged(views[1], target_table, home)
            slabs = [(at, min(at + slab_tokens, end)) for at in range(first, end, slab_tokens)]
            memory = torch.empty(slab_bytes(views[0].payload_bytes(slabs[0])), dtype=torch.uint8, device=home)
            settle(home)
            for tokens in slabs:
                if staged:
                    middle = packed(memory, views[0].payload_bytes(tokens))
                    queue(ends[0], middle, tokens)
                    queue(middle, ends[1], tokens)
                else:
                    queue(*ends, tokens)
                count += 1 + staged
                reference.copy(*views, tokens)
            stream.synchronize()
            assert same(target_regions, contents(target)), (near, far, first, length)
    return len(bound), count


def fenced(length: int, *, at_end: bool) -> tuple[mmap.mmap, torch.Tensor]:
    """Memory next to a page, behind or before it, whose access ends the process."""
    inside = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, inside + 2 * mmap.PAGESIZE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    for place in (0, inside + mmap.PAGESIZE):
        address = ctypes.c_void_p(whole.data_ptr() + place)
        if _LIBC.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    first = mmap.PAGESIZE + (inside - length if at_end else 0)
    return mapping, whole[first : first + length]


def read_beyond_a_fence() -> int:
    """Read the byte behind fenced memory: this ends the process."""
    _, memory = fenced(100, at_end=True)
    return int(ctypes.c_uint8.from_address(memory.data_ptr() + 100).value)


def fenced_regions(pool: KVPool, *, at_end: bool) -> tuple[PlaneTable, list[torch.Tensor], list[mmap.mmap]]:
    """Return copies of the pool's regions, each next to a forbidden page, and their table."""
    mappings, regions = zip(*(fenced(n, at_end=at_end) for n in pool.geometry.region_bytes), strict=True)
    for index, region in enumerate(regions):
        region.copy_(torch.from_numpy(pool.region(index).copy()))
    return table_of(pool, regions, CPU), list(regions), list(mappings)


def check_fences(near: Shape, far: Shape, tokens: tuple[int, int], *, at_end: bool) -> int:
    """Gather, scatter and copy directly with every region and slab next to a forbidden page; return the copied bytes."""
    near, far = replace(near, guard_bytes=0), replace(far, guard_bytes=0)
    stream = CopyStream(CPU)
    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        near_table, near_regions, near_kept = fenced_regions(source, at_end=at_end)
        far_table, far_regions, far_kept = fenced_regions(target, at_end=at_end)
        near_ids, far_ids = (page_ids(shape, tokens, 1, repeats=False) for shape in (near, far))
        chosen = range(near.layers), range(near.heads)
        views = pool_view(source, near_ids, 0, *chosen), pool_view(target, far_ids, 0, *chosen)
        payload = views[0].payload_bytes(tokens)
        mapping, slab = fenced(slab_bytes(payload), at_end=at_end)
        near_end, far_end = paged(views[0], near_table, CPU), paged(views[1], far_table, CPU)
        copied(near_end, packed(slab, payload), tokens, stream, trailer_for(payload))
        expected = np.empty(slab_bytes(payload), dtype=np.uint8)
        reference.copy(*chosen_of(source, near_ids, tokens, *chosen, expected), tokens, trailer_for(payload))
        assert np.array_equal(slab.numpy(), expected)
        bare_mapping, bare = fenced(payload, at_end=at_end)
        bare.copy_(slab[:payload].flip(0))
        copied(packed(bare, payload), far_end, tokens, stream)
        reference.copy(*chosen_of(target, far_ids, tokens, *chosen, bare.numpy())[::-1], tokens)
        assert same(far_regions, contents(target))
        copied(near_end, far_end, tokens, stream)
        reference.copy(*views, tokens)
        assert same(far_regions, contents(target))
        assert same(near_regions, contents(source))
        assert all((*near_kept, *far_kept, mapping, bare_mapping))
    return payload


def refusal(kind: str, fault: str) -> tuple[str, str, bool]:
    """Copy with one fault; return the error's kind and text, and whether any byte of slab or pages has changed."""
    far_shape = Shape(head_dim=32 if fault == "another model" else 64)
    with opened(Shape(), seed=1) as source, opened(far_shape, seed=None) as target:
        pools, tables, regions = (source, target), [], []
        for pool in pools:
            table, own = on_device(pool, CPU)
            tables.append(table)
            regions += own
        before = [*contents(source), *contents(target)]
        # The fault is on the side with pages; for a direct copy, on the target.
        faulty = 0 if kind == "gather" else 1
        given: list[Pages] = [np.array([2, 1], dtype=np.int32)] * 2
        wrong = {
            "too few pages": [2],
            "no pages": [],
            "a page beyond the last": [2, 12],
            "a page twice": [2, 2],
        }
        given[faulty] = np.array(wrong.get(fault, [2, 1]), dtype=np.int64 if fault == "pages of 64 bits" else np.int32)
        first, layers, heads = [0, 0], [range(3), range(3)], [range(4), range(4)]
        first[faulty] = 1 if fault == "pages of another part" else 0
        layers[faulty] = range(1, 4) if fault == "layers beyond the last" else range(3)
        heads[faulty] = {"every second head": range(0, 4, 2), "fewer heads": range(3)}.get(fault, range(4))
        tokens = (4, 4) if fault == "no tokens" else (0, 32)
        payload = 2 * 3 * 32 * 4 * 128
        memory = poisoned(2 * slab_bytes(payload), CPU)
        lengths = {"a short slab": payload - 1, "no room for a trailer": payload + 63}
        said = payload - 1 if fault == "another payload" else payload
        trailer = trailer_for(payload + (fault == "another trailer"))
        stream = CopyStream(torch.device("meta") if fault == "a stream elsewhere" else CPU)
        try:
            slab = packed(memory[: lengths.get(fault, memory.numel())], said)
            ends = [
                slab if is_slab else paged(pool_view(pool, ids, at, *chosen), table, CPU)
                for pool, table, ids, at, *chosen, is_slab in zip(
                    pools, tables, given, first, layers, heads, (kind == "scatter", kind == "gather"), strict=True
                )
            ]
            both = (slab, slab) if fault == "two slabs" else (ends[0], ends[1])
            tail = trailer if kind == "gather" or fault == "a trailer behind pages" else None
            copied(*both, tokens, stream, tail)
            error_kind, message = "", ""
        except LongshoreError as error:
            error_kind, message = f"{type(error).__name__} {error.reason.name}", str(error)
        return error_kind, message, not same(regions, before) or not bool((memory == POISON).all())


def bound_refusals() -> list[str]:
    """Queue a bound copy where a token lies in no page, and where a target page stands twice; return the errors."""
    found = []
    with opened(Shape(), seed=1) as source, opened(Shape(), seed=None) as target:
        (near, _), (far, regions) = on_device(source, CPU), on_device(target, CPU)
        ids = np.array([2, 1], dtype=np.int32)
        near_end = paged(pool_view(source, ids, 0, range(3), range(4)), near, CPU)
        far_end = paged(pool_view(target, ids, 0, range(3), range(4)), far, CPU)
        twice = (PageIds(target, np.array([3, 3], dtype=np.int32), CPU), 0)
        copy = BoundCopy(near_end.side, far_end.side, (0, 16), CopyStream(CPU))
        for place, tokens in ((far_end.place, (32, 48)), (twice, (0, 16))):
            try:
                copy.queue(near_end.place, place, tokens)
            except LongshoreError as error:
                found.append(f"{type(error).__name__} {error.reason.name}")
        assert same(regions, contents(target))
    return found


@contextmanager
def laid_out(layout: KVLayout, geometry: PoolGeometry) -> Iterator[KVPool]:
    descriptor = create_memfd("longshore-test", geometry.region_bytes[0])
    try:
        pool = KVPool(layout, geometry, [descriptor])
    finally:
        os.close(descriptor)
    yield pool
    pool.close()


def check_far(what: str) -> int:
    """Gather from and scatter to pages, or tokens, whose distances need 64 bits. CPU only: memory exists where it is touched."""
    if what == "pages":
        layout = KVLayout(ModelShape.kv(1, 2, 64, 2), Parallel(), 4, PageOrder.HND)
        strides, tokens, pages = (3 << 30, 128, 512), (1, 11), np.array([2, 0, 1], dtype=np.int32)
    else:
        # Odd, so that words are bytes and a tile's offsets large; long rows, so that a tile lies in one page.
        layout = KVLayout(ModelShape.kv(1, 2, 255, 1), Parallel(), 32, PageOrder.NHD)
        strides, tokens, pages = (510, 300_000_001, 255), (3, 64), np.array([2, 0], dtype=np.int32)
    planes = tuple(PlaneGeometry(0, index * 4096, *strides) for index in range(2))
    with laid_out(layout, PoolGeometry(3, (9 << 30,), planes)) as pool:
        generator = np.random.default_rng(5)
        for index in range(2):
            plane_of(pool, index)[:] = generator.integers(0, 256, plane_of(pool, index).shape, np.uint8)
        table = PlaneTable(pool, [address for address, _ in pool.regions], CPU)
        stream, chosen = CopyStream(CPU), (range(1), range(2))
        view = pool_view(pool, pages, 0, *chosen)
        payload, end = view.payload_bytes(tokens), paged(view, table, CPU)
        slab, expected = poisoned(payload, CPU), np.zeros(payload, dtype=np.uint8)
        copied(end, packed(slab, payload), tokens, stream)
        reference.copy(*chosen_of(pool, pages, tokens, *chosen, expected), tokens)
        assert np.array_equal(slab.numpy(), expected)
        turned = slab.flip(0)
        copied(packed(turned, payload), end, tokens, stream)
        reference.copy(*chosen_of(pool, pages, tokens, *chosen, expected), tokens)
        assert np.array_equal(turned.numpy(), expected)
    return payload


def check_large_slab(device_name: str) -> int:
    """Move a slab above 4 GiB through a pool of as much and compare it with what indexing gives. Needs 20 GB there."""
    device = torch.device(device_name)
    tokens, heads, dim, size = 2048, 8, 128, 64
    layout = KVLayout(ModelShape.kv(520, heads, dim, 2), Parallel(), size)
    page = size * heads * dim * 2
    plane_bytes = tokens // size * page
    planes = tuple(PlaneGeometry(0, i * plane_bytes, page, heads * dim * 2, dim * 2) for i in range(1040))
    geometry = PoolGeometry(tokens // size, (1040 * plane_bytes,), planes)
    with laid_out(layout, geometry) as pool:
        memory = torch.randint(0, 256, (geometry.region_bytes[0],), dtype=torch.uint8, device=device)
        table, stream = table_of(pool, [memory], device), CopyStream(device)
        view = pool_view(pool, np.arange(32, dtype=np.int32)[::-1].copy(), 0, range(520), range(heads))
        payload = view.payload_bytes((0, tokens))
        slab = torch.zeros(payload, dtype=torch.uint8, device=device)
        ends = paged(view, table, device), packed(slab, payload)
        for source, target in (ends, ends[::-1]):
            settle(device)
            copied(source, target, (0, tokens), stream)
            settle(device)
            assert torch.equal(slab.view(1040, 32, page), memory.view(1040, 32, page).flip(1))
            memory.fill_(POISON)
    return payload


def check_many_launches(device_name: str, count: int) -> int:
    """Queue gathers of other pages without a wait between them; return how many slabs were right."""
    device, shape, tokens = torch.device(device_name), Shape(), (0, 64)
    chosen, right = (range(3), range(4)), 0
    with opened(shape, seed=1) as pool:
        table, _ = on_device(pool, device)
        stream = CopyStream(device)
        views = [pool_view(pool, page_ids(shape, tokens, seed, repeats=True), 0, *chosen) for seed in range(count)]
        payload = views[0].payload_bytes(tokens)
        slabs = [poisoned(payload, device) for _ in views]
        ends = [(paged(view, table, device), packed(slab, payload)) for view, slab in zip(views, slabs, strict=True)]
        bound = BoundCopy(ends[0][0].side, ends[0][1].side, tokens, stream)
        bound.prepare()
        settle(device)
        if device.type == "cuda":
            with stream.entered():
                torch.cuda._sleep(10_000_000)
        for source, target in ends:
            bound.queue(source.place, target.place, tokens)
        settle(device)
        for view, slab in zip(views, slabs, strict=True):
            expected = np.zeros(payload, dtype=np.uint8)
            reference.copy(*chosen_of(pool, view.pages, tokens, *chosen, expected), tokens)
            right += np.array_equal(slab.cpu().numpy(), expected)
    return right
