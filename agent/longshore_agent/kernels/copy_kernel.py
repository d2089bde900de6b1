"""Copies rows of heads between two sides on a device, each of them pages or a packed slab, in one launch.

Called by `device_launch`, which checks all arguments; a wrong one reads or writes another owner's memory. `device_grid`
chooses the tiles. The kernel has no fence: the bytes are in place only after the stream has passed the launch.

A program moves one tile, [rows, columns] words, of one head of one plane; if the number of programs is limited, it
moves several, one after another. A row is one token; its columns are the words of its adjacent heads. If pages are long
enough, a tile lies in one page of either side, and each page id is one scalar; for short or odd pages, each row of the
tile loads its own. A packed side, [planes, rows, heads, row bytes] without gaps, has no pages: its `page_tokens` is 0.

The grid is (tiles, heads of a row's own, planes), tiles of one row of tiles side by side. If `persistent`, it is any
number of programs, which share the tiles in that order. The arguments:

    source, target: address of a table of planes, [plane, PLANE_FIELDS] int64 from the first chosen layer on: address,
        page stride, token stride, head stride. If the side is packed: address of its first byte.
    source_pages, target_pages: address of int32 page ids, the first one for the first wanted row; not read if the side
        is packed.
    source_token, target_token: of the first row of the first tile, counted from the beginning of the first page, or
        from the first wanted row if the side is packed.
    source_gap, target_gap: the pool's layers that are not chosen, between the planes of K and V; not read if the side
        is packed.
    source_head, target_head: the first chosen head; not read if the side is packed.
    layer_count: chosen layers.
    row_first, row_end: the wanted rows, counted from the first row of the first tile.
    row_units: units of a row.
    tile_count, own_heads, plane_count: tiles of one head, heads of a row's own, chosen planes.
    tail_bytes: zeros and trailer behind a packed target, below 128; 0: none are written.
    word_0 to word_7: the trailer, 64-bit numbers in its order.
    unit_bytes: of a unit, 16, 8, 4, 2 or 1: all addresses and strides are multiples of it.
    word: integer type of a unit's size, at most 8 bytes: of a unit of 16 bytes, a thread moves two adjacent words.
    rows, columns: of a tile; columns are words.
    source_page_tokens, target_page_tokens: tokens of a page, 0: packed; if `one_page`, `rows` divides both.
    whole_rows: `columns` are all of a row.
    step: the type that holds every offset inside a tile, in words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longshore_agent.kernels.device_grid import PLANE_FIELDS, Tile, Tuning

# Number of the kernel's addresses, 32-bit numbers and 64-bit words, in this order, before its constants.
ARGUMENTS = (4, 13, 9)
_PLANE_FIELDS = tl.constexpr(PLANE_FIELDS)
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def constants(tile: Tile, tuning: Tuning) -> dict[str, object]:
    """Return the compile-time arguments of the kernel."""
    return {
        "unit_bytes": tile.unit_bytes,
        "word": _WORDS[tile.word_bytes],
        "rows": tile.rows,
        "columns": tile.columns,
        "source_page_tokens": tile.source_page_tokens,
        "target_page_tokens": tile.target_page_tokens,
        "one_page": tile.one_page,
        "whole_rows": tile.whole_rows,
        "step": tl.int32 if tile.narrow else tl.int64,
        "persistent": tuning.programs_max > 0,
    }


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _tile_of(
    index: tl.tensor, tile_count: tl.tensor, own_heads: tl.tensor, persistent: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the indices of the tile, of its head among a row's own heads, and of its plane."""
    tile, own_head, plane = index, tl.program_id(1), tl.program_id(2)
    if persistent:
        tile, own_head, plane = index % tile_count, index // tile_count % own_heads, index // tile_count // own_heads
    return tile, own_head, plane


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _columns_of(
    tile: tl.tensor, row_words: tl.tensor, columns: tl.constexpr, whole_rows: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the tile's index along the rows, and its columns in words. Tiles of one row of tiles are side by side."""
    column = tl.arange(0, columns)
    if not whole_rows:
        column_tiles = (row_words + columns - 1) // columns
        column += tile % column_tiles * columns
        tile = tile // column_tiles
    return tile, column


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def locate(
    side: tl.tuple,
    chosen: tl.tuple,
    at: tl.tensor,
    meant: tl.tensor,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    rows: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    step: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return a pointer for the tile on one side, and the offset of each row from it in words.

    The digest kernel calls it, too.

    All rows share one base of 64 bits, since a 64-bit product for each row would cost more than its copy.

    Args: the kernel's, and
        side: (source, source_pages, source_token, source_gap, source_head), or those of the target.
        chosen: (plane, own_head, own_heads, layer_count, row_count, row_words).
        at: of the tile's first row, counted from the first row of the first tile.
        meant: mask of the wanted rows; the others are in no page.
    """
    memory, pages, token, gap, head = side
    plane, own_head, own_heads, layer_count, row_count, row_words = chosen
    word_bytes: tl.constexpr = word.primitive_bitwidth // 8
    units: tl.constexpr = unit_bytes // word_bytes
    token += at
    row = tl.arange(0, rows)
    if page_tokens == 0:
        token_words = own_heads * row_words
        base = tl.multiple_of(memory.to(tl.int64).to(tl.pointer_type(word)), unit_bytes)
        base += (plane.to(tl.int64) * row_count + token) * token_words + own_head * row_words
        offset = row.to(step) * token_words
    else:
        # There are at most two kinds, K and V, so no division is needed to find the kind.
        pool_plane = plane + (plane >= layer_count).to(tl.int32) * gap
        # The compiler does not know the alignment of loaded addresses. Without this hint it would move single words.
        fields = memory.to(tl.int64).to(tl.pointer_type(tl.int64)) + pool_plane * _PLANE_FIELDS
        base = tl.multiple_of(tl.load(fields).to(tl.pointer_type(word)), unit_bytes)
        page_stride = tl.multiple_of(tl.load(fields + 1) // word_bytes, units)
        token_stride = tl.multiple_of(tl.load(fields + 2) // word_bytes, units)
        base += (head + own_head).to(tl.int64) * tl.multiple_of(tl.load(fields + 3) // word_bytes, units)
        ids = pages.to(tl.int64).to(tl.pointer_type(tl.int32))
        if one_page:
            base += tl.load(ids + token // page_tokens).to(tl.int64) * page_stride
            base += (token % page_tokens).to(tl.int64) * token_stride
            offset = row.to(step) * tl.multiple_of(token_stride.to(step), units)
        else:
            position = token + row
            page = tl.load(ids + position // page_tokens, mask=meant, other=0)
            offset = page.to(tl.int64) * page_stride + (position % page_tokens).to(tl.int64) * token_stride
    return base, offset


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _write_tail(end: tl.tensor, tail_bytes: tl.tensor, words: tl.tuple) -> None:
    """Write zeros and the trailer `words` behind the payload, which ends at the address `end`."""
    place = tl.arange(0, 128)
    at = place - (tail_bytes.to(tl.int64) - 64)
    # Bytes of the gap have a negative index in the trailer, and are zero.
    number = words[0].to(tl.int64)
    for index in tl.static_range(1, 8):
        number = tl.where(at >= 8 * index, words[index].to(tl.int64), number)
    tail = tl.where(at >= 0, number >> (at & 7) * 8, 0).to(tl.int8)
    tl.store(end.to(tl.pointer_type(tl.int8)) + place, tail, mask=place < tail_bytes)


# No value that differs from call to call may specialize the kernel: compiling one takes a second.
@triton.jit(do_not_specialize=tuple(range(sum(ARGUMENTS))))  # type: ignore[untyped-decorator]  # Triton has no types
def copy_kernel(
    source: tl.int64,
    source_pages: tl.int64,
    target: tl.int64,
    target_pages: tl.int64,
    source_token: tl.int32,
    target_token: tl.int32,
    source_gap: tl.int32,
    target_gap: tl.int32,
    source_head: tl.int32,
    target_head: tl.int32,
    layer_count: tl.int32,
    row_first: tl.int32,
    row_end: tl.int32,
    row_units: tl.int32,
    tile_count: tl.int32,
    own_heads: tl.int32,
    plane_count: tl.int32,
    tail_bytes: tl.int64,
    word_0: tl.int64,
    word_1: tl.int64,
    word_2: tl.int64,
    word_3: tl.int64,
    word_4: tl.int64,
    word_5: tl.int64,
    word_6: tl.int64,
    word_7: tl.int64,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    source_page_tokens: tl.constexpr,
    target_page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    whole_rows: tl.constexpr,
    step: tl.constexpr,
    persistent: tl.constexpr,
) -> None:
    """Copy this program's tiles. The first program also writes the tail of a packed target. Args: see the module."""
    row_words = row_units * (unit_bytes // (word.primitive_bitwidth // 8))
    row_count = row_end - row_first
    first, count, stride = tl.program_id(0), tl.program_id(0) + 1, 1
    if persistent:
        count, stride = tile_count * own_heads * plane_count, tl.num_programs(0)
    for index in tl.range(first, count, stride):
        tile, own_head, plane = _tile_of(index, tile_count, own_heads, persistent)
        tile, column = _columns_of(tile, row_words, columns, whole_rows)
        at = tile * rows
        row = at + tl.arange(0, rows)
        meant = (row >= row_first) & (row < row_end)
        chosen = (plane, own_head, own_heads, layer_count, row_count, row_words)
        source_side = (source, source_pages, source_token, source_gap, source_head)
        target_side = (target, target_pages, target_token, target_gap, target_head)
        source_at, source_row = locate(
            source_side, chosen, at, meant, unit_bytes, word, rows, source_page_tokens, one_page, step
        )
        target_at, target_row = locate(
            target_side, chosen, at, meant, unit_bytes, word, rows, target_page_tokens, one_page, step
        )
        mask = meant[:, None] & (column < row_words)[None, :]
        words = tl.load(source_at + (source_row[:, None] + column[None, :]), mask=mask)
        tl.store(target_at + (target_row[:, None] + column[None, :]), words, mask=mask)
    if target_page_tokens == 0:  # noqa: SIM102 - decided when it is compiled
        if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
            payload_bytes = plane_count.to(tl.int64) * row_count * own_heads * row_units * unit_bytes
            trailer = (word_0, word_1, word_2, word_3, word_4, word_5, word_6, word_7)
            _write_tail(target.to(tl.int64) + payload_bytes, tail_bytes, trailer)
