"""Tests many rooms: none leaves state, memory is bounded while they wait, and no instance waits for another."""

from __future__ import annotations

import pytest
from core_exchange import MS, Exchange, size_of

from longshore_wire.errors import Reason, RoomError

LEASE_NS = 1000 * MS
# Two leases, and a minute in which a source that has died may come back.
FORGOTTEN_NS = 2 * LEASE_NS + 61_000 * MS


# A minute of computation on an idle machine, so the general limit of tests is too close on a busy one.
@pytest.mark.timeout(1200)
@pytest.mark.rest("simulator")
@pytest.mark.slow
def test_after_a_hundred_thousand_rooms_nothing_of_them_is_left() -> None:
    # Three slabs a room, enough to fill the ring during a batch, and few, because there are many rooms.
    exchange = Exchange.of(2, lease_ns=LEASE_NS, slab_bytes_min=4 << 10)
    # The first rooms attach the peers; counters of stale messages and retries have their names by then.
    room = 0
    for batch in range(1 + 1000):
        for _ in range(100):
            room += 1
            instance = f"P{room % 2}"
            exchange.claim(instance, room, 40)
            exchange.offer(instance, room, 40)
        exchange.settle()
        exchange.tick(20 * MS)
        if batch == 0:
            exchange.tick(FORGOTTEN_NS)
            before = [size_of(core) for core in (*exchange.sources.values(), exchange.target)]
    assert len(exchange.done) == room
    assert exchange.failed == []
    for _ in range(4):
        exchange.tick(FORGOTTEN_NS // 3)
    assert [size_of(core) for core in (*exchange.sources.values(), exchange.target)] == before
    assert exchange.target.granter.ring.region_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("rooms", [4000, pytest.param(10_000, marks=pytest.mark.rest("simulator"))])
def test_many_rooms_at_once_are_all_done_within_the_ring_and_fair_between_instances(rooms: int) -> None:
    instances, tokens = 4, 100
    exchange = Exchange.of(instances)
    for room in range(rooms):
        exchange.claim(f"P{room % instances}", room, tokens)
    exchange.settle()
    # One instance has everything ready before the others begin, and must not delay them.
    for instance in range(instances):
        for room in range(instance, rooms, instances):
            exchange.offer(f"P{instance}", room, tokens)
    exchange.settle(until_done=rooms // 2)
    shares = [sum(key.instance == f"P{instance}" for key in exchange.done) for instance in range(instances)]
    jain = sum(shares) ** 2 / (instances * sum(share**2 for share in shares))
    exchange.settle()
    for _ in range(20):
        exchange.tick(500 * MS)
    assert len(exchange.done) == rooms
    assert exchange.failed == []
    assert exchange.ring_peak_bytes <= exchange.target.config.ring_bytes
    assert jain >= 0.9, shares


def test_a_room_above_the_limit_is_refused_as_busy_and_the_others_are_done() -> None:
    exchange = Exchange.of(1, rooms_max=50)
    for room in range(50):
        exchange.claim("P0", room, 20)
    with pytest.raises(RoomError) as refused:
        exchange.claim("P0", 50, 20)
    assert refused.value.reason is Reason.BUSY
    for room in range(50):
        exchange.offer("P0", room, 20)
    exchange.settle()
    exchange.claim("P0", 50, 20)
    exchange.offer("P0", 50, 20)
    exchange.settle()
    assert len(exchange.done) == 51
