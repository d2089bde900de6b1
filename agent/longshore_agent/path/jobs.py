"""What the control thread hands to lanes and scatter threads, and what they hand back. Values only."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from longshore_agent.kernels.view import Pages, View, pool_view
from longshore_agent.memory.pools import KVPool
from longshore_wire.effects import PeerId, StartScatter, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import PoolInfo, RegionInfo
from longshore_wire.plan import Pair
from longshore_wire.trailer import SealedTrailer, Trailer


def page_ids(packed: bytes) -> Pages:
    """Return packed page ids as an array."""
    return np.frombuffer(packed, dtype="<i4")


@dataclass(frozen=True, slots=True)
class PageTable:
    """Pages of one room: `pages[i]` holds page number `first_page + i` of the sequence."""

    first_page: int
    pages: Pages

    def view(self, pool: KVPool, route: Pair) -> View:
        """Return the view of the layers and heads that a pair of ranks moves."""
        layers, heads = route.local_layers(pool.layout), route.local_heads(pool.layout)
        return pool_view(pool, self.pages, self.first_page, layers, heads)


@dataclass(slots=True)
class WriteJob:
    """One slab to bring over. `cancelled` is set by the control thread; a lane looks before it begins each write."""

    effect: StartWrite
    pool: KVPool
    pages: PageTable
    peer_name: str  # the transport's
    ring: RegionInfo | None
    target_pool: PoolInfo | None
    target_layout: KVLayout
    queued_ns: int
    noticed: bool  # the transport tells the target of a staged slab's arrival; else a control message does
    neighbour: KVPool | None = None  # the target's pages, where they are mapped here: way DIRECT
    cancelled: bool = False

    def source(self) -> View:
        """Return the view of what is copied."""
        return self.pages.view(self.pool, self.effect.route)

    def target_pages(self, ids: Pages) -> PageTable:
        """Return the target's pages, whose ids are those of the effect."""
        return PageTable(self.effect.first_claimed_token // self.target_layout.page_size, ids)

    def neighbour_sides(self, ids: Pages) -> tuple[View, View]:
        """Return source and target of a slab that is copied from pages to pages; `ids` as of `target_pages`."""
        assert self.neighbour is not None
        return self.source(), self.target_pages(ids).view(self.neighbour, self.effect.route)


def trailer_of(effect: StartWrite | StartScatter) -> Trailer:
    """Return the trailer that a slab must have: what the gather writes and the scatter looks for."""
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


def sealed_trailer(job: WriteJob) -> SealedTrailer:
    """Return what the gather of a staged slab writes behind it."""
    assert job.ring is not None
    return trailer_of(job.effect).seal(job.ring.trailer_key)


@dataclass(slots=True)
class ProbeJob:
    """Find out what bytes to a peer travel over."""

    peer: PeerId
    peer_name: str
    region: RegionInfo
    epoch: int


@dataclass(slots=True)
class ScatterJob:
    """One landed slab to copy into pages."""

    effect: StartScatter
    pool: KVPool
    pages: PageTable
    landed_ns: int
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What became of a WriteJob. `error` is empty if the bytes are there; `dropped` if nothing was begun."""

    job: WriteJob
    error: str
    dropped: bool
    notify: bool  # the transport gave no notice: send one
    settled: bool = True  # False: bytes of a failed write may still land


def dropped_write(job: WriteJob) -> WriteResult:
    """Return what became of a job that nobody waits for: whatever was written of it, nobody is told."""
    return WriteResult(job, "", dropped=True, notify=False)


def still_wanted(jobs: Iterable[WriteJob], drop: Callable[[WriteJob], None]) -> list[WriteJob]:
    """Drop those of waiting jobs that were given up; return the others in their order."""
    kept: list[WriteJob] = []
    for job in jobs:
        if job.cancelled:
            drop(job)
        else:
            kept.append(job)
    return kept


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found; `error` if it failed."""

    job: ProbeJob
    wire: str
    error: str


@dataclass(frozen=True, slots=True)
class ScatterResult:
    """What became of a ScatterJob."""

    job: ScatterJob
    reason: Reason
    error: str
    dropped: bool


Result = WriteResult | ProbeResult | ScatterResult


@dataclass(slots=True)
class Results:
    """Results on their way to the control thread, and the descriptor that wakes it."""

    wake: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _queue: deque[Result] = field(default_factory=deque)

    def put(self, result: Result) -> None:
        """Hand one over; any thread."""
        self._queue.append(result)
        os.eventfd_write(self.wake, 1)

    def drop(self, job: WriteJob) -> None:
        """Answer a job of which nothing was begun and which nobody waits for; any thread."""
        self.put(dropped_write(job))

    def take(self) -> list[Result]:
        """Return all that are there; the control thread."""
        try:
            os.eventfd_read(self.wake)
        except BlockingIOError:
            return []
        taken = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken
