"""Scatters of a GPU's worker: a landed slab is queued for its device at once, and is over when its event has passed.

Called by the control thread, through `moving`. The device reads a slab's trailer just before it scatters: only a slab
whose trailer was right then counts. Another one is scattered again until the deadline; its room's pages are the room's own
until it ends, so nobody reads what a wrong slab has left there.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from longshore_agent.errors import PoolError
from longshore_agent.path.device_stages import Copy, Stages
from longshore_agent.path.jobs import ScatterJob, ScatterResult, trailer_of
from longshore_agent.path.stage_log import StageLog
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.trailer import Trailer, unseal

# A trailer that is not there yet is looked for again after this; it only ever happens with a broken transport.
_TRAILER_PAUSE_NS = 1_000_000


@dataclass(slots=True)
class _Slab:
    """One slab that has landed."""

    job: ScatterJob
    deadline_ns: int
    copy: Copy | None = None
    start_ns: int = 0
    wanted: Trailer = field(init=False)

    def __post_init__(self) -> None:
        self.wanted = trailer_of(self.job.effect)


class DeviceScatterers:
    """See the module. The grants bound what is under way: never more than the ring."""

    def __init__(
        self, stages: Stages, metrics: Metrics, spans: SpanRecorder, *, trailer_deadline_ns: int, trailer_key: bytes
    ) -> None:
        self._stages = stages
        self._log = StageLog(metrics, spans)
        self._trailer_deadline_ns, self._trailer_key = trailer_deadline_ns, trailer_key
        self._queued: deque[_Slab] = deque()
        self._late: list[tuple[int, _Slab]] = []  # (when to look again, slab)
        self._done: list[ScatterResult] = []

    @property
    def busy(self) -> bool:
        """Whether something is under way that only `turn` brings on, or something is to be written down."""
        return bool(self._queued or self._late or self._done or self._log)

    def put(self, job: ScatterJob) -> None:
        """Queue one slab for the device."""
        self._begin(_Slab(job, time.monotonic_ns() + self._trailer_deadline_ns))

    def turn(self) -> list[ScatterResult]:
        """Take notice of what is over; return what has ended since the last turn."""
        if not self._queued and not self._done:
            self._log.write()
        while self._queued:
            slab = self._queued[0]
            assert slab.copy is not None
            # One stream does them in their order.
            if not slab.copy.passed():
                break
            self._queued.popleft()
            self._end(slab)
        if self._late:
            now_ns = time.monotonic_ns()
            due = [slab for again_ns, slab in self._late if again_ns <= now_ns]
            self._late = [late for late in self._late if late[0] > now_ns]
            for slab in due:
                self._begin(slab)
        done, self._done = self._done, []
        return done

    def stop(self) -> None:
        """Nothing here waits for anything: there is nothing to stop."""

    def _begin(self, slab: _Slab) -> None:
        job = slab.job
        if job.cancelled:
            self._done.append(ScatterResult(job, Reason.NONE, "", dropped=True))
            return
        slab.start_ns = time.monotonic_ns()
        try:
            slab.copy = self._stages.scatter(job)
        except PoolError as error:
            self._done.append(ScatterResult(job, error.reason, str(error), dropped=True))
            return
        except LongshoreError as error:
            self._done.append(ScatterResult(job, error.reason, str(error), dropped=False))
            return
        self._queued.append(slab)

    def _end(self, slab: _Slab) -> None:
        job, effect, end_ns = slab.job, slab.job.effect, time.monotonic_ns()
        assert slab.copy is not None
        found = unseal(slab.copy.trailer(), self._trailer_key)
        slab.copy.end()
        if found == slab.wanted:
            self._log.stage("scatter", effect, 0, slab.start_ns, end_ns)
            self._done.append(ScatterResult(job, Reason.NONE, "", dropped=False))
        elif job.cancelled or end_ns >= slab.deadline_ns:
            text = f"slab {effect.slab} of room {slab.wanted.room} ends with {found}, not with {slab.wanted}"
            wrong = "the room was given up" if job.cancelled else text
            self._done.append(ScatterResult(job, Reason.TRAILER_MISMATCH, wrong, dropped=False))
        else:
            self._late.append((end_ns + _TRAILER_PAUSE_NS, slab))
