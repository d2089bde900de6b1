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


def test_a_worker_that_ends_has_unmapped_all_it_held_and_its_own_pools_are_nobodys():
    holders = PoolHolders()
    for owner in (OWNER, OTHER):
        for name in ("a", "b"):
            holders.give(owner, 0, name)
    assert not holders.take(OWNER, 0)
    assert holders.left("a", PeerId("prefill", 0, 0)) == []
    assert holders.left("b", PeerId("prefill", 0, 1)) == [(OWNER, 0)]
    assert holders.take(OTHER, 0)
    holders.give(OTHER, 0, "c")
    assert not holders.take(OTHER, 0)
    assert holders.left("d", OTHER) == []
    assert holders.take(OTHER, 0)


def test_a_pool_that_is_registered_and_given_again_is_waited_for_again():
    holders = PoolHolders()
    holders.give(OWNER, 0, "a")
    assert not holders.take(OWNER, 0)
    assert holders.unmapped(OWNER, 0, "a")
    assert holders.take(OWNER, 0)
    holders.give(OWNER, 0, "a")
    assert not holders.take(OWNER, 0)
