"""The device kernels against the references of the CPU's, bit for bit: on a GPU, or in Triton's interpreter on a CPU.

Each check raises AssertionError or returns what it saw. It runs in a process that has set TRITON_INTERPRET or not
before this module is imported: importing it loads torch and Triton.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import torch
from page_shapes import GUARD_BYTES, POISON, Shape, chosen_of, contents, opened, page_ids, trailer_for

from longshore_agent.kernels import reference
from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.gather import device_launch as gather
from longshore_agent.kernels.held_pages import HeldPages
from longshore_agent.kernels.scatter import device_launch as scatter
from longshore_agent.kernels.view import payload_bytes
from longshore_agent.memory.ipc import create_memfd
from longshore_agent.memory.pools import KVPool
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, PlaneGeometry, PoolGeometry
from longshore_wire.trailer import slab_bytes

Request = tuple[tuple[int, int], range, range]

_LIBC = ctypes.CDLL(None, use_errno=True)


def on_device(pool: KVPool, device: torch.device, shift: int = 0) -> tuple[DevicePages, list[torch.Tensor]]:
    """Copies of the pool's regions on the device, each `shift` bytes behind an aligned address, and their table."""
    regions = []
    for index, length in enumerate(pool.geometry.region_bytes):
        memory = torch.empty(length + shift, dtype=torch.uint8, device=device)[shift:]
        memory.copy_(torch.from_numpy(pool.region(index).copy()))
        regions.append(memory)
    return DevicePages(pool, [region.data_ptr() for region in regions], device), regions


