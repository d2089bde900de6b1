"""Transfer threads of one worker. Each lane has a buffer of its own and takes slabs from one queue, so that all lanes
work for a single pair when there is only one, and one lane's wire overlaps another's gather.
"""

from __future__ import annotations

import queue
import threading
import time

from longshore_agent.errors import PoolError, ShapeError, TransportError, WriteFailedError
from longshore_agent.memory.staging import StagingBuffer
from longshore_agent.path.deliver import Deliverer
from longshore_agent.path.gather import begin_gather
from longshore_agent.path.jobs import ProbeJob, ProbeResult, Results, WriteJob, WriteResult
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import LaneStatus
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.transports.base import PreparingTransport
from longshore_wire.plan import Way


class Lanes:
    """The lanes and the queue before them; grants and the window of writes in place bound the queue."""

    def __init__(
        self,
        buffers: list[StagingBuffer],
        transport: PreparingTransport,
        results: Results,
        metrics: Metrics,
        spans: SpanRecorder,
        *,
        slices_batch: int,
        probe_address: int,
    ) -> None:
        self._transport = transport
        self._deliverer = Deliverer(transport, metrics, slices_batch=slices_batch)
        self._results = results
        self._metrics = metrics
        self._spans = spans
        self._probe_address = probe_address
        self._queue: queue.SimpleQueue[WriteJob | ProbeJob | None] = queue.SimpleQueue()
        self._slabs = [0] * len(buffers)
        self._bytes = [0] * len(buffers)
        self._busy = [False] * len(buffers)
        self._threads = [
            threading.Thread(target=self._run, args=(index, buffer), name=f"lane-{index}", daemon=True)
            for index, buffer in enumerate(buffers)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: WriteJob | ProbeJob) -> None:
        """Queue one job."""
        self._queue.put(job)

    def status(self) -> tuple[LaneStatus, ...]:
        """Return what each lane has done."""
        return tuple(
            LaneStatus(index, self._busy[index], self._slabs[index], self._bytes[index])
            for index in range(len(self._threads))
        )

    def stop(self) -> None:
        """Let the lanes end after what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self, index: int, buffer: StagingBuffer) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, ProbeJob):
                self._results.put(self._probe(job))
                continue
            self._busy[index] = True
            result = self._write(job, index, buffer)
            self._busy[index] = False
            self._results.put(result)

    def _write(self, job: WriteJob, index: int, buffer: StagingBuffer) -> WriteResult:
        if job.cancelled:
            return WriteResult(job, "", dropped=True, notify=False)
        try:
            if job.effect.way is Way.STAGED:
                self._stage(job, index, buffer)
            else:
                start_ns = time.monotonic_ns()
                self._deliverer.in_place(job)
                self._record("write", job, index, start_ns, time.monotonic_ns())
        except WriteFailedError as error:
            return WriteResult(job, str(error), dropped=False, notify=False, settled=error.settled)
        except (TransportError, PoolError, ShapeError) as error:
            return WriteResult(job, str(error), dropped=False, notify=False)
        self._slabs[index] += 1
        self._bytes[index] += job.effect.payload_bytes
        self._metrics.add("longshore_lane_slabs_total", 1, lane=index)
        self._metrics.add("longshore_lane_bytes_total", job.effect.payload_bytes, lane=index)
        noticed = job.effect.way is Way.STAGED and job.noticed
        return WriteResult(job, "", dropped=False, notify=not noticed)

    def _stage(self, job: WriteJob, index: int, buffer: StagingBuffer) -> None:
        """Gather and write a slab, in pieces where that keeps them in this processor's cache between the two."""
        gathering = begin_gather(job, buffer)
        gather_ns = write_ns = 0
        begin_ns = first_write_ns = turned_ns = time.monotonic_ns()
        gathered_ns = begin_ns
        for offset, length in gathering.pieces(job.piece_bytes):
            gathered_ns = time.monotonic_ns()
            gather_ns += gathered_ns - turned_ns
            if offset == 0:
                first_write_ns = gathered_ns
            self._deliverer.staged(job, buffer, offset, length, last=offset + length == gathering.length_bytes)
            turned_ns = time.monotonic_ns()
            write_ns += turned_ns - gathered_ns
        self._record("gather", job, index, begin_ns, gathered_ns, gather_ns)
        self._record("write", job, index, first_write_ns, turned_ns, write_ns)

    def _record(
        self, stage: str, job: WriteJob, index: int, start_ns: int, end_ns: int, worked_ns: int | None = None
    ) -> None:
        """Record a stage of a slab; `worked_ns` of the time between were its own, by default all of it."""
        worked_ns = end_ns - start_ns if worked_ns is None else worked_ns
        self._spans.record(stage, job.effect.pair, job.effect.slab, index, start_ns, end_ns)
        self._metrics.observe("longshore_stage_seconds", worked_ns / 1e9, stage=stage)
        self._metrics.add("longshore_stage_bytes_total", job.effect.payload_bytes, stage=stage)

    def _probe(self, job: ProbeJob) -> ProbeResult:
        region = job.region
        try:
            wire = self._transport.probe_wire(job.peer_name, self._probe_address, region.address, region.length_bytes)
        except TransportError as error:
            return ProbeResult(job, "Unknown", str(error))
        return ProbeResult(job, wire.value, "")
