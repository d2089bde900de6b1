"""What one launch of a device kernel is: its grid, its tile, and its numbers. Pure arithmetic, no tensor library.

Called by `gather.device_launch`, `scatter.device_launch` and `direct.device_launch`; the kernels' view of the same numbers is `device_rows`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

# Of one plane's line in the table of planes: its address, then the strides of pages, tokens and heads.
PLANE_FIELDS = 4
# The widest access of a thread. Addresses that are no multiples of it are accessed by a half of it, and so on.
UNIT_BYTES_MAX = 16
# The longest number that a kernel can load. Two side by side make a unit of 16 bytes, moved by one access.
_WORD_BYTES_MAX = 8
# Kernels count tokens in 32 bits, and the last tile may reach beyond the last token.
TOKEN_COUNT_MAX = 2**31 - 2**20
# Kernels count the words of one token's heads in 32 bits, and the last column may reach beyond its end.
TOKEN_BYTES_MAX = 2**30
# The hardware's limits of a grid.
GRID_MAX = (2**31 - 1, 65535, 65535)
# Offsets inside a tile have 32 bits up to here, and 64 beyond.
_NARROW_BYTES_MAX = 2**31
# Which of a grid's numbers says where in the list of page ids the first token's is: it alone differs between slabs.
PAGE_FIRST = 7
# A tile in one page needs this many bytes to be worth it: below, a program loads the ids of many short pages instead.
_ONE_PAGE_BYTES_MIN = 4096
# A row is cut into columns of a power of two; more columns are used as long as less than this share of them stays idle.
_IDLE_COLUMNS_SHARE_MAX = 1 / 8


@dataclass(frozen=True)
class Tuning:
    """What may be tried for speed; every choice gives the same bytes.

    Attributes:
        tile_bytes: moved by one program, a power of two from 512 to 65536.
        warps: of one program, a power of two.
        programs_max: programs of one launch, each of which moves tiles one after another; a program never runs on more
            than one of the device's processors, so that this also limits how many an engine loses. 0: one for each tile.
    """

    tile_bytes: int = 16384
    warps: int = 4
    programs_max: int = 0


@dataclass(frozen=True)
class Tile:
    """The shape of what one program moves; see `device_rows.copy_tiles` for the fields."""

    unit_bytes: int
    word_bytes: int
    rows: int
    columns: int
    page_tokens: int
    one_page: bool
    whole_rows: bool
    narrow: bool


@dataclass(frozen=True)
class PairTile(Tile):
    """A tile that lies in pages on two sides; `page_tokens` is what both sides' pages can be cut into."""

    near_page_tokens: int
    far_page_tokens: int


@dataclass(frozen=True)
class Grid:
    """One launch.

    Attributes:
        programs: in three dimensions.
        numbers: arguments of the kernel, in the order of `device_rows.copy_tiles` from `layer_first` to `plane_count`.
        tile: its compile-time arguments.
    """

    programs: tuple[int, int, int]
    numbers: tuple[int, ...]
    tile: Tile


def unit_of(bits: int) -> int:
    """Return the widest access for addresses and steps whose bitwise or is `bits`: 16, 8, 4, 2 or 1 bytes."""
    return min(bits & -bits, UNIT_BYTES_MAX) if bits else UNIT_BYTES_MAX


@functools.lru_cache(maxsize=256)
def choose_tile(unit_bytes: int, row_bytes: int, row_step_bytes: int, page_tokens: int, tile_bytes: int) -> Tile:
    """Choose columns that fit the row and rows that fit the page.

    Args:
        unit_bytes: of `unit_of`; divides `row_bytes`.
        row_bytes: of the heads of one token that lie side by side.
        row_step_bytes: the longest step from one row of a tile to the next, in pages or slab.
        page_tokens: rows of a page.
        tile_bytes: of `Tuning`.
    """
    word_bytes = min(unit_bytes, _WORD_BYTES_MAX)
    tile_words, row_words = tile_bytes // word_bytes, row_bytes // word_bytes
    candidates = [tile_words >> shift for shift in range((tile_bytes // UNIT_BYTES_MAX).bit_length())]
    covered = {columns: -(-row_words // columns) * columns for columns in candidates}
    limit = min(covered.values()) * (1 + _IDLE_COLUMNS_SHARE_MAX)
    columns = next(columns for columns in candidates if covered[columns] <= limit)
    rows = tile_words // columns
    page_rows = min(rows, page_tokens & -page_tokens)
    one_page = page_rows == rows or page_rows * columns * word_bytes >= _ONE_PAGE_BYTES_MIN
    rows = page_rows if one_page else rows
    # Products of 64 bits for each row would cost more instructions than the copy itself.
    narrow = rows * row_step_bytes + tile_bytes < _NARROW_BYTES_MAX
    return Tile(unit_bytes, word_bytes, rows, columns, page_tokens, one_page, columns >= row_words, narrow)


def tile_count(tile: Tile, row_bytes: int, slot_first: int, token_count: int) -> int:
    """Return how many tiles cover one head of one plane."""
    column_tiles = -(-row_bytes // (tile.word_bytes * tile.columns))
    if tile.one_page:
        pages = -(-(slot_first + token_count) // tile.page_tokens)
        return pages * (tile.page_tokens // tile.rows) * column_tiles
    return -(-token_count // tile.rows) * column_tiles
