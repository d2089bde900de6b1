"""Defines slabs, their ends, and the log of their stages: what the control thread and the pipeline give each other.

Used by `worker.moving`, `life` and `runners`. Only the control thread sets `cancelled`, and it may do so at any time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from longshore_agent.kernels.copier import Pages, View, pool_view, remote_view
from longshore_agent.memory.pools import KVPool
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_wire.effects import PeerId, StartScatter, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import PEER, PoolInfo, RegionInfo, SlabReady
from longshore_wire.plan import Pair
from longshore_wire.trailer import SealedTrailer, Trailer

# When so many records are pending, each new one first writes the oldest.
_PENDING_MAX = 4096


def page_ids(packed: bytes) -> Pages:
    """Return packed page ids as an array."""
    return np.frombuffer(packed, dtype="<i4")


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of one room: `pages[i]` is the id of page `first_page + i` of the sequence."""

    first_page: int
    pages: Pages
    _views: dict[tuple[KVPool, range, range], View] = field(default_factory=dict)

    def view(self, pool: KVPool, route: Pair) -> View:
        """Return the view of the layers and heads that a pair of ranks moves. All slabs of a pair share one view."""
        layers, heads = route.local_layers(pool.layout), route.local_heads(pool.layout)
        found = self._views.get((pool, layers, heads))
        if found is None:
            found = pool_view(pool, self.pages, self.first_page, layers, heads)
            self._views[pool, layers, heads] = found
        return found


class Stage(Enum):
    """The progress of an outbound slab."""

    WAITING = auto()
    COPYING = auto()
    WRITING = auto()


@dataclass(slots=True, eq=False)
class OutboundSlab:
    """One slab to bring to its target.

    Attributes:
        pool, pages: of our engine.
        peer_name: the target's name at the transport.
        ring: the target's ring; None: it has none.
        target_pool, target_layout: of the target; the pool is None if the target has not attached it.
        transport_announces: True: the transport notifies the target that a staged slab has landed; False: a message
            does.
        neighbour, neighbour_pages: for way DIRECT, the target's pool and pages, mapped into this process.
        cancelled: the life checks it before it starts a copy or a write.
        lane: index of the lane that status and metrics count the slab for.
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
        """Return the view of the target's pages at their addresses in this process."""
        assert self.neighbour is not None
        assert self.neighbour_pages is not None
        return self.neighbour_pages.view(self.neighbour, self.effect.route)

    def remote_target(self) -> View:
        """Return the view of the target's pages at their addresses in the target's process."""
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
        """Return the trailer to write behind a staged slab, sealed with the key of the target's ring."""
        assert self.ring is not None
        return trailer_of(self.effect).seal(self.ring.trailer_key)

    def ready_message(self) -> SlabReady:
        """Return the message that announces the slab to the target."""
        effect = self.effect
        return SlabReady(effect.pair, effect.slab, effect.generation, effect.payload_bytes, effect.total_tokens)

    def notice(self) -> bytes:
        """Return the notice that the transport delivers after the slab's bytes; empty: none."""
        return PEER.encode(self.ready_message()) if self.transport_announces else b""


@dataclass(slots=True, eq=False)
class InboundSlab:
    """One landed slab to copy into pages.

    Attributes:
        landed_ns: time.monotonic_ns when the control thread started the scatter.
    """

    effect: StartScatter
    pool: KVPool
    pages: PageTable
    landed_ns: int
    cancelled: bool = False

    def target(self) -> View:
        """Return the view of our engine's pages."""
        return self.pages.view(self.pool, self.effect.route)


def trailer_of(effect: StartWrite | StartScatter) -> Trailer:
    """Return the trailer that identifies a slab."""
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
    """A request to find out over which wire bytes reach a peer.

    Attributes:
        region: memory of the peer that the probe may write to.
        epoch: of the peer.
    """

    peer: PeerId
    peer_name: str
    region: RegionInfo
    epoch: int


