"""Which bytes of pages and slab one program of a device kernel moves: the address arithmetic that gather and scatter share.

Called by `gather.triton_kernel` and `scatter.triton_kernel`, compiled into them; `device_grid` chooses the arguments.
Nothing is checked here: a wrong argument reads or writes memory of somebody else.

A program moves one tile, [rows, columns] words, of one head of one plane. A row is one token; its columns are the words of
its heads that lie side by side. The tile lies in one page wherever pages are long enough, so that its page id is one
scalar; only for short or odd pages each row of the tile loads its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longshore_agent.kernels.device_grid import PLANE_FIELDS, TRAILER_NUMBERS, Tile, Tuning

_PLANE_FIELDS = tl.constexpr(PLANE_FIELDS)
_TRAILER_NUMBERS = tl.constexpr(TRAILER_NUMBERS)
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
        "load_cache": tuning.load_cache,
        "load_eviction": tuning.load_eviction,
        "store_cache": tuning.store_cache,
    }


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _locate_rows(
    page_ids: tl.tensor,
    row_tile: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    slot_first: tl.tensor,
    token_count: tl.tensor,
    rows: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return, of each row of a tile: its offset in the plane, its token in the slab, and whether there is such a token.

    `row_tile` counts tiles of one head and plane; strides and offsets are in words.
    """
    if one_page:
        page_tiles: tl.constexpr = page_tokens // rows
        page_index = row_tile // page_tiles
        slot = row_tile % page_tiles * rows + tl.arange(0, rows)
        token = page_index * page_tokens + slot - slot_first
        meant = (token >= 0) & (token < token_count)
        page_row = tl.load(page_ids + page_index).to(tl.int64) * page_stride + slot.to(tl.int64) * token_stride
    else:
        token = row_tile * rows + tl.arange(0, rows)
        meant = token < token_count
        position = token + slot_first
        page = tl.load(page_ids + position // page_tokens, mask=meant, other=0)
        page_row = page.to(tl.int64) * page_stride + (position % page_tokens).to(tl.int64) * token_stride
    return page_row, token, meant


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def locate_tile(
    planes: tl.tensor,
    request: tl.tensor,
    slab: tl.tensor,
    layer_first: tl.tensor,
    layer_count: tl.tensor,
    pool_layers: tl.tensor,
    head_first: tl.tensor,
    slot_first: tl.tensor,
    token_count: tl.tensor,
    row_units: tl.tensor,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return pointers into the pages, pointers into the slab and which of them are meant: three of [rows, columns] words.

    The grid is (tiles, heads of a row's own, planes of the slab), tiles of one row of tiles side by side.

    Args:
        planes: [plane, PLANE_FIELDS] int64 of the whole pool: address, page stride, token stride, head stride.
        request: [TRAILER_NUMBERS + pages] int32: the trailer, then page ids.
        slab: its first byte.
        layer_first, layer_count, pool_layers: the chosen layers, and how many the pool has.
        head_first: the first chosen head.
        slot_first: where the first token lies in the first page.
        token_count: tokens of the slab.
        row_units: units of a row.
        unit_bytes: 16, 8, 4, 2 or 1: all addresses and strides are multiples of it.
        word: the type of a number of as many, but of 8 where units have 16: a thread moves two that lie side by side.
        page_tokens: tokens of a page.
        one_page: `rows` divides `page_tokens`.
    """
    word_bytes: tl.constexpr = word.primitive_bitwidth // 8
    unit_words: tl.constexpr = unit_bytes // word_bytes
    head = tl.program_id(1)
    slab_plane = tl.program_id(2)
    plane = slab_plane // layer_count * pool_layers + layer_first + slab_plane % layer_count
    # What is loaded has no known alignment: the compiler is told, or it would move single words.
    fields = planes + plane * _PLANE_FIELDS
    base = tl.multiple_of(tl.load(fields).to(tl.pointer_type(word)), unit_bytes)
    page_stride = tl.multiple_of(tl.load(fields + 1) // word_bytes, unit_words)
    token_stride = tl.multiple_of(tl.load(fields + 2) // word_bytes, unit_words)
    head_stride = tl.multiple_of(tl.load(fields + 3) // word_bytes, unit_words)

    row_words = row_units * unit_words
    column_tiles = (row_words + columns - 1) // columns
    row_tile = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * columns + tl.arange(0, columns)
    page_row, token, meant = _locate_rows(
        request + _TRAILER_NUMBERS,
        row_tile,
        page_stride,
        token_stride,
        slot_first,
        token_count,
        rows,
        page_tokens,
        one_page,
    )
    page_row += (head_first + head).to(tl.int64) * head_stride
    slab_row = (slab_plane.to(tl.int64) * token_count + token) * tl.num_programs(1) + head
    slab_base = tl.multiple_of(slab.to(tl.pointer_type(word)), unit_bytes)
    page_words = base + page_row[:, None] + column[None, :]
    slab_words = slab_base + slab_row[:, None] * row_words + column[None, :]
    return page_words, slab_words, meant[:, None] & (column < row_words)[None, :]
