"""Tests that ring memory of an aborted room is freed exactly when no writer can write it any more."""

from __future__ import annotations

import msgspec
from source_voice import attach_to, drain_writers
from two_writers import FIRST, KEY, SECOND, Scene

from longshore_wire.effects import SECOND_NS
from longshore_wire.errors import Reason
from longshore_wire.peer_messages import Attach, EndAck, RoomKey, WireFound


def test_memory_comes_back_writer_by_writer_when_each_has_ended_its_writes_and_says_so() -> None:
    scene = Scene.given_up()
    both = scene.held
    assert both and scene.target.granter.ring.used_bytes == 0
    scene.settle()
    # The sources know of the abort, and their lanes still write.
    assert scene.held == both
    scene.end_writes(FIRST)
    scene.settle()
    assert 0 < scene.held < both
    scene.end_writes(SECOND)
    scene.settle()
    assert scene.held == 0
    assert scene.free == 1 << 20
    assert KEY not in scene.target.rooms


def test_no_confirmation_of_another_life_another_room_another_claim_or_another_writer_frees_anything() -> None:
    scene = Scene.given_up()
    both = scene.held
    pair = scene.pair(FIRST)
    for wrong in (
        msgspec.structs.replace(pair, source_epoch=6),
        msgspec.structs.replace(pair, target_epoch=8),
        msgspec.structs.replace(pair, key=RoomKey("P", 2)),
    ):
        scene.say(FIRST, EndAck(wrong))
        assert scene.held == both
    serial = scene.target.rooms[KEY].pairs[FIRST, 0].serial
    assert serial > 0
    for wrong_serial in (serial + 1, -1):
        scene.say(FIRST, EndAck(pair, wrong_serial))
        assert scene.held == both
    scene.say(SECOND, EndAck(scene.pair(SECOND), scene.target.rooms[KEY].pairs[SECOND, 0].serial))
    assert 0 < scene.held < both
    first = sum(region.length_bytes for region in scene.target.rooms[KEY].pairs[FIRST, 0].regions.values())
    assert scene.held == first


def test_a_silent_writer_keeps_its_memory_in_quarantine_until_nobody_listens_at_its_address() -> None:
    scene = Scene.given_up()
    both = scene.held
    for second in range(1, 60):
        scene.target.renew(second * SECOND_NS)
        scene.target.tick(second * SECOND_NS)
    assert scene.held == both
    scene.target.peer_dead(FIRST, 7, 60 * SECOND_NS)
    # Its kernel may still deliver sent bytes.
    assert scene.held == both
    assert drain_writers(scene.target, 60 * SECOND_NS) == [7]
    assert 0 < scene.held < both
    scene.target.peer_dead(SECOND, 7, 60 * SECOND_NS)
    assert drain_writers(scene.target, 60 * SECOND_NS) == [7]
    assert scene.held == 0
    scene.target.peer_dead(SECOND, 7, 60 * SECOND_NS)
    assert not drain_writers(scene.target, 60 * SECOND_NS)


def test_the_next_life_of_a_writer_is_proof_that_the_last_ones_writes_are_over() -> None:
    scene = Scene.given_up()
    both = scene.held
    attach = scene.target.peers[FIRST].attach
    assert attach is not None
    attach_to(scene.target, FIRST, msgspec.structs.replace(attach, generation=99), 0)
    assert scene.held == both
    attach_to(scene.target, FIRST, msgspec.structs.replace(attach, epoch=8), 0)
    assert scene.held == both
    assert set(drain_writers(scene.target, 0)) == {7}
    assert 0 < scene.held < both


def test_what_a_source_says_of_the_wire_frees_nothing() -> None:
    scene = Scene.given_up()
    both = scene.held
    scene.say(FIRST, WireFound(7, 9, "a wire that nobody knows"))
    assert scene.held == both
    assert isinstance(scene.target.peers[FIRST].attach, Attach)


def waiting_room(scene: Scene) -> RoomKey:
    """Let another room of the first source wait for memory while the whole ring is in quarantine."""
    ring = scene.target.granter.ring
    while (region := ring.allocate(ring.largest_free_bytes or ring.capacity_bytes)) is not None:
        ring.hold(region)
    assert (ring.free_bytes, ring.used_bytes) == (0, 0)
    key = scene.claim(2)
    scene.offer(2)
    scene.settle()
    return key


def test_a_room_that_meets_a_ring_in_quarantine_waits_and_is_served_when_the_writers_confirm() -> None:
    scene = Scene.given_up()
    key = waiting_room(scene)
    assert not scene.target.rooms[key].failed
    for peer in (FIRST, SECOND):
        scene.end_writes(peer)
    scene.settle()
    assert all(pair.regions for pair in scene.target.rooms[key].pairs.values())


def test_a_room_fails_when_nothing_but_quarantine_stays_for_longer_than_a_writer_may_be_silent() -> None:
    scene = Scene.given_up()
    key = waiting_room(scene)
    limit_ns = scene.target.config.peer_timeout_ns
    while scene.now_ns < 3 * limit_ns:
        scene.tick(SECOND_NS)
        room = scene.target.rooms.get(key)
        assert (room is None or room.failed) is (scene.now_ns >= limit_ns)
    assert scene.target.ended[key].reason is Reason.RING_TOO_SMALL
    assert "quarantined" in scene.target.ended[key].text
