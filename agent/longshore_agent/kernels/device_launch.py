"""Copies on a device that have one shape: their checks, their grid, and the launch that serves all of them.

Called by `device_copier`. A side is an engine's pages, which may lie on another GPU whose memory is mapped for this one, or a
slab of staging memory. What differs between the copies of one shape is written anew for each: addresses of page ids and
slabs, the first page, and the trailer. That takes some microseconds of the host.
"""

from __future__ import annotations

import functools
import operator
import struct
from typing import NamedTuple

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.copier import Slab
from longshore_agent.kernels.copy_kernel import ARGUMENTS, constants, copy_kernel
from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_grid import (
    TOKEN_BYTES_MAX,
    Grid,
    Tuning,
    choose_grid,
    choose_tile,
    unit_of,
)
from longshore_agent.kernels.device_kernel import DeviceKernel, Launch
from longshore_agent.kernels.device_pages import DevicePages, HeldPages
from longshore_agent.kernels.view import View, check_fit, check_tokens
from longshore_wire.trailer import SealedTrailer, slab_bytes

_KERNEL = DeviceKernel(copy_kernel, constants, ARGUMENTS)
# By whether source and target are slabs: gather, scatter and direct copy. The best of sweeps on H200s:
# benchmarks/gather_scatter_gpu.py --sweep and benchmarks/direct_gpu.py --sweep.
TUNINGS = {
    (False, True): Tuning(tile_bytes=8192),
    (True, False): Tuning(tile_bytes=4096, warps=4),
    (False, False): Tuning(tile_bytes=8192),
}
_TRAILER_WORDS = struct.Struct("<8q")
_NO_TAIL = (0,) * 9


class Paged(NamedTuple):
    """A side in an engine's pages, whose table of planes is on the device."""

    view: View
    table: DevicePages


Side = Paged | Slab
# Where one copy of a shape begins and ends.
Place = HeldPages | Slab


class _BoundSide(NamedTuple):
    """What all copies of one shape have in common on one side: nothing but its name where it is a slab."""

    name: str
    table: DevicePages | None = None
    planes: int = 0  # address of the first chosen layer's line in the table


class BoundCopy:
    """Copies of as many tokens, from the same places of pages to such, of the same layers and heads of two sides."""

    def __init__(
        self, source: Side, target: Side, tokens: tuple[int, int], stream: CopyStream, tuning: Tuning | None = None
    ) -> None:
        """Check the first of these copies and choose their grid; queue and compile nothing.

        Args:
            source, target: at most one of them a slab; as many layers and heads on both, of one model.
            tokens: as of `cpu_copy.copy_rows`.
            stream: of the device where the tables are; it reaches all addresses.
            tuning: None: that of `TUNINGS`.
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
        near, far = (_place_in_pages(side, tokens, self._grid.counts[0]) for side in sides)
        self._same = (
            *(number for pair in zip(near, far, strict=True) for number in pair),
            len(views[0].layers),
            *self._grid.counts,
        )
        self._tail_bytes = slab_bytes(self._payload_bytes) - self._payload_bytes
        self._launch: Launch | None = None

    def ready(self) -> bool:
        """Whether the kernel is compiled; if it is not, it is compiled beside this thread from now on.

        Raises:
            DeviceError: it could not be compiled; the next question tries again.
        """
        return self._launch is not None or _KERNEL.ready(self._stream, self._grid.tile, self._tuning)

    def prepare(self) -> Launch:
        """Compile the kernel unless that was done, which takes a second. Raises DeviceError."""
        if self._launch is None:
            self._launch = _KERNEL.bind(self._stream, self._grid, self._tuning)
        return self._launch

    def queue(
        self, source: Place, target: Place, tokens: tuple[int, int], trailer: SealedTrailer | None = None
    ) -> None:
        """Queue the copy of tokens [first, end) by one launch; return when that is queued.

        The bytes are where they belong, for every later reader on any device, once the stream has passed it: whoever tells of
        them waits for that first. Pages, lists and slab are in use until then.

        Args:
            source, target: page ids of the same pools; slabs as aligned as the first one. A target's pages may not repeat.
            tokens: as many as the first copy's, and as far from the beginning of their page on either side.
            trailer: written behind a target that is a slab, after a gap of zeros; nothing behind it is touched.
        Raises:
            ShapeError: an argument breaks the above, named in the message; nothing was launched.
            LongshoreError: TOKENS_OVERLAP for a target page that stands in its list twice; nothing was launched.
            DeviceError: the driver refuses the launch, or the kernel cannot be compiled.
        """
        assert tokens[1] - tokens[0] == self._token_count, (tokens, self._token_count)
        tail = _NO_TAIL
        if trailer is not None:
            if not isinstance(target, Slab) or trailer.payload_bytes != self._payload_bytes:
                raise ShapeError(
                    f"trailer.payload_bytes is {trailer.payload_bytes}: the target is a slab of {self._payload_bytes} bytes"
                )
            tail = (self._tail_bytes, *_TRAILER_WORDS.unpack(trailer.data))
        near, near_ids = self._placed(self._sides[0], source, tokens, 0)
        far, far_ids = self._placed(self._sides[1], target, tokens, tail[0])
        launch = self._launch or self.prepare()
        launch.queue(near, near_ids, far, far_ids, *self._same, *tail)

    def _placed(self, side: _BoundSide, place: Place, tokens: tuple[int, int], tail_bytes: int) -> tuple[int, int]:
        """Return the address of a side's planes or slab, and that of the first page id."""
        if side.table is not None:
            assert isinstance(place, HeldPages), f"{side.name} was pages"
            assert place.pool is side.table.pool, "page ids of another pool"
            return side.planes, place.address_of(tokens, unique=side.name == "target")
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
        # There are no page ids: nothing reads the second address.
        return address, address


def _bound_side(name: str, side: Side) -> _BoundSide:
    if isinstance(side, Slab):
        return _BoundSide(name)
    return _BoundSide(name, side.table, side.table.line(side.view.layers.start))


def _place_in_pages(side: Side, tokens: tuple[int, int], skipped: int) -> tuple[int, int, int]:
    """Return token, gap and head of one side, as `copy_kernel` counts them.

    Args:
        skipped: kernels count rows from the first one of the first tile, which a copy may begin within.
    """
    if isinstance(side, Slab):
        return -skipped, 0, 0
    view, table = side
    slot = view.rows(tokens)[0] % view.page_rows
    return slot - skipped, table.pool.layer_count - len(view.layers), view.heads.start


def shape_of(view: View, tokens: tuple[int, int]) -> tuple[int, ...]:
    """Return what copies have in common on a side with pages that one `BoundCopy` can queue."""
    layers, heads = view.layers, view.heads
    place = tokens[0] % (view.page_rows * view.row_tokens)
    return tokens[1] - tokens[0], place, layers.start, layers.stop, heads.start, heads.stop


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
    # From one token to the next: in pages their stride, in a slab all its heads.
    steps = [*(table.token_stride_max for _, table in paged), *(row_bytes * own_heads for _ in slabs)]
    near, far = (0 if isinstance(side, Slab) else side.view.page_rows for side in sides)
    tile = choose_tile(unit_bytes, row_bytes, max(steps), (near, far), tuning.tile_bytes)
    first, end = view.rows(tokens)
    # Where tiles lie in one page, they begin at the same rows of pages on both sides.
    slot = max(first % side.view.page_rows for side in paged)
    return choose_grid(tile, row_bytes, own_heads, view.plane_count, slot, end - first, tuning.programs_max)
