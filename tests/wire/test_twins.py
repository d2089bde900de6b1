"""Two decode workers of one name, both alive: the newer one is served, the older one is told why it is not."""

from __future__ import annotations

from longshore_wire.claims import Wanted
from longshore_wire.effects import SECOND_NS, PeerAttached, PeerId, RoomEnded, RoomReleased, SessionConfig
from longshore_wire.engine_messages import Endpoint, Half, RankAddress
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import Pong, Refuse, RegionInfo, RoomKey
from longshore_wire.plan import Way
from longshore_wire.session import PeerState
from longshore_wire.source_session import SourceSession
from longshore_wire.target_session import TargetSession

LAYOUT = KVLayout(ModelShape(2, 4, 16, 2), Parallel(), 16)
PREFILL, DECODE = PeerId("P", 0, 0), PeerId("D", 0, 0)
ENDPOINT = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),))


def decode(epoch: int) -> TargetSession:
    session = TargetSession(SessionConfig("d", "D", epoch, LAYOUT, ring_bytes=1 << 20, force_way=Way.STAGED), now_ns=0)
    session.describe(b"", RegionInfo(0, 1 << 20), {})
    return session


def claim(session: TargetSession, room: int) -> list[object]:
    """Claim a room; return what the session says."""
    session.claim(Wanted(RoomKey("P", room, 0), ENDPOINT, 0, 60, 4, bytes(16)), 0)
    return [message for _, message in session.take_outbox()]


def exchange(source: SourceSession, target: TargetSession, said: list[object]) -> None:
    """Carry messages to and fro until neither side has any."""
    while said:
        for message in said:
            source.receive(DECODE, message, 0)
        for _, answer in source.take_outbox():
            target.receive(PREFILL, answer, 0)
        said = [message for _, message in target.take_outbox()]


def test_the_older_of_two_workers_of_one_name_is_refused_by_that_name_and_the_newer_one_keeps_its_rooms() -> None:
    source = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
    older, newer = decode(100), decode(200)
    exchange(source, newer, claim(newer, 1))
    source.take_effects()

    exchange(source, older, claim(older, 2))

    ended = [effect for effect in older.take_effects() if isinstance(effect, RoomEnded)]
    assert [effect.reason for effect in ended] == [Reason.STALE_EPOCH]
    assert "decode D rank 0" in ended[0].text and "instance name" in ended[0].text
    assert not [effect for effect in source.take_effects() if isinstance(effect, PeerAttached)]
    assert source.peers[DECODE].epoch == 200
    assert list(source.rooms) == [RoomKey("P", 1, 0)]


def test_a_refusal_of_an_earlier_life_means_nothing_to_the_next_one() -> None:
    source = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
    newer = decode(200)
    exchange(source, newer, claim(newer, 1))

    newer.receive(PREFILL, Refuse(Reason.STALE_EPOCH, "late", epoch=100), 0)

    assert newer.peers[PREFILL].state is PeerState.ATTACHED
    assert list(newer.rooms) == [RoomKey("P", 1, 0)]


def test_an_older_worker_is_served_once_the_newer_one_is_gone() -> None:
    source = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
    older, newer = decode(100), decode(200)
    exchange(source, newer, claim(newer, 1))
    source.tick(source.config.peer_timeout_ns + SECOND_NS)
    source.take_outbox()

    exchange(source, older, claim(older, 2))

    assert source.peers[DECODE].epoch == 100
    assert RoomKey("P", 2, 0) in source.rooms


def test_what_the_refused_worker_was_being_sent_stays_quarantined() -> None:
    """It was attached before, so a write to its ring may still be on its way: only its ring's owner must not reuse it."""
    source = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
    older = decode(100)
    exchange(source, older, claim(older, 2))
    source.offer(2, 0, 0, 60, last=True, now_ns=0)
    for _, message in source.take_outbox():
        older.receive(PREFILL, message, 0)
    granted = older.granter.ring.used_bytes
    assert granted
    older.take_outbox()

    older.receive(PREFILL, Refuse(Reason.STALE_EPOCH, "a newer one is there", epoch=100), 0)

    assert older.peers[PREFILL].trouble == "a newer one is there"
    assert older.granter.ring.held_bytes == granted


def test_a_room_of_the_older_one_that_was_granted_nothing_is_forgotten_when_it_is_refused() -> None:
    """The claim went to a source that had turned to the newer one meanwhile: nobody will ever confirm it."""
    source = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
    older, newer = decode(100), decode(200)
    exchange(source, older, claim(older, 1))
    exchange(source, newer, claim(newer, 2))
    older.take_effects()

    claim(older, 3)  # lost: it travels on a connection that the source does not know any more
    older.receive(PREFILL, Pong(0), 0)
    older.receive(PREFILL, Refuse(Reason.STALE_EPOCH, "a newer worker is attached", epoch=100), 0)

    assert RoomKey("P", 3, 0) not in older.rooms
    assert RoomReleased(Half.TARGET, RoomKey("P", 3, 0)) in older.take_effects()
    # What room 1 was granted may still be written.
    assert list(older.rooms) == [RoomKey("P", 1, 0)]
    assert older.granter.ring.held_bytes
