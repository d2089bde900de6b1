"""Checks the copies of one shape on a device, chooses their grid once, and queues each of them by one launch.

Called by `device_copier`. A side is a slab of staging memory or an engine's pages, which may lie on another GPU whose
memory is mapped for this one. Pages are kept in the form that the kernel reads: a pool's table of planes, and the page
ids of each sequence, which come from a peer or an engine and are checked before a kernel turns one into an address.
Each copy gets its own addresses of page ids and slabs, first page and trailer, which takes the host some microseconds.
A copy has not ended when `queue` returns: the caller keeps the pages mapped until the stream has passed the launch.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from longshore_agent.errors import DeviceError, PoolError, ShapeError
from longshore_agent.kernels.copier import Pages, Slab, View, check_fit, check_tokens
from longshore_agent.kernels.device_grid import (
    PLANE_FIELDS,
    TOKEN_BYTES_MAX,
    Grid,
    Tuning,
    choose_grid,
    choose_tile,
    unit_of,
)
from longshore_agent.kernels.device_kernel import CopyStream, DeviceKernel, Launch
from longshore_agent.memory import cuda
from longshore_agent.memory.pools import KVPool, are_unique
from longshore_wire.layout import PageOrder
from longshore_wire.slabs import SealedTrailer, slab_bytes

_ID_BYTES = 4
_KERNEL = DeviceKernel()
# Keys: whether source and target are slabs, for gather, scatter and direct copy. Values: the best of sweeps on H200s:
# benchmarks/gather_scatter_gpu.py --sweep and benchmarks/direct_gpu.py --sweep.
TUNINGS = {
    (False, True): Tuning(tile_bytes=8192),
    (True, False): Tuning(tile_bytes=4096, warps=4),
    (False, False): Tuning(tile_bytes=8192),
}
_TRAILER_WORDS = struct.Struct("<8q")
_NO_TAIL = (0,) * 9


class PlaneTable:
    """The table of one pool's planes in the memory of one device, as the kernel reads it.

    Attributes:
        pool: layout and geometry of the pages, already checked. Its own mapping is not used.
        device: the device of the pages, with its index; "cpu" for Triton's interpreter.
        bits: bitwise or of all addresses and strides, in bytes.
        token_stride_max: the longest token stride of a plane, in bytes.
        heads_adjoin: True: the heads of a token are adjacent in every plane.
    """

    def __init__(self, pool: KVPool, region_addresses: Sequence[int], device: torch.device, section: int = 0) -> None:
        """Put the table of a section's planes on the device.

        Args:
            region_addresses: one for each of the pool's regions, of its first byte in the device's address space.
        Raises:
            PoolError: the number of addresses is not the number of regions.
            DeviceError: the device has no memory for the table.
        """
        geometry = pool.geometry
        if len(region_addresses) != len(geometry.region_bytes):
            raise PoolError(
                f"{len(region_addresses)} addresses for {len(geometry.region_bytes)} regions: pass one for each region"
            )
        self.pool, held = pool, pool.sections[section]
        lines = [
            (region_addresses[plane.region] + plane.offset, plane.page_stride, plane.token_stride, plane.head_stride)
            for plane in held.planes
        ]
        try:
            self._planes = torch.tensor(lines, dtype=torch.int64, device=device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"the GPU has no memory left for a pool's table of {len(lines)} planes: leave the agent some of what its "
                "engine takes"
            ) from error
        self.device, self._address = self._planes.device, self._planes.data_ptr()
        # A stride that no index uses does not limit the alignment. The address of a plane is always used.
        counts = (2, pool.page_count, held.page_rows, held.heads)
        steps = [step for line in lines for step, count in zip(line, counts, strict=True) if count > 1]
        self.bits = functools.reduce(operator.or_, steps, held.row_bytes)
        self.token_stride_max = max(plane.token_stride for plane in held.planes)
        self.heads_adjoin = all(plane.head_stride == held.row_bytes for plane in held.planes)

    def line(self, layer: int) -> int:
        """Return the address of a layer's first plane in the table, [planes, PLANE_FIELDS] int64 on the device.

        A line is the address of the plane, then its strides of pages, tokens and heads.
        """
        return self._address + layer * PLANE_FIELDS * self._planes.element_size()


class PageIds:
    """The page ids of a sequence, in a device's memory. Keep it until every stream has passed the last launch on it.

    Attributes:
        pool: the pool of the pages.
    """

    def __init__(
        self,
        pool: KVPool,
        pages: Pages,
        device: torch.device,
        stream: CopyStream | None = None,
        *,
        to_write: bool = False,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Check `pages` ([ids] int32, in the host's memory) and copy them. The caller may change them afterwards.

        Args:
            stream: the stream of all launches that will read them, where the copy is queued. None: wait for the copy.
            to_write: True: check now for repeated pages; False: `address_of` checks when it is first asked to.
            memory: for at least as many ids, if `stream` is given; None: allocate it. See `id_memory`.
        Raises:
            ShapeError: `pages` is not such an array.
            LongshoreError: PAGE_OUT_OF_RANGE, names the index.
            DeviceError: the device has no memory for them, or refuses the copy.
        """
        if pages.dtype != np.int32 or pages.ndim != 1 or not pages.size:
            raise ShapeError(f"pages is {pages.dtype} {pages.shape}: give int32 ids in one dimension, at least one")
        pool.check_pages(pages)
        self.pool = pool
        self._ids = pages.copy()
        if stream is not None and stream.context is not None:
            self._table = id_memory(pages.size, device) if memory is None else memory
            cuda.copy_to_device(stream.context, self._table.data_ptr(), self._ids.tobytes(), stream.handle)
        else:
            self._table = torch.tensor(pages, dtype=torch.int32, device=device)
            if self._table.is_cuda:
                # Launches on other streams read the ids and would not wait for this copy.
                torch.cuda.current_stream(device).synchronize()
        self._address = self._table.data_ptr()
        self._count = pages.size
        # The check may sort the ids, which takes as long as the copy. A source's pages may repeat.
        self._is_unique = to_write and are_unique(self._ids)

    def address_of(self, first_page: int, tokens: tuple[int, int], page_tokens: int, *, unique: bool) -> int:
        """Return the device address of the id (int32) of the first token's page; the other pages' ids follow it.

        Args:
            first_page: number of the first id's page in the sequence.
            tokens: [first, end) in the sequence, not empty.
            page_tokens: of the view.
            unique: refuse a list with a repeated page, since two tokens would be written to one place. Pages of a slot have
                layers of their own, so that each of them may be named again.
        Raises:
            ShapeError: a token lies in no page of the list.
            LongshoreError: TOKENS_OVERLAP.
        """
        first, end = tokens[0] // page_tokens - first_page, -(-tokens[1] // page_tokens) - first_page
        if not 0 <= first < end <= self._count:
            held = (first_page, first_page + self._count)
            raise ShapeError(f"pages are numbers [{held[0]}, {held[1]}) of a sequence: tokens {tokens} lie elsewhere")
        if unique and not self._is_unique and self.pool.layout.order is not PageOrder.SLOT:
            self.pool.check_pages(self._ids, unique=True)
            self._is_unique = True
        return self._address + first * _ID_BYTES


