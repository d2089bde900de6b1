"""Simulates a worker's lanes, which write slabs into peers' memory, and its scatters, which copy slabs into pages.

Only `sim_worker` uses this. Threads stop with their process. A write on the wire continues while the process is stopped.
Bytes that its kernel has sent may land shortly after its death.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sim_memory import Words, damaged
from sim_world import MS, ViolationError, Write

from longshore_wire.effects import StartScatter, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.peer_messages import RoomKey
from longshore_wire.ways import Way

if TYPE_CHECKING:
    from sim_engine import Client, Room
    from sim_worker import Worker

# A transport retries if its peer does not answer.
AGAIN_NS = 100 * MS
# Bytes that a process has sent land up to this long after its death.
SENT_NS = 1000 * MS


@dataclass(eq=False, slots=True)
class Job:
    """One slab that is being written or scattered."""

    effect: Any
    room: Room
    fate: Write
    target: Worker | None = None
    lands_ns: int = 0
    begun: bool = False
    cancelled: bool = False
    settled: bool = False  # the fate of its bytes is known
    lost: bool = False
    overtaken_ns: int | None = None
    words: Words | None = None
    digests: bytes = b""
    differs: bool = False  # a direct copy has found other digests at its target


class Lanes:
    """The threads of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.unsettled = False  # bytes of a failed write may still land
        self.jobs: dict[RoomKey, set[Job]] = {}
        self._worker = worker
        self._world = worker.world
        self._begun: set[tuple[Any, int]] = set()
        self._ways: dict[Any, Way] = {}
        self._endless: list[Job] = []
        # Writes of others into this worker's memory that have not landed, by the life of their writer.
        self._incoming: dict[int, dict[Job, Worker]] = {}

    def overtaken(self, now_ns: int) -> int | None:
        """Return the start of an endless write of a failed room, if there is one."""
        found = [job for job in self._endless if job.cancelled]
        for job in found:
            job.overtaken_ns = now_ns if job.overtaken_ns is None else job.overtaken_ns
        return min((job.overtaken_ns for job in found if job.overtaken_ns is not None), default=None)

    def waits_for(self, epoch: int) -> bool:
        """Whether bytes that a life of a source has sent may still land here, if that life has ended."""
        pending = self._incoming.get(epoch, {}).items()
        return any(writer.alive or job.lands_ns <= writer.ended_ns + SENT_NS for job, writer in pending)

    def _comes(self, job: Job, writer: Worker, after_ns: int) -> None:
        job.lands_ns = self._world.now_ns + after_ns
        self._incoming.setdefault(writer.epoch, {})[job] = writer
        self._world.at(after_ns, writer.lanes.land, job)

    def maps(self, client: Client) -> bool:
        """Whether this worker is copying into pages of an engine of its node, which it has mapped."""
        return any(
            job.begun and job.effect.way is Way.DIRECT and job.target is not None and job.target.client is client
            for jobs in self.jobs.values()
            for job in jobs
        )

    def cancel(self, key: RoomKey) -> None:
        """Drop the jobs of a failed room that have not begun."""
        for job in self.jobs.get(key, ()):
            job.cancelled = True

    def forget(self, key: RoomKey) -> None:
        """Forget a released room."""
        if self.jobs.pop(key, None):
            raise ViolationError(f"{self._worker} releases room {key.room} while a thread touches its pages")

    def _job(self, effect: StartWrite | StartScatter, receiver: str) -> Job:
        key = effect.pair.key
        room = self._worker.tables.get(key)
        if room is None:
            raise ViolationError(f"{self._worker} is to touch pages of room {key.room} that it has given back")
        job = Job(effect, room, self._world.chance.write(self._worker.label, receiver))
        self.jobs.setdefault(key, set()).add(job)
        return job

    # -- writes ----------------------------------------------------------------------------------------------------

    def start_write(self, effect: StartWrite) -> None:
        """Start to write one slab to its target."""
        worker = self._worker
        identity = (effect.pair, effect.slab)
        if identity in self._begun:
            raise ViolationError(f"{worker} writes slab {effect.slab} of room {effect.pair.key.room} twice")
        self._begun.add(identity)
        if self._ways.setdefault(effect.pair, effect.way) is not effect.way:
            raise ViolationError(f"{worker} writes room {effect.pair.key.room} by two ways")
        target = worker.routes.get(effect.peer)
        if target is None:
            text = f"the transport does not know {effect.peer}"
            worker.core.write_failed(effect.peer, effect.pair, effect.slab, text, worker.clock())
            return
        self._world.counts[f"slabs {effect.way.name.lower()}"] += 1
        job = self._job(effect, target.label)
        job.target = target
        self._world.at(job.fate.begin_ns, worker.thread, self._begin_write, job)

    def _begin_write(self, job: Job) -> None:
        worker, effect, fate = self._worker, job.effect, job.fate
        assert job.target is not None
        if job.cancelled or not job.room.lives:
            job.cancelled = True
            worker.deliver(self._written, job)
            return
        job.begun = True
        if effect.way is Way.DIRECT and not job.target.alive:
            # Its agent starts the next worker only after the neighbours have unmapped the dead worker's pools.
            job.lost = job.settled = True
            worker.deliver(self._written, job)
            return
        pages = job.room.caches[effect.pair.cache]
        job.words = pages.read(effect.route, effect.tokens)
        if effect.digest_key:
            job.digests = pages.digests(effect.route, effect.tokens, job.words)
        if fate.damage:
            self._world.counts["damaged slabs"] += 1
            job.words = damaged(job.words, fate.damage)
        if fate.land_ns is not None:
            job.target.lanes._comes(job, worker, fate.land_ns)
        if fate.end_ns is not None:
            self._world.at(fate.end_ns, worker.thread, self._end_write, job)
        else:
            self._endless.append(job)

    def land(self, job: Job) -> None:
        """Bring the bytes of a write to its target, if they were sent."""
        worker, target = self._worker, job.target
        assert target is not None
        target.lanes._incoming[worker.epoch].pop(job)
        direct = job.effect.way is Way.DIRECT
        sent = worker.alive or (not direct and job.lands_ns <= worker.ended_ns + SENT_NS)
        if not sent or not (target.alive or direct):
            return
        if not worker.host.reaches(target.host):
            # A kernel retransmits, but not for a process that has ended.
            if worker.alive:
                target.lanes._comes(job, worker, AGAIN_NS)
            return
        job.settled = True
        self._world.say(repr(worker), f"slab {job.effect.slab} of room {job.effect.pair.key.room} lands at {target}")
        target.lanes.take(job)

    def take(self, job: Job) -> None:
        """Take bytes of a peer that arrive in this worker's memory."""
        effect, words = job.effect, job.words
        assert words is not None
        if effect.way is Way.STAGED:
            self._worker.staging.land(effect, words)
            return
        room = self._worker.client.rooms.get(effect.pair.key)
        if room is not None and room.lives:
            # Use the claim's page list, not the room's current pages.
            held = room.caches[effect.pair.cache]
            numbers, size = np.frombuffer(effect.target_pages, "<i4").tolist(), held.pool.layout.page_size
            pages = held.of(numbers, effect.first_claimed_token // size)
            pages.write(effect.route, effect.tokens, words)
            if effect.way is Way.DIRECT and job.digests:
                found = pages.read(effect.route, effect.tokens)
                job.differs = pages.digests(effect.route, effect.tokens, found) != job.digests

    def _end_write(self, job: Job) -> None:
        assert job.target is not None
        if job.target.alive and not job.fate.fails and not job.settled:
            self._world.at(AGAIN_NS, self._worker.thread, self._end_write, job)
        else:
            self._worker.deliver(self._written, job)

    def _written(self, job: Job) -> None:
        worker, effect = self._worker, job.effect
        core, now_ns = worker.core, worker.clock()
        assert job.target is not None
        self.jobs[effect.pair.key].discard(job)
        lost = job.begun and (job.lost or not job.target.alive)
        if lost or (job.begun and job.fate.fails):
            settled = job.fate.settled or lost
            self.unsettled = self.unsettled or not settled
            core.write_failed(effect.peer, effect.pair, effect.slab, "the write failed", now_ns, settled=settled)
        elif job.differs:
            core.write_failed(
                effect.peer, effect.pair, effect.slab, "digests differ", now_ns, reason=Reason.DIGEST_MISMATCH
            )
        elif job.cancelled:
            core.write_done(effect.peer, effect.pair, effect.slab, 0, now_ns)
        else:
            core.write_done(
                effect.peer,
                effect.pair,
                effect.slab,
                effect.payload_bytes,
                now_ns,
                announce=True,
                digests=job.digests,
            )
            worker.flush()

    # -- scatters --------------------------------------------------------------------------------------------------

    def start_scatter(self, effect: StartScatter) -> None:
        """Start to scatter one landed slab into the pages, or to compare pages that were written in place."""
        job = self._job(effect, "scatter")
        self._world.at(job.fate.begin_ns, self._worker.thread, self._scatter, job)

    def _scatter(self, job: Job) -> None:
        effect, reason = job.effect, Reason.NONE
        if not job.cancelled and job.room.lives:
            pages = job.room.caches[effect.pair.cache]
            if effect.way is Way.STAGED:
                words = self._worker.staging.take(effect)
                if words is None:
                    reason = Reason.TRAILER_MISMATCH
                else:
                    if job.fate.damage:
                        self._world.counts["damaged slabs"] += 1
                        words = damaged(words[None, :, None], job.fate.damage)
                    pages.write(effect.route, effect.tokens, words)
            if effect.digest_key and reason is Reason.NONE:
                found = pages.digests(effect.route, effect.tokens, pages.read(effect.route, effect.tokens))
                reason = Reason.NONE if found == effect.digests else Reason.DIGEST_MISMATCH
        self._worker.deliver(self._scattered, job, reason)

    def _scattered(self, job: Job, reason: Reason) -> None:
        effect, core, now_ns = job.effect, self._worker.core, self._worker.clock()
        self.jobs[effect.pair.key].discard(job)
        if reason is Reason.NONE or job.cancelled:
            core.scatter_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, now_ns)
        else:
            core.scatter_failed(effect.peer, effect.pair, effect.slab, reason, "other bytes", now_ns)
