"""Tests that an owner that unregisters a pool gets PoolFree when the last worker that maps it has unmapped it or ended."""

from __future__ import annotations

from longshore_agent.supervisor.pool_broker import PoolHolders
from longshore_wire.effects import PeerId

OWNER, OTHER = PeerId("decode", 0, 0), PeerId("decode", 0, 1)
A, B, C = (PeerId("prefill", 0, rank) for rank in range(3))


def test_a_pool_that_nobody_was_given_is_free_at_once():
    assert PoolHolders().take(OWNER, 0)


def test_a_pool_is_free_when_its_last_holder_has_unmapped_it():
    holders = PoolHolders()
    for holder in (A, B, A):
        holders.give(OWNER, 0, holder)
    holders.give(OWNER, 1, A)
    assert not holders.take(OWNER, 0)
    assert not holders.unmapped(OWNER, 1, A)
    assert not holders.unmapped(OWNER, 0, A)
    assert holders.unmapped(OWNER, 0, B)
    assert not holders.unmapped(OWNER, 0, B)
    assert not holders.take(OWNER, 1)


def test_a_worker_that_ends_has_unmapped_all_it_held():
    holders = PoolHolders()
    for owner in (OWNER, OTHER):
        for holder in (A, B):
            holders.give(owner, 0, holder)
    assert not holders.take(OWNER, 0)
    assert holders.left(A) == []
    assert holders.left(B) == [(OWNER, 0)]
    assert holders.take(OTHER, 0)


def test_pools_of_an_owner_that_has_ended_are_awaited_until_their_last_holder_has_unmapped_them():
    holders = PoolHolders()
    for pool in (0, 1):
        holders.give(OWNER, pool, A)
    holders.give(OWNER, 1, B)
    holders.give(OTHER, 0, C)
    assert sorted(holders.take_all(OWNER)) == [0, 1]
    assert holders.holders(OWNER) == [A, B]
    assert holders.unmapped(OWNER, 0, A)
    assert not holders.unmapped(OWNER, 1, A)
    assert holders.holders(OWNER) == [B]
    assert holders.left(B) == [(OWNER, 1)]
    assert holders.holders(OWNER) == []
    assert holders.take_all(OWNER) == []


def test_a_pool_that_is_registered_and_given_again_is_waited_for_again():
    holders = PoolHolders()
    holders.give(OWNER, 0, A)
    assert not holders.take(OWNER, 0)
    assert holders.unmapped(OWNER, 0, A)
    assert holders.take(OWNER, 0)
    holders.give(OWNER, 0, A)
    assert not holders.take(OWNER, 0)