def id_memory(count: int, device: torch.device) -> torch.Tensor:
    """Return memory for `count` page ids, [count] int32. Raises DeviceError if the device has none left."""
    try:
        return torch.empty(count, dtype=torch.int32, device=device)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the GPU has no memory left for {count} page ids: leave the agent some of what its engine takes"
        ) from error


class Paged(NamedTuple):
    """A side in an engine's pages, with the table of planes on the device."""

    view: View
    table: PlaneTable


Side = Paged | Slab


# The page ids of a side, and the number of the first one's page in the sequence.
Listed = tuple[PageIds, int]
# A side of one copy of a shape.
Place = Listed | Slab


class _BoundSide(NamedTuple):
    """The values that all copies of one shape share on one side. A slab has only a name."""

    name: str
    table: PlaneTable | None = None
    planes: int = 0  # address of the table's line for the first chosen layer
    page_tokens: int = 0


class BoundCopy:
    """All copies of one shape: equally many tokens, at the same places in pages, of the same layers and heads."""

    def __init__(
        self, source: Side, target: Side, tokens: tuple[int, int], stream: CopyStream, tuning: Tuning | None = None
    ) -> None:
        """Check the first of these copies and choose their grid; queue and compile nothing.

        Args:
            source, target: at most one of them a slab; of one model, with equally many layers and heads.
            tokens: see `cpu_copy.copy_rows`.
            stream: of the device that holds the tables; it can access all addresses.
            tuning: None: use `TUNINGS`.
        Raises:
            ShapeError: the two sides do not fit each other, or one launch cannot copy so much; names the argument.
        """
        sides = (source, target)
        views = [side.view for side in sides if isinstance(side, Paged)]
        if len(views) == len(sides):
            check_fit(views[0], views[1], tokens)
        elif views:
            check_tokens(tokens, views[0].row_tokens)
        else:
            raise ShapeError("source and target are slabs: give pages on one side")
        for side in sides:
            if isinstance(side, Paged) and side.table.device != stream.device:
                raise ShapeError(f"stream is of {stream.device}: the pages are on {side.table.device}")
        self._stream, self._token_count = stream, tokens[1] - tokens[0]
        self._payload_bytes = views[0].payload_bytes(tokens)
        self._tuning = tuning or TUNINGS[isinstance(source, Slab), isinstance(target, Slab)]
        self._grid = _grid(sides, tokens, self._tuning)
        self._sides = [_bound_side(*each) for each in zip(("source", "target"), sides, strict=True)]
        places = (_offsets_in_pages(side, tokens, self._grid.counts[0]) for side in sides)
        self._same = (
            *(number for pair in zip(*places, strict=True) for number in pair),
            len(views[0].layers),
            *self._grid.counts,
        )
        self._tail_bytes = slab_bytes(self._payload_bytes) - self._payload_bytes
        self._launch: Launch | None = None

    def ready(self) -> bool:
        """Whether the kernel is compiled. If it is not, begin to compile it in another thread.

        Raises:
            DeviceError: the compilation failed; the next call tries again.
        """
        return self._launch is not None or _KERNEL.ready(self._stream, self._grid.tile, self._tuning)

    def prepare(self) -> Launch:
        """Compile the kernel if necessary, which takes a second. Raises DeviceError."""
        if self._launch is None:
            self._launch = _KERNEL.bind(self._stream, self._grid, self._tuning)
        return self._launch

    def queue(
        self, source: Place, target: Place, tokens: tuple[int, int], trailer: SealedTrailer | None = None
    ) -> None:
        """Queue the copy of tokens [first, end) by one launch; return when it is queued.

        After the stream has passed the launch, every later reader on any device sees the bytes; announce them only
        then. Until then, pages, lists and slab are in use.

        Args:
            source, target: page ids of the same pools, or slabs with the first slab's alignment. A target's pages may
                not repeat.
            tokens: equally many as in the first copy, and at the same distance from the beginning of their page on
                either side.
            trailer: written behind a target that is a slab, after a gap of zeros; nothing behind it is touched.
        Raises:
            ShapeError: an argument breaks the above, named in the message; nothing was launched.
            LongshoreError: TOKENS_OVERLAP if a target page is in its list twice; nothing was launched.
            DeviceError: the driver refuses the launch, or the kernel cannot be compiled.
        """
        values = self._values(source, target, tokens, trailer)
        launch = self._launch or self.prepare()
        launch(*values)

    def checked(
        self,
        source: Place,
        target: Place,
        tokens: tuple[int, int],
        trailer: SealedTrailer | None = None,
        before_bytes: int = 0,
    ) -> Callable[[], None]:
        """Check as `queue`, and return the call that queues the copy; it raises only DeviceError.

        Args:
            before_bytes: of the slab's payload that lie before a target that is a piece of it.
        """
        values = self._values(source, target, tokens, trailer, before_bytes)
        return functools.partial(self._launch or self.prepare(), *values)

    def _values(
        self,
        source: Place,
        target: Place,
        tokens: tuple[int, int],
        trailer: SealedTrailer | None,
        before_bytes: int = 0,
    ) -> tuple[int, ...]:
        """Return the values of one launch. Raises ShapeError and LongshoreError as `queue`."""
        assert tokens[1] - tokens[0] == self._token_count, (tokens, self._token_count)
        tail = _NO_TAIL
        if trailer is not None:
            slab_payload_bytes = before_bytes + self._payload_bytes
            if not isinstance(target, Slab) or trailer.payload_bytes != slab_payload_bytes:
                raise ShapeError(
                    f"trailer.payload_bytes is {trailer.payload_bytes}: the target is a slab of {slab_payload_bytes} bytes"
                )
            tail_bytes = self._tail_bytes
            if before_bytes:
                tail_bytes = slab_bytes(slab_payload_bytes) - slab_payload_bytes
            tail = (tail_bytes, *_TRAILER_WORDS.unpack(trailer.data))
        source_at, source_ids = self._addresses(self._sides[0], source, tokens, 0)
        target_at, target_ids = self._addresses(self._sides[1], target, tokens, tail[0])
        return (source_at, source_ids, target_at, target_ids, *self._same, *tail)

    def _addresses(self, side: _BoundSide, place: Place, tokens: tuple[int, int], tail_bytes: int) -> tuple[int, int]:
        """Return the addresses of a side's planes or slab, and of its first page id."""
        if side.table is not None:
            assert not isinstance(place, Slab), f"{side.name} was pages"
            ids, first_page = place
            assert ids.pool is side.table.pool, "page ids of another pool"
            return side.planes, ids.address_of(first_page, tokens, side.page_tokens, unique=side.name == "target")
        assert isinstance(place, Slab), f"{side.name} was a slab"
        memory, offset_bytes, payload_bytes = place
        if payload_bytes != self._payload_bytes:
            raise ShapeError(f"{side.name}.payload_bytes is {payload_bytes}: the rows take {self._payload_bytes}")
        if not 0 <= offset_bytes <= memory.length_bytes - payload_bytes - tail_bytes:
            raise ShapeError(
                f"{side.name} is at {offset_bytes} of {memory.length_bytes} bytes: it takes {payload_bytes + tail_bytes}"
            )
        address = memory.address + offset_bytes
        assert address % self._grid.tile.unit_bytes == 0, (address, self._grid.tile)
        # A slab has no page ids, so the second address is not read.
        return address, address


