"""Tests how a claim is cut into slabs: within the limits, of equal length, beginning at a page's first token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longshore_wire.effects import PeerId
from longshore_wire.peer_messages import PairKey, RoomKey
from longshore_wire.room import TargetPair
from longshore_wire.slabs import SlabGrid, even_tokens, slab_limit_bytes, staging_of_tests
from longshore_wire.states import TargetEvent, TargetSlab
from longshore_wire.ways import Way


def test_the_last_slab_is_as_long_as_the_others() -> None:
    # 300 tokens where 204 fit: 204 and 96 would overlap with less.
    assert even_tokens(300, 204, 204, 64) == 192
    assert even_tokens(384, 204, 204, 64) == 192


def test_no_more_slabs_than_stay_above_the_minimum() -> None:
    # 12.5 pages: slabs of 3 pages would be 5, the last with half a page, although each slab has the same control cost.
    assert even_tokens(800, 204, 409, 64) == 5 * 64
    # One of all tokens, where two would both be below it.
    assert even_tokens(256, 204, 409, 64) == 256


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 64))
def test_slabs_hold_each_claimed_token_once_and_the_last_one_ends_where_the_claim_ends(
    first: int, count: int, slab_tokens: int
) -> None:
    grid = SlabGrid(first, first + count, slab_tokens)
    held = [token for slab in range(grid.count) for token in range(*grid.tokens(slab))]
    assert held == list(range(first, first + count))


@given(st.integers(0, 500), st.integers(1, 64), st.data())
def test_a_target_counts_the_tokens_of_the_slabs_that_are_in_its_pages(
    count: int, slab_tokens: int, data: st.DataObject
) -> None:
    grid = SlabGrid(7, 7 + count, slab_tokens)
    key = PairKey(RoomKey("P", 1), 0, 0, 1, 1, "D")
    pair = TargetPair(key, PeerId("P", 0, 0), None, Way.CONTIGUOUS, grid=grid, states=[TargetSlab.WANTED] * grid.count)
    placed = {slab for slab in range(grid.count) if data.draw(st.booleans())}
    for slab in placed:
        pair.step_slab(slab, TargetEvent.PLACE)
    assert pair.done_tokens == sum(len(range(*grid.tokens(slab))) for slab in placed)
    assert pair.done == (len(placed) == grid.count)


@given(st.integers(1, 4096), st.integers(1, 512), st.integers(0, 512), st.integers(1, 64))
def test_slabs_are_whole_pages_within_the_limit_and_no_more_than_pages_demand(
    count: int, tokens_min: int, more: int, page: int
) -> None:
    tokens_min = max(tokens_min, page)
    tokens_max = tokens_min + more
    tokens = even_tokens(count, tokens_min, tokens_max, page)
    assert tokens % page == 0
    assert 0 < tokens <= tokens_max
    # No more slabs than the largest whole pages would make, or the minimum allows.
    most = max(-(-count // (tokens_max // page * page)), count // tokens_min)
    assert SlabGrid(0, count, tokens).count <= most


@given(unit=st.integers(1, 1 << 30), writers=st.integers(1, 8), caches=st.integers(1, 16), on_gpu=st.booleans())
def test_the_staging_of_tests_holds_two_units_of_each_writer_and_no_more_than_the_deployment_has(
    unit: int, writers: int, caches: int, *, on_gpu: bool
) -> None:
    lane, ring = staging_of_tests(1 << 40, 1 << 40, unit, on_gpu=on_gpu, cache_count=caches)
    assert slab_limit_bytes(lane, ring, caches * writers) >= -(-unit // writers)
    assert staging_of_tests(1 << 10, 1 << 12, unit, on_gpu=on_gpu) == (1 << 10, 1 << 12)


def test_the_staging_of_tests_on_a_gpu_holds_slabs_that_take_longer_than_their_control() -> None:
    assert staging_of_tests(64 << 20, 4 << 30, 1 << 10, on_gpu=True) == (32 << 20, 512 << 20)
    assert staging_of_tests(64 << 20, 4 << 30, 1 << 10, on_gpu=False) == (4 << 20, 64 << 20)
