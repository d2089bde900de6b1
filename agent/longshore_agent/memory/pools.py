"""Maps an engine's pages into this worker: checks the engine's declaration, gives views to kernels.

Called by the worker (register, unregister) and by kernels. The engine's geometry is untrusted input. Nothing is mapped
before all of its addresses are checked against their regions. A closed pool stays mapped while a copy or write holds it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import MemoryLostError, PoolError
from longshore_agent.memory.cuda import Device
from longshore_agent.memory.device_memory import DeviceMapping, RegisteredMapping
from longshore_agent.memory.host_memory import Mapping, map_shared, torn_count
from longshore_wire.engine_messages import DeviceRegion
from longshore_wire.errors import LayoutError, LongshoreError, Reason
from longshore_wire.layout import PLANE_BYTES, KVLayout, PageOrder, PlaneGeometry, PoolGeometry

# How a process gets a region of pages: a file descriptor, ours to close, or its place on a GPU.
RegionHandle = int | DeviceRegion
# Lists up to this length are checked number by number.
_SHORT_PAGES_MAX = 128


class PlaneGroup(NamedTuple):
    """Consecutive planes with equal strides (bytes), from number `first` in the pool's order on.

    `addresses` are the addresses of their first pages in this process, [planes] int64. With an `element_stride` of 0 the
    elements of a row are adjacent.
    """

    first: int
    addresses: npt.NDArray[np.int64]
    page_stride: int
    token_stride: int
    head_stride: int
    element_stride: int = 0


class PoolSection(NamedTuple):
    """The planes of one section of a layout in a pool. With PageOrder.OPAQUE a row is a whole blob, of which a page has one.

    Attributes:
        kinds: planes of a layer.
        heads: local ones.
        row_bytes: bytes of a row, without gaps.
        element_bytes: of an element of a row; a blob is one element.
        page_rows: rows of one head in a page.
        row_tokens: tokens of a row.
        planes: their places, by kind and local layer.
        groups: the same, mostly one group. Their addresses are valid only inside `in_use`.
    """

    kinds: int
    heads: int
    row_bytes: int
    element_bytes: int
    page_rows: int
    row_tokens: int
    planes: tuple[PlaneGeometry, ...]
    groups: list[PlaneGroup]


class KVPool:
    """The pages of one engine rank.

    Attributes:
        layout, geometry: as registered.
        layer_count: local layers.
        device: the GPU for which the pages are mapped: in its memory, or that of another GPU or the host within its reach;
            None if they are for the CPU.
        on_device: they are for a GPU.
        sealed: the engine cannot truncate its memory, so that other engines' workers may map it.
        adjacent: the elements of every row are adjacent.
        closed_s: time of `close` by `time.monotonic`; None before it.
        sections: those of the layout.
        views: for `pipeline.slabs`: views of no pages, by section, layers and heads.
    """

    def __init__(
        self,
        layout: KVLayout,
        geometry: PoolGeometry,
        handles: Sequence[RegionHandle],
        device: Device | None = None,
        *,
        stop: threading.Event | None = None,
        unmap_later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Check the geometry and map its regions. The caller keeps the descriptors and may close them afterwards.

        Args:
            handles: one for each region: file descriptors of host memory, or places on a GPU if `device` is given.
            device: the GPU for which to map the regions. It is given host memory only if nobody can truncate that.
            stop: give up mapping host memory for the GPU when it is set.
            unmap_later: calls its argument, which unmaps the regions, in another thread; None: this thread unmaps them.
        Raises:
            PoolError: the geometry does not fit the layout, or its regions; names the region, or the plane and field.
        """
        check_geometry(layout, geometry)
        strided = [index for index, plane in enumerate(geometry.planes) if plane.element_stride]
        self.adjacent = not strided
        if strided and device is not None:
            raise PoolError(
                f"planes[{strided[0]}].element_stride is {geometry.planes[strided[0]].element_stride}: a row in the reach "
                "of a GPU has adjacent elements, give 0"
            )
        if len(handles) != len(geometry.region_bytes):
            raise PoolError(
                f"{len(handles)} file descriptors for {len(geometry.region_bytes)} regions: pass one for each region"
            )
        self.layout = layout
        self.geometry = geometry
        self.layer_count = len(layout.layers)
        self._sharing = _sharing(layout, geometry) if layout.order is PageOrder.SLOT else ()
        self.on_device = device is not None
        self.device = device
        self._unmap_later = unmap_later
        self._mappings = _map_regions(geometry, handles, device, stop)
        self.sealed = all(mapping.sealed for mapping in self._mappings if isinstance(mapping, Mapping))
        self.sections = pool_sections(layout, geometry, [mapping.address for mapping in self._mappings])
        self._regions = [mapping.bytes_view() for mapping in self._mappings if isinstance(mapping, Mapping)]
        self.views: dict[tuple[int, tuple[int, int], tuple[int, int]], Any] = {}
        self._lock = threading.Lock()
        self._users_count = 0
        self._closing = False
        self.closed_s: float | None = None
        self._closed = threading.Event()

    @property
    def page_count(self) -> int:
        """Pages in every plane."""
        return self.geometry.page_count

    @property
    def busy(self) -> bool:
        """Whether a copy or a write uses the mapping."""
        with self._lock:
            return self._users_count > 0

    @property
    def regions(self) -> list[tuple[int, int]]:
        """(address in this process, length in bytes) of each region, for a transport to register."""
        return [(mapping.address, mapping.length_bytes) for mapping in self._mappings]

    def region(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of one region. Valid only inside `in_use`."""
        return self._regions[index]

    def check_claimed(self, pages: npt.NDArray[np.int32]) -> None:
        """Raise LongshoreError unless these pages, all that a room has here, can be written; names the first wrong one."""
        self.check_pages(pages, unique=True)
        for parts in self._sharing if pages.size else ():
            seen: dict[int, int] = {}
            for part in parts:
                page = int(pages[part])
                if (other := seen.setdefault(page, part)) != part:
                    raise _repeated(other, part, page)

    def check_pages(self, pages: npt.NDArray[np.int32], *, unique: bool = False) -> None:
        """Raise LongshoreError unless each page id is in [0, page_count); names the first wrong index.

        Args:
            unique: also refuse repeated pages, since a scatter would write two tokens to one place. Those of a slot are of different
                layers, and `check_claimed` has seen all of them.
        """
        unique = unique and self.layout.order is not PageOrder.SLOT
        if pages.size <= _SHORT_PAGES_MAX:
            # Sooner than numpy, whose calls take a microsecond each.
            ids = pages.tolist()
            if not ids or (min(ids) >= 0 and max(ids) < self.page_count and not (unique and len(set(ids)) < len(ids))):
                return
        # As unsigned numbers, negative ids are the largest.
        if int(pages.view(np.uint32).max()) >= self.page_count:
            index = int(np.flatnonzero((pages < 0) | (pages >= self.page_count))[0])
            raise LongshoreError(
                f"pages[{index}] is {int(pages[index])}: the pool has pages 0 to {self.page_count - 1}",
                reason=Reason.PAGE_OUT_OF_RANGE,
            )
        if unique and not are_unique(pages):
            order = np.argsort(pages, kind="stable")
            same = np.flatnonzero(np.diff(pages[order]) == 0)
            first, second = int(order[same[0]]), int(order[same[0] + 1])
            raise _repeated(first, second, int(pages[first]))

    def hold(self) -> None:
        """Hold the mapping for one copy or write, until `let_go`.

        Raises:
            PoolError: `close` was called.
        """
        with self._lock:
            if self._closing:
                raise PoolError("the pool is unregistered: register it again", reason=Reason.UNKNOWN_POOL)
            self._users_count += 1

    def let_go(self) -> None:
        """Release a `hold`. After `close`, the last release unmaps the pool."""
        with self._lock:
            self._users_count -= 1
            last = self._closing and self._users_count == 0
        if last:
            self._end()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the mapping for one copy or write; may be nested. Raises the errors of `hold` and, at its end, of `check_whole`."""
        self.hold()
        try:
            yield
            self.check_whole()
        finally:
            self.let_go()

    def check_whole(self, *, touch: bool = False) -> None:
        """Raise MemoryLostError if a part of the pages was found missing: bytes copied since then may be invalid.

        Args:
            touch: first access the end of each region, since the kernel, which copies for some transports, does not report
                missing memory.
        """
        for region in self._regions if touch else ():
            int(region[-1])
        if not torn_count():
            return
        for index, mapping in enumerate(self._mappings):
            if isinstance(mapping, Mapping) and mapping.torn:
                raise MemoryLostError(
                    f"region {index} of the pages was {mapping.length_bytes} bytes and was cut short: unregister the pool, and "
                    "register one whose memory stays"
                )

    def close(self) -> bool:
        """Refuse new holds and unmap at once or, if some are left, with the last one. Idempotent; never blocks.

        Returns:
            True if the memory is unmapped; False if it is still held or another thread unmaps it, see `wait_closed`.
        """
        with self._lock:
            if self._closing:
                return self._closed.is_set()
            self._closing = True
            self.closed_s = time.monotonic()
            idle = self._users_count == 0
        if idle:
            self._end()
        return self._closed.is_set()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the memory is unmapped after `close`; return whether it is."""
        return self._closed.wait(timeout_s)

    def _end(self) -> None:
        if self._unmap_later is None:
            self._unmap()
        else:
            self._unmap_later(self._unmap)

    def _unmap(self) -> None:
        # Drop this pool's own views first, so that none points to unmapped memory.
        self._regions.clear()
        for mapping in self._mappings:
            mapping.unmap()
        self._closed.set()


def _sharing(layout: KVLayout, geometry: PoolGeometry) -> tuple[tuple[int, ...], ...]:
    """Return the parts of a slot whose layers share a tensor, by tensor. Each of them needs a page of its own."""
    found: dict[tuple[int, int], dict[int, None]] = {}
    for layer in range(len(layout.layers)):
        plane = geometry.planes[layer]
        found.setdefault((plane.region, plane.offset), {})[layer // layout.page_size] = None
    return tuple(dict.fromkeys(tuple(parts) for parts in found.values() if len(parts) > 1))


def _repeated(first: int, second: int, page: int) -> LongshoreError:
    text = f"pages[{first}] and pages[{second}] are both {page}: two parts of a sequence cannot be written to one page"
    return LongshoreError(text, reason=Reason.TOKENS_OVERLAP)


def are_unique(pages: npt.NDArray[np.int32]) -> bool:
    """Whether no page id is repeated."""
    if pages.size <= _SHORT_PAGES_MAX:
        return len(set(pages.tolist())) == pages.size
    ordered = np.sort(pages)
    return not (ordered[1:] == ordered[:-1]).any()


def check_geometry(layout: KVLayout, geometry: PoolGeometry) -> None:
    """Raise PoolError unless `geometry` fits `layout`, all bytes are in their regions, and no plane uses a byte twice.

    Pure: maps nothing, and accepts numbers of any size and sign.
    """
    for index, length_bytes in enumerate(geometry.region_bytes):
        if not 1 <= length_bytes < 2**63:
            raise PoolError(f"region_bytes[{index}] is {length_bytes}: give a number from 1 to 2**63 - 1")
    try:
        layout.check()
        geometry.check(layout)
    except LayoutError as error:
        raise PoolError(str(error)) from error
    element_bytes = 1 if layout.order is PageOrder.OPAQUE else layout.model.element_bytes
    for index, plane in enumerate(geometry.planes):
        for field in PLANE_BYTES:
            value: int = getattr(plane, field)
            if value % element_bytes:
                raise PoolError(
                    f"planes[{index}].{field} is {value}: give a multiple of the element size, {element_bytes}"
                )


def pool_sections(layout: KVLayout, geometry: PoolGeometry, region_addresses: Sequence[int]) -> tuple[PoolSection, ...]:
    """Return the sections of a pool whose regions are at these addresses."""
    found, first, layer_count = [], 0, len(layout.layers)
    opaque = layout.order is PageOrder.OPAQUE
    for section in layout.sections:
        planes = geometry.planes[first : first + section.kinds * layer_count]
        first += len(planes)
        found.append(
            PoolSection(
                kinds=section.kinds,
                heads=len(layout.heads_of(section.heads)),
                row_bytes=section.row_bytes,
                element_bytes=section.row_bytes if opaque else layout.model.element_bytes,
                page_rows=layout.page_rows(section),
                row_tokens=layout.page_size if opaque else 1,
                planes=planes,
                groups=_groups(planes, region_addresses),
            )
        )
    return tuple(found)


def _groups(planes: Sequence[PlaneGeometry], region_addresses: Sequence[int]) -> list[PlaneGroup]:
    strides = [(plane.page_stride, plane.token_stride, plane.head_stride, plane.element_stride) for plane in planes]
    starts = [index for index in range(len(planes)) if index == 0 or strides[index] != strides[index - 1]]
    addresses = np.array([region_addresses[plane.region] + plane.offset for plane in planes], dtype=np.int64)
    ends = [*starts[1:], len(planes)]
    return [PlaneGroup(start, addresses[start:end], *strides[start]) for start, end in zip(starts, ends, strict=True)]


def close_handles(handles: Iterable[RegionHandle]) -> None:
    """Close the file descriptors among the handles."""
    for handle in handles:
        if isinstance(handle, int):
            os.close(handle)


def _map_regions(
    geometry: PoolGeometry, handles: Sequence[RegionHandle], device: Device | None, stop: threading.Event | None
) -> list[Mapping | DeviceMapping | RegisteredMapping]:
    mappings: list[Mapping | DeviceMapping | RegisteredMapping] = []
    try:
        for index, (handle, length_bytes) in enumerate(zip(handles, geometry.region_bytes, strict=True)):
            try:
                if isinstance(handle, DeviceRegion):
                    assert device is not None, "a region on a GPU needs the device that maps it"
                    mappings.append(DeviceMapping(device, handle, length_bytes))
                elif device is None:
                    mappings.append(map_shared(handle, length_bytes))
                else:
                    mappings.append(RegisteredMapping(device, handle, length_bytes, stop))
            except PoolError as error:
                raise PoolError(f"region {index}: {error}") from error
    except BaseException:
        for mapping in mappings:
            mapping.unmap()
        raise
    return mappings
