"""Joins the cores of two prefill ranks that write one room to one decode rank, without a transport.

Tests end the writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core_outputs import effects_of, messages_of

from longshore_client.memory import pool_geometry
from longshore_wire.claims import Wanted
from longshore_wire.effects import PeerId, RoomEnded, SessionConfig, StartScatter, StartWrite
from longshore_wire.engine_messages import CachePages, Endpoint, RankAddress
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import PairKey, PeerMessage, PoolInfo, RegionInfo, RoomKey, SlabReady
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way

MODEL = ModelShape.kv(layers=2, kv_heads=4, head_dim=16, element_bytes=2)
KEY = RoomKey("P", 1)
HALVES = KVLayout(MODEL, Parallel(tp=2), 16)
TOKENS = 64
FIRST, SECOND = PeerId("P", 0, 0), PeerId("P", 0, 1)
DECODE = PeerId("D", 0, 0)


def prefill(layout: KVLayout, epoch: int, now_ns: int) -> SourceSession:
    """Return one life of a prefill rank, which listens at `h:1` or `h:2`. Its engine's life is 1."""
    session = SourceSession(SessionConfig("d", "P", epoch, layout, slab_bytes_min=1024, engine=1), now_ns=now_ns)
    session.describe(b"", None, {}, address=f"h:{layout.rank + 1}")
    return session


