"""Lanes of a GPU's worker: gathers and writes of all slabs, driven by events, without a thread and without a wait.

Called by the control thread, through `moving`: `put` and `turn` begin whatever can begin and take notice of what is done. A
slab's gather is queued on a stream; while it runs, its write is looked up; when its event has passed, the write begins.
The lanes' memory is one buffer, of which each slab takes as much as it needs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from longshore_agent.errors import TransportError
from longshore_agent.memory.staging import StagingPieces
from longshore_agent.path.deliver import cut, ready_message
from longshore_agent.path.device_stages import Copy, Stages
from longshore_agent.path.jobs import ProbeJob, ProbeResult, Results, WriteJob, WriteResult, dropped_write, still_wanted
from longshore_agent.path.stage_log import StageLog
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import LaneStatus
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.transports.base import DraftingTransport, Write, WriteState
from longshore_wire.codec import PEER
from longshore_wire.errors import LongshoreError
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.plan import Way
from longshore_wire.ring import Region, Ring
from longshore_wire.slabs import region_bytes

# Gathers that are queued before the wire is ready for them: the next slab and the one after it. More would only put off
# the first write, since each takes the control thread as long to queue as it takes the device to do.
_GATHERS_AHEAD_MAX = 2
# Writes in flight: the wire never waits for this thread to begin the next, and the first to begin is the first to land.
_WRITES_OPEN_MAX = 3


def buffer_bytes(lane_count: int, lane_bytes: int) -> int:
    """Return the memory of all lanes together: as many slabs of `lane_bytes` as there are lanes, with their trailers."""
    return lane_count * region_bytes(lane_bytes)


@dataclass(slots=True, eq=False)
class _Slab:
    """One slab on its way: first its gather, then its write."""

    job: WriteJob
    region: Region
    copy: Copy
    start_ns: int
    write: Write | None = None  # drafted while the gather runs
    error: str = ""  # of the draft

    @property
    def given_up(self) -> bool:
        """Whether no write of it will begin; not while its draft is being made."""
        return bool(self.error) or (self.job.cancelled and self.write is not None)


class DeviceLanes:
    """See the module. The grants bound what waits here, as they do for `lanes`."""

    def __init__(
        self,
        buffer: StagingPieces,
        lane_count: int,
        stages: Stages,
        transport: DraftingTransport,
        results: Results,
        metrics: Metrics,
        spans: SpanRecorder,
        *,
        probe_address: int,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        """Make idle lanes.

        Args:
            buffer: memory of all lanes together.
            results: where probes' results go, which come from a thread of their own.
            enter: makes the device current for such a thread.
        """
        self._buffer = buffer
        self._lane_bytes = buffer.length_bytes // lane_count
        self._memory = Ring(buffer.length_bytes)
        self._stages = stages
        self._transport = transport
        self._probe_results = results
        self._log = StageLog(metrics, spans)
        self._probe_address = probe_address
        self._enter = enter
        self._queue: deque[WriteJob] = deque()
        self._gathers: deque[_Slab] = deque()
        self._writes: deque[_Slab] = deque()
        self._done: list[WriteResult] = []
        self._probes_open: set[int] = set()
        self._slabs = [0] * lane_count
        self._bytes = [0] * lane_count

    @property
    def busy(self) -> bool:
        """Whether something is under way that only `turn` brings on, or something is to be written down."""
        return bool(self._queue or self._gathers or self._writes or self._done or self._log)

    def put(self, job: WriteJob | ProbeJob) -> None:
        """Begin one job, or queue it."""
        if isinstance(job, ProbeJob):
            self._probes_open.add(id(job))
            threading.Thread(target=self._probe, args=(job,), name="probe", daemon=True).start()
            return
        assert job.effect.way is Way.STAGED, job.effect.way
        self._queue.append(job)
        # An offer brings many slabs at once.
        self._advance()

    def hurry(self) -> None:
        """Between two other things that the thread does: if the oldest write is over, tell of it, begin the next, and use its memory."""
        if self._hurry_wire():
            self._begin_gathers()

    def turn(self) -> list[WriteResult]:
        """Begin and end what can be; return what has ended since the last turn."""
        if self._queue or self._gathers or self._writes:
            self._advance()
        elif not self._done:
            self._log.write()
        done, self._done = self._done, []
        return done

    def drop_given_up(self) -> None:
        """Jobs have been given up: those that wait are answered with the next turn, whatever waits before them."""
        self._queue = deque(still_wanted(self._queue, self._drop))

    def probed(self, job: ProbeJob) -> None:
        """A probe's result has been taken: writes may begin again."""
        self._probes_open.discard(id(job))

    def status(self) -> tuple[LaneStatus, ...]:
        """Return what each lane has done: a slab counts for the lane in whose part of the memory it began."""
        busy = {self._lane(slab) for slab in (*self._gathers, *self._writes)}
        return tuple(
            LaneStatus(index, index in busy, self._slabs[index], self._bytes[index])
            for index in range(len(self._slabs))
        )

    def held(self) -> tuple[WriteJob, ...]:
        """Return the jobs whose writes are open."""
        return tuple(slab.job for slab in self._writes)

    def stop(self) -> None:
        """Begin no gather and no write any more."""
        for job in (*self._queue, *(slab.job for slab in self._gathers)):
            job.cancelled = True

    def _hurry_wire(self) -> bool:
        """Look at the oldest write alone, and begin what can begin; return whether any has ended."""
        ended = False
        while self._writes and self._end_write(self._writes[0]):
            ended = True
        if self._gathers:
            self._begin_writes()
        return ended

    def _advance(self) -> None:
        # The wire first: whatever else is done here, it should not stand still meanwhile.
        self._begin_writes()
        ended = [slab for slab in list(self._writes) if self._end_write(slab)]
        if ended:
            self._begin_writes()
        self._begin_gathers()

    # -- gathers ---------------------------------------------------------------------------------------------------

    def _begin_gathers(self) -> None:
        while self._queue:
            job = self._queue[0]
            if job.cancelled:
                self._queue.popleft()
                self._drop(job)
                continue
            if len(self._gathers) >= _GATHERS_AHEAD_MAX:
                return
            region = self._memory.allocate(region_bytes(job.effect.payload_bytes))
            if region is None:
                return
            self._queue.popleft()
            start_ns = time.monotonic_ns()
            try:
                copy = self._stages.gather(job, region.offset_bytes)
            except LongshoreError as error:
                self._memory.free(region)
                self._done.append(WriteResult(job, str(error), dropped=False, notify=False))
                continue
            slab = _Slab(job, region, copy, start_ns)
            self._gathers.append(slab)
            # What was there before: a wire that stands still waits for nothing that is begun here.
            self._hurry_wire()
            self._draft(slab)
            self._begin_writes()

    def _draft(self, slab: _Slab) -> None:
        job = slab.job
        assert job.ring is not None
        length_bytes = region_bytes(job.effect.payload_bytes)
        pieces = cut(self._buffer, slab.region.offset_bytes, job.ring, job.effect.offset_bytes, length_bytes)
        notice = PEER.encode(ready_message(job)) if job.noticed else b""
        try:
            slab.write = self._transport.draft(job.peer_name, *pieces, notice)
            self._log.count("longshore_write_pieces_total", len(pieces[0]), way="staged")
        except TransportError as error:
            slab.error = str(error)

    # -- writes ----------------------------------------------------------------------------------------------------

    def _begin_writes(self) -> None:
        """Begin the write of each slab whose gather has passed, in their order; none while a probe measures the wire."""
        self._end_given_up()
        while self._gathers and len(self._writes) < _WRITES_OPEN_MAX and not self._probes_open:
            slab, job = self._gathers[0], self._gathers[0].job
            if slab.write is None or slab.given_up or not slab.copy.passed():
                return
            self._gathers.popleft()
            slab.copy.end()
            self._transport.start(slab.write)
            self._writes.append(slab)
            now_ns = time.monotonic_ns()
            self._log.stage("gather", job.effect, self._lane(slab), slab.start_ns, now_ns)
            slab.start_ns = now_ns
            self._log.count("longshore_writes_total", 1, way="staged")

    def _end_given_up(self) -> None:
        """Let go of slabs that will not be written, once the device has left them: they wait for no probe and no write."""
        for slab in [slab for slab in self._gathers if slab.given_up]:
            if not slab.copy.passed():
                return
            self._gathers.remove(slab)
            slab.copy.end()
            self._memory.free(slab.region)
            if slab.write is not None:
                self._transport.drop(slab.write)
            if slab.job.cancelled:
                self._drop(slab.job)
            else:
                self._done.append(WriteResult(slab.job, slab.error, dropped=False, notify=False))

    def _end_write(self, slab: _Slab) -> bool:
        """Drive a write; return whether it is over. A target hears of it by this look, which sends the notice."""
        assert slab.write is not None
        state = self._transport.state(slab.write)
        if state is WriteState.OPEN:
            return False
        self._writes.remove(slab)
        settled = self._transport.release(slab.write)
        self._memory.free(slab.region)
        self._done.append(self._ended(slab, state, settled=settled))
        return True

    def _ended(self, slab: _Slab, state: WriteState, *, settled: bool) -> WriteResult:
        job = slab.job
        if job.cancelled:
            self._log.count("longshore_overtaken_writes_total", 1, way="staged")
        if state is WriteState.FAILED:
            assert slab.write is not None
            error = slab.write.error or "the write failed and the transport does not say why"
            return WriteResult(job, error, dropped=False, notify=False, settled=settled)
        lane = self._lane(slab)
        self._log.stage("write", job.effect, lane, slab.start_ns, time.monotonic_ns())
        if job.cancelled:
            return dropped_write(job)
        self._slabs[lane] += 1
        self._bytes[lane] += job.effect.payload_bytes
        self._log.count("longshore_lane_slabs_total", 1, lane=lane)
        self._log.count("longshore_lane_bytes_total", job.effect.payload_bytes, lane=lane)
        return WriteResult(job, "", dropped=False, notify=not job.noticed)

    # -- the rest --------------------------------------------------------------------------------------------------

    def _drop(self, job: WriteJob) -> None:
        self._done.append(dropped_write(job))

    def _lane(self, slab: _Slab) -> int:
        return min(slab.region.offset_bytes // self._lane_bytes, len(self._slabs) - 1)

    def _probe(self, job: ProbeJob) -> None:
        self._enter()
        region = job.region
        try:
            wire = self._transport.probe_wire(job.peer_name, self._probe_address, region.address, region.length_bytes)
            self._probe_results.put(ProbeResult(job, wire.value, ""))
        except TransportError as error:
            self._probe_results.put(ProbeResult(job, UNKNOWN_WIRE, str(error)))
