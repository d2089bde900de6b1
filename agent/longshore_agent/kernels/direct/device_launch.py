"""Copy head slices of pages in a device's memory straight into another rank's pages: checks, grid and launch.

Called by `device_copier`; the counterpart of `launch`, which serves CPUs. The target's pages may lie on another GPU
whose memory is mapped for the source's.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np
import torch

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.copy_stream import CopyStream, check_stream
from longshore_agent.kernels.device_grid import (
    GRID_MAX,
    TOKEN_BYTES_MAX,
    TOKEN_COUNT_MAX,
    UNIT_BYTES_MAX,
    Grid,
    PairTile,
    Tuning,
    choose_tile,
    unit_of,
)
from longshore_agent.kernels.device_kernel import BoundKernel, DeviceKernel
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.direct.triton_kernel import constants, direct_kernel
from longshore_agent.kernels.held_pages import HeldPages
from longshore_agent.kernels.view import View, check_fit, pool_view
from longshore_agent.memory.pools import KVPool

_KERNEL = DeviceKernel(direct_kernel, constants)
TUNING = Tuning(tile_bytes=8192)
# Which of a grid's numbers say where the first tile begins in either list of page ids: they alone differ between slabs.
NEAR_TOKEN, FAR_TOKEN = 3, 7
# And which says how many rows of the first tile are not meant; behind it stands where the meant ones end.
ROW_FIRST = 9


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A direct copy whose arguments fit each other and what is on the device. Made by `plan_copy`; nothing of it is queued.

    Attributes:
        copied_bytes: what is copied.
        pools: the source's and the target's.
        tensors: planes and page ids of the source, then of the target.
    """

    copied_bytes: int
    token_count: int
    pools: tuple[KVPool, KVPool]
    grid: Grid
    tensors: tuple[torch.Tensor, ...]
    stream: CopyStream
    tuning: Tuning

    def queue(self) -> None:
        """Queue it by one launch; return when that is queued.

        The bytes are where they belong, for every later reader on any device, once the stream has passed it: whoever tells of
        them waits for that first. Pages and lists are in use until then.

        Raises:
            DeviceError: the driver refuses the launch.
        """
        _KERNEL.launch(self.stream, self.grid, self.tensors, (), self.tuning)

    def ready(self) -> bool:
        """Whether its kernel is compiled; if it is not, it is compiled beside this thread from now on.

        Raises:
            DeviceError: it could not be compiled; the next question tries again.
        """
        return _KERNEL.ready(self.stream, self.grid, self.tensors, (), self.tuning)


def plan_copy(
    sides: tuple[View, View],
    pages: tuple[DevicePages, DevicePages],
    lists: tuple[HeldPages, HeldPages],
    tokens: tuple[int, int],
    stream: CopyStream,
    tuning: Tuning = TUNING,
) -> PlannedCopy:
    """Return the copy of tokens [first, end) of a sequence from the source's pages into the target's.

    Args:
        sides: source and target; as many layers and heads on both, of one model.
        pages: their tables, on the stream's device, with addresses that it reaches.
        lists: their page ids, on the stream's device; those of the target may not repeat.
        tokens: as of `cpu_copy.copy`.
    Raises:
        ShapeError: the two sides do not fit each other or what is on the device.
        LongshoreError: TOKENS_OVERLAP for a target page that stands in its list twice.
    """
    source, target = sides
    check_fit(source, target, tokens)
    copied = source.payload_bytes(tokens)
    for held, unique in zip(lists, (False, True), strict=True):
        held.index_of(tokens, unique=unique)
    check_stream(stream, pages[0].device)
    tensors = (pages[0].planes, lists[0].table, pages[1].planes, lists[1].table)
    if len({tensor.device for tensor in tensors}) != 1:
        raise ShapeError(f"pages and lists are on several devices: put their tables on {stream.device}")
    grid = _grid(sides, pages, (lists[0].first_page, lists[1].first_page), tokens, copied, tuning)
    pools = (source.own_pool, target.own_pool)
    return PlannedCopy(copied, tokens[1] - tokens[0], pools, grid, tensors, stream, tuning)


class BoundCopy:
    """Direct copies of one shape: as many tokens, from the same places of pages, of the same layers and heads of two pools.

    Made once and queued for each slab, which takes some microseconds of the host: only where the page ids lie and which of
    them come first is written anew.
    """

    def __init__(self, planned: PlannedCopy) -> None:
        """Take the first of these copies; compile its kernel unless it is ready, and queue nothing. Raises DeviceError."""
        self._grid, self._stream, self._tuning = planned.grid, planned.stream, planned.tuning
        self._pools, self._token_count = planned.pools, planned.token_count
        # Kernels count rows from the first one of the first tile, which a copy may begin within.
        self._skipped, self._row_end = planned.grid.numbers[ROW_FIRST], planned.grid.numbers[ROW_FIRST + 1]
        self._planes = (planned.tensors[0], planned.tensors[2])
        self._bound: BoundKernel | None = None
        if planned.stream.context is not None:
            self._bound = _KERNEL.bind_values(planned.stream, planned.grid, planned.tensors, planned.tuning)
            self._addresses = (self._planes[0].data_ptr(), self._planes[1].data_ptr())

    def queue(self, lists: tuple[HeldPages, HeldPages], tokens: tuple[int, int]) -> None:
        """Queue the copy of tokens [first, end); what `PlannedCopy.queue` says of use and order is so here.

        Args:
            lists: page ids of the same pools.
            tokens: as many as the first copy's, and as far from the beginning of their page on either side.
        Raises:
            ShapeError: a token lies in no page of a list; nothing was launched.
            LongshoreError: TOKENS_OVERLAP, as `plan_copy`.
            DeviceError: the driver refuses the launch.
        """
        assert tokens[1] - tokens[0] == self._token_count, (tokens, self._token_count)
        near, far = lists
        assert (near.pool, far.pool) == self._pools, "page ids of other pools"
        near.index_of(tokens, unique=False)
        far.index_of(tokens, unique=True)
        near_token, far_token = (
            _first_row(held.pool.page_tokens, held.pool.layout.page_size, tokens[0], held.first_page) - self._skipped
            for held in lists
        )
        if max(near_token, far_token) + self._row_end > TOKEN_COUNT_MAX:
            raise ShapeError(f"tokens is {tokens}: more than one launch can copy, choose fewer")
        same = self._grid.numbers
        numbers = (
            *same[:NEAR_TOKEN],
            near_token,
            *same[NEAR_TOKEN + 1 : FAR_TOKEN],
            far_token,
            *same[FAR_TOKEN + 1 :],
        )
        if self._bound is None:
            tensors = (self._planes[0], near.table, self._planes[1], far.table)
            grid = Grid(self._grid.programs, numbers, self._grid.tile)
            _KERNEL.launch(self._stream, grid, tensors, (), self._tuning)
            return
        assert near.address % UNIT_BYTES_MAX == far.address % UNIT_BYTES_MAX == 0, (near.address, far.address)
        self._bound.queue_values(self._addresses[0], near.address, self._addresses[1], far.address, *numbers)


