"""Tests a prefill rank whose pages no transport can read in place, as on a GPU: decode stages, other modes are refused."""

from __future__ import annotations

import pytest
from core_outputs import effects_of, messages_of
from source_voice import attach_to

from longshore_client.memory import pool_geometry
from longshore_wire.claims import Wanted
from longshore_wire.effects import PeerId, SessionConfig, StartWrite
from longshore_wire.engine_messages import CachePages, Endpoint, RankAddress
from longshore_wire.errors import Reason, RoomError
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import PROTOCOL_VERSION, Abort, Attach, Claim, PairKey, PoolInfo, RegionInfo, RoomKey
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Staging, Way

LAYOUT = KVLayout(ModelShape.kv(2, 4, 16, 2), Parallel(), 16)
RING = RegionInfo(4096, 1 << 20)
POOL = PoolInfo(0, pool_geometry(LAYOUT, 64), (1 << 21,))
KEY = RoomKey("P", 1)


def attach(instance: str, epoch: int, *, in_place: bool) -> Attach:
    ring = RING if instance == "D" else None
    pools = (POOL,) if instance == "D" else ()
    return Attach(
        PROTOCOL_VERSION, "d", instance, epoch, LAYOUT, "Loopback", b"", ring, pools, 1 << 20, in_place=in_place
    )


def claimed(in_place: bool, staging: Staging = Staging.AUTO) -> tuple[Way, str]:
    """Return mode and reason of a decode rank's claim to a prefill rank with whole pages for it."""
    config = SessionConfig("d", "D", 9, LAYOUT, ring_bytes=RING.length_bytes, staging=staging)
    session = TargetSession(config, now_ns=0)
    session.describe(b"", RING, {0: POOL})
    endpoint = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),))
    session.claim(Wanted(KEY, endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)
    attach_to(session, PeerId("P", 0, 0), attach("P", 7, in_place=in_place), 0)
    found = [message for _, message in messages_of(session) if isinstance(message, Claim)]
    return found[0].way, found[0].why.name


def test_decode_stages_what_it_would_have_written_in_place() -> None:
    assert claimed(in_place=True) == (Way.CONTIGUOUS, "DEFAULT")
    assert claimed(in_place=False) == (Way.STAGED, "STAGING")


def answer(way: Way, *, in_place: bool) -> tuple[list[Abort], list[StartWrite]]:
    """Return the effects of a claim at a prefill rank that has offered all tokens."""
    session = SourceSession(SessionConfig("d", "P", 7, LAYOUT, in_place=in_place), now_ns=0)
    session.describe(b"", None, {})
    session.offer(1, [(0, 0, 64)], last=True, now_ns=0)
    peer = PeerId("D", 0, 0)
    session.receive(peer, attach("D", 9, in_place=True), 0)
    pair = PairKey(KEY, 0, 0, 7, 9, "D")
    pages = b"".join(number.to_bytes(4, "little") for number in range(4))
    session.receive(peer, Claim(pair, 0, 64, way, 0, 4, pages, serial=1), 0)
    aborts = [message for _, message in messages_of(session) if isinstance(message, Abort)]
    return aborts, [effect for effect in effects_of(session) if isinstance(effect, StartWrite)]


@pytest.mark.parametrize("way", [Way.CONTIGUOUS, Way.SLICES])
def test_prefill_refuses_a_way_that_would_have_its_pages_read_where_they_lie(way: Way) -> None:
    aborts, writes = answer(way, in_place=True)
    assert (aborts, [write.way for write in writes]) == ([], [way])
    aborts, writes = answer(way, in_place=False)
    assert writes == []
    assert [abort.reason for abort in aborts] == [Reason.UNSUPPORTED]
    assert way.name in aborts[0].text
    assert "GPU" in aborts[0].text


@pytest.mark.parametrize("settings", [{"staging": Staging.NEVER}, {"force_way": Way.SLICES}])
def test_decode_refuses_to_claim_in_place_what_no_transport_can_write_there(settings: dict[str, object]) -> None:
    def claims(**more: object) -> TargetSession:
        config = SessionConfig("d", "D", 9, LAYOUT, ring_bytes=RING.length_bytes, agent="here", **settings, **more)
        session = TargetSession(config, now_ns=0)
        session.describe(b"", RING, {0: POOL})
        return session

    endpoint = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),))
    claims().claim(Wanted(KEY, endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)
    refusing = claims(in_place=False)
    with pytest.raises(RoomError, match="those of decode D are on a GPU: have them staged") as caught:
        refusing.claim(Wanted(KEY, endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)
    assert (caught.value.reason, refusing.rooms) == (Reason.UNSUPPORTED, {})
    # A full hit has no mode, and neighbours need no transport.
    refusing.claim(Wanted(KEY, endpoint, (CachePages(0, 60, 60, 0, b""),)), 0)
    if "force_way" not in settings:
        near = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),), agent="here")
        refusing.claim(Wanted(RoomKey("P", 2), near, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)
    assert len(refusing.rooms) == 2 if "force_way" not in settings else 1


def test_a_direct_copy_from_there_is_no_transport_s_business() -> None:
    aborts, writes = answer(Way.DIRECT, in_place=False)
    assert (aborts, [write.way for write in writes]) == ([], [Way.DIRECT])


def test_a_prefill_rank_says_whether_its_pages_can_be_read_in_place() -> None:
    for in_place in (True, False):
        session = SourceSession(SessionConfig("d", "P", 7, LAYOUT, in_place=in_place), now_ns=0)
        session.describe(b"", None, {})
        session.receive(PeerId("D", 0, 0), attach("D", 9, in_place=True), 0)
        said = [message for _, message in messages_of(session) if isinstance(message, Attach)]
        assert [each.in_place for each in said] == [in_place]
