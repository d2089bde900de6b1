"""Tests a prefill rank's core with two caches: claims that come before the offer, and aborts of one of them."""

from __future__ import annotations

import msgspec

from longshore_client.memory import pool_geometry
from longshore_wire.effects import SECOND_NS, PeerId, RoomEnded, Send, SessionConfig, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Claim,
    Demand,
    PairKey,
    PoolInfo,
    RegionInfo,
    RoomKey,
    SlabAck,
)
from longshore_wire.source import SourceSession
from longshore_wire.ways import Way

ONE = KVLayout(ModelShape.kv(2, 4, 16, 2), Parallel(), 16)
LAYOUT = msgspec.structs.replace(ONE, others=(msgspec.structs.replace(ONE, name="draft"),))
KEY, DECODE = RoomKey("P", 1), PeerId("D", 0, 0)
PAGES = b"".join(number.to_bytes(4, "little") for number in range(4))


def prefill() -> SourceSession:
    """Return a prefill rank to which a decode rank is attached."""
    session = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
    session.describe(b"", None, {})
    pools = tuple(PoolInfo(cache, pool_geometry(ONE, 64), (1 << 21,)) for cache in range(2))
    ring = RegionInfo(4096, 1 << 20)
    session.receive(DECODE, Attach(PROTOCOL_VERSION, "d", "D", 9, LAYOUT, "Loopback", b"", ring, pools, 1 << 20), 0)
    return session


def pair(cache: int) -> PairKey:
    return PairKey(KEY, 0, 0, 7, 9, "D", cache=cache)


def claim(cache: int, first_token: int) -> Claim:
    count = 0 if first_token == 64 else 4
    return Claim(pair(cache), first_token, 64, Way.CONTIGUOUS, 0, count, PAGES[: 4 * count], serial=cache + 1)


def ended(session: SourceSession) -> list[Reason]:
    return [effect.reason for effect in session.take_effects() if isinstance(effect, RoomEnded)]


def test_a_cache_that_decode_has_already_is_remembered_as_long_as_its_room_is_open() -> None:
    session = prefill()
    session.receive(DECODE, claim(0, 64), 0)
    session.receive(DECODE, claim(1, 0), 0)
    # Longer than two leases, which is how long other notes of peers are kept.
    for second in range(1, 300):
        session.renew(second * SECOND_NS)
        session.links.peers[DECODE].heard_ns = second * SECOND_NS
        session.tick(second * SECOND_NS)
    now_ns = 300 * SECOND_NS
    session.take_effects()
    session.offer(1, [(0, 0, 64), (1, 0, 64)], last=True, now_ns=now_ns)
    writes = [effect for effect in session.take_effects() if isinstance(effect, StartWrite)]
    assert {write.pair.cache for write in writes} == {1}
    for write in writes:
        session.write_done(DECODE, write.pair, write.slab, write.payload_bytes, now_ns)
        session.receive(DECODE, SlabAck(write.pair, write.slab, 0), now_ns)
    assert ended(session) == [Reason.NONE]
    assert not session.rooms


def test_serials_of_claims_of_nothing_leave_no_gap() -> None:
    session = prefill()
    for room in range(1, 50):
        key = PairKey(RoomKey("P", room), 0, 0, 7, 9, "D")
        for cache, first_token in ((0, 64), (1, 0)):
            named = msgspec.structs.replace(key, cache=cache)
            count = 0 if first_token == 64 else 4
            serial = 2 * room + cache - 1
            session.receive(
                DECODE, Claim(named, first_token, 64, Way.CONTIGUOUS, 0, count, PAGES[: 4 * count], serial=serial), 0
            )
        session.offer(room, [(0, 0, 64), (1, 0, 64)], last=True, now_ns=0)
        for write in [effect for effect in session.take_effects() if isinstance(effect, StartWrite)]:
            session.write_done(DECODE, write.pair, write.slab, write.payload_bytes, 0)
            session.receive(DECODE, SlabAck(write.pair, write.slab, 0), 0)
    assert not session.rooms
    used = session._used_serials(session.links.peers[DECODE])
    assert (used.floor, len(used.above)) == (2 * 49, 0)


def test_a_claim_of_nothing_is_answered_again_when_its_answer_was_lost_and_another_cache_has_opened_the_room() -> None:
    session = prefill()
    session.receive(DECODE, claim(0, 64), 0)
    session.receive(DECODE, claim(1, 0), 0)
    session.take_effects()
    # The Demand of the first claim was lost, so it comes again.
    session.receive(DECODE, claim(0, 64), 1)
    sent = [effect.message for effect in session.take_effects() if isinstance(effect, Send)]
    assert [type(message) for message in sent] == [Demand]
    assert sent[0].pair.cache == 0
    session.offer(1, [(0, 0, 64), (1, 0, 64)], last=True, now_ns=2)
    for write in [effect for effect in session.take_effects() if isinstance(effect, StartWrite)]:
        session.write_done(DECODE, write.pair, write.slab, write.payload_bytes, 2)
        session.receive(DECODE, SlabAck(write.pair, write.slab, 0), 2)
    assert ended(session) == [Reason.NONE]


def test_a_peer_is_named_once_at_the_end_of_a_room_however_many_caches_it_has() -> None:
    session = prefill()
    for cache in (0, 1):
        session.receive(DECODE, claim(cache, 0), 0)
    for cache in (0, 1):
        session.receive(DECODE, Abort(pair(cache), Reason.CANCELLED, "", cache + 1), 0)
    (end,) = [effect for effect in session.take_effects() if isinstance(effect, RoomEnded)]
    assert end.about()["peer"] == DECODE.path
    assert [each.cache for each in end.pairs] == [0, 1]


def test_a_room_that_decode_gives_up_as_busy_is_over_for_prefill() -> None:
    session = prefill()
    session.receive(DECODE, claim(0, 0), 0)
    for cache in (0, 1):
        session.receive(DECODE, Abort(pair(cache), Reason.BUSY, "too many claims", cache + 1), 0)
    assert ended(session) == [Reason.CANCELLED]
    assert session.ended[KEY].reason is Reason.CANCELLED
