"""A cluster of protocol cores on a simulated network, from one seed: messages are lost, repeated, delayed, reordered.

Memory is real bytes: what a room delivered is judged by target pages, and by counts of posts for each piece,
never by the room's own word.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from longshore_client.memory import pool_geometry
from longshore_wire.claims import Wanted
from longshore_wire.codec import PEER
from longshore_wire.crossover import WHOLE_PAGES, Crossover
from longshore_wire.effects import (
    Dial,
    Effect,
    HangUp,
    Knock,
    PeerAttached,
    PeerId,
    RoomEnded,
    RoomReleased,
    SessionConfig,
    StartScatter,
    StartWrite,
)
from longshore_wire.engine_messages import Endpoint, Half, RankAddress
from longshore_wire.errors import Reason, RoomError
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import PairKey, PeerMessage, PoolInfo, RegionInfo, RoomKey, SlabReady, WireFound
from longshore_wire.plan import Way
from longshore_wire.source_session import SourceSession
from longshore_wire.target_session import TargetSession

MS = 1_000_000
TICK_NS = 20 * MS


@dataclass
class Chaos:
    """How bad the network is. Probabilities per message, delays in ns."""

    loss: float = 0.0
    repeat: float = 0.0
    delay_ns: int = 5 * MS
    write_ns: int = 10 * MS


@dataclass
class Node:
    """One worker: a core, its pages, and (decode) its ring."""

    peer: PeerId
    core: SourceSession | TargetSession
    pages: dict[RoomKey, np.ndarray] = field(default_factory=dict)
    ring: np.ndarray | None = None
    alive: bool = True
    outcomes: dict[RoomKey, Reason] = field(default_factory=dict)
    released: Counter[RoomKey] = field(default_factory=Counter)
    open_writes: int = 0


class Cluster:
    """Prefill ranks, decode ranks, and a clock that only this object moves."""

    def __init__(
        self,
        seed: int,
        model: ModelShape,
        prefill: Parallel,
        decode: Parallel,
        chaos: Chaos,
        *,
        ring_bytes: int = 1 << 16,
        slab_bytes: int = 1 << 13,
        force_way: Way | None = None,
        crossover: Crossover = WHOLE_PAGES,
        wire: str = "",
    ) -> None:
        """`wire`: what sources find out some time after a target has attached, and tell it once; empty: they do not."""
        self.random = random.Random(seed)
        self.chaos = chaos
        self.now_ns = 0
        self.posts: Counter[tuple[object, ...]] = Counter()
        self.ways: defaultdict[PairKey, set[Way]] = defaultdict(set)
        self.writes_into_freed = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._settings = (model, ring_bytes, slab_bytes, force_way)
        self._crossover, self._wire = crossover, wire
        self.sources = {
            rank: self._node("P", rank, prefill, epoch=1000 + rank, source=True)
            for rank in range(prefill.tp * prefill.pp)
        }
        self.targets = {
            rank: self._node("D", rank, decode, epoch=2000 + rank, source=False)
            for rank in range(decode.tp * decode.pp)
        }

    def _node(self, instance: str, rank: int, parallel: Parallel, *, epoch: int, source: bool) -> Node:
        model, ring_bytes, slab_bytes, force_way = self._settings
        place = Parallel(tp=parallel.tp, tp_rank=rank % parallel.tp, pp=parallel.pp, pp_rank=rank // parallel.tp)
        config = SessionConfig(
            deployment="sim",
            instance=instance,
            epoch=epoch,
            layout=KVLayout(model, place, page_size=4),
            ring_bytes=ring_bytes,
            slab_bytes_max=slab_bytes,
            slab_bytes_min=256,
            retry_ns=50 * MS,
            force_way=force_way,
            crossover=self._crossover,
        )
        core = SourceSession(config, now_ns=self.now_ns) if source else TargetSession(config, now_ns=self.now_ns)
        ring = None if source else np.zeros(ring_bytes, np.uint8)
        pools = {0: PoolInfo(0, pool_geometry(config.layout, 128), (0,))}
        probe = RegionInfo(0, 1) if self._wire else None
        core.describe(b"", None if source else RegionInfo(0, ring_bytes), pools, probe)
        return Node(PeerId(instance, 0, rank), core, ring=ring)

    def node(self, peer: PeerId) -> Node:
        """Return the node that a peer id names."""
        return (self.sources if peer.instance == "P" else self.targets)[peer.rank]

    def endpoint(self) -> Endpoint:
        """Return the prefill instance's endpoint."""
        ranks = tuple(RankAddress(rank, f"sim:{rank}", node.core.config.epoch) for rank, node in self.sources.items())
        return Endpoint("P", self.sources[0].core.config.layout, ranks)

    def at(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Run `action` after `delay_ns`."""
        self._sequence += 1
        heapq.heappush(self._events, (self.now_ns + delay_ns, self._sequence, action))

    def run(self, until: Callable[[], bool], limit_ns: int = 400_000 * MS) -> None:
        """Move the clock until `until` holds; fails if it never does."""
        next_tick_ns = self.now_ns
        end_ns = self.now_ns + limit_ns
        while not until():
            assert self.now_ns < end_ns, "the cluster did not come to rest"
            if self._events and self._events[0][0] <= next_tick_ns:
                self.now_ns, _, action = heapq.heappop(self._events)
                action()
            else:
                self.now_ns = next_tick_ns
                next_tick_ns += TICK_NS
                for node in [*self.sources.values(), *self.targets.values()]:
                    if node.alive:
                        node.core.renew(self.now_ns)
                        node.core.tick(self.now_ns)
                        self.flush(node)

    def flush(self, node: Node) -> None:
        """Carry out what a core asks for."""
        for effect in node.core.take_effects():
            self._apply(node, effect)
        for peer, message in node.core.take_outbox():
            self._post(node, peer, message)

    def _post(self, node: Node, peer: PeerId, message: PeerMessage) -> None:
        copies = 1 + (self.random.random() < self.chaos.repeat)
        data = PEER.encode(message)
        for _ in range(copies):
            if self.random.random() < self.chaos.loss:
                continue
            delay_ns = self.random.randrange(self.chaos.delay_ns) + 1
            self.at(delay_ns, lambda: self._deliver(node.peer, peer, data))

    def _deliver(self, sender: PeerId, receiver: PeerId, data: bytes) -> None:
        node = self.node(receiver)
        if node.alive:
            node.core.receive(sender, PEER.decode(data), self.now_ns)
            self.flush(node)

    def _apply(self, node: Node, effect: Effect) -> None:
        if isinstance(effect, StartWrite):
            self.posts[effect.pair, effect.slab] += 1
            self.ways[effect.pair].add(effect.way)
            node.open_writes += 1
            delay_ns = self.random.randrange(self.chaos.write_ns) + 1
            self.at(delay_ns, lambda: self._write(node, effect))
        elif isinstance(effect, StartScatter):
            self.at(self.random.randrange(self.chaos.write_ns) + 1, lambda: self._scatter(node, effect))
        elif isinstance(effect, RoomEnded):
            assert effect.key not in node.outcomes, "a room ended twice"
            node.outcomes[effect.key] = effect.reason
        elif isinstance(effect, RoomReleased):
            node.released[effect.key] += 1
        elif isinstance(effect, PeerAttached):
            if self._wire and effect.peer.instance == "D":
                found = WireFound(node.core.config.epoch, effect.attach.epoch, self._wire)
                self.at(self.random.randrange(500 * MS) + 1, lambda: self._post(node, effect.peer, found))
        elif isinstance(effect, Knock):
            if not self.node(effect.peer).alive:
                assert isinstance(node.core, TargetSession)
                node.core.peer_dead(effect.peer, self.now_ns)
        else:
            assert not isinstance(effect, Dial | HangUp) or effect.peer.instance == "P"

    def _slices(self, node: Node, effect: StartWrite | StartScatter) -> tuple[slice, slice, slice]:
        layout = node.core.config.layout
        layers, heads = effect.route.local_layers(layout), effect.route.local_heads(layout)
        return slice(layers.start, layers.stop), slice(*effect.tokens), slice(heads.start, heads.stop)

    def _write(self, node: Node, effect: StartWrite) -> None:
        node.open_writes -= 1
        if not node.alive:
            return
        layers, tokens, heads = self._slices(node, effect)
        assert not node.released[effect.pair.key], "pages were read after their release"
        data = np.ascontiguousarray(node.pages[effect.pair.key][layers, tokens, heads])
        target = self.node(effect.peer)
        if target.alive and target.core.config.epoch == effect.pair.target_epoch:
            if effect.way is Way.STAGED:
                assert target.ring is not None
                flat = data.reshape(-1).view(np.uint8)
                assert flat.size == effect.payload_bytes
                target.ring[effect.offset_bytes : effect.offset_bytes + flat.size] = flat
                self._check_region(target, effect)
            else:
                layers_t, tokens_t, heads_t = self._slices(target, StartScatterLike(effect))
                assert not target.released[effect.pair.key], "pages were written after their release"
                target.pages[effect.pair.key][layers_t, tokens_t, heads_t] = data
        ready = SlabReady(effect.pair, effect.slab, effect.generation, effect.payload_bytes, effect.total_tokens)
        self._post(node, effect.peer, ready)
        assert isinstance(node.core, SourceSession)
        node.core.write_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, self.now_ns)
        self.flush(node)

    def _check_region(self, target: Node, effect: StartWrite) -> None:
        """A write must land in a region that its target still holds for exactly this slab."""
        assert isinstance(target.core, TargetSession)
        room = target.core.rooms.get(effect.pair.key)
        pair = room.pairs.get(PeerId("P", 0, effect.pair.source_rank)) if room else None
        region = pair.regions.get(effect.slab) if pair else None
        if region is None or region.generation != effect.generation:
            self.writes_into_freed += 1

    def _scatter(self, node: Node, effect: StartScatter) -> None:
        if not node.alive:
            return
        assert node.ring is not None
        layers, tokens, heads = self._slices(node, effect)
        assert not node.released[effect.pair.key], "pages were written after their release"
        view = node.pages[effect.pair.key][layers, tokens, heads]
        data = node.ring[effect.offset_bytes : effect.offset_bytes + effect.payload_bytes].view(view.dtype)
        node.pages[effect.pair.key][layers, tokens, heads] = data.reshape(view.shape)
        assert isinstance(node.core, TargetSession)
        node.core.scatter_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, self.now_ns)
        self.flush(node)

    # -- engines -----------------------------------------------------------------------------------------------------

    def content(self, node: Node, room: int, tokens: int) -> np.ndarray:
        """Return what the pages of a rank hold after prefill: global ids, [layers, tokens, heads, 2] int32."""
        layout = node.core.config.layout
        layer, token, head = np.meshgrid(layout.layers, np.arange(tokens), layout.heads, indexing="ij")
        ids = (layer * 1_000_003 + token * 1_009 + head * 17 + (room % 1009) * 7919).astype(np.int32)
        return np.stack([ids, -ids - 1], axis=-1)

    def claim(self, room: int, first: int, total: int) -> None:
        """Every decode rank claims a room."""
        key = RoomKey("P", room, 0)
        for node in self.targets.values():
            want = self.content(node, room, total)
            node.pages[key] = np.zeros_like(want)
            node.pages[key][:, :first] = want[:, :first]
            assert isinstance(node.core, TargetSession)
            size = node.core.config.layout.page_size
            page_count = -(-total // size) - first // size
            node.core.claim(Wanted(key, self.endpoint(), first, total, page_count, bytes(4 * page_count)), self.now_ns)
            self.flush(node)

    def offer(self, room: int, first: int, end: int, *, last: bool) -> None:
        """Every prefill rank offers one chunk of a room."""
        key = RoomKey("P", room, 0)
        for node in self.sources.values():
            if node.alive:
                node.pages[key] = self.content(node, room, end)
                assert isinstance(node.core, SourceSession)
                try:
                    node.core.offer(room, 0, first, end, last=last, now_ns=self.now_ns)
                except RoomError as error:
                    assert key in node.outcomes or key in node.core.ended, "an offer of an open room was refused"
                    # So its engine hears of the end.
                    node.outcomes.setdefault(key, error.reason)
                self.flush(node)

    def delivered(self, room: int, total: int) -> bool:
        """Whether every decode rank's pages hold exactly what prefill's hold."""
        key = RoomKey("P", room, 0)
        return all(np.array_equal(node.pages[key], self.content(node, room, total)) for node in self.targets.values())

    def outcomes(self, room: int, half: Half) -> list[Reason | None]:
        """Return what each rank told its engine of a room; None: nothing yet."""
        nodes = self.sources if half is Half.SOURCE else self.targets
        return [node.outcomes.get(RoomKey("P", room, 0)) for node in nodes.values() if node.alive]

    def restart(self, node: Node) -> None:
        """Kill a worker and start its next life with empty hands."""
        config = node.core.config
        new = self._node(
            config.instance,
            node.peer.rank,
            config.layout.parallel,
            epoch=config.epoch + 10_000,
            source=isinstance(node.core, SourceSession),
        )
        node.alive = False
        nodes = self.sources if config.instance == "P" else self.targets
        nodes[node.peer.rank] = new


def StartScatterLike(effect: StartWrite) -> StartScatter:  # noqa: N802 - reads as the type that it makes
    """Return the target's view of a write in place."""
    return StartScatter(
        effect.peer, effect.pair, effect.slab, effect.tokens, effect.route, effect.payload_bytes, 0, 0, digest=False
    )
