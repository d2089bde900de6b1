"""Compares digests of devices with the reference, on a GPU or in Triton's interpreter on a CPU. See `copy_checks`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import played_device
import torch
from cache_oracle import POISON, Memory, content, state_geometry
from copy_checks import CPU, Request, on_device, paged, poisoned, same, settle, table_of
from page_shapes import Shape, contents, one_part, opened, page_ids, trailer_for
from played_device import make_copier, play, staged, wait_compiled

from longshore_agent.errors import DeviceError
from longshore_agent.kernels import device_digest, device_kernel, reference
from longshore_agent.kernels.copier import Copy, Part, Slab, View, pool_view
from longshore_agent.kernels.cpu_copy import CpuCopier
from longshore_agent.kernels.device_copier import DeviceCopier
from longshore_agent.kernels.device_digest import BoundDigest, CopyDigests
from longshore_agent.kernels.device_kernel import CopyStream, DeviceKernel
from longshore_agent.kernels.device_launch import PlaneTable
from longshore_agent.kernels.digest import Digests, Words, expanded
from longshore_agent.memory import cuda
from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.memory.pools import KVPool
from longshore_agent.pipeline.slabs import PageTable
from longshore_client.memory import pool_geometry
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import KVLayout
from longshore_wire.plan import plan
from longshore_wire.slabs import slab_bytes

KEY = b"a key of digests"


def digests_of(view: View, tokens: tuple[int, int], table: PlaneTable, stream: CopyStream) -> Words:
    """Return the digests that the kernel computes alone, [planes, heads] uint64."""
    device = stream.device
    source = paged(view, table, device)
    bound = BoundDigest(source.side, tokens, stream)  # type: ignore[arg-type]
    key = torch.from_numpy(expanded(KEY).view(np.int64).copy()).to(device)
    found = torch.zeros(bound.count, dtype=torch.int64, device=device)
    settle(device)
    bound.checked(source.place, tokens)(key.data_ptr(), found.data_ptr())  # type: ignore[arg-type]
    settle(device)
    return found.cpu().numpy().view(np.uint64).reshape(view.plane_count, len(view.heads))


def check_digests(shape: Shape, requests: list[Request], device_name: str, *, pool_shift: int = 0) -> int:
    """Compare the digests of each request; return how many there were."""
    device, count = torch.device(device_name), 0
    with opened(shape, seed=1) as pool:
        table, regions = on_device(pool, device, pool_shift)
        stream = CopyStream(device)
        for seed, (tokens, layers, heads) in enumerate(requests):
            pages = page_ids(shape, tokens, seed, repeats=True)
            view = pool_view(pool, pages, tokens[0] // shape.page_size, layers, heads)
            found, wanted = digests_of(view, tokens, table, stream), reference.digests(view, tokens, KEY)
            assert np.array_equal(found, wanted), (tokens, layers, heads, pages)
            assert len(np.unique(found)) == found.size
            count += found.size
        assert same(regions, contents(pool)), "the digest wrote to the pages"
    return count


def check_layouts(near: Shape, far: Shape, tokens: tuple[int, int]) -> int:
    """Compare the digests of one content in the pages of two pools; return how many there were."""
    stream, found = CopyStream(CPU), []
    with opened(near, seed=1) as source, opened(far, seed=2) as target:
        views = [
            pool_view(pool, page_ids(shape, tokens, seed, repeats=False), tokens[0] // shape.page_size, *chosen)
            for seed, (pool, shape) in enumerate(((source, near), (target, far)))
            for chosen in [(range(shape.layers), range(min(near.heads, far.heads)))]
        ]
        reference.copy(views[0], views[1], tokens)
        for view in views:
            table, regions = on_device(view.own_pool, CPU)
            found.append(digests_of(view, tokens, table, stream))
            assert regions
    assert np.array_equal(*found)
    return found[0].size


class Place:
    """A copier of a device, and the pages and staging memory that it copies between."""

    def __init__(self, device_name: str, source: KVPool, target: KVPool, payload_bytes: int) -> None:
        self.device = torch.device(device_name)
        if self.device.type == "cpu":
            played_device.interpret()
        self.memory = poisoned(slab_bytes(payload_bytes), self.device)
        staging = StagingRange(self.memory.data_ptr(), self.memory.numel(), 1 << 40)
        driver: Any = played_device.DEVICE if self.device.type == "cpu" else cuda.device_at(self.device.index)
        self.copier = DeviceCopier(driver, staging, staging)
        self.slab = Slab(staging, 0, payload_bytes)
        self.regions: list[list[torch.Tensor]] = []
        for pool in (source, target):
            _, regions = on_device(pool, self.device)
            for section in range(len(pool.sections)):
                self.copier._tables[pool, section] = table_of(pool, regions, self.device, section)
            self.regions.append(regions)
        settle(self.device)

    def ended(self, copy: Copy) -> Digests:
        """Copy, wait for the end, and return the digests."""
        while (ticket := self.copier.submit(copy)) is None:
            wait_compiled()
        return self._digests(ticket)

    def digest(self, *parts: Part) -> Words:
        found = self._digests(self.copier.digest(parts, KEY))
        assert not found.target
        return np.frombuffer(found.source, dtype="<u8")

    def _digests(self, ticket: Any) -> Digests:
        while not ticket.passed():
            pass
        assert ticket.end()
        return ticket.digests  # type: ignore[no-any-return]


def views_of(pools: tuple[KVPool, KVPool], shapes: tuple[Shape, Shape], tokens: tuple[int, int]) -> tuple[View, View]:
    """Return the views of all layers and of the heads that both have."""
    heads = range(min(shape.heads for shape in shapes))
    near, far = (
        pool_view(
            pool, page_ids(shape, tokens, seed, repeats=False), tokens[0] // shape.page_size, range(shape.layers), heads
        )
        for seed, (pool, shape) in enumerate(zip(pools, shapes, strict=True))
    )
    return near, far


def check_copies(near: Shape, far: Shape, tokens: tuple[int, int], device_name: str) -> int:
    """Gather, scatter and copy directly with a key; compare bytes and digests. Return how many digests a side has."""
    with opened(near, seed=1) as source, opened(far, seed=None) as target:
        views = views_of((source, target), (near, far), tokens)
        payload = views[0].payload_bytes(tokens)
        place, trailer = Place(device_name, source, target, payload), trailer_for(payload)
        wanted = reference.digests(views[0], tokens, KEY).tobytes()
        gather = one_part(views[0], place.slab, tokens, trailer, digest_key=KEY)
        scatter = one_part(place.slab, views[1], tokens, accepts=trailer.data.__eq__, digest_key=KEY)
        direct = one_part(views[0], views[1], tokens, digest_key=KEY)
        reference.copy(*views, tokens)
        # Twice, so that the second copies use the memory of the first ones.
        for _ in range(2):
            assert place.ended(gather) == Digests(wanted)
            assert place.ended(scatter) == Digests(b"", wanted)
            assert same(place.regions[1], contents(target))
            for region in place.regions[1]:
                region.copy_(poisoned(region.numel(), place.device))
            settle(place.device)
            assert place.ended(direct) == Digests(wanted, wanted)
            assert same(place.regions[1], contents(target))
            assert place.ended(gather._replace(digest_key=b"")) == Digests()
        assert same(place.regions[0], contents(source)), "a digest wrote to the pages"
    return len(wanted) // 8


def check_parts(layouts: tuple[KVLayout, KVLayout], device_name: str) -> int:
    """Move what one pair of ranks moves of a cache with several sections, of a slot layer by layer.

    Compares bytes and digests with those of a CPU's copier; returns how many digests a side has.
    """
    tokens = (0, 21)
    route = plan(*layouts).pairs[0]
    ranks = layouts[0].at(route.source_rank), layouts[1].at(route.target_rank)
    slot, pools, tables = route.slot, [], []
    for number, layout in enumerate(ranks):
        memory, handles = Memory.shared(layout, (state_geometry if slot else pool_geometry)(layout, 6))
        table = PageTable(0, np.array([4, 1, 3, 0, 2, 5][: layout.pages_of(*tokens)[1]], np.int32))
        if number == 0:
            memory.put(memory.data, table.pages.tolist(), content(5, layout, tokens[1]), *tokens)
        pools.append(KVPool(layout, memory.geometry, handles))
        tables.append(table)
        for handle in handles:
            os.close(handle)
    units = route.units_of(*tokens)
    payload = route.payload_bytes(*units)
    place, trailer = Place(device_name, pools[0], pools[1], payload), trailer_for(payload)
    near, far = (
        table.parts(pool, route, units, other.layout)
        for table, pool, other in zip(tables, pools, reversed(pools), strict=True)
    )
    host = CpuCopier().submit(Copy(near, far, digest_key=KEY)).digests
    moved = contents(pools[1])
    gather = Copy(near, place.slab, trailer, digest_key=KEY)
    scatter = Copy(place.slab, far, accepts=trailer.data.__eq__, digest_key=KEY)
    for _ in range(2):
        assert place.ended(gather) == Digests(host.source)
        assert place.ended(scatter) == Digests(b"", host.source)
        assert same(place.regions[1], moved)
        for region in place.regions[1]:
            region.fill_(POISON)
        settle(place.device)
        assert place.ended(Copy(near, far, digest_key=KEY)) == Digests(host.source, host.source)
        assert same(place.regions[1], moved)
        assert place.ended(gather._replace(digest_key=b"")) == Digests()
        assert np.array_equal(place.digest(*near), np.frombuffer(host.source, "<u8"))
    for pool in pools:
        pool.close()
    return len(host.source) // 8


def check_flip(near: Shape, tokens: tuple[int, int], device_name: str) -> int:
    """Flip a bit of one byte after another; return how many digests were compared each time."""
    with opened(near, seed=1) as pool, opened(near, seed=None) as other:
        view, _ = views_of((pool, other), (near, near), tokens)
        place = Place(device_name, pool, other, view.payload_bytes(tokens))
        before = place.digest(Part(view, tokens))
        assert np.array_equal(before, reference.digests(view, tokens, KEY).ravel())
        first, end = view.rows(tokens)
        for row, plane, head, byte in (
            (first, 0, len(view.heads) - 1, 0),
            (end - 1, view.plane_count - 1, 0, view.row_bytes - 1),
            ((first + end) // 2, view.plane_count // 2, len(view.heads) // 2, view.row_bytes // 2),
        ):
            geometry = pool.geometry.planes[plane]
            page, slot = divmod(row - view.first_row, view.page_rows)
            at = geometry.offset + int(view.pages[page]) * geometry.page_stride + slot * geometry.token_stride
            flipped = place.regions[0][geometry.region][at + head * geometry.head_stride + byte :][:1]
            flipped ^= 1
            settle(place.device)
            after = place.digest(Part(view, tokens))
            assert np.flatnonzero(before != after).tolist() == [plane * len(view.heads) + head]
            flipped ^= 1
            settle(place.device)
        assert np.array_equal(place.digest(Part(view, tokens)), before)
    return int(before.size)


def compiling_threads(shape: Shape, device_name: str) -> list[str]:
    """Register a pool, and compute digests of it; return the threads that compiled the kernel of digests."""
    threads: list[str] = []
    compile_it = DeviceKernel._compile

    def compiles(kernel: DeviceKernel, stream: Any, tile: Any, tuning: Any) -> Any:
        if kernel is device_digest._KERNEL and device_kernel._key(stream, tile, tuning) not in kernel._compiled:
            threads.append(threading.current_thread().name)
        return compile_it(kernel, stream, tile, tuning)

    tokens = (0, 2 * shape.page_size)
    with (
        opened(shape, seed=1) as pool,
        opened(shape, seed=None) as other,
        patch.object(DeviceKernel, "_compile", compiles),
    ):
        view, _ = views_of((pool, other), (shape, shape), tokens)
        place = Place(device_name, pool, other, view.payload_bytes(tokens))
        place.copier.prepare_pool(pool, direct=False)
        wait_compiled()
        assert np.array_equal(place.digest(Part(view, tokens)), reference.digests(view, tokens, KEY).ravel())
    return threads


def damaged_list(shape: Shape, tokens: tuple[int, int]) -> tuple[int, int]:
    """Copy directly while the device's list of the target's pages is damaged.

    Returns:
        The digests of a side, and how many of them differ between the sides.
    """
    with opened(shape, seed=1) as source, opened(shape, seed=None) as target:
        views = views_of((source, target), (shape, shape), tokens)
        place = Place("cpu", source, target, views[0].payload_bytes(tokens))
        copy = one_part(*views, tokens, digest_key=KEY)
        found = place.ended(copy)
        assert found.source == found.target
        for region in place.regions[1]:
            region.zero_()
        ids = place.copier._held(target, views[1].pages, place.copier._directs, to_write=True)
        ids._table[0] = (ids._table[0] + 1) % shape.page_count
        source_digests, target_digests = (np.frombuffer(each, dtype="<u8") for each in place.ended(copy))
        return source_digests.size, int(np.count_nonzero(source_digests != target_digests))


def planted(damage: str, file: Path) -> tuple[bool, bool]:
    """Copy with a damage of `gpu/plants`, which replaces methods of this process's copier.

    Returns:
        Whether the digests of both sides differ: of pages that are copied directly, and by way of a slab.
    """
    place_of_plants = Path(__file__).parent / "gpu" / "plants" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("plants", place_of_plants)
    assert spec is not None
    assert spec.loader is not None
    plants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plants)
    with opened(PLANTED, seed=1) as source, opened(PLANTED, seed=None) as target, ExitStack() as stack:
        for name in ("submit", "_hold"):
            stack.enter_context(patch.object(DeviceCopier, name, getattr(DeviceCopier, name)))
        stack.enter_context(patch.object(CopyDigests, "calls", CopyDigests.calls))
        plants.change_memory = lambda at, count, change: ctypes.memmove(at, change(ctypes.string_at(at, count)), count)
        plants.plant(file)
        views = views_of((source, target), (PLANTED, PLANTED), (0, 32))
        payload = views[0].payload_bytes((0, 32))
        place, trailer = Place("cpu", source, target, payload), trailer_for(payload)
        for pool in (source, target):
            regions = [torch.from_numpy(pool.region(index)) for index in range(len(pool.geometry.region_bytes))]
            place.copier._tables[pool, 0] = table_of(pool, regions, CPU)
        file.write_text(damage, encoding="utf-8")
        direct = place.ended(one_part(*views, (0, 32), digest_key=KEY))
        gathered = place.ended(one_part(views[0], place.slab, (0, 32), trailer, digest_key=KEY))
        scattered = place.ended(one_part(place.slab, views[1], (0, 32), accepts=lambda _: True, digest_key=KEY))
    return direct.source != direct.target, gathered.source != scattered.target


# Rows of one head as large as those of the tests on GPUs.
PLANTED = Shape(layers=1, head_dim=128)
# Its digests take more bytes than a trailer, so that the two can be told apart.
PLAYED = Shape(layers=2)


class Recorded:
    """A simulated device whose calls are recorded, and a gather, scatter or direct copy on it.

    Attributes:
        calls: (what was queued, handle of its stream).
        refused: index of the launch that the driver refuses, counted from the next one.
    """

    def __init__(self, kind: str, source: KVPool, target: KVPool) -> None:
        play()
        self.calls: list[tuple[str, int]] = []
        self.refused = -1
        copy_to_device: Callable[..., None] = cuda.copy_to_device
        key = expanded(KEY).tobytes()

        def upload(device: object, at: int, data: bytes, stream: int) -> None:
            copy_to_device(device, at, data, stream)
            begins = bytes((ctypes.c_uint8 * len(data)).from_address(at))
            known = begins.startswith(key) and not any(begins[len(key) :])
            self.calls.append(("key and zeros" if known else "page ids", stream))

        def launch(_: object, function: int, *others: Any) -> None:
            refused, self.refused = self.refused == 0, self.refused - 1
            if refused:
                raise DeviceError("the driver refuses")
            self.calls.append((played_device.FUNCTIONS[function], others[3]))

        def fill(found: Any, _: int, stream: int) -> None:
            self.calls.append(("trailer" if found.length_bytes == 64 else "sums", stream))

        cuda.copy_to_device, cuda.launch = upload, launch  # type: ignore[assignment]
        cuda.HostBytes.fill = fill  # type: ignore[method-assign]
        self.copier, memory = make_copier()
        streams = (self.copier._gathers, self.copier._scatters, self.copier._directs)
        for handle, stream in enumerate(streams, 1):
            stream.handle = handle
        for pool in (source, target):
            played_device.on_device(pool)
        self.tokens = (0, PLAYED.page_size)
        self.views = views_of((source, target), (PLAYED, PLAYED), self.tokens)
        if kind == "direct":
            self.copy = one_part(*self.views, self.tokens)
        else:
            self.copy = staged(kind, self.views[kind == "scatter"], memory, self.tokens)

    def submit(self, key: bytes) -> Any:
        while (ticket := self.copier.submit(self.copy._replace(digest_key=key))) is None:
            wait_compiled()
        return ticket

    def taken(self) -> list[tuple[str, int]]:
        """Return and forget the calls."""
        calls, self.calls = self.calls, []
        return calls


def queued(kind: str) -> dict[str, list[tuple[str, int]]]:
    """Copy without a key, with one, and so on; return what each copy queued on which stream."""
    with opened(PLAYED, seed=1) as source, opened(PLAYED, seed=None) as target:
        place, found = Recorded(kind, source, target), {}
        for name, key in (("first", b""), ("again", b""), ("key", KEY), ("key again", KEY), ("no key", b"")):
            ticket = place.submit(key)
            found[name] = place.taken()
            assert bool(ticket.digests.source or ticket.digests.target) is False
            ticket.end()
            assert bool(ticket.digests.source or ticket.digests.target) is bool(key)
        place.copier.digest((Part(place.views[0], place.tokens),), KEY).end()
        place.taken()
        place.copier.digest((Part(place.views[0], place.tokens),), KEY).end()
        found["alone"] = place.taken()
        assert not source.busy
        assert not target.busy
        # Copies that end one after another share their memory.
        assert {len(free) for free in place.copier._digest_memories._free.values()} == {1}
    return found


def refused(kind: str, number: int) -> dict[str, object]:
    """Copy with a key while the driver refuses a launch, then again.

    Args:
        number: of the launch.
    Returns:
        What was queued, whether pools were held then and after the end, the error and whether it was the end's, and the
        digests of the second copy.
    """
    with opened(PLAYED, seed=1) as source, opened(PLAYED, seed=None) as target:
        place = Recorded(kind, source, target)
        place.submit(b"").end()
        place.submit(KEY).end()
        place.taken()
        place.refused, at_end, error = number, False, ""
        found: dict[str, object] = {}
        try:
            ticket = place.submit(KEY)
            at_end = True
            found["held"] = source.busy or target.busy
            ticket.end()
        except DeviceError as caught:
            error = str(caught)
        found |= {"queued": [name for name, _ in place.taken()], "error": error, "at end": at_end}
        found["held later"] = source.busy or target.busy
        again = place.submit(KEY)
        again.end()
        found["queued later"] = [name for name, _ in place.taken()]
        assert {len(free) for free in place.copier._digest_memories._free.values()} == {1}
    return found


def digest_refusal(fault: str) -> tuple[str, str]:
    """Ask for digests with one fault; return the error's kind and text. No pool stays held."""
    with opened(PLAYED, seed=1) as source, opened(PLAYED, seed=None) as target:
        place = Recorded("gather", source, target)
        ids = {"too few pages": [2], "a page beyond the last": [2, 12]}.get(fault, [2, 1])
        view = pool_view(source, np.array(ids, dtype=np.int32), 0, range(2), range(4))

        def refuse(*_: object) -> None:
            raise DeviceError("the driver refuses")

        if fault == "a pool that has left":
            source.close()
        if fault == "no host memory":
            cuda.HostBytes = refuse  # type: ignore[assignment, misc]
        if fault == "no event":
            cuda.Event = refuse  # type: ignore[assignment, misc]
        kind = message = ""
        try:
            place.copier.digest((Part(view, (4, 4) if fault == "no tokens" else (0, 32)),), KEY)
        except LongshoreError as error:
            kind, message = f"{type(error).__name__} {error.reason.name}", str(error)
        assert not source.busy
        assert "digest" not in [name for name, _ in place.calls]
        return kind, message
