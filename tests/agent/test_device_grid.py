"""Tests the grid of a kernel launch: every word is in exactly one tile, and every access is aligned."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.device_grid import choose_grid, choose_tile, unit_of


@given(st.lists(st.integers(0, 2**48), min_size=1, max_size=6))
def test_a_unit_divides_every_address_and_step_and_none_twice_as_wide_does(steps: list[int]) -> None:
    bits = 0
    for step in steps:
        bits |= step
    unit = unit_of(bits)
    assert unit in {1, 2, 4, 8, 16}
    assert all(step % unit == 0 for step in steps)
    assert unit == 16 or any(step % (2 * unit) for step in steps)


@given(
    unit_bytes=st.sampled_from([1, 2, 4, 8, 16]),
    row_units=st.integers(1, 600),
    page_tokens=st.sampled_from([1, 2, 16, 17, 24, 64, 256]),
    other_tokens=st.sampled_from([0, 1, 2, 16, 17, 24, 64, 256]),
    tile_bytes=st.sampled_from([512, 2048, 16384]),
    first=st.integers(0, 600),
    row_count=st.integers(1, 300),
    programs_max=st.sampled_from([0, 7]),
)
def test_tiles_cover_every_row_and_word_once_and_none_lies_in_two_pages(
    unit_bytes: int,
    row_units: int,
    page_tokens: int,
    other_tokens: int,
    tile_bytes: int,
    first: int,
    row_count: int,
    programs_max: int,
) -> None:
    row_bytes = row_units * unit_bytes
    tile = choose_tile(unit_bytes, row_bytes, row_bytes, (page_tokens, other_tokens), tile_bytes)
    words = row_bytes // tile.word_bytes
    assert row_bytes % tile.word_bytes == 0
    assert tile.rows * tile.columns * tile.word_bytes <= tile_bytes
    column_tiles = -(-words // tile.columns)
    grid = choose_grid(tile, row_bytes, 3, 5, first % page_tokens, row_count, programs_max)
    row_first, row_end, units, tile_count, *others = grid.counts
    assert (units, *others) == (row_units, 3, 5)
    assert grid.programs == ((min(15 * tile_count, 7), 1, 1) if programs_max else (tile_count, 3, 5))
    covered: Counter[int] = Counter()
    for number in range(tile_count):
        rows = [number // column_tiles * tile.rows + row for row in range(tile.rows)]
        meant = [row - row_first for row in rows if row_first <= row < row_end]
        covered.update(meant)
        for page in {page_tokens, other_tokens} - {0} if tile.one_page else ():
            assert len({(first + row) // page for row in meant}) <= 1
    assert covered == dict.fromkeys(range(row_count), column_tiles)
    assert tile.columns * column_tiles >= words


def test_more_than_one_launch_can_copy_is_refused() -> None:
    tile = choose_tile(16, 512, 2048, (16, 0), 8192)
    for planes, rows, programs_max in ((65536, 1, 0), (1, 2**31, 0), (2**20, 2**20, 7)):
        with pytest.raises(ShapeError, match="more than one launch"):
            choose_grid(tile, 512, 1, planes, 0, rows, programs_max)


@pytest.mark.parametrize(("page_tokens", "one_page"), [(1, False), (16, True), (17, False), (64, True), (256, True)])
def test_a_tile_stays_in_one_page_where_pages_are_long_enough(page_tokens: int, one_page: bool) -> None:
    tile = choose_tile(16, 512, 2048, (page_tokens, 0), 16384)
    assert tile.one_page is one_page
    assert tile.rows * 512 >= 4096
    assert not one_page or page_tokens % tile.rows == 0


@pytest.mark.parametrize(
    ("row_bytes", "idle_share_max"), [(512, 0), (640, 0.125), (160, 0.125), (1152, 0.125), (16, 0)]
)
def test_few_lanes_stay_idle_for_rows_that_are_no_power_of_two(row_bytes: int, idle_share_max: float) -> None:
    tile = choose_tile(16, row_bytes, 2048, (0, 64), 16384)
    words = row_bytes // 8
    covered = -(-words // tile.columns) * tile.columns
    assert covered <= words * (1 + idle_share_max)
