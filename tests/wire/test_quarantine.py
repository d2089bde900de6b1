"""Ring memory of a room that was given up: it comes back when no writer can write it any more, and not a message earlier."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from longshore_client.memory import pool_geometry
from longshore_wire.claims import Wanted
from longshore_wire.effects import SECOND_NS, PeerGone, PeerId, RoomReleased, SessionConfig
from longshore_wire.engine_messages import Endpoint, RankAddress
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import (
    AbortAck,
    Attach,
    PairKey,
    PeerMessage,
    PoolInfo,
    RegionInfo,
    RoomKey,
    WireFound,
)
from longshore_wire.plan import Way
from longshore_wire.source_session import SourceSession
from longshore_wire.target_session import TargetSession

MODEL = ModelShape(layers=2, kv_heads=4, head_dim=16, element_bytes=2)
KEY = RoomKey("P", 1, 0)
TOKENS = 64
FIRST, SECOND = PeerId("P", 0, 0), PeerId("P", 0, 1)
DECODE = PeerId("D", 0, 0)


@dataclass
class Scene:
    """Two prefill ranks with open writes to one decode rank, which has just given their room up."""

    target: TargetSession
    sources: dict[PeerId, SourceSession]
    now_ns: int = 0

    @classmethod
    def of(cls, way: Way = Way.STAGED) -> Scene:
        layout = KVLayout(MODEL, Parallel(tp=2), 16)
        config = SessionConfig("d", "D", 9, KVLayout(MODEL, Parallel(), 8), ring_bytes=1 << 20, force_way=way)
        target = TargetSession(config, now_ns=0)
        pools = {0: PoolInfo(0, pool_geometry(config.layout, 8), (4096,))}
        target.describe(b"", RegionInfo(0, 1 << 20), pools)
        sources = {}
        for rank, peer in enumerate((FIRST, SECOND)):
            own = KVLayout(MODEL, Parallel(tp=2, tp_rank=rank), 16)
            sources[peer] = SourceSession(SessionConfig("d", "P", 7, own, slab_bytes_min=1024), now_ns=0)
            sources[peer].describe(b"", None, {})
        scene = cls(target, sources)
        ranks = tuple(RankAddress(rank, f"h:{rank + 1}", 7) for rank in range(2))
        target.claim(Wanted(KEY, Endpoint("P", layout, ranks), 0, TOKENS, 8, bytes(32)), 0)
        for source in sources.values():
            source.offer(1, 0, 0, TOKENS, last=True, now_ns=0)
        while scene.exchange():
            pass
        assert all(source.rooms[KEY].busy for source in sources.values())
        target.cancel(KEY, Reason.CANCELLED, "enough", 0)
        target.take_effects()
        return scene

    def exchange(self) -> bool:
        """Carry what was said; nobody's writes end. Returns whether anything was."""
        said = self.target.take_outbox()
        for peer, message in said:
            self.sources[peer].receive(DECODE, message, self.now_ns)
        answers = [(peer, message) for peer, source in self.sources.items() for _, message in source.take_outbox()]
        for peer, message in answers:
            self.target.receive(peer, message, self.now_ns)
        return bool(said or answers)

    def end_writes(self, peer: PeerId) -> None:
        """The lanes of one source are through with what they had."""
        source = self.sources[peer]
        pair = source.rooms[KEY].pairs[DECODE]
        for slab in [slab for slab, state in enumerate(pair.states) if state.value in ("writing", "draining")]:
            source.write_done(DECODE, pair.pair, slab, 1, 0)

    def pair(self, peer: PeerId) -> PairKey:
        return self.target.rooms[KEY].pairs[peer].pair

    def say(self, peer: PeerId, message: PeerMessage) -> None:
        self.target.receive(peer, message, 0)

    @property
    def held(self) -> int:
        return self.target.granter.ring.held_bytes

    @property
    def free(self) -> int:
        return self.target.granter.ring.free_bytes


def test_memory_comes_back_writer_by_writer_when_each_has_ended_its_writes_and_says_so() -> None:
    scene = Scene.of()
    both = scene.held
    assert both and scene.target.granter.ring.used_bytes == 0
    while scene.exchange():
        pass
    # The sources know of it, and their lanes still write.
    assert scene.held == both
    scene.end_writes(FIRST)
    while scene.exchange():
        pass
    assert 0 < scene.held < both
    scene.end_writes(SECOND)
    while scene.exchange():
        pass
    assert scene.held == 0
    assert scene.free == 1 << 20
    assert KEY not in scene.target.rooms


