"""Tests that a room that has failed at one rank of an instance fails at every rank, whenever its engine opens it."""

from __future__ import annotations

import pytest
from core_outputs import effects_of, messages_of
from two_writers import DECODE, FIRST, Scene
from two_writers import KEY as WRITTEN

from longshore_wire.bindings import Binding
from longshore_wire.claims import Wanted
from longshore_wire.effects import PeerId, RoomEnded, RoomGivenUp, SessionConfig
from longshore_wire.engine_messages import CachePages, Endpoint, Half, RankAddress
from longshore_wire.errors import Reason, RoomError
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import RoomKey
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession

MODEL = ModelShape.kv(2, 4, 16, 2)
LAYOUT = KVLayout(MODEL, Parallel(tp=2, tp_rank=1), 16)
KEY = RoomKey("P", 5)


def _config(instance: str) -> SessionConfig:
    return SessionConfig("d", instance, 1, LAYOUT)


def test_an_offer_that_comes_after_a_sibling_has_failed_its_room_is_refused_with_that_reason() -> None:
    source = SourceSession(_config("P"), now_ns=0)
    source.sibling_failed(KEY, Reason.TOTAL_MISMATCH, "prefill says 60 tokens, decode 61", 1)

    with pytest.raises(RoomError, match="decode 61") as caught:
        source.offer(5, [(0, 0, 60)], last=True, now_ns=2)

    assert caught.value.reason is Reason.TOTAL_MISMATCH


def test_a_claim_that_comes_after_a_sibling_has_failed_its_room_is_refused_with_that_reason() -> None:
    target = TargetSession(_config("D"), now_ns=0)
    target.sibling_failed(KEY, Reason.PEER_LOST, "prefill P rank 0 was silent", 1)
    endpoint = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 1), RankAddress(1, "h:2", 1)))

    with pytest.raises(RoomError, match="silent") as caught:
        target.claim(Wanted(KEY, endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 2)

    assert caught.value.reason is Reason.PEER_LOST


def test_an_open_room_fails_once_however_many_siblings_fail_it() -> None:
    source = SourceSession(_config("P"), now_ns=0)
    source.offer(5, [(0, 0, 60)], last=True, now_ns=1)

    for moment in (2, 3):
        source.sibling_failed(KEY, Reason.ENGINE_LOST, "gone", moment)

    ends = [effect for effect in effects_of(source) if isinstance(effect, RoomEnded)]
    assert [(end.half, end.reason) for end in ends] == [(Half.SOURCE, Reason.ENGINE_LOST)]


MINE, OTHER = b"m" * 16, b"o" * 16


@pytest.mark.parametrize("is_first", [True, False])
def test_a_target_that_asked_one_rank_ends_its_room_at_all_of_them(is_first: bool) -> None:
    """Decode asks one rank for a room, which fails before its prefill has offered it there."""
    asked, sibling = (SourceSession(_config("P"), now_ns=0) for _ in range(2))
    target = TargetSession(_config("D"), now_ns=0)
    asked.describe(b"", None, {}, address="h:2")
    endpoint = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 1), RankAddress(1, "h:2", 1)))
    target.ask(Wanted(KEY, endpoint, (CachePages(0, 0, 1, 0, b""),), binding=Binding(b"", MINE)), 1)
    if is_first:
        sibling.offer(5, [(0, 0, 60)], last=True, now_ns=1, binding=Binding(b"", MINE))
    target.cancel(KEY, Reason.CANCELLED, "enough", 2)
    given_up = list[RoomGivenUp]()
    while messages := [(asked, PeerId("D", 0, 1), each) for _, each in messages_of(target)] + [
        (target, PeerId("P", 0, 1), each) for _, each in messages_of(asked)
    ]:
        for core, peer, message in messages:
            core.receive(peer, message, 3)
        given_up += [effect for effect in effects_of(asked) if isinstance(effect, RoomGivenUp)]

    for told in given_up:
        sibling.sibling_failed(told.key, told.reason, told.text, 4, told.capability)
    if is_first:
        ends = [effect for effect in effects_of(sibling) if isinstance(effect, RoomEnded)]
        assert [end.reason for end in ends] == [Reason.CANCELLED]
    else:
        with pytest.raises(RoomError, match="enough"):
            sibling.offer(5, [(0, 0, 60)], last=True, now_ns=5, binding=Binding(b"", MINE))


@pytest.mark.parametrize(("peer", "told"), [(DECODE, 1), (PeerId("another", 0, 0), 0)])
def test_a_target_that_gives_up_a_room_of_which_a_rank_is_done_ends_it_at_its_siblings(peer: PeerId, told: int) -> None:
    """Its claim may not have arrived at these, where the room would wait for it. Only the replica that has the room ends it."""
    scene = Scene.of()
    scene.offer(WRITTEN.room)
    scene.deliver(FIRST)
    source = scene.sources[FIRST]
    assert scene.half(FIRST, WRITTEN.room) is Reason.NONE
    effects_of(source)

    scene.target.cancel(WRITTEN, Reason.CANCELLED, "enough", scene.now_ns)
    for to, message in messages_of(scene.target):
        if to == FIRST:
            source.receive(peer, message, scene.now_ns)

    given_up = [effect for effect in effects_of(source) if isinstance(effect, RoomGivenUp)]
    assert [(each.key, each.reason) for each in given_up] == [(WRITTEN, Reason.CANCELLED)] * told


@pytest.mark.parametrize("is_first", [True, False])
def test_another_requests_room_of_the_same_number_stays_open(is_first: bool) -> None:
    sibling = SourceSession(_config("P"), now_ns=0)
    for turn in (0, 1):
        if turn == is_first:
            sibling.sibling_failed(KEY, Reason.CANCELLED, "enough", 1, OTHER)
        else:
            sibling.offer(5, [(0, 0, 60)], last=True, now_ns=1, binding=Binding(b"", MINE))

    assert not sibling.rooms[KEY].failed


def test_a_room_that_is_done_here_stays_done() -> None:
    source = SourceSession(_config("P"), now_ns=0)
    source._remember(KEY, Reason.NONE, "", 1)

    source.sibling_failed(KEY, Reason.ENGINE_LOST, "gone", 2)

    assert source.ended[KEY].reason is Reason.NONE


def test_a_room_that_a_sibling_has_failed_for_being_busy_is_not_tried_again() -> None:
    """An engine repeats a call that is refused with BUSY, and this room does not come back."""
    target, source = TargetSession(_config("D"), now_ns=0), SourceSession(_config("P"), now_ns=0)
    endpoint = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 1), RankAddress(1, "h:2", 1)))
    for core in (target, source):
        core.sibling_failed(KEY, Reason.BUSY, "room 5 is not open at P", 1)

    with pytest.raises(RoomError) as claimed:
        target.claim(Wanted(KEY, endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 2)
    with pytest.raises(RoomError) as offered:
        source.offer(5, [(0, 0, 60)], last=True, now_ns=2)

    assert {claimed.value.reason, offered.value.reason} == {Reason.CANCELLED}
