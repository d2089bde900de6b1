"""Tests that our cores lack the protocol defects of docs/design/2026-11-21-defects-of-others.md."""

from __future__ import annotations

import msgspec
import pytest
from core_outputs import messages_of
from source_voice import attach_to, drain_writers
from two_writers import DECODE, FIRST, KEY, SECOND, TOKENS, Scene

from longshore_wire.claims import Wanted
from longshore_wire.effects import SECOND_NS, SessionConfig
from longshore_wire.engine_messages import CachePages
from longshore_wire.errors import Reason, RingError
from longshore_wire.links import PeerState
from longshore_wire.peer_messages import Abort, Attach, Claim, Demand, EndAck, RegionInfo, RoomKey
from longshore_wire.states import TargetPairState
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way


def test_a_room_whose_write_fails_fails_alone_and_its_peers_are_served_on() -> None:
    scene = Scene.of()
    scene.offer(KEY.room)
    scene.settle()
    first = scene.writes(FIRST)[0]
    scene.sources[FIRST].write_failed(DECODE, first.pair, first.slab, "the wire broke", 0)
    scene.settle()
    assert scene.ended(KEY.room) is Reason.TRANSFER_FAILED
    states = {peer.state for core in (*scene.sources.values(), scene.target) for peer in core.peers.values()}
    assert states == {PeerState.ATTACHED}
    scene.claim(2)
    scene.offer(2)
    assert scene.deliver(FIRST) and scene.deliver(SECOND)
    assert scene.ended(2) is Reason.NONE


def test_a_room_that_could_never_fit_fails_alone_with_both_sizes() -> None:
    scene = Scene.of()
    small = SessionConfig("d", "E", 9, scene.target.config.layout, ring_bytes=512, force_way=Way.STAGED)
    other = TargetSession(small, now_ns=0)
    pair = scene.target.rooms[KEY].pairs[FIRST, 0]
    with pytest.raises(RingError, match="512 bytes cannot hold two slabs"):
        other.claim(Wanted(RoomKey("P", 2), scene.endpoint(), (CachePages(0, 0, TOKENS, 8, bytes(32)),)), 0)
    assert not other.rooms
    # If decode does not check, the source refuses, only for that room.
    attach = scene.sources[FIRST].peers[DECODE].attach
    assert attach is not None
    shrunk = msgspec.structs.replace(attach, ring=RegionInfo(0, 512), generation=attach.generation + 1)
    scene.sources[FIRST].receive(DECODE, shrunk, 0)
    claim = Claim(msgspec.structs.replace(pair.pair, key=RoomKey("P", 3)), 0, TOKENS, Way.STAGED, serial=1000)
    messages_of(scene.sources[FIRST])
    scene.sources[FIRST].receive(DECODE, claim, 0)
    (answer,) = [message for _, message in messages_of(scene.sources[FIRST]) if isinstance(message, Abort)]
    assert (answer.reason, answer.pair.key.room) == (Reason.RING_TOO_SMALL, 3)
    assert scene.sources[FIRST].peers[DECODE].state is PeerState.ATTACHED
    assert list(scene.sources[FIRST].rooms) == [KEY]


def test_an_arrival_that_is_told_again_counts_once_and_never_for_another_writer() -> None:
    scene = Scene.of()
    scene.offer(KEY.room)
    scene.settle()
    scattered = 0
    while writes := scene.writes(FIRST):
        for write in writes:
            ready = scene.land(FIRST, write)
            for _ in range(3):
                scene.say(FIRST, ready)
            # Also if it names the other writer, or arrives over the other one's connection.
            scene.say(FIRST, msgspec.structs.replace(ready, pair=scene.pair(SECOND)))
            scene.say(SECOND, ready)
        scattered += scene.scatter()
        scene.settle()
    grid = scene.target.rooms[KEY].pairs[FIRST, 0].grid
    assert grid is not None and scattered == grid.count
    assert scene.target.rooms[KEY].pairs[SECOND, 0].done_count == 0
    assert scene.ended(KEY.room) is None
    assert scene.deliver(SECOND) == grid.count
    assert scene.ended(KEY.room) is Reason.NONE


