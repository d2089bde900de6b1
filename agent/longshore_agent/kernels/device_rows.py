"""The copy that gather and scatter share on a device: which bytes of pages and slab a program moves, and their move.

Called by `gather.triton_kernel` and `scatter.triton_kernel`, compiled into them; `device_grid` chooses the arguments.
Nothing is checked here: a wrong argument reads or writes memory of somebody else.

A program moves one tile, [rows, columns] words, of one head of one plane; or one after another, where few programs are
allowed. A row is one token; its columns are the words of
its heads that lie side by side. The tile lies in one page wherever pages are long enough, so that its page id is one
scalar; only for short or odd pages each row of the tile loads its own.

The grid is (tiles, heads of a row's own, planes of the slab), tiles of one row of tiles side by side; where `persistent`,
it is any number of programs, which share the tiles in that order. The kernels' arguments:

    planes: [plane, PLANE_FIELDS] int64 of the whole pool: address, page stride, token stride, head stride.
    pages: int32 page ids of a sequence.
    slab: its first byte.
    layer_first, layer_count, pool_layers, head_first: the chosen layers, how many the pool has, the first chosen head.
    slot_first, token_count: where the first token lies in the first page; tokens of the slab.
    row_units: units of a row.
    page_first: which of `pages` is that of the first token.
    tile_count, own_heads, plane_count: tiles of one head, heads of a row's own, planes of the slab.
    unit_bytes: of a unit, 16, 8, 4, 2 or 1: all addresses and strides are multiples of it.
    word: the type of a number of as many, but of 8 where units have 16: a thread moves two that lie side by side.
    rows, columns: of a tile; columns are words.
    page_tokens: tokens of a page; `rows` divides it where `one_page`.
    whole_rows: `columns` are all of a row.
    step: the type that holds every offset inside a tile, in words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longshore_agent.kernels.device_grid import PLANE_FIELDS, Tile, Tuning

_PLANE_FIELDS = tl.constexpr(PLANE_FIELDS)
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def constants(tile: Tile, tuning: Tuning) -> dict[str, object]:
    """Return the compile-time arguments of a kernel."""
    return {
        "unit_bytes": tile.unit_bytes,
        "word": _WORDS[tile.word_bytes],
        "rows": tile.rows,
        "columns": tile.columns,
        "page_tokens": tile.page_tokens,
        "one_page": tile.one_page,
        "whole_rows": tile.whole_rows,
        "step": tl.int32 if tile.narrow else tl.int64,
        "persistent": tuning.programs_max > 0,
    }


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def locate_head(
    planes: tl.tensor,
    layer_first: tl.tensor,
    layer_count: tl.tensor,
    pool_layers: tl.tensor,
    head_first: tl.tensor,
    own_head: tl.tensor,
    slab_plane: tl.tensor,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    units: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a pointer to the tile's head in its plane, and the plane's strides of pages and tokens in words.

    `units` are the words of a unit.
    """
    # There are K and V at most, so that no division is needed to find the kind.
    plane = slab_plane + layer_first + (slab_plane >= layer_count).to(tl.int32) * (pool_layers - layer_count)
    # What is loaded has no known alignment: the compiler is told, or it would move single words.
    fields = planes + plane * _PLANE_FIELDS
    word_bytes: tl.constexpr = unit_bytes // units
    base = tl.multiple_of(tl.load(fields).to(tl.pointer_type(word)), unit_bytes)
    page_stride = tl.multiple_of(tl.load(fields + 1) // word_bytes, units)
    token_stride = tl.multiple_of(tl.load(fields + 2) // word_bytes, units)
    head_stride = tl.multiple_of(tl.load(fields + 3) // word_bytes, units)
    return base + (head_first + own_head).to(tl.int64) * head_stride, page_stride, token_stride


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _locate_rows(
    base: tl.tensor,
    pages: tl.tensor,
    tile: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    slot_first: tl.tensor,
    token_count: tl.tensor,
    units: tl.constexpr,
    rows: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    step: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a pointer for the tile, the offset of each row from it in words, and the slab's token of the first row.

    What all rows share is one number of 64 bits: a product of 64 bits for each row would cost more than its copy.
    """
    row = tl.arange(0, rows)
    if one_page:
        page_tiles: tl.constexpr = page_tokens // rows
        page_index = tile // page_tiles
        slot = tile % page_tiles * rows
        token = page_index * page_tokens + slot - slot_first
        base += tl.load(pages + page_index).to(tl.int64) * page_stride + slot.to(tl.int64) * token_stride
        offset = row.to(step) * tl.multiple_of(token_stride.to(step), units)
    else:
        token = tile * rows
        position = token + slot_first + row
        page_id = pages + position // page_tokens
        page = tl.load(page_id, mask=token + row < token_count, other=0)
        offset = page.to(tl.int64) * page_stride + (position % page_tokens).to(tl.int64) * token_stride
    return base, offset, token


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _locate_tile(
    planes: tl.tensor,
    pages: tl.tensor,
    slab: tl.tensor,
    layer_first: tl.tensor,
    layer_count: tl.tensor,
    pool_layers: tl.tensor,
    head_first: tl.tensor,
    slot_first: tl.tensor,
    token_count: tl.tensor,
    row_units: tl.tensor,
    own_heads: tl.tensor,
    tile: tl.tensor,
    own_head: tl.tensor,
    slab_plane: tl.tensor,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    whole_rows: tl.constexpr,
    step: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return pointers into the pages, pointers into the slab and which of them are meant: three of [rows, columns] words.

    Args: the kernels', and
        pages: the id of the first token's page, and those behind it.
        tile, own_head, slab_plane: which tile of which head of a row's own, of which plane of the slab.
    """
    units: tl.constexpr = unit_bytes // (word.primitive_bitwidth // 8)
    base, page_stride, token_stride = locate_head(
        planes, layer_first, layer_count, pool_layers, head_first, own_head, slab_plane, unit_bytes, word, units
    )
    row_words = row_units * units
    column = tl.arange(0, columns)
    if not whole_rows:
        column_tiles = (row_words + columns - 1) // columns
        column += tile % column_tiles * columns
        tile = tile // column_tiles
    base, page_row, token = _locate_rows(
        base,
        pages,
        tile,
        page_stride,
        token_stride,
        slot_first,
        token_count,
        units,
        rows,
        page_tokens,
        one_page,
        step,
    )
    row = tl.arange(0, rows)
    meant = (token + row >= 0) & (token + row < token_count)
    token_words = own_heads * row_words
    slab_base = tl.multiple_of(slab.to(tl.pointer_type(word)), unit_bytes)
    slab_base += (slab_plane.to(tl.int64) * token_count + token) * token_words + own_head * row_words
    page_words = base + (page_row[:, None] + column[None, :])
    slab_words = slab_base + ((row.to(step) * token_words)[:, None] + column[None, :])
    return page_words, slab_words, meant[:, None] & (column < row_words)[None, :]


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def copy_tiles(
    planes: tl.tensor,
    pages: tl.tensor,
    slab: tl.tensor,
    layer_first: tl.tensor,
    layer_count: tl.tensor,
    pool_layers: tl.tensor,
    head_first: tl.tensor,
    slot_first: tl.tensor,
    token_count: tl.tensor,
    row_units: tl.tensor,
    page_first: tl.tensor,
    tile_count: tl.tensor,
    own_heads: tl.tensor,
    plane_count: tl.tensor,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    whole_rows: tl.constexpr,
    step: tl.constexpr,
    persistent: tl.constexpr,
    to_slab: tl.constexpr,
) -> None:
    """Copy this program's tiles: from pages to slab where `to_slab`, else from slab to pages."""
    first, count, stride = tl.program_id(0), tl.program_id(0) + 1, 1
    if persistent:
        count, stride = tile_count * own_heads * plane_count, tl.num_programs(0)
    for index in tl.range(first, count, stride):
        tile, own_head, slab_plane = index, tl.program_id(1), tl.program_id(2)
        if persistent:
            tile, own_head, slab_plane = (
                index % tile_count,
                index // tile_count % own_heads,
                index // tile_count // own_heads,
            )
        page_words, slab_words, mask = _locate_tile(
            planes,
            pages + page_first,
            slab,
            layer_first,
            layer_count,
            pool_layers,
            head_first,
            slot_first,
            token_count,
            row_units,
            own_heads,
            tile,
            own_head,
            slab_plane,
            unit_bytes,
            word,
            rows,
            columns,
            page_tokens,
            one_page,
            whole_rows,
            step,
        )
        source, target = page_words, slab_words
        if not to_slab:
            source, target = slab_words, page_words
        words = tl.load(source, mask=mask)
        tl.store(target, words, mask=mask)
