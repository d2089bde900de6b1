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

from longshore_agent.kernels.device_grid import PLANE_FIELDS, TRAILER_NUMBERS

_PLANE_FIELDS = tl.constexpr(PLANE_FIELDS)
_TRAILER_NUMBERS = tl.constexpr(TRAILER_NUMBERS)


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
    word_bytes: tl.constexpr,
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
        word_bytes: as many, but 8 where units are 16: no number has 16 bytes, a thread moves two that lie side by side.
        page_tokens: tokens of a page.
        one_page: `rows` divides `page_tokens`.
    """
    unit_words: tl.constexpr = unit_bytes // word_bytes
    word: tl.constexpr = (
        tl.int64
        if word_bytes == 8  # noqa: PLR2004 - bytes, as the next
        else tl.int32
        if word_bytes == 4  # noqa: PLR2004
        else tl.int16
        if word_bytes == 2  # noqa: PLR2004
        else tl.int8
    )
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
    page_ids = request + _TRAILER_NUMBERS
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
    page_row += (head_first + head).to(tl.int64) * head_stride
    slab_row = (slab_plane.to(tl.int64) * token_count + token) * tl.num_programs(1) + head
    slab_base = tl.multiple_of(slab.to(tl.pointer_type(word)), unit_bytes)
    page_words = base + page_row[:, None] + column[None, :]
    slab_words = slab_base + slab_row[:, None] * row_words + column[None, :]
    return page_words, slab_words, meant[:, None] & (column < row_words)[None, :]
