"""Tests allowed wires at the cores: decode claims nothing over a wire that is unknown or not on its list."""

from __future__ import annotations

import pytest
from core_outputs import effects_of, messages_of
from source_voice import attach_to, stay_alive

from longshore_client.memory import pool_geometry
from longshore_wire.claims import Wanted
from longshore_wire.effects import PeerId, RoomEnded, RoomReleased, SessionConfig, StartWrite
from longshore_wire.engine_messages import CachePages, Endpoint, Half, RankAddress
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.links import WIRE_WAIT_NS
from longshore_wire.peer_messages import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Claim,
    PairKey,
    PoolInfo,
    RegionInfo,
    RoomKey,
    WireFound,
)
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import AllowedWires, Way

MODEL = ModelShape.kv(2, 4, 16, 2)
WHOLE, HALVES = KVLayout(MODEL, Parallel(), 16), KVLayout(MODEL, Parallel(2), 16)
FIRST, SECOND = PeerId("P", 0, 0), PeerId("P", 0, 1)
NOW_NS = 1_000_000_000


class Scene:
    """A decode core that allows RDMA and NVLink, and two ranks of a prefill instance that have attached."""

    def __init__(self) -> None:
        config = SessionConfig(
            "d", "D", 1, WHOLE, backend="NIXL", ring_bytes=1 << 20, wires=("RDMA", "NVLink"), agent="here"
        )
        self.core = TargetSession(config, now_ns=0)
        self.core.describe(b"", None, {}, RegionInfo(4096, 4096))
        self.ended: dict[int, RoomEnded] = {}
        self.released: set[int] = set()
        self.claim(1)
        for peer in (FIRST, SECOND):
            said = Attach(PROTOCOL_VERSION, "d", "P", 7, HALVES.at(peer.rank), "NIXL", b"", None, (), 1 << 20)
            attach_to(self.core, peer, said, NOW_NS)

    def claim(self, room: int, agent: str = "elsewhere") -> None:
        ranks = tuple(RankAddress(rank, f"h:{rank}", 7) for rank in range(2))
        wanted = Wanted(
            RoomKey("P", room), Endpoint("P", HALVES, ranks, agent=agent), (CachePages(0, 0, 4, 1, bytes(4)),)
        )
        self.core.claim(wanted, NOW_NS)

    def found(self, peer: PeerId, wire: str) -> None:
        self.core.receive(peer, WireFound(7, 1, wire), NOW_NS)

    def said(self, kind: type) -> list[tuple[int, int]]:
        """Return (room, source rank) of the messages of one kind that are sent now, in order and without duplicates."""
        for effect in effects_of(self.core):
            if isinstance(effect, RoomEnded):
                self.ended[effect.key.room] = effect
            elif isinstance(effect, RoomReleased):
                self.released.add(effect.key.room)
        sent = [
            (message.pair.key.room, peer.rank) for peer, message in messages_of(self.core) if isinstance(message, kind)
        ]
        return list(dict.fromkeys(sent))


def test_a_room_is_claimed_over_each_wire_once_that_is_known_to_be_allowed():
    scene = Scene()
    assert scene.said(Claim) == []
    scene.found(SECOND, "NVLink")
    assert scene.said(Claim) == [(1, 1)]
    scene.found(FIRST, "RDMA")
    assert scene.said(Claim) == [(1, 0)]
    scene.claim(2)
    assert scene.said(Claim) == [(2, 0), (2, 1)]


@pytest.mark.parametrize("wire", ["TCP", "Unknown", "a wire that nobody knows"])
def test_a_room_over_another_wire_fails_before_a_byte_is_asked_for_and_its_source_is_told(wire):
    scene = Scene()
    scene.found(FIRST, wire)
    assert scene.said(Abort) == [(1, 0), (1, 1)]
    assert scene.ended[1].reason is Reason.WIRE_NOT_ALLOWED
    assert "prefill P rank 0 reaches decode D rank 0" in scene.ended[1].text
    assert "allows only NVLink, RDMA" in scene.ended[1].text
    # A later one is refused, too, and neither keeps its pages.
    scene.claim(2)
    assert scene.said(Claim) == []
    assert scene.ended[2].reason is Reason.WIRE_NOT_ALLOWED
    assert scene.released == {1, 2}
    assert scene.core.rooms == {}
    assert all(not peer.rooms for peer in scene.core.peers.values())


def test_a_source_that_was_claimed_before_the_wire_to_its_sibling_was_known_is_told_to_stop():
    scene = Scene()
    scene.found(SECOND, "RDMA")
    scene.said(Claim)
    scene.found(FIRST, "TCP")
    assert scene.said(Abort) == [(1, 0), (1, 1)]
    assert scene.ended[1].reason is Reason.WIRE_NOT_ALLOWED
    # It was granted no memory yet, so nothing waits for its answer.
    assert scene.core.rooms == {}
    assert scene.released == {1}


def test_a_wire_that_nobody_tells_of_is_none_that_is_allowed():
    scene = Scene()
    said = stay_alive(scene.core, NOW_NS, NOW_NS + WIRE_WAIT_NS - 1)
    assert not [message for _, message in said if isinstance(message, Claim)]
    assert scene.ended == {}
    scene.core.tick(NOW_NS + WIRE_WAIT_NS)
    assert scene.said(Claim) == []
    assert scene.ended[1].reason is Reason.WIRE_NOT_ALLOWED