def test_no_confirmation_of_another_life_another_room_or_another_writer_frees_anything() -> None:
    scene = Scene.of()
    both = scene.held
    pair = scene.pair(FIRST)
    for wrong in (
        msgspec.structs.replace(pair, source_epoch=6),
        msgspec.structs.replace(pair, target_epoch=8),
        msgspec.structs.replace(pair, key=RoomKey("P", 2, 0)),
    ):
        scene.say(FIRST, AbortAck(wrong))
        assert scene.held == both
    scene.say(SECOND, AbortAck(scene.pair(SECOND)))
    assert 0 < scene.held < both
    first = sum(region.length_bytes for region in scene.target.rooms[KEY].pairs[FIRST].regions.values())
    assert scene.held == first


def test_a_silent_writer_keeps_its_memory_in_quarantine_until_nobody_listens_at_its_address() -> None:
    scene = Scene.of()
    both = scene.held
    for second in range(1, 60):
        scene.target.renew(second * SECOND_NS)
        scene.target.tick(second * SECOND_NS)
    assert scene.held == both
    scene.target.peer_dead(FIRST, 60 * SECOND_NS)
    assert 0 < scene.held < both
    scene.target.peer_dead(SECOND, 60 * SECOND_NS)
    assert scene.held == 0


def test_the_next_life_of_a_writer_is_proof_that_the_last_ones_writes_are_over() -> None:
    scene = Scene.of()
    both = scene.held
    attach = scene.target.peers[FIRST].attach
    assert attach is not None
    scene.say(FIRST, msgspec.structs.replace(attach, generation=99))
    assert scene.held == both
    scene.say(FIRST, msgspec.structs.replace(attach, epoch=8))
    assert 0 < scene.held < both


@pytest.mark.parametrize("way", [Way.STAGED, Way.DIRECT])
def test_a_lost_writer_whose_access_was_taken_away_frees_its_memory_but_not_pages_that_it_has_mapped(way: Way) -> None:
    scene = Scene.of(way)
    held, now_ns = scene.held, 6 * SECOND_NS
    scene.target.peer_revoked(FIRST, 0)
    # Not while it is attached: only losing a peer takes its access away.
    assert scene.held == held
    scene.target.tick(now_ns)
    effects = scene.target.take_effects()
    assert {effect.peer for effect in effects if isinstance(effect, PeerGone)} == {FIRST, SECOND}
    scene.target.peer_revoked(FIRST, now_ns)
    scene.target.peer_revoked(SECOND, now_ns)
    released = [effect for effect in scene.target.take_effects() if isinstance(effect, RoomReleased)]
    assert scene.held == 0
    assert (KEY in scene.target.rooms) is (way is Way.DIRECT)
    assert not released


def test_what_a_source_says_of_the_wire_frees_nothing() -> None:
    scene = Scene.of()
    both = scene.held
    scene.say(FIRST, WireFound(7, 9, "a wire that nobody knows"))
    assert scene.held == both
    assert isinstance(scene.target.peers[FIRST].attach, Attach)


def waiting_room(scene: Scene) -> RoomKey:
    """Let another room of the first source wait for memory while all of the ring is in quarantine."""
    ring = scene.target.granter.ring
    while (region := ring.allocate(ring.largest_free_bytes or ring.capacity_bytes)) is not None:
        ring.hold(region)
    assert (ring.free_bytes, ring.used_bytes) == (0, 0)
    key = RoomKey("P", 2, 0)
    endpoint = Endpoint(
        "P", KVLayout(MODEL, Parallel(tp=2), 16), tuple(RankAddress(n, f"h:{n + 1}", 7) for n in range(2))
    )
    scene.target.claim(Wanted(key, endpoint, 0, TOKENS, 8, bytes(32)), 0)
    for source in scene.sources.values():
        source.offer(2, 0, 0, TOKENS, last=True, now_ns=0)
    while scene.exchange():
        pass
    return key


def test_a_room_that_meets_a_ring_in_quarantine_waits_and_is_served_when_the_writers_confirm() -> None:
    scene = Scene.of()
    key = waiting_room(scene)
    assert not scene.target.rooms[key].failed
    for peer in (FIRST, SECOND):
        scene.end_writes(peer)
    while scene.exchange():
        pass
    assert all(pair.regions for pair in scene.target.rooms[key].pairs.values())


def test_a_room_fails_when_nothing_but_quarantine_stays_for_longer_than_a_writer_may_be_silent() -> None:
    scene = Scene.of()
    key = waiting_room(scene)
    limit_ns = scene.target.config.peer_timeout_ns
    for now_ns in range(0, 3 * limit_ns, SECOND_NS):
        scene.now_ns = now_ns
        scene.target.renew(now_ns)
        for source in scene.sources.values():
            source.renew(now_ns)
            source.tick(now_ns)
        scene.target.tick(now_ns)
        while scene.exchange():
            pass
        room = scene.target.rooms.get(key)
        assert (room is None or room.failed) is (now_ns >= limit_ns)
    assert scene.target.ended[key].reason is Reason.RING_TOO_SMALL
    assert "quarantined" in scene.target.ended[key].text
