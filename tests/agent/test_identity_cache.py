"""Tests the identity cache: values cached by the identity of the objects from which they were computed."""

from __future__ import annotations

import pytest

from longshore_agent.kernels.copier import IdentityCache


def test_a_value_is_made_once_for_the_same_objects_and_again_for_equal_ones() -> None:
    kept: IdentityCache[object] = IdentityCache(10)
    pages, others, pool = [1, 2], [1, 2], object()
    first = kept.get(object, pages, pool)
    assert kept.get(object, pages, pool) is first
    assert kept.get(object, others, pool) is not first
    assert kept.get(object, pages, object()) is not first


def test_the_value_that_was_asked_for_longest_ago_makes_room() -> None:
    kept: IdentityCache[object] = IdentityCache(2)
    one, two, three = [1], [2], [3]
    first, second = kept.get(object, one), kept.get(object, two)
    assert kept.get(object, one) is first
    kept.get(object, three)
    assert kept.get(object, one) is first
    assert kept.get(object, two) is not second


def test_the_objects_stay_while_their_value_does_so_that_no_other_one_is_taken_for_them() -> None:
    kept: IdentityCache[int] = IdentityCache(1000)
    # Keep them alive. Otherwise lists that are dropped at once get each other's identity.
    assert [kept.get(lambda number=number: number, [number]) for number in range(500)] == list(range(500))


def test_what_cannot_be_made_is_not_kept() -> None:
    kept: IdentityCache[object] = IdentityCache(10)
    pages = [1]

    def fail() -> object:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        kept.get(fail, pages)
    assert kept.get(object, pages) is not None