@dataclass(frozen=True, slots=True)
class OutboundEnd:
    """How the life of an outbound slab ended. Without `error` and `dropped`, all bytes are in the target's memory.

    Attributes:
        error: why the slab failed; empty: it did not.
        dropped: True: the slab was cancelled, and the target is not notified even if bytes were written.
        must_announce: True: the transport has not notified the target; send a control message.
        settled: False: bytes of a failed write may still land.
    """

    slab: OutboundSlab
    error: str = ""
    dropped: bool = False
    must_announce: bool = False
    settled: bool = True


@dataclass(frozen=True, slots=True)
class InboundEnd:
    """How the life of an inbound slab ended.

    Attributes:
        reason, error: why the slab failed; NONE and empty: it did not.
        dropped: True: the slab was cancelled, which is no failure.
    """

    slab: InboundSlab
    reason: Reason = Reason.NONE
    error: str = ""
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class ProbeEnd:
    """The result of a probe.

    Attributes:
        wire: value of a `transports.base.Wire`.
        error: why the probe failed; empty: it did not.
    """

    probe: WireProbe
    wire: str
    error: str = ""


End = OutboundEnd | InboundEnd | ProbeEnd


def dropped(slab: OutboundSlab) -> OutboundEnd:
    """Return the end of a cancelled slab."""
    return OutboundEnd(slab, dropped=True)


@dataclass(slots=True)
class Ends:
    """A queue of ends from other threads to the control thread.

    Attributes:
        wake: an eventfd, readable while an end is in the queue.
    """

    wake: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _queue: deque[End] = field(default_factory=deque)

    def put(self, end: End) -> None:
        """Add an end. Called by any thread."""
        self._queue.append(end)
        os.eventfd_write(self.wake, 1)

    def take(self) -> list[End]:
        """Remove and return all ends. Called by the control thread."""
        try:
            os.eventfd_read(self.wake)
        except BlockingIOError:
            return []
        taken = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken


def still_wanted(slabs: Iterable[OutboundSlab], put: Callable[[OutboundEnd], None]) -> list[OutboundSlab]:
    """Give `put` the ends of the cancelled slabs; return the others in their order."""
    kept: list[OutboundSlab] = []
    for slab in slabs:
        if slab.cancelled:
            put(dropped(slab))
        else:
            kept.append(slab)
    return kept


class _Span(NamedTuple):
    stage: str
    effect: StartWrite | StartScatter
    lane: int
    start_ns: int
    end_ns: int


class _Count(NamedTuple):
    name: str
    value: int
    labels: dict[str, str | int]


class StageLog:
    """See the module.

    Args:
        deferred: True: keep records until `write_one`; one thread may use the log. False: write each at once, from any
            thread.
    """

    def __init__(self, metrics: Metrics, spans: SpanRecorder, *, deferred: bool) -> None:
        self._metrics = metrics
        self._spans = spans
        self._pending_max = _PENDING_MAX if deferred else 0
        self._pending: deque[_Span | _Count] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def stage(self, stage: str, effect: StartWrite | StartScatter, lane: int, start_ns: int, end_ns: int) -> None:
        """Record that a slab was in `stage` from `start_ns` to `end_ns` (time.monotonic_ns)."""
        self._keep(_Span(stage, effect, lane, start_ns, end_ns))

    def count(self, name: str, value: int = 1, **labels: str | int) -> None:
        """Add `value` to a counter."""
        self._keep(_Count(name, value, labels))

    def write_one(self) -> None:
        """Write the oldest pending record. It writes only one, so that a thread can check for new work in between."""
        if self._pending:
            self._write(self._pending.popleft())

    def _keep(self, record: _Span | _Count) -> None:
        if not self._pending_max:
            self._write(record)
            return
        if len(self._pending) >= self._pending_max:
            self.write_one()
        self._pending.append(record)

    def _write(self, record: _Span | _Count) -> None:
        if isinstance(record, _Count):
            self._metrics.add(record.name, record.value, **record.labels)
            return
        stage, effect, lane, start_ns, end_ns = record
        self._spans.record(stage, effect.pair, effect.slab, lane, start_ns, end_ns)
        self._metrics.observe("longshore_stage_seconds", (end_ns - start_ns) / 1e9, stage=stage)
        self._metrics.add("longshore_stage_bytes_total", effect.payload_bytes, stage=stage)
