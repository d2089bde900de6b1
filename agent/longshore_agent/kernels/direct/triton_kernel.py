"""Pages to pages on a device: one launch reads the source's pages and writes the target's, which may be another GPU's.

Called by `device_launch`, which checks everything. A program moves tiles as those of `device_rows`: [rows, columns] words
of one head of one plane. Where pages of both sides are long enough, a tile lies in one page on either side, and each page
id is one scalar. Nothing is fenced inside: a launch is followed by a wait for its stream, which its bytes never outlast.

The kernel's arguments beyond those of `device_rows`; near is the source, far the target:

    near_planes, near_pages, far_planes, far_pages: the tables of either side.
    layer_count: chosen layers, as many on both sides.
    near_layer, near_layers, near_head, far_layer, far_layers, far_head: the first chosen layer, how many the pool has, and the
        first chosen head, of either side.
    near_token, far_token: of the first row of the first tile, counted from the beginning of either page list.
    row_first, row_end: the rows that are meant, counted from the first row of the first tile.
    near_page_tokens, far_page_tokens: tokens of a page; `rows` divides both where `one_page`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longshore_agent.kernels.device_grid import PairTile, Tile, Tuning
from longshore_agent.kernels.device_rows import constants as tile_constants
from longshore_agent.kernels.device_rows import locate_head

# Numbers that differ from call to call must not make a kernel of their own: compiling one takes a second.
_NUMBERS = (
    "near_layer",
    "near_layers",
    "near_head",
    "near_token",
    "far_layer",
    "far_layers",
    "far_head",
    "far_token",
    "layer_count",
    "row_first",
    "row_end",
    "row_units",
    "tile_count",
    "own_heads",
    "plane_count",
)


def constants(tile: Tile, tuning: Tuning) -> dict[str, object]:
    """Return the compile-time arguments of the kernel."""
    assert isinstance(tile, PairTile)
    found = tile_constants(tile, tuning)
    del found["page_tokens"]
    return found | {"near_page_tokens": tile.near_page_tokens, "far_page_tokens": tile.far_page_tokens}


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _tile_of(
    index: tl.tensor, tile_count: tl.tensor, own_heads: tl.tensor, persistent: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return which tile of which head of a row's own, of which plane."""
    tile, own_head, plane = index, tl.program_id(1), tl.program_id(2)
    if persistent:
        tile, own_head, plane = index % tile_count, index // tile_count % own_heads, index // tile_count // own_heads
    return tile, own_head, plane


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _columns_of(
    tile: tl.tensor, row_words: tl.tensor, columns: tl.constexpr, whole_rows: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return which tile of rows it is, tiles of one row of tiles being side by side, and its columns in words."""
    column = tl.arange(0, columns)
    if not whole_rows:
        column_tiles = (row_words + columns - 1) // columns
        column += tile % column_tiles * columns
        tile = tile // column_tiles
    return tile, column


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _locate_rows(
    base: tl.tensor,
    pages: tl.tensor,
    token: tl.tensor,
    meant: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    units: tl.constexpr,
    rows: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    step: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return a pointer for the tile on one side, and the offset of each row from it in words.

    Args: the kernel's, and
        token: of the tile's first row, counted from the beginning of the page list.
        meant: which rows are; the others are in no page.
    """
    row = tl.arange(0, rows)
    if one_page:
        base += tl.load(pages + token // page_tokens).to(tl.int64) * page_stride
        base += (token % page_tokens).to(tl.int64) * token_stride
        offset = row.to(step) * tl.multiple_of(token_stride.to(step), units)
    else:
        position = token + row
        page = tl.load(pages + position // page_tokens, mask=meant, other=0)
        offset = page.to(tl.int64) * page_stride + (position % page_tokens).to(tl.int64) * token_stride
    return base, offset


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]  # Triton has no types
def direct_kernel(
    near_planes: tl.tensor,
    near_pages: tl.tensor,
    far_planes: tl.tensor,
    far_pages: tl.tensor,
    near_layer: tl.tensor,
    near_layers: tl.tensor,
    near_head: tl.tensor,
    near_token: tl.tensor,
    far_layer: tl.tensor,
    far_layers: tl.tensor,
    far_head: tl.tensor,
    far_token: tl.tensor,
    layer_count: tl.tensor,
    row_first: tl.tensor,
    row_end: tl.tensor,
    row_units: tl.tensor,
    tile_count: tl.tensor,
    own_heads: tl.tensor,
    plane_count: tl.tensor,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    near_page_tokens: tl.constexpr,
    far_page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    whole_rows: tl.constexpr,
    step: tl.constexpr,
    persistent: tl.constexpr,
) -> None:
    """Copy this program's tiles from the near pages into the far ones. Args: see the module and `device_rows`."""
    units: tl.constexpr = unit_bytes // (word.primitive_bitwidth // 8)
    row_words = row_units * units
    first, count, stride = tl.program_id(0), tl.program_id(0) + 1, 1
    if persistent:
        count, stride = tile_count * own_heads * plane_count, tl.num_programs(0)
    for index in tl.range(first, count, stride):
        tile, own_head, plane = _tile_of(index, tile_count, own_heads, persistent)
        near, near_page, near_step = locate_head(
            near_planes, near_layer, layer_count, near_layers, near_head, own_head, plane, unit_bytes, word, units
        )
        far, far_page, far_step = locate_head(
            far_planes, far_layer, layer_count, far_layers, far_head, own_head, plane, unit_bytes, word, units
        )
        tile, column = _columns_of(tile, row_words, columns, whole_rows)
        at = tile * rows
        row = at + tl.arange(0, rows)
        meant = (row >= row_first) & (row < row_end)
        near, near_row = _locate_rows(
            near,
            near_pages,
            near_token + at,
            meant,
            near_page,
            near_step,
            units,
            rows,
            near_page_tokens,
            one_page,
            step,
        )
        far, far_row = _locate_rows(
            far, far_pages, far_token + at, meant, far_page, far_step, units, rows, far_page_tokens, one_page, step
        )
        mask = meant[:, None] & (column < row_words)[None, :]
        words = tl.load(near + (near_row[:, None] + column[None, :]), mask=mask)
        tl.store(far + (far_row[:, None] + column[None, :]), words, mask=mask)