@dataclass
class Scene:
    """Two prefill ranks and one decode rank. Nothing is lost, and nothing is delivered before `exchange`."""

    target: TargetSession
    sources: dict[PeerId, SourceSession]
    now_ns: int = 0
    lost: set[PeerId] = field(default_factory=set)  # sources of which nothing arrives
    landed: list[StartScatter] = field(default_factory=list)
    told: dict[int, Reason] = field(default_factory=dict)
    effects: list[object] = field(default_factory=list)  # of decode's core, since the last look

    @classmethod
    def of(cls, way: Way = Way.STAGED, *, lost: PeerId | None = None, settle: bool = True, **settings: int) -> Scene:
        """Return ranks that are attached by a claim of room KEY, which is not offered yet; not `settle`: only claimed."""
        config = SessionConfig(
            "d", "D", 9, KVLayout(MODEL, Parallel(), 8), **{"ring_bytes": 1 << 20, "force_way": way, **settings}
        )
        target = TargetSession(config, now_ns=0)
        pools = {0: PoolInfo(0, pool_geometry(config.layout, 8), (4096,))}
        target.describe(b"", RegionInfo(0, config.ring_bytes), pools)
        sources = {}
        for rank, peer in enumerate((FIRST, SECOND)):
            own = KVLayout(MODEL, Parallel(tp=2, tp_rank=rank), 16)
            sources[peer] = prefill(own, 7, 0)
        scene = cls(target, sources, lost=set() if lost is None else {lost})
        scene.claim(KEY.room)
        if settle:
            scene.settle()
        return scene

    @classmethod
    def given_up(cls, way: Way = Way.STAGED) -> Scene:
        """Return ranks with open writes of a room that decode has just aborted."""
        scene = cls.of(way)
        scene.offer(KEY.room)
        scene.settle()
        assert all(source.rooms[KEY].busy for source in scene.sources.values())
        scene.target.cancel(KEY, Reason.CANCELLED, "enough", 0)
        effects_of(scene.target)
        return scene

    def claim(self, room: int, first_token: int = 0, endpoint: Endpoint | None = None) -> RoomKey:
        """Claim tokens of a room at decode, from `first_token` on."""
        key, page_count = RoomKey("P", room), (TOKENS - first_token) // 8
        wanted = Wanted(
            key, endpoint or self.endpoint(), (CachePages(0, first_token, TOKENS, page_count, bytes(4 * page_count)),)
        )
        self.target.claim(wanted, self.now_ns)
        return key

    def restart(self, peer: PeerId) -> None:
        """Replace a prefill worker by its next life at its address, to which its engine has sent nothing yet."""
        old = self.sources[peer].config
        self.sources[peer] = prefill(old.layout, old.epoch + 1, self.now_ns)

    def half(self, peer: PeerId, room: int) -> Reason | None:
        """Return the end of a room that a prefill rank's current worker reported to its engine; None if none yet."""
        ended = self.sources[peer].ended.get(RoomKey("P", room))
        return None if ended is None else ended.reason

    @staticmethod
    def endpoint() -> Endpoint:
        """Return decode's endpoint of both prefill ranks."""
        ranks = tuple(RankAddress(rank, f"h:{rank + 1}", 7) for rank in range(2))
        return Endpoint("P", HALVES, ranks)

    def settle(self) -> None:
        """Deliver messages until there are none."""
        while self.exchange():
            pass

    def writes(self, peer: PeerId) -> list[StartWrite]:
        """Return the writes that a source's core has started since the last call."""
        return [effect for effect in effects_of(self.sources[peer]) if isinstance(effect, StartWrite)]

    def land(self, peer: PeerId, write: StartWrite) -> SlabReady:
        """Complete a write at its source; return the message to its target."""
        self.sources[peer].write_done(DECODE, write.pair, write.slab, write.payload_bytes, self.now_ns)
        return SlabReady(write.pair, write.slab, write.generation, write.payload_bytes, write.total_tokens)

    def offer(self, room: int, first_token: int = 0, end_token: int = TOKENS) -> None:
        """Offer tokens of a room at both prefill ranks."""
        for source in self.sources.values():
            source.offer(room, [(0, first_token, end_token)], last=end_token == TOKENS, now_ns=self.now_ns)

    def deliver(self, peer: PeerId) -> int:
        """Write everything that one source's rooms still need; return the number of slabs."""
        count = 0
        self.settle()
        while writes := self.writes(peer):
            for write in writes:
                self.say(peer, self.land(peer, write))
            count += self.scatter()
            self.settle()
        return count

    def tick(self, step_ns: int) -> None:
        """Let time pass; engines live."""
        self.now_ns += step_ns
        for core in (*self.sources.values(), self.target):
            core.renew(self.now_ns)
            core.tick(self.now_ns)
        self.look()
        self.settle()

    def scatter(self) -> int:
        """Scatter all landed slabs; return their number."""
        self.look()
        landed, self.landed = self.landed, []
        for effect in landed:
            self.target.scatter_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, self.now_ns)
        self.look()
        return len(landed)

    def look(self) -> None:
        """Store the effects of decode's core and the events for its engine."""
        self.effects = list(effects_of(self.target))
        for effect in self.effects:
            if isinstance(effect, StartScatter):
                self.landed.append(effect)
            elif isinstance(effect, RoomEnded):
                assert effect.key.room not in self.told, "an engine was told twice"
                self.told[effect.key.room] = effect.reason

    def exchange(self) -> bool:
        """Deliver messages without completing writes; return whether there were any."""
        said = messages_of(self.target)
        for peer, message in said:
            self.sources[peer].receive(DECODE, message, self.now_ns)
        answers = [(peer, message) for peer, source in self.sources.items() for _, message in messages_of(source)]
        for peer, message in answers:
            if peer not in self.lost:
                self.target.receive(peer, message, self.now_ns)
        return bool(said or answers)

    def end_writes(self, peer: PeerId) -> None:
        """Complete all writes of one source's lanes."""
        source = self.sources[peer]
        pair = source.rooms[KEY].pairs[DECODE, 0]
        for slab in [slab for slab, state in enumerate(pair.states) if state.value in ("writing", "draining")]:
            source.write_done(DECODE, pair.pair, slab, 1, 0)

    def ended(self, room: int) -> Reason | None:
        """Return the end of a room that decode's engine got; None if none yet."""
        self.look()
        return self.told.get(room)

    def pair(self, peer: PeerId) -> PairKey:
        return self.target.rooms[KEY].pairs[peer, 0].pair

    def say(self, peer: PeerId, message: PeerMessage) -> None:
        self.target.receive(peer, message, self.now_ns)

    @property
    def held(self) -> int:
        return self.target.granter.ring.held_bytes

    @property
    def free(self) -> int:
        return self.target.granter.ring.free_bytes
