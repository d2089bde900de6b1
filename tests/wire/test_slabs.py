"""How a claim is cut into slabs: within the limits, as long as each other, and from a page's first token on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longshore_wire.claims import even_tokens
from longshore_wire.slabs import SlabGrid


def test_the_last_slab_is_as_long_as_the_others() -> None:
    # 256 tokens where 204 fit: 204 and 52 would overlap with nothing.
    assert SlabGrid(0, 256, even_tokens(256, 204, 64)).count == 2
    assert even_tokens(256, 204, 64) == 128


@given(st.integers(1, 4096), st.integers(1, 512), st.integers(1, 64))
def test_slabs_are_whole_pages_within_the_limit_and_no_more_than_pages_demand(
    count: int, tokens_max: int, page: int
) -> None:
    tokens_max = max(tokens_max, page)
    tokens = even_tokens(count, tokens_max, page)
    assert tokens % page == 0
    assert 0 < tokens <= tokens_max
    # No more slabs than the largest whole pages would make.
    assert SlabGrid(0, count, tokens).count <= -(-count // (tokens_max // page * page))
