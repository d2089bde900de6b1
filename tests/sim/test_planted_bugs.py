"""Tests that the simulator finds each planted bug within a number of rooms, and shrinks the run."""

from __future__ import annotations

import pytest
from planted_bugs import PLANTS, planted
from sim_run import play
from sim_shrink import Shrinker, kind, told
from simulate import ROOMS_MAX, is_deep, search

# Other bugs raise errors that a wrong test would also raise.
FOUND = ("ViolationError", "AssertionError")


@pytest.mark.parametrize("name", ["A", "F", "dead by address", "one for both memories", "restart of the other"])
def test_a_planted_bug_is_found_and_the_same_run_holds_without_it(name: str) -> None:
    found, _ = search(name, ROOMS_MAX)
    assert found is not None
    assert found.fault.startswith(FOUND), found.where
    without = play(found.scenario, deep=is_deep(found.scenario.seed))
    assert not without.fault, without.where


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_planted_bugs_are_found_within_twenty_thousand_rooms() -> None:
    taken = {}
    for name in PLANTS:
        found, taken[name] = search(name, ROOMS_MAX)
        assert found is not None, f"{name} was not found: {taken}"
        assert found.fault.startswith(FOUND), found.where
        without = play(found.scenario, deep=is_deep(found.scenario.seed))
        assert not without.fault, without.where
    assert sum(taken.values()) <= ROOMS_MAX, taken


def test_a_failing_run_is_made_small_and_is_told_as_a_list_of_events() -> None:
    with planted("G"):
        found, _ = search("G", ROOMS_MAX)
        assert found is not None
        small = Shrinker(found, deep=False).shrink()
        again = play(small)
        text = told(small, deep=False)

    assert kind(again.fault) == kind(found.fault)
    assert len(small.rooms) <= 2 < len(found.scenario.rooms)
    assert again.fault in text
    assert "lands at" in text
