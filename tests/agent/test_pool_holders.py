"""An owner that unregisters a pool hears that it is free when the last worker that was given it has unmapped it, or ended."""

from __future__ import annotations

from longshore_agent.supervisor.pool_holders import PoolHolders
from longshore_wire.effects import PeerId

OWNER, OTHER = PeerId("decode", 0, 0), PeerId("decode", 0, 1)


def test_a_pool_that_nobody_was_given_is_free_at_once():
    assert PoolHolders().take(OWNER, 0)


def test_a_pool_is_free_when_its_last_holder_has_unmapped_it():
    holders = PoolHolders()
    for name in ("a", "b", "a"):
        holders.give(OWNER, 0, name)
    holders.give(OWNER, 1, "a")
    assert not holders.take(OWNER, 0)
    assert not holders.unmapped(OWNER, 1, "a")
    assert not holders.unmapped(OWNER, 0, "a")
    assert holders.unmapped(OWNER, 0, "b")
    assert not holders.unmapped(OWNER, 0, "b")
    assert not holders.take(OWNER, 1)


def test_a_worker_that_ends_has_unmapped_all_it_held():
    holders = PoolHolders()
    for owner in (OWNER, OTHER):
        for name in ("a", "b"):
            holders.give(owner, 0, name)
    assert not holders.take(OWNER, 0)
    assert holders.left("a") == []
    assert holders.left("b") == [(OWNER, 0)]
    assert holders.take(OTHER, 0)


def test_pools_of_an_owner_that_has_ended_are_awaited_until_their_last_holder_has_unmapped_them():
    holders = PoolHolders()
    for pool in (0, 1):
        holders.give(OWNER, pool, "a")
    holders.give(OWNER, 1, "b")
    holders.give(OTHER, 0, "c")
    assert sorted(holders.take_all(OWNER)) == [0, 1]
    assert holders.holders(OWNER) == ["a", "b"]
    assert holders.unmapped(OWNER, 0, "a")
    assert not holders.unmapped(OWNER, 1, "a")
    assert holders.holders(OWNER) == ["b"]
    assert holders.left("b") == [(OWNER, 1)]
    assert holders.holders(OWNER) == []
    assert holders.take_all(OWNER) == []


def test_a_pool_that_is_registered_and_given_again_is_waited_for_again():
    holders = PoolHolders()
    holders.give(OWNER, 0, "a")
    assert not holders.take(OWNER, 0)
    assert holders.unmapped(OWNER, 0, "a")
    assert holders.take(OWNER, 0)
    holders.give(OWNER, 0, "a")
    assert not holders.take(OWNER, 0)
