"""The target's stage: a landed slab from the ring into the engine's pages, once its trailer proves that it is whole.

Runs in threads of its own and never blocks the control thread.
"""

from __future__ import annotations

import queue
import threading
import time

from longshore_agent.errors import MemoryLostError, PoolError, ShapeError
from longshore_agent.kernels.cpu_copy import copy
from longshore_agent.kernels.view import slab_view
from longshore_agent.memory.staging import StagingBuffer
from longshore_agent.path.jobs import Results, ScatterJob, ScatterResult, trailer_of
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_wire.errors import Reason
from longshore_wire.trailer import TRAILER_BYTES, aligned, unseal

# A trailer that is not there yet is looked for again after this; it only ever happens with a broken transport.
_TRAILER_PAUSE_S = 0.001


def scatter_slab(job: ScatterJob, ring: StagingBuffer) -> None:
    """Copy a landed slab from the ring into the engine's pages.

    Raises:
        PoolError: the engine has let its pages go.
        MemoryLostError: it has cut its memory short.
        ShapeError: the slab cannot be.
    """
    effect = job.effect
    target = job.pages.view(job.pool, effect.route)
    slab = ring.view(effect.offset_bytes, effect.payload_bytes)
    copy(slab_view(slab, target, effect.tokens), target, effect.tokens)


class Scatterers:
    """Threads that scatter, and the queue before them. The grants bound the queue: it never holds more than the ring."""

    def __init__(
        self,
        ring: StagingBuffer,
        results: Results,
        metrics: Metrics,
        spans: SpanRecorder,
        *,
        thread_count: int,
        trailer_deadline_ns: int,
        trailer_key: bytes,
    ) -> None:
        self._ring = ring
        self._results = results
        self._metrics = metrics
        self._spans = spans
        self._trailer_deadline_ns, self._trailer_key = trailer_deadline_ns, trailer_key
        self._queue: queue.SimpleQueue[ScatterJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"scatter-{index}", daemon=True)
            for index in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: ScatterJob) -> None:
        """Queue one slab."""
        self._queue.put(job)

    def stop(self) -> None:
        """Let the threads end after what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self, index: int) -> None:
        while (job := self._queue.get()) is not None:
            self._results.put(self._scatter(job, index))

    def _scatter(self, job: ScatterJob, index: int) -> ScatterResult:
        if job.cancelled:
            return ScatterResult(job, Reason.NONE, "", dropped=True)
        effect = job.effect
        wrong = self._wait_trailer(job)
        if wrong:
            return ScatterResult(job, Reason.TRAILER_MISMATCH, wrong, dropped=False)
        start_ns = time.monotonic_ns()
        try:
            scatter_slab(job, self._ring)
        except PoolError as error:
            return ScatterResult(job, error.reason, str(error), dropped=True)
        except (ShapeError, MemoryLostError) as error:
            return ScatterResult(job, error.reason, str(error), dropped=False)
        end_ns = time.monotonic_ns()
        self._spans.record("scatter", effect.pair, effect.slab, index, start_ns, end_ns)
        self._metrics.observe("longshore_stage_seconds", (end_ns - start_ns) / 1e9, stage="scatter")
        self._metrics.add("longshore_stage_bytes_total", effect.payload_bytes, stage="scatter")
        return ScatterResult(job, Reason.NONE, "", dropped=False)

    def _wait_trailer(self, job: ScatterJob) -> str:
        """Return what is wrong with the slab's trailer after the deadline; empty: it is the one that was granted."""
        effect = job.effect
        offset = effect.offset_bytes + aligned(effect.payload_bytes)
        wanted = trailer_of(effect)
        deadline_ns = time.monotonic_ns() + self._trailer_deadline_ns
        while True:
            found = unseal(self._ring.bytes_at(offset, TRAILER_BYTES), self._trailer_key)
            if found == wanted:
                return ""
            if job.cancelled:
                return "the room was given up"
            if time.monotonic_ns() >= deadline_ns:
                return f"slab {effect.slab} of room {wanted.room} ends with {found}, not with {wanted}"
            time.sleep(_TRAILER_PAUSE_S)