def _bound_side(name: str, side: Side) -> _BoundSide:
    if isinstance(side, Slab):
        return _BoundSide(name)
    return _BoundSide(name, side.table, side.table.line(side.view.layers.start), side.view.page_tokens)


def _offsets_in_pages(side: Side, tokens: tuple[int, int], skipped: int) -> tuple[int, int, int]:
    """Return token, gap and head of one side, as `copy_kernel` counts them.

    Args:
        skipped: rows of the first tile before the copy's first row; kernels count from the tile's first row.
    """
    if isinstance(side, Slab):
        return -skipped, 0, 0
    view, table = side
    slot = view.rows(tokens)[0] % view.page_rows
    return slot - skipped, table.pool.layer_count - len(view.layers), view.heads.start


def shape_of(view: View, tokens: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of a side with pages. One `BoundCopy` can queue all copies of equal shapes."""
    layers, heads = view.layers, view.heads
    place = tokens[0] % view.page_tokens
    return view.section, tokens[1] - tokens[0], place, layers.start, layers.stop, heads.start, heads.stop


def _grid(sides: tuple[Side, Side], tokens: tuple[int, int], tuning: Tuning) -> Grid:
    paged = [side for side in sides if isinstance(side, Paged)]
    slabs = [side for side in sides if isinstance(side, Slab)]
    view = paged[0].view
    own_heads, row_bytes = len(view.heads), view.row_bytes
    if all(table.heads_adjoin for _, table in paged):
        own_heads, row_bytes = 1, own_heads * row_bytes
    if row_bytes * own_heads > TOKEN_BYTES_MAX:
        raise ShapeError(f"heads is {view.heads}: {row_bytes * own_heads} bytes a token are above {TOKEN_BYTES_MAX}")
    addresses = [slab.memory.address + slab.offset_bytes for slab in slabs]
    unit_bytes = unit_of(functools.reduce(operator.or_, [*(table.bits for _, table in paged), *addresses]))
    # Bytes from one token to the next: the stride in pages, all heads of a token in a slab.
    steps = [*(table.token_stride_max for _, table in paged), *(row_bytes * own_heads for _ in slabs)]
    source_page, target_page = (0 if isinstance(side, Slab) else side.view.page_rows for side in sides)
    tile = choose_tile(unit_bytes, row_bytes, max(steps), (source_page, target_page), tuning.tile_bytes)
    first, end = view.rows(tokens)
    # If tiles lie in one page, they begin at the same rows of pages on both sides.
    slot = max(first % side.view.page_rows for side in paged)
    return choose_grid(tile, row_bytes, own_heads, view.plane_count, slot, end - first, tuning.programs_max)
