"""Computes grid, tile and counts of one launch of the copy kernel. Pure arithmetic, no tensor library.

Called by `device_launch`; `copy_kernel` documents how the kernel uses these numbers.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass

from longshore_agent.errors import ShapeError

# Fields of a plane's line in the table of planes: its address, then the strides of pages, tokens and heads.
PLANE_FIELDS = 4
# The widest access of a thread. Addresses that are not multiples of it use half of it, and so on.
UNIT_BYTES_MAX = 16
# The longest number that a kernel can load. Two adjacent ones are a unit of 16 bytes, moved by one access.
_WORD_BYTES_MAX = 8
# Kernels count tokens in 32 bits, and the last tile may extend beyond the last token.
_TOKEN_COUNT_MAX = 2**31 - 2**20
# Kernels count the words of one token's heads in 32 bits, and the last column may extend beyond them.
TOKEN_BYTES_MAX = 2**30
# The hardware's limits of a grid.
_GRID_MAX = (2**31 - 1, 65535, 65535)
# Offsets inside a tile have 32 bits up to here, and 64 beyond.
_NARROW_BYTES_MAX = 2**31
# A tile in one page must have this many bytes. If pages are shorter, a program loads the ids of several instead.
_ONE_PAGE_BYTES_MIN = 4096
# Columns are a power of two: the largest one that covers at most this share more words than the best choice does.
_IDLE_COLUMNS_SHARE_MAX = 1 / 8


@dataclass(frozen=True)
class Tuning:
    """Parameters that change only the speed of a copy, not its bytes.

    Attributes:
        tile_bytes: moved by one program, a power of two from 512 to 65536.
        warps: of one program, a power of two.
        programs_max: programs of one launch, each of which moves tiles one after another. A program uses one of the
            device's processors, so this also limits how many an engine loses. 0: one program for each tile.
    """

    tile_bytes: int = 16384
    warps: int = 4
    programs_max: int = 0


@dataclass(frozen=True)
class Tile:
    """The shape of one program's tile; see `copy_kernel` for the fields."""

    unit_bytes: int
    word_bytes: int
    rows: int
    columns: int
    source_page_tokens: int
    target_page_tokens: int
    one_page: bool
    whole_rows: bool
    narrow: bool


@dataclass(frozen=True)
class Grid:
    """One launch.

    Attributes:
        programs: in three dimensions.
        counts: row_first, row_end, row_units, tile_count, own_heads and plane_count of the kernel.
        tile: its compile-time arguments.
    """

    programs: tuple[int, int, int]
    counts: tuple[int, ...]
    tile: Tile


def unit_of(bits: int) -> int:
    """Return the widest access for addresses and steps whose bitwise or is `bits`: 16, 8, 4, 2 or 1 bytes."""
    return min(bits & -bits, UNIT_BYTES_MAX) if bits else UNIT_BYTES_MAX


@functools.lru_cache(maxsize=256)
def choose_tile(
    unit_bytes: int, row_bytes: int, row_step_bytes: int, page_tokens: tuple[int, int], tile_bytes: int
) -> Tile:
    """Choose columns that fit the row and rows that fit the pages.

    Args:
        unit_bytes: from `unit_of`; divides `row_bytes`.
        row_bytes: of the adjacent heads of one token.
        row_step_bytes: the longest step from one row of a tile to the next, on either side.
        page_tokens: rows of a page of the source and of the target; 0: packed.
        tile_bytes: of `Tuning`.
    """
    word_bytes = min(unit_bytes, _WORD_BYTES_MAX)
    tile_words, row_words = tile_bytes // word_bytes, row_bytes // word_bytes
    candidates = [tile_words >> shift for shift in range((tile_bytes // UNIT_BYTES_MAX).bit_length())]
    covered = {columns: -(-row_words // columns) * columns for columns in candidates}
    limit = min(covered.values()) * (1 + _IDLE_COLUMNS_SHARE_MAX)
    columns = next(columns for columns in candidates if covered[columns] <= limit)
    rows = tile_words // columns
    # Pages of both sides can be cut into tiles of this many rows.
    common_rows = math.gcd(*page_tokens)
    page_rows = min(rows, common_rows & -common_rows)
    one_page = page_rows == rows or page_rows * columns * word_bytes >= _ONE_PAGE_BYTES_MIN
    rows = page_rows if one_page else rows
    # A 64-bit product for each row would cost more instructions than the copy itself.
    narrow = rows * row_step_bytes + tile_bytes < _NARROW_BYTES_MAX
    return Tile(unit_bytes, word_bytes, rows, columns, *page_tokens, one_page, columns >= row_words, narrow)


def choose_grid(
    tile: Tile, row_bytes: int, own_heads: int, plane_count: int, slot: int, row_count: int, programs_max: int
) -> Grid:
    """Return the launch for this many rows of each head.

    Args:
        slot: index of the first row in its page; if both sides have pages, the larger index.
        programs_max: of `Tuning`.
    Raises:
        ShapeError: one launch cannot copy so much.
    """
    # If tiles lie in one page, the first tile begins at a multiple of its rows in the page.
    skipped = slot % tile.rows if tile.one_page else 0
    column_tiles = -(-row_bytes // (tile.word_bytes * tile.columns))
    tiles = -(-(skipped + row_count) // tile.rows) * column_tiles
    programs = (tiles, own_heads, plane_count)
    all_tiles = tiles * own_heads * plane_count
    too_many = all_tiles > _TOKEN_COUNT_MAX if programs_max else any(map(operator.gt, programs, _GRID_MAX))
    if slot + row_count > _TOKEN_COUNT_MAX or too_many:
        raise ShapeError(f"tokens has {row_count} rows: more than one launch can copy, choose fewer")
    counts = (skipped, skipped + row_count, row_bytes // tile.unit_bytes, *programs)
    return Grid((min(all_tiles, programs_max), 1, 1) if programs_max else programs, counts, tile)
