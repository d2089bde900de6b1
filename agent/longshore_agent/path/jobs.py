"""What the control thread hands to lanes and scatter threads, and what they hand back. Values only."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longshore_agent.memory.pools import KVPool
from longshore_wire.effects import PeerId, StartScatter, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import PoolInfo, RegionInfo
from longshore_wire.trailer import SealedTrailer, Trailer

Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageTable:
    """Pages of one room: `pages[i]` holds page number `first_page + i` of the sequence."""

    first_page: int
    pages: Pages

    def of_tokens(self, first_token: int, end_token: int, page_size: int) -> Pages:
        """Return the pages that hold tokens [first, end), beginning with that of `first_token`."""
        first = first_token // page_size - self.first_page
        end = -(-end_token // page_size) - self.first_page
        return self.pages[first:end]


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