def test_a_room_is_not_done_before_every_planned_writer_was_heard_of_and_has_delivered() -> None:
    scene = Scene.of(lost=SECOND)
    scene.offer(KEY.room)
    assert scene.deliver(FIRST)
    assert scene.target.rooms[KEY].pairs[FIRST, 0].state is TargetPairState.COMPLETE
    assert scene.ended(KEY.room) is None
    # Lost messages are repeated.
    scene.lost.clear()
    for _ in range(8):
        scene.tick(SECOND_NS // 2)
    assert scene.deliver(SECOND)
    assert scene.ended(KEY.room) is Reason.NONE


def test_a_room_is_not_done_while_a_slab_in_its_middle_is_missing() -> None:
    scene = Scene.of()
    scene.offer(KEY.room)
    assert scene.deliver(SECOND)
    missing = None
    scene.settle()
    while writes := scene.writes(FIRST):
        for write in writes:
            if missing is None and write.slab == 1:
                missing = write
                continue
            scene.say(FIRST, scene.land(FIRST, write))
        scene.scatter()
        scene.settle()
    assert missing is not None
    pair = scene.target.rooms[KEY].pairs[FIRST, 0]
    assert pair.done_count == len(pair.states) - 1
    assert scene.ended(KEY.room) is None
    scene.say(FIRST, scene.land(FIRST, missing))
    scene.scatter()
    scene.settle()
    assert scene.ended(KEY.room) is Reason.NONE


def test_no_token_is_read_before_its_engine_has_offered_it() -> None:
    scene = Scene.of()
    wanted = []
    for first, end in ((0, 5), (5, 21), (21, 40), (40, TOKENS)):
        scene.settle()
        wanted += scene.writes(FIRST)
        assert all(write.tokens[1] <= first for write in wanted)
        scene.offer(KEY.room, first, end)
    assert len(wanted) >= 3
    for write in wanted:
        scene.say(FIRST, scene.land(FIRST, write))
    scene.scatter()
    scene.deliver(FIRST)
    scene.deliver(SECOND)
    assert scene.ended(KEY.room) is Reason.NONE


def test_an_abort_is_not_confirmed_while_a_write_that_failed_may_still_land() -> None:
    scene = Scene.given_up()
    held = scene.held
    source = scene.sources[FIRST]
    scene.settle()
    pair = source.rooms[KEY].pairs[DECODE, 0]
    stuck, *others = [slab for slab, state in enumerate(pair.states) if state.value == "draining"]
    for slab in others:
        source.write_done(DECODE, pair.pair, slab, 0, 0)
    source.write_failed(DECODE, pair.pair, stuck, "gone, and nobody knows where", 0, settled=False)
    for _ in range(100):
        scene.tick(SECOND_NS)
    assert scene.held == held
    scene.end_writes(SECOND)
    scene.settle()
    mine = sum(region.length_bytes for region in scene.target.rooms[KEY].pairs[FIRST, 0].regions.values())
    assert scene.held == mine > 0
    # The source's next life proves that the last one's process has ended.
    attach = scene.target.peers[FIRST].attach
    assert isinstance(attach, Attach)
    attach_to(scene.target, FIRST, msgspec.structs.replace(attach, epoch=8), scene.now_ns)
    drain_writers(scene.target, scene.now_ns)
    assert scene.held == 0


def test_a_message_for_a_room_that_is_gone_is_counted_and_harms_nothing() -> None:
    scene = Scene.of()
    pair = scene.pair(FIRST)
    scene.offer(KEY.room)
    scene.deliver(FIRST)
    scene.deliver(SECOND)
    assert KEY not in scene.target.rooms
    for message in (Demand(pair, 8, 8, 8), EndAck(pair), Demand(pair, -1, -1, -1)):
        scene.say(FIRST, message)
    assert scene.target.counters["stale.Demand"] == 2
    scene.claim(2)
    scene.offer(2)
    scene.deliver(FIRST)
    scene.deliver(SECOND)
    assert scene.ended(2) is Reason.NONE