def shape_of(sides: tuple[View, View], tokens: tuple[int, int]) -> tuple[int, ...]:
    """Return what copies between two pools have in common that one `BoundCopy` can queue."""
    shape = [tokens[1] - tokens[0]]
    for side in sides:
        shape += (
            tokens[0] % side.own_pool.layout.page_size,
            side.layers.start,
            side.layers.stop,
            side.heads.start,
            side.heads.stop,
        )
    return tuple(shape)


def prepare(source: DevicePages, stream: CopyStream, page_ids: torch.Tensor, tuning: Tuning = TUNING) -> None:
    """Compile the kernels of copies out of a pool into others that are laid out as it is: a second each.

    For as many heads as peers of other TP sizes take. Copies to pools of other page sizes, orders or alignments are compiled
    when they come.

    Args:
        page_ids: an example of page ids on the stream's device, aligned as all are there.
    """
    pool = source.pool
    tokens, layers = (0, pool.layout.page_size), range(pool.layer_count)
    ids = np.zeros(1, dtype=np.int32)
    for count in pool.layout.shared_head_counts:
        side = pool_view(pool, ids, 0, layers, range(count))
        grid = _grid((side, side), (source, source), (0, 0), tokens, side.payload_bytes(tokens), tuning)
        _KERNEL.prepare(stream, grid, (source.planes, page_ids, source.planes, page_ids), (), tuning)


def _grid(
    sides: tuple[View, View],
    pages: tuple[DevicePages, DevicePages],
    first_pages: tuple[int, int],
    tokens: tuple[int, int],
    copied_bytes: int,
    tuning: Tuning,
) -> Grid:
    near, far = pages
    near_pool, far_pool = near.pool, far.pool
    heads = len(sides[0].heads)
    own_heads, row = heads, near_pool.row_bytes
    if near.heads_adjoin and far.heads_adjoin:
        own_heads, row = 1, heads * row
    if row * own_heads > TOKEN_BYTES_MAX:
        raise ShapeError(f"heads is {sides[0].heads}: {row * own_heads} bytes a token are above {TOKEN_BYTES_MAX}")
    plane_count = near_pool.kinds * len(sides[0].layers)
    row_count = copied_bytes // (plane_count * own_heads * row)
    unit = unit_of(near.bits | far.bits)
    page_tokens = math.gcd(near_pool.page_tokens, far_pool.page_tokens)
    step = max(near.token_stride_max, far.token_stride_max)
    tile = choose_tile(unit, row, step, page_tokens, tuning.tile_bytes)
    # Where a tile lies in one page, the first one begins where a page may be cut into such.
    starts = [
        _first_row(pool.page_tokens, pool.layout.page_size, tokens[0], first)
        for pool, first in zip((near_pool, far_pool), first_pages, strict=True)
    ]
    skipped = starts[0] % tile.rows if tile.one_page else 0
    column_tiles = -(-row // (tile.word_bytes * tile.columns))
    tiles = -(-(skipped + row_count) // tile.rows) * column_tiles
    programs = (tiles, own_heads, plane_count)
    all_tiles = tiles * own_heads * plane_count
    too_many = all_tiles > TOKEN_COUNT_MAX if tuning.programs_max else any(map(operator.gt, programs, GRID_MAX))
    if max(starts) + row_count > TOKEN_COUNT_MAX or too_many:
        raise ShapeError(f"tokens is {tokens}: more than one launch can copy, choose fewer")
    numbers = (
        *(sides[0].layers.start, near_pool.layer_count, sides[0].heads.start, starts[0] - skipped),
        *(sides[1].layers.start, far_pool.layer_count, sides[1].heads.start, starts[1] - skipped),
        *(len(sides[0].layers), skipped, skipped + row_count, row // unit, *programs),
    )
    if tuning.programs_max:
        programs = (min(all_tiles, tuning.programs_max), 1, 1)
    pair = PairTile(**vars(tile), near_page_tokens=near_pool.page_tokens, far_page_tokens=far_pool.page_tokens)
    return Grid(programs, numbers, pair)


def _first_row(page_tokens: int, page_size: int, token: int, first_page: int) -> int:
    """Return which row of a page list a token is in: a page whose content is opaque is one row."""
    return (token // page_size - first_page) * page_tokens + token % page_size % page_tokens
