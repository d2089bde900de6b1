"""Transfer threads of one worker. Each lane has a buffer of its own and takes slabs from one queue, so that all lanes
work for a single pair when there is only one, and one lane's wire overlaps another's gather.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from longshore_agent.errors import TransportError, WriteFailedError
from longshore_agent.memory.staging import StagingBuffer
from longshore_agent.path.deliver import Deliverer
from longshore_agent.path.gather import gather_slab
from longshore_agent.path.jobs import ProbeJob, ProbeResult, Results, WriteJob, WriteResult, dropped_write
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import LaneStatus
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.transports.base import PreparingTransport
from longshore_wire.errors import LongshoreError
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.plan import Way


class Lanes:
    """The lanes and the queue before them; grants and the window of writes in place bound the queue."""

    def __init__(
        self,
        buffers: Sequence[StagingBuffer],
        transport: PreparingTransport,
        results: Results,
        metrics: Metrics,
        spans: SpanRecorder,
        *,
        slices_batch: int,
        probe_address: int,
    ) -> None:
        """Start a thread for each buffer."""
        self._transport = transport
        self._deliverer = Deliverer(transport, metrics, slices_batch=slices_batch)
        self._results = results
        self._metrics = metrics
        self._spans = spans
        self._probe_address = probe_address
        self._queue: queue.SimpleQueue[WriteJob | ProbeJob | None] = queue.SimpleQueue()
        self._slabs = [0] * len(buffers)
        self._bytes = [0] * len(buffers)
        self._held: list[WriteJob | None] = [None] * len(buffers)
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
            LaneStatus(index, self._held[index] is not None, self._slabs[index], self._bytes[index])
            for index in range(len(self._threads))
        )

    def held(self) -> tuple[WriteJob, ...]:
        """Return the jobs that lanes have begun and not ended."""
        return tuple(job for job in self._held if job is not None)

    def stop(self) -> None:
        """Let the lanes end after what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self, index: int, buffer: StagingBuffer) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, ProbeJob):
                self._results.put(self._probe(job))
                continue
            self._held[index] = job
            result = self._write(job, index, buffer)
            self._held[index] = None
            self._results.put(result)

    def _write(self, job: WriteJob, index: int, buffer: StagingBuffer) -> WriteResult:
        if job.cancelled:
            return dropped_write(job)
        try:
            start_ns = time.monotonic_ns()
            if job.effect.way is Way.STAGED:
                length_bytes = gather_slab(job, buffer)
                self._record("gather", job, index, start_ns)
                if job.cancelled:
                    return dropped_write(job)
                start_ns = time.monotonic_ns()
                self._deliverer.staged(job, buffer, length_bytes)
            elif job.effect.way is Way.DIRECT:
                self._deliverer.direct(job)
            elif not self._deliverer.in_place(job):
                return dropped_write(job)
        except WriteFailedError as error:
            self._count_overtaken(job)
            return WriteResult(job, str(error), dropped=False, notify=False, settled=error.settled)
        except LongshoreError as error:
            return WriteResult(job, str(error), dropped=False, notify=False)
        self._record("write", job, index, start_ns)
        if self._count_overtaken(job):
            # Perhaps not all of it was written, and nobody waits for it.
            return dropped_write(job)
        self._slabs[index] += 1
        self._bytes[index] += job.effect.payload_bytes
        self._metrics.add("longshore_lane_slabs_total", 1, lane=index)
        self._metrics.add("longshore_lane_bytes_total", job.effect.payload_bytes, lane=index)
        noticed = job.effect.way is Way.STAGED and job.noticed
        return WriteResult(job, "", dropped=False, notify=not noticed)

    def _count_overtaken(self, job: WriteJob) -> bool:
        """Count a write whose room was given up while it was under way; return whether it was."""
        if job.cancelled:
            self._metrics.add("longshore_overtaken_writes_total", 1, way=job.effect.way.name.lower())
        return job.cancelled

    def _record(self, stage: str, job: WriteJob, index: int, start_ns: int) -> None:
        end_ns = time.monotonic_ns()
        self._spans.record(stage, job.effect.pair, job.effect.slab, index, start_ns, end_ns)
        self._metrics.observe("longshore_stage_seconds", (end_ns - start_ns) / 1e9, stage=stage)
        self._metrics.add("longshore_stage_bytes_total", job.effect.payload_bytes, stage=stage)

    def _probe(self, job: ProbeJob) -> ProbeResult:
        region = job.region
        try:
            wire = self._transport.probe_wire(job.peer_name, self._probe_address, region.address, region.length_bytes)
        except TransportError as error:
            return ProbeResult(job, UNKNOWN_WIRE, str(error))
        return ProbeResult(job, wire.value, "")