def held(pool: KVPool, pages: np.ndarray, device: torch.device, tokens: tuple[int, int]) -> HeldPages:
    """The pages of exactly these tokens, on the device."""
    return HeldPages(pool, pages, device, tokens[0] // pool.layout.page_size)


def settle(device: torch.device) -> None:
    """Wait for all streams: what tests prepare and look at is on other streams than what they test."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def poisoned(length: int, device: torch.device) -> torch.Tensor:
    return torch.full((length,), POISON, dtype=torch.uint8, device=device)


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
        device_pages, regions = on_device(pool, device, pool_shift)
        stream = CopyStream(device)
        for seed, (tokens, layers, heads) in enumerate(requests):
            pages = page_ids(shape, tokens, seed, repeats=True)
            listed = held(pool, pages, device, tokens)
            payload = payload_bytes(pool, tokens, layers, heads)
            trailer = trailer_for(payload) if seed % 4 != 3 else None
            length = slab_bytes(payload)
            buffer = poisoned(length + 2 * GUARD_BYTES + slab_shift, device)
            target = buffer[GUARD_BYTES + slab_shift :][:length]
            expected = np.full(buffer.numel(), POISON, dtype=np.uint8)
            packed = expected[GUARD_BYTES + slab_shift :][:length]
            reference.copy(*chosen_of(pool, pages, tokens, layers, heads, packed), tokens, trailer)
            settle(device)
            done = gather.gather_slices(
                device_pages, listed, tokens, layers, heads, target, trailer, stream, tuning or Tuning()
            )
            settle(device)
            assert done == payload
            assert np.array_equal(buffer.cpu().numpy(), expected), (tokens, layers, heads, pages)
            total += payload
        for region, before in zip(regions, contents(pool), strict=True):
            assert np.array_equal(region.cpu().numpy(), before), "the gather wrote to the pages"
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
        device_pages, regions = on_device(pool, device, pool_shift)
        stream = CopyStream(device)
        for seed, (tokens, layers, heads) in enumerate(requests):
            pages = page_ids(shape, tokens, seed, repeats=False)
            listed = held(pool, pages, device, tokens)
            payload = payload_bytes(pool, tokens, layers, heads)
            slab = np.random.default_rng(seed).integers(0, 256, payload + slab_shift, np.uint8)
            source = torch.from_numpy(slab.copy()).to(device)[slab_shift:]
            settle(device)
            done = scatter.scatter_slices(
                device_pages, listed, tokens, layers, heads, source, stream, tuning or Tuning()
            )
            settle(device)
            reference.copy(*chosen_of(pool, pages, tokens, layers, heads, slab[slab_shift:])[::-1], tokens)
            assert done == payload
            assert np.array_equal(source.cpu().numpy(), slab[slab_shift:]), "the scatter wrote to the slab"
            for region, expected in zip(regions, contents(pool), strict=True):
                assert np.array_equal(region.cpu().numpy(), expected), (tokens, layers, heads, pages)
            total += payload
    return total


def fenced(length: int, *, at_end: bool) -> tuple[mmap.mmap, torch.Tensor]:
    """Memory beside a page that ends the process when it is read or written: behind its end, or before its beginning."""
    inside = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, inside + 2 * mmap.PAGESIZE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    for place in (0, inside + mmap.PAGESIZE):
        address = ctypes.c_void_p(whole.data_ptr() + place)
        if _LIBC.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    first = mmap.PAGESIZE + (inside - length if at_end else 0)
    return mapping, whole[first : first + length]


def check_fences(shape: Shape, request: Request, *, at_end: bool) -> int:
    """Gather and scatter with every buffer and region beside a forbidden page; one without guards. On a CPU only."""
    tokens, layers, heads = request
    cpu = torch.device("cpu")
    with opened(shape, seed=1) as pool:
        pages = page_ids(shape, tokens, 1, repeats=False)
        mappings, regions = zip(*(fenced(n, at_end=at_end) for n in pool.geometry.region_bytes), strict=True)
        for index, region in enumerate(regions):
            region.copy_(torch.from_numpy(pool.region(index).copy()))
        device_pages = DevicePages(pool, [region.data_ptr() for region in regions], cpu)
        stream, listed = CopyStream(cpu), held(pool, pages, cpu, tokens)
        payload = payload_bytes(pool, tokens, layers, heads)
        mapping, slab = fenced(slab_bytes(payload), at_end=at_end)
        gather.gather_slices(device_pages, listed, tokens, layers, heads, slab, trailer_for(payload), stream)
        expected = np.empty(slab_bytes(payload), dtype=np.uint8)
        reference.copy(*chosen_of(pool, pages, tokens, layers, heads, expected), tokens, trailer_for(payload))
        assert np.array_equal(slab.numpy(), expected)
        mapping_bare, bare = fenced(payload, at_end=at_end)
        bare.copy_(slab[:payload].flip(0))
        scatter.scatter_slices(device_pages, listed, tokens, layers, heads, bare, stream)
        reference.copy(*chosen_of(pool, pages, tokens, layers, heads, bare.numpy())[::-1], tokens)
        for region, after in zip(regions, contents(pool), strict=True):
            assert np.array_equal(region.numpy(), after)
        assert all((*mappings, mapping, mapping_bare))
    return payload


def read_beyond_a_fence() -> int:
    """Read the byte behind fenced memory: this ends the process."""
    _, memory = fenced(100, at_end=True)
    return int(ctypes.c_uint8.from_address(memory.data_ptr() + 100).value)


def refusal(fault: str) -> tuple[str, str, bool]:
    """Launch with one fault; return the error's kind, what it says, and whether any byte of slab or pages has changed."""
    cpu, elsewhere = torch.device("cpu"), torch.device("meta")
    with opened(Shape(), seed=1) as pool:
        device_pages, regions = on_device(pool, cpu)
        payload = payload_bytes(pool, (0, 32), range(3), range(4))
        slab = poisoned(2 * slab_bytes(payload), cpu)
        arguments: dict[str, object] = {
            "device_pages": device_pages,
            "pages": HeldPages(pool, np.array([2, 1], dtype=np.int32), cpu),
            "tokens": (0, 32),
            "layers": range(3),
            "heads": range(4),
            "stream": CopyStream(cpu),
        }
        faults: dict[str, dict[str, Any]] = {
            "too few pages": {"pages": np.array([2], dtype=np.int32)},
            "pages of another part": {"pages": np.array([2, 1], dtype=np.int32), "first_page": 1},
            "pages of 64 bits": {"pages": np.array([2, 1], dtype=np.int64)},
            "no pages": {"pages": np.array([], dtype=np.int32)},
            "a page beyond the last": {"pages": np.array([2, 12], dtype=np.int32)},
            "a page twice": {"pages": np.array([2, 2], dtype=np.int32)},
            "no tokens": {"tokens": (4, 4)},
            "layers beyond the last": {"layers": range(1, 4)},
            "every second head": {"heads": range(0, 4, 2)},
            "a short target": {"target": slab[: payload + 63]},
            "a target of words": {"target": slab.view(torch.int16)},
            "a target with gaps": {"target": slab[::2]},
            "a target elsewhere": {"target": slab.to(elsewhere)},
            "a short source": {"source": slab[: payload - 1]},
            "a source elsewhere": {"source": slab.to(elsewhere)},
            "another payload": {"trailer": trailer_for(payload + 1)},
            "a stream elsewhere": {"stream": CopyStream(elsewhere)},
        }
        changes = faults[fault]
        before = contents(pool)
        try:
            if "pages" in changes:
                changes = {"pages": HeldPages(pool, changes["pages"], cpu, changes.get("first_page", 0))}
            if "source" in fault or "twice" in fault:
                scatter.scatter_slices(**arguments | {"source": slab} | changes)
            else:
                gather.gather_slices(**arguments | {"target": slab, "trailer": trailer_for(payload)} | changes)
            kind, message = "", ""
        except LongshoreError as error:
            kind, message = type(error).__name__, str(error)
            if kind == "LongshoreError":
                kind += f" {error.reason.name}"
        same = all(np.array_equal(region.numpy(), old) for region, old in zip(regions, before, strict=True))
        return kind, message, not same or not bool((slab == POISON).all())


def check_far(what: str) -> int:
    """Gather from and scatter to pages, or tokens, whose distances need 64 bits. CPU only: memory exists where it is touched."""
    if what == "pages":
        layout = KVLayout(ModelShape(1, 2, 64, 2), Parallel(), 4, PageOrder.HND)
        strides, tokens, pages = (3 << 30, 128, 512), (1, 11), np.array([2, 0, 1], dtype=np.int32)
    else:
        # Odd, so that words are bytes and a tile's offsets large; long rows, so that a tile lies in one page.
        layout = KVLayout(ModelShape(1, 2, 255, 1), Parallel(), 32, PageOrder.NHD)
        strides, tokens, pages = (510, 300_000_001, 255), (3, 64), np.array([2, 0], dtype=np.int32)
    planes = tuple(PlaneGeometry(0, index * 4096, *strides) for index in range(2))
    geometry = PoolGeometry(3, (9 << 30,), planes)
    descriptor = create_memfd("longshore-test", geometry.region_bytes[0])
    try:
        pool = KVPool(layout, geometry, [descriptor])
    finally:
        os.close(descriptor)
    generator = np.random.default_rng(5)
    for index in range(2):
        pool.plane(index)[:] = generator.integers(0, 256, pool.plane(index).shape, np.uint8)
    cpu = torch.device("cpu")
    device_pages = DevicePages(pool, [address for address, _ in pool.regions], cpu)
    stream = CopyStream(cpu)
    request = (tokens, range(1), range(2))
    payload = payload_bytes(pool, *request)
    slab, expected = poisoned(payload, cpu), np.zeros(payload, dtype=np.uint8)
    listed = held(pool, pages, cpu, tokens)
    gather.gather_slices(device_pages, listed, *request, slab, None, stream)
    reference.copy(*chosen_of(pool, pages, *request, expected), tokens)
    assert np.array_equal(slab.numpy(), expected)
    scatter.scatter_slices(device_pages, listed, *request, slab.flip(0), stream)
    reference.copy(*chosen_of(pool, pages, *request, expected), tokens)
    assert np.array_equal(slab.flip(0).numpy(), expected)
    pool.close()
    return payload


def check_large_slab(device_name: str) -> int:
    """Move a slab above 4 GiB through a pool of as much and compare it with what indexing gives. Needs 20 GB there."""
    device = torch.device(device_name)
    tokens, heads, dim, size = 2048, 8, 128, 64
    layout = KVLayout(ModelShape(520, heads, dim, 2), Parallel(), size)
    page = size * heads * dim * 2
    plane_bytes = tokens // size * page
    planes = tuple(PlaneGeometry(0, i * plane_bytes, page, heads * dim * 2, dim * 2) for i in range(1040))
    geometry = PoolGeometry(tokens // size, (1040 * plane_bytes,), planes)
    descriptor = create_memfd("longshore-test", geometry.region_bytes[0])
    try:
        pool = KVPool(layout, geometry, [descriptor])
    finally:
        os.close(descriptor)
    memory = torch.randint(0, 256, (geometry.region_bytes[0],), dtype=torch.uint8, device=device)
    device_pages, stream = DevicePages(pool, [memory.data_ptr()], device), CopyStream(device)
    pages, request = np.arange(32, dtype=np.int32)[::-1].copy(), ((0, tokens), range(520), range(heads))
    payload = payload_bytes(pool, *request)
    slab = torch.zeros(payload, dtype=torch.uint8, device=device)
    listed = held(pool, pages, device, (0, tokens))
    settle(device)
    gather.gather_slices(device_pages, listed, *request, slab, None, stream)
    settle(device)
    assert torch.equal(slab.view(1040, 32, page), memory.view(1040, 32, page).flip(1))
    memory.fill_(POISON)
    settle(device)
    scatter.scatter_slices(device_pages, listed, *request, slab, stream)
    settle(device)
    assert torch.equal(slab.view(1040, 32, page), memory.view(1040, 32, page).flip(1))
    pool.close()
    return payload


def check_many_launches(device_name: str, count: int) -> int:
    """Queue gathers of other pages without a wait between them; return how many slabs were right."""
    device, shape, tokens = torch.device(device_name), Shape(), (0, 64)
    request = (tokens, range(3), range(4))
    right = 0
    with opened(shape, seed=1) as pool:
        device_pages, _ = on_device(pool, device)
        stream = CopyStream(device)
        lists = [page_ids(shape, tokens, seed, repeats=True) for seed in range(count)]
        listed = [held(pool, pages, device, tokens) for pages in lists]
        payload = payload_bytes(pool, *request)
        slabs = [poisoned(payload, device) for _ in lists]
        settle(device)
        if device.type == "cuda":
            with stream.entered():
                torch.cuda._sleep(10_000_000)
        for pages, slab in zip(listed, slabs, strict=True):
            gather.gather_slices(device_pages, pages, *request, slab, None, stream)
        settle(device)
        for pages, slab in zip(lists, slabs, strict=True):
            expected = np.zeros(payload, dtype=np.uint8)
            reference.copy(*chosen_of(pool, pages, *request, expected), tokens)
            right += np.array_equal(slab.cpu().numpy(), expected)
    return right
