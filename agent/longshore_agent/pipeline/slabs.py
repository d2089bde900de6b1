"""The slabs of a worker: what the control thread hands to the pipeline, and what it gets back. Values only."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from longshore_agent.kernels.view import Pages, View, pool_view, remote_view
from longshore_agent.memory.pools import KVPool
from longshore_wire.codec import PEER
from longshore_wire.effects import PeerId, StartScatter, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import PoolInfo, RegionInfo, SlabReady
from longshore_wire.plan import Pair
from longshore_wire.trailer import SealedTrailer, Trailer


def page_ids(packed: bytes) -> Pages:
    """Return packed page ids as an array."""
    return np.frombuffer(packed, dtype="<i4")


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Pages of one room: `pages[i]` holds page number `first_page + i` of the sequence."""

    first_page: int
    pages: Pages
    _views: dict[tuple[KVPool, range, range], View] = field(default_factory=dict)

    def view(self, pool: KVPool, route: Pair) -> View:
        """Return the view of the layers and heads that a pair of ranks moves: the same one for each slab."""
        layers, heads = route.local_layers(pool.layout), route.local_heads(pool.layout)
        found = self._views.get((pool, layers, heads))
        if found is None:
            found = pool_view(pool, self.pages, self.first_page, layers, heads)
            self._views[pool, layers, heads] = found
        return found


class Stage(Enum):
    """How far the life of an outbound slab is."""

    WAITING = auto()
    COPYING = auto()
    WRITING = auto()


@dataclass(slots=True, eq=False)
class OutboundSlab:
    """One slab to bring to its target.

    Attributes:
        peer_name: of the target, at the transport.
        ring: the target's; None: it has none.
        target_pool, target_layout: of the target; the pool is None if it has not attached it.
        transport_announces: the transport tells the target that a staged slab has landed. False: a control message does.
        neighbour, neighbour_pages: the target's pool and pages, where they are mapped here: way DIRECT.
        cancelled: set by the control thread. The slab's life looks at it before each step.
        lane: which lane's memory it takes.
    """

    effect: StartWrite
    pool: KVPool
    pages: PageTable
    peer_name: str
    ring: RegionInfo | None
    target_pool: PoolInfo | None
    target_layout: KVLayout
    transport_announces: bool
    neighbour: KVPool | None = None
    neighbour_pages: PageTable | None = None
    cancelled: bool = False
    stage: Stage = Stage.WAITING
    lane: int = 0

    def source(self) -> View:
        """Return the view of our engine's pages."""
        return self.pages.view(self.pool, self.effect.route)

    def neighbour_target(self) -> View:
        """Return the view of the target's pages that are mapped here."""
        assert self.neighbour is not None
        assert self.neighbour_pages is not None
        return self.neighbour_pages.view(self.neighbour, self.effect.route)

    def remote_target(self) -> View:
        """Return the view of the target's pages where its process has them."""
        assert self.target_pool is not None
        route, layout = self.effect.route, self.target_layout
        return remote_view(
            layout,
            self.target_pool.geometry,
            self.target_pool.region_addresses,
            page_ids(self.effect.target_pages),
            self.effect.first_claimed_token // layout.page_size,
            route.local_layers(layout),
            route.local_heads(layout),
        )

    def sealed_trailer(self) -> SealedTrailer:
        """Return the trailer that is written behind a staged slab."""
        assert self.ring is not None
        return trailer_of(self.effect).seal(self.ring.trailer_key)

    def ready_message(self) -> SlabReady:
        """Return the message that says that the slab has landed."""
        effect = self.effect
        return SlabReady(effect.pair, effect.slab, effect.generation, effect.payload_bytes, effect.total_tokens)

    def notice(self) -> bytes:
        """Return what the transport hands to the target once the slab has landed; empty: nothing."""
        return PEER.encode(self.ready_message()) if self.transport_announces else b""


@dataclass(slots=True, eq=False)
class InboundSlab:
    """One landed slab to copy into pages. `landed_ns`: when the control thread heard of it."""

    effect: StartScatter
    pool: KVPool
    pages: PageTable
    landed_ns: int
    cancelled: bool = False

    def target(self) -> View:
        """Return the view of our engine's pages."""
        return self.pages.view(self.pool, self.effect.route)


def trailer_of(effect: StartWrite | StartScatter) -> Trailer:
    """Return the trailer that a slab must have."""
    pair = effect.pair
    return Trailer(
        room=pair.key.room,
        pool=pair.key.pool,
        slab=effect.slab,
        source_rank=pair.source_rank,
        target_rank=pair.target_rank,
        source_epoch=pair.source_epoch,
        target_epoch=pair.target_epoch,
        generation=effect.generation,
        payload_bytes=effect.payload_bytes,
    )


@dataclass(slots=True, eq=False)
class WireProbe:
    """Find out what bytes to a peer travel over."""

    peer: PeerId
    peer_name: str
    region: RegionInfo
    epoch: int


@dataclass(frozen=True, slots=True)
class OutboundEnd:
    """How the life of an outbound slab ended.

    Attributes:
        error: empty if all bytes are there.
        dropped: nobody waits for the slab; nobody is told of what was written.
        must_announce: the transport gave no notice: send a control message.
        settled: False: bytes of a failed write may still land.
    """

    slab: OutboundSlab
    error: str = ""
    dropped: bool = False
    must_announce: bool = False
    settled: bool = True


@dataclass(frozen=True, slots=True)
class InboundEnd:
    """How the life of an inbound slab ended. `dropped`: nobody waits for it."""

    slab: InboundSlab
    reason: Reason = Reason.NONE
    error: str = ""
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class ProbeEnd:
    """What a probe found; `error` if it failed."""

    probe: WireProbe
    wire: str
    error: str = ""


End = OutboundEnd | InboundEnd | ProbeEnd


def dropped(slab: OutboundSlab) -> OutboundEnd:
    """Return the end of a slab that nobody waits for."""
    return OutboundEnd(slab, dropped=True)


@dataclass(slots=True)
class Ends:
    """Ends on their way from threads to the control thread, and the descriptor that wakes it."""

    wake: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _queue: deque[End] = field(default_factory=deque)

    def put(self, end: End) -> None:
        """Hand one over; any thread."""
        self._queue.append(end)
        os.eventfd_write(self.wake, 1)

    def take(self) -> list[End]:
        """Return all that are there; the control thread."""
        try:
            os.eventfd_read(self.wake)
        except BlockingIOError:
            return []
        taken = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken


def still_wanted(slabs: Iterable[OutboundSlab], ends: Ends) -> list[OutboundSlab]:
    """End the cancelled ones of waiting slabs; return the others in their order."""
    kept: list[OutboundSlab] = []
    for slab in slabs:
        if slab.cancelled:
            ends.put(dropped(slab))
        else:
            kept.append(slab)
    return kept
