"""Tests which sources a decode rank dials, and when, by its core alone."""

from __future__ import annotations

import msgspec
import pytest
from core_outputs import effects_of, messages_of
from source_voice import attach_to

from longshore_wire.claims import Wanted
from longshore_wire.effects import SECOND_NS, Dial, PeerId, SessionConfig
from longshore_wire.engine_messages import CachePages, Endpoint, RankAddress
from longshore_wire.errors import Reason, RoomError
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.links import PeerState
from longshore_wire.peer_messages import Attach, Claim, RoomKey
from longshore_wire.target import TargetSession

LAYOUT = KVLayout(ModelShape.kv(2, 4, 16, 2), Parallel(), 16)
PREFILL = PeerId("P", 0, 0)
MINUTE_NS = 60 * SECOND_NS


def _run(target: TargetSession, from_ns: int, until_ns: int) -> list[tuple[int, Dial]]:
    """Let time pass; return the times and addresses of the session's dials."""
    now_ns, dials = from_ns, []
    while now_ns < until_ns:
        target.tick(now_ns)
        target.renew(now_ns)
        dials += [(now_ns, effect) for effect in effects_of(target) if isinstance(effect, Dial)]
        messages_of(target)
        now_ns = min(until_ns, target.next_due_ns() or until_ns)
    return dials


def test_a_source_that_stays_silent_is_dialled_anew_now_and_then_while_a_room_waits_for_its_word() -> None:
    target = TargetSession(SessionConfig("d", "D", 1, LAYOUT, ring_bytes=1 << 20), now_ns=0)
    endpoint = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),))
    target.claim(Wanted(RoomKey("P", 5), endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)
    assert [effect for effect in effects_of(target) if isinstance(effect, Dial)] == [Dial(PREFILL, "h:1")]
    target.peers[PREFILL].state = PeerState.LOST

    dials = _run(target, 0, MINUTE_NS)

    # Its host is admitted when it attaches, not while it is only dialled.
    assert {dial for _, dial in dials} == {Dial(PREFILL, "h:1")}
    moments = [moment for moment, _ in dials]
    gaps = [later - earlier for earlier, later in zip([0, *moments], moments, strict=False)]
    assert min(gaps) >= target.config.peer_timeout_ns
    assert len(dials) >= MINUTE_NS // (2 * target.config.peer_timeout_ns)


def test_a_late_attach_of_a_life_before_the_one_that_a_room_names_does_not_attach_it() -> None:
    target = TargetSession(SessionConfig("d", "D", 1, LAYOUT, ring_bytes=1 << 20), now_ns=0)

    def claim(room: int, epoch: int) -> None:
        endpoint = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", epoch),))
        target.claim(Wanted(RoomKey("P", room), endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)

    claim(1, 7)
    late = Attach(2, "d", "P", 7, LAYOUT, "Loopback", b"", None, (), 1 << 20, address="h:1")
    late = msgspec.structs.replace(late, attempt=target.peers[PREFILL].attempt)
    messages_of(target)
    claim(2, 9)
    claim(3, 9)
    assert [type(message) for _, message in messages_of(target)] == [Attach], "to the life that is there now, once"

    target.receive(PREFILL, late, 0)

    assert target.peers[PREFILL].state is PeerState.DIALING
    attach_to(target, PREFILL, msgspec.structs.replace(late, epoch=9), 0)
    claims = [message for _, message in messages_of(target) if isinstance(message, Claim)]
    assert {message.pair.source_epoch for message in claims} == {9}


def test_claims_dial_only_so_many_sources_that_have_not_answered_and_others_are_told_to_try_again() -> None:
    target = TargetSession(SessionConfig("d", "D", 1, LAYOUT, ring_bytes=1 << 20), now_ns=0)
    wide = KVLayout(LAYOUT.model, Parallel(tp=1024), 16)
    ranks = tuple(RankAddress(rank, f"h:{rank}", 7) for rank in range(1024))
    with pytest.raises(RoomError, match="1024 prefill ranks") as caught:
        target.claim(
            Wanted(RoomKey("wide", 1), Endpoint("wide", wide, ranks), (CachePages(0, 0, 60, 4, bytes(16)),)), 0
        )
    assert caught.value.reason is Reason.UNSUPPORTED
    assert (target.rooms, target.peers, target.take_effects()) == ({}, {}, [])

    def claim(number: int) -> None:
        endpoint = Endpoint(f"P{number}", LAYOUT, (RankAddress(0, f"h:{number}", 7),))
        target.claim(Wanted(RoomKey(f"P{number}", 1), endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)

    for number in range(256):
        claim(number)
    with pytest.raises(RoomError, match="256 prefill ranks") as caught:
        claim(256)
    assert caught.value.reason is Reason.BUSY
    # One that has answered makes place for another.
    answer = Attach(2, "d", "P7", 7, LAYOUT, "Loopback", b"", None, (), 1 << 20, engine=1)
    attach_to(target, PeerId("P7", 0, 0), answer, 0)
    claim(256)
    assert len(target.rooms) == 257


def test_a_lost_source_of_which_no_room_is_left_is_hung_up_and_not_dialled() -> None:
    target = TargetSession(SessionConfig("d", "D", 1, LAYOUT, ring_bytes=1 << 20), now_ns=0)
    endpoint = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),))
    target.claim(Wanted(RoomKey("P", 5), endpoint, (CachePages(0, 0, 0, 0, b""),)), 0)
    effects_of(target)
    target.peers[PREFILL].state = PeerState.LOST
    target.peers[PREFILL].rooms.clear()

    assert _run(target, 0, MINUTE_NS) == []
    assert PREFILL not in target.peers


def test_time_in_which_this_side_did_not_listen_is_nobodys_silence_nor_takes_a_lease() -> None:
    target = TargetSession(SessionConfig("d", "D", 1, LAYOUT, ring_bytes=1 << 20), now_ns=0)
    target.claim(
        Wanted(
            RoomKey("P", 5), Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),)), (CachePages(0, 0, 60, 4, bytes(16)),)
        ),
        0,
    )
    absent_ns = 10 * max(target.config.peer_timeout_ns, target.config.lease_ns)

    target.was_absent(absent_ns, absent_ns)
    target.tick(absent_ns)

    assert target.peers[PREFILL].state is PeerState.DIALING
    assert target.rooms
    # From here on the time counts again.
    assert target.table.lease_until_ns == absent_ns + target.config.lease_ns
    target.tick(absent_ns + target.config.peer_timeout_ns)
    assert target.peers[PREFILL].state is PeerState.LOST
