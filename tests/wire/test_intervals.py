"""Compares Coverage with a set of integers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore_wire.errors import Reason, RoomError
from longshore_wire.intervals import Coverage

INTERVALS = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(added=st.lists(INTERVALS, max_size=12), asked=INTERVALS)
def test_a_coverage_answers_as_a_set_of_integers_would(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    coverage, model = Coverage(), set[int]()
    for first, end in added:
        tokens = set(range(first, end))
        assert coverage.overlaps(first, end) == bool(tokens & model)
        if tokens & model:
            with pytest.raises(RoomError) as caught:
                coverage.add(first, end)
            assert caught.value.reason is Reason.TOKENS_OVERLAP
        else:
            coverage.add(first, end)
            model |= tokens
        assert coverage.total == len(model)
        assert {token for first, end in coverage.intervals for token in range(first, end)} == model
    wanted = set(range(*asked))
    assert coverage.covers(*asked) == (wanted <= model)
    gaps = coverage.missing(*asked)
    assert {token for first, end in gaps for token in range(first, end)} == wanted - model
    assert all(before[1] < after[0] for before, after in pairwise(gaps))
    assert (asked[0] in coverage) == (asked[0] in model)
    end = coverage.end_of_prefix(asked[0])
    assert set(range(asked[0], end)) <= model and end not in model


def test_neighbours_become_one_interval_in_any_order() -> None:
    coverage = Coverage()
    for first in (20, 0, 30, 10):
        coverage.add(first, first + 10)
    assert coverage.intervals == ((0, 40),)


def test_an_overlap_is_named_and_nothing_is_added() -> None:
    coverage = Coverage()
    coverage.add(10, 20)
    with pytest.raises(RoomError, match=r"\[15, 30\).*\[15, 20\)"):
        coverage.add(15, 30)
    assert coverage.intervals == ((10, 20),)


def test_nothing_is_missing_from_an_empty_interval() -> None:
    assert Coverage().missing(5, 5) == []
    assert Coverage().covers(5, 5)
    assert Coverage().missing(5, 9) == [(5, 9)]