def test_a_room_that_goes_directly_waits_for_no_wire_and_is_held_to_no_list():
    scene = Scene()
    scene.claim(2, agent="here")
    assert scene.said(Claim) == [(2, 0), (2, 1)]
    scene.found(FIRST, "TCP")
    scene.said(Claim)
    assert set(scene.ended) == {1}
    assert {pair.way for pair in scene.core.rooms[RoomKey("P", 2)].pairs.values()} == {Way.DIRECT}
    assert scene.ended[1].half is Half.TARGET


def test_cuda_ipc_on_the_list_allows_nvlink_which_is_one_kind_of_it_and_not_the_other_way_round():
    assert AllowedWires(("CudaIPC",)).fault("NVLink", FIRST, SECOND) == ""
    assert AllowedWires(("RDMA", "CudaIPC")).holds("NVLink")
    assert AllowedWires(("NVLink",)).holds("NVLink")
    assert "over CudaIPC" in AllowedWires(("NVLink",)).fault("CudaIPC", FIRST, SECOND)
    assert not AllowedWires(("RDMA",)).holds("NVLink")
    assert not AllowedWires(("CudaIPC",)).holds("Unknown")


TARGET = PeerId("D", 0, 0)
PROBE = RegionInfo(4096, 4096)


class SourceScene:
    """A prefill core that allows RDMA, and a decode rank that has attached and claimed rooms 1 (in place) and 2 (directly)."""

    def __init__(self, probe: RegionInfo | None = PROBE) -> None:
        config = SessionConfig("d", "P", 7, WHOLE, backend="NIXL", wires=("RDMA",), agent="here")
        self.core = SourceSession(config, now_ns=0)
        self.core.describe(b"", None, {})
        pools = (PoolInfo(0, pool_geometry(WHOLE, 64), (1 << 21,)),)
        attach = Attach(PROTOCOL_VERSION, "d", "D", 9, WHOLE, "NIXL", b"", None, pools, 1 << 20, probe=probe)
        self.core.receive(TARGET, attach, NOW_NS)
        self.claim(1, Way.CONTIGUOUS)

    def claim(self, room: int, way: Way) -> None:
        self.core.offer(room, [(0, 0, 16)], last=True, now_ns=NOW_NS)
        pair = PairKey(RoomKey("P", room), 0, 0, 7, 9, "D")
        self.core.receive(TARGET, Claim(pair, 0, 16, way, 0, 1, bytes(4), serial=room), NOW_NS)

    def found(self, wire: str, failure: str = "", epoch: int = 9) -> None:
        self.core.wire_found(TARGET, epoch, wire, failure, NOW_NS)

    def writes(self) -> list[int]:
        return [effect.pair.key.room for effect in effects_of(self.core) if isinstance(effect, StartWrite)]

    def aborted(self) -> dict[int, Abort]:
        said = [message for _, message in messages_of(self.core) if isinstance(message, Abort)]
        return {abort.pair.key.room: abort for abort in said}


def test_a_source_begins_no_write_before_its_wire_is_known_and_tells_the_target_what_was_found() -> None:
    scene = SourceScene()
    assert scene.writes() == []
    scene.found("RDMA", epoch=8)
    assert scene.writes() == [], "another life of the target was probed"
    messages_of(scene.core)
    scene.found("RDMA")
    assert scene.writes() == [1]
    assert [message for _, message in messages_of(scene.core)] == [WireFound(7, 9, "RDMA")]
    scene.claim(3, Way.CONTIGUOUS)
    assert scene.writes() == [3]


@pytest.mark.parametrize(("wire", "failure"), [("TCP", ""), ("Unknown", "the peer is gone")])
def test_a_source_fails_rooms_over_a_forbidden_wire_and_writes_nothing(wire: str, failure: str) -> None:
    scene = SourceScene()
    scene.found(wire, failure)
    assert scene.writes() == []
    abort = scene.aborted()[1]
    assert abort.reason is Reason.WIRE_NOT_ALLOWED
    assert "prefill P rank 0 reaches decode D rank 0" in abort.text
    assert failure in abort.text
    scene.claim(3, Way.CONTIGUOUS)
    assert scene.writes() == []
    assert set(scene.aborted()) == {3}
    assert scene.core.wire_fault(scene.core.peers[TARGET]) == abort.text


def test_a_source_copies_directly_whatever_the_wire_is() -> None:
    scene = SourceScene()
    scene.claim(2, Way.DIRECT)
    assert scene.writes() == [2]
    scene.found("TCP")
    assert set(scene.aborted()) == {1}


def test_a_target_that_cannot_be_probed_is_reached_over_no_allowed_wire() -> None:
    scene = SourceScene(probe=None)
    assert scene.writes() == []
    assert "no memory for a probe" in scene.aborted()[1].text


def test_a_lost_target_leaves_nothing_that_waits_for_a_wire() -> None:
    scene = SourceScene()
    scene.core.peer_lost(TARGET, "gone", NOW_NS)
    assert scene.core.rooms == {}
    scene.found("RDMA")
    assert scene.writes() == []
