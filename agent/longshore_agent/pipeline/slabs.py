"""Defines slabs and their ends, which the control thread and the pipeline give each other, and the pieces of their writes.

Used by `worker.moving`, `life` and `runners`. Only the control thread sets `cancelled`, and it may do so at any time.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from longshore_agent.kernels.copier import (
    Pages,
    Part,
    Parts,
    PlaneRows,
    View,
    plane_rows,
    pool_view,
    remote_view,
)
from longshore_agent.kernels.digest import first_difference
from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.memory.pools import KVPool, pool_sections
from longshore_agent.transports.base import Pieces
from longshore_wire.effects import PeerId, StartScatter, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, PageOrder
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.peer_messages import PEER, Attach, RegionInfo, SlabReady
from longshore_wire.plan import Pair
from longshore_wire.slabs import SealedTrailer, Trailer
from longshore_wire.ways import Way

Addresses = npt.NDArray[np.uint64]
Interval = tuple[int, int]

# Each layout of peers has others. More than the pieces of a slot.
_VIEWS_MAX = 4096
_NO_PAGES = np.empty(0, dtype=np.int32)


def page_ids(packed: bytes) -> Pages:
    """Return packed page ids as an array."""
    return np.frombuffer(packed, dtype="<i4")


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of one cache of a room: `pages[i]` is the id of page `first_page + i` of the sequence."""

    first_page: int
    pages: Pages
    _views: dict[tuple[KVPool, int, Interval, Interval], View] = field(default_factory=dict)

    def parts(self, pool: KVPool, route: Pair, units: Interval, other: KVLayout | None = None) -> Parts:
        """Return the parts of a copy of the units that one slab of a pair of ranks moves; see `_parts`. Slabs share views."""
        if len(route.sections) == 1 and not route.slot:
            return (Part(self._view(pool, route, 0, route.layers), units),)
        return _parts(pool.layout, route, units, other, partial(self._view, pool, route))

    def holding(self, layout: KVLayout, layers: Interval) -> tuple[Pages, int]:
        """Return the pages, and the number of the first one for these layers: of a slot, the page that holds them is page 0."""
        if layout.order is not PageOrder.SLOT:
            return self.pages, self.first_page
        return self.pages, -((layers[0] - layout.layers.start) // layout.page_size)

    def _view(self, pool: KVPool, route: Pair, section: int, layers: Interval) -> View:
        key = (pool, section, layers, route.sections[section])
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            view = _view_of_no_pages(pool, route, section, layers)
            found = self._views[key] = view.of(*self.holding(pool.layout, layers))
        return found


def _parts(
    layout: KVLayout,
    route: Pair,
    units: Interval,
    other: KVLayout | None,
    view: Callable[[int, Interval], View],
) -> Parts:
    """Return one part for each section of which a pair moves heads; of a slot, for each of its pages that is touched.

    Args:
        layout: of the cache on this side.
        other: the layout of the other side, if that is pages, too: parts of a slot end where its pages end.
        view: returns that of a section and of global layers.
    """
    if not route.slot:
        return tuple(Part(view(section, route.layers), units) for section in _held_sections(route))
    return tuple(
        Part(view(section, run), (0, layout.sections[section].rows))
        for section in _held_sections(route)
        for run in slot_runs(units, layout, other)
    )


def _held_sections(route: Pair) -> Iterator[int]:
    """Yield the sections of which a pair moves heads."""
    for section, (first, end) in enumerate(route.sections):
        if first < end:
            yield section


def _view_of_no_pages(pool: KVPool, route: Pair, section: int, layers: Interval) -> View:
    key = (section, layers, route.sections[section])
    view = pool.views.get(key)
    if view is None:
        if len(pool.views) >= _VIEWS_MAX:
            pool.views.clear()
        chosen = _local(layers, pool.layout), route.local_heads(pool.layout, section)
        view = pool.views[key] = pool_view(pool, _NO_PAGES, 0, *chosen, section)
    return view


def _local(layers: Interval, layout: KVLayout) -> range:
    """Return global layers as indexes into those of `layout`."""
    return range(layers[0] - layout.layers.start, layers[1] - layout.layers.start)


def slot_runs(units: Interval, *layouts: KVLayout | None) -> Iterator[Interval]:
    """Cut layers [first, end) of a slot where a page of one of the layouts ends."""
    edges = {*units}
    for layout in layouts:
        if layout is not None:
            first, size = layout.layers.start, layout.page_size
            edges.update(range(first + (units[0] - first) // size * size + size, units[1], size))
    return pairwise(sorted(edges))


class Stage(Enum):
    """The progress of an outbound slab."""

    WAITING = auto()
    COPYING = auto()
    WRITING = auto()


@dataclass(slots=True, eq=False)
class OutboundSlab:
    """One slab to bring to its target.

    Attributes:
        pool, table: of our engine.
        peer_name: the target's name at the transport.
        attach: the target's newest Attach when the life began.
        transport_announces: True: the transport notifies the target that a staged slab has landed; False: a message
            does.
        neighbour, neighbour_table: for way DIRECT, the target's pool, mapped into this process, and its pages.
        cancelled: the life checks it before it starts a copy or a write.
        lane: index of the lane that status and metrics count the slab for.
        wire: the wire of its bytes, as metrics name it.
    """

    effect: StartWrite
    pool: KVPool
    table: PageTable
    peer_name: str
    attach: Attach
    transport_announces: bool
    neighbour: KVPool | None = None
    neighbour_table: PageTable | None = None
    cancelled: bool = False
    stage: Stage = Stage.WAITING
    lane: int = 0
    wire: str = UNKNOWN_WIRE

    def source(self) -> Parts:
        """Return our engine's pages."""
        return self.table.parts(self.pool, self.effect.route, self.effect.tokens, self._slot_of_target())

    def neighbour_target(self) -> Parts:
        """Return the target's pages at their addresses in this process."""
        assert self.neighbour is not None
        assert self.neighbour_table is not None
        return self.neighbour_table.parts(self.neighbour, self.effect.route, self.effect.tokens, self.pool.layout)

    def remote_target(self) -> Parts:
        """Return the target's pages at their addresses in the target's process."""
        effect, route = self.effect, self.effect.route
        layout, pool = self.attach.layout.caches[effect.pair.cache], self.attach.pool(effect.pair.cache)
        assert pool is not None
        first_page, _ = layout.pages_of(effect.first_claimed_token, effect.first_claimed_token + 1)
        table = PageTable(first_page, page_ids(effect.target_pages))
        sections = pool_sections(layout, pool.geometry, pool.region_addresses)

        def view(section: int, layers: Interval) -> View:
            chosen = _local(layers, layout), route.local_heads(layout, section)
            return remote_view(sections[section], len(layout.layers), *table.holding(layout, layers), *chosen)

        return _parts(layout, route, effect.tokens, self.pool.layout, view)

    def _slot_of_target(self) -> KVLayout | None:
        """Return the layout of the target's slot, if that is written without a slab."""
        if not self.effect.route.slot or self.effect.way is Way.STAGED:
            return None
        return self.neighbour.layout if self.neighbour else self.attach.layout.caches[self.effect.pair.cache]

    def sealed_trailer(self) -> SealedTrailer:
        """Return the trailer to write behind a staged slab, sealed with the key of the target's ring."""
        assert self.attach.ring is not None
        return trailer_of(self.effect).seal(self.attach.ring.trailer_key)

    def ready_message(self) -> SlabReady:
        """Return the message that announces the slab to the target."""
        effect = self.effect
        return SlabReady(effect.pair, effect.slab, effect.generation, effect.payload_bytes, effect.total_tokens)

    def notice(self) -> bytes:
        """Return the notice that the transport delivers after the slab's bytes; empty: none."""
        return PEER.encode(self.ready_message()) if self.transport_announces else b""


@dataclass(slots=True, eq=False)
class InboundSlab:
    """One slab to copy into pages and to compare, or only to compare because it was written in place.

    Attributes:
        landed_ns: time.monotonic_ns when the control thread started the scatter.
    """

    effect: StartScatter
    pool: KVPool
    table: PageTable
    landed_ns: int
    cancelled: bool = False

    def target(self) -> Parts:
        """Return our engine's pages."""
        return self.table.parts(self.pool, self.effect.route, self.effect.tokens)


def digest_fault(effect: StartWrite | StartScatter, layout: KVLayout, source: bytes, target: bytes) -> str:
    """Compare the digests of both sides' pages (`kernels.digest.Digests`). Returns what differs; empty: nothing does.

    Args:
        layout: of the cache on one of the sides.
    """
    index = first_difference(source, target)
    if index is None:
        return ""
    unit, (first, end) = ("layers" if effect.route.slot else "tokens"), effect.tokens
    return (
        f"{_digest_place(effect, layout, index)}: {unit} {first} to {end} in decode rank {effect.pair.target_rank}'s pages are "
        f"not those of prefill rank {effect.pair.source_rank} (slab {effect.slab}, {effect.way.label})"
    )


def _digest_place(effect: StartWrite | StartScatter, layout: KVLayout, index: int) -> str:
    """Name the layer, plane and head of digest number `index`."""
    route = effect.route
    first_layer, end_layer = effect.tokens if route.slot else route.layers
    names = {1: ("",), 2: ("K, ", "V, ")}.get(layout.plane_count // len(layout.layers)) if not route.slot else None
    place = ""
    for section, (first_head, end_head) in zip(layout.sections, route.sections, strict=True):
        for plane in range(section.first, section.first + section.kinds):
            layer, head = divmod(index, max(1, end_head - first_head))
            name = f"plane {plane}, " if names is None else names[plane]
            place = f"layer {first_layer + layer}, {name}head {first_head + head}"
            index -= (end_layer - first_layer) * (end_head - first_head)
            if index < 0:
                break
        if index < 0:
            break
    return f"cache {effect.pair.cache}, {place}" if effect.pair.cache else place


def trailer_of(effect: StartWrite | StartScatter) -> Trailer:
    """Return the trailer that identifies a slab."""
    pair = effect.pair
    return Trailer(
        room=pair.key.room,
        cache=pair.cache,
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


class OutboundEnd(msgspec.Struct, frozen=True):
    """How the life of an outbound slab ended. Without `error` and `dropped`, all bytes are in the target's memory.

    Attributes:
        error: why the slab failed; empty: it did not.
        reason: of the error.
        dropped: True: the slab was cancelled, and the target is not notified even if bytes were written.
        must_announce: True: the transport has not notified the target; send a control message.
        settled: False: bytes of a failed write may still land.
        digests: of the source's pages, for that message; empty: none.
    """

    slab: OutboundSlab
    error: str = ""
    reason: Reason = Reason.TRANSFER_FAILED
    dropped: bool = False
    must_announce: bool = False
    settled: bool = True
    digests: bytes = b""


class InboundEnd(msgspec.Struct, frozen=True):
    """How the life of an inbound slab ended.

    Attributes:
        reason, error: why the slab failed; NONE and empty: it did not.
        dropped: True: the slab was cancelled, which is no failure.
    """

    slab: InboundSlab
    reason: Reason = Reason.NONE
    error: str = ""
    dropped: bool = False


class ProbeEnd(msgspec.Struct, frozen=True):
    """The result of a probe.

    Attributes:
        wire: value of a `Wire`, or UNKNOWN_WIRE.
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


def pieces_in_place(source: Parts, target: Parts) -> Pieces:
    """Return the pieces that bring the source's pages to the target's.

    If both sides hold the same heads in the same order, each page is one piece; otherwise a piece is one head slice of
    one token, or less. Adjacent pieces are merged, so do not count on one piece a page.

    Args:
        source, target: pages of either side, cut alike, with equally many layers and heads.
    """
    found = [
        _pieces_of(rows)
        for near, far in zip(source, target, strict=True)
        for rows in plane_rows(near.view, far.view, near.tokens)
    ]
    return Pieces(*_merge(*(np.concatenate(each) for each in zip(*found, strict=True))))


def _pieces_of(rows: PlaneRows) -> tuple[Addresses, Addresses, Addresses]:
    """Return source, target and length of each row in all planes."""
    rows.join_tokens()
    source_at, target_at, counts, lengths = (column[:, None, None] for column in rows.segments.T)
    head = np.arange(rows.heads, dtype=np.int64)[None, :, None]
    token = np.arange(counts.max(initial=1), dtype=np.int64)
    wanted = np.broadcast_to(token < counts, (len(counts), rows.heads, len(token)))
    offsets = [
        (at + head * strides.head + token * strides.token)[wanted]
        for at, strides in ((source_at, rows.source), (target_at, rows.target))
    ]
    sources, targets = (
        (planes[:, None] + offset).astype(np.uint64).ravel()
        for planes, offset in zip((rows.source_planes, rows.target_planes), offsets, strict=True)
    )
    length = np.broadcast_to(lengths, wanted.shape)[wanted].astype(np.uint64)
    return sources, targets, np.tile(length, len(rows.source_planes))


def _merge(sources: Addresses, targets: Addresses, lengths: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Merge pieces that follow each other on both sides."""
    follows = (sources[1:] == sources[:-1] + lengths[:-1]) & (targets[1:] == targets[:-1] + lengths[:-1])
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    return sources[heads], targets[heads], np.add.reduceat(lengths, heads)


def staged_pieces(
    buffer: StagingRange, begin_bytes: int, ring: RegionInfo, offset_bytes: int, length_bytes: int
) -> Pieces:
    """Return the pieces of a staged slab's write, cut where a registration of either side ends. Mostly it is one.

    Args:
        buffer: staging memory of the source.
        begin_bytes: offset of the slab in `buffer`.
        offset_bytes: offset of the slab in the target's ring.
        length_bytes: of payload and trailer.
    """
    pieces = buffer.pieces(begin_bytes, length_bytes)
    if len(pieces) == 1 and not ring.extent_bytes:
        return Pieces.one(buffer.address + begin_bytes, ring.address + offset_bytes, length_bytes)
    extent = ring.extent_bytes or ring.length_bytes
    cuts = {0, length_bytes}
    cuts.update(range(extent - offset_bytes % extent, length_bytes, extent))
    cuts.update(itertools.accumulate(piece_bytes for _, piece_bytes in pieces))
    edges = np.array(sorted(cuts), dtype=np.uint64)
    starts, lengths = edges[:-1], np.diff(edges)
    sources, targets = starts + np.uint64(buffer.address + begin_bytes), starts + np.uint64(ring.address + offset_bytes)
    return Pieces(sources, targets, lengths)
