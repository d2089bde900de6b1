"""Way DIRECT of a GPU's worker: copies from our engine's pages into a neighbour's, driven by events, without a wait.

Called by the control thread, through `moving` and `near_writes`. A slab is queued on the device at once; it is over, and its
target may be told, when its event has passed. Until then both pools are held. One stream does all slabs in their order.
Slabs whose kernel is compiled beside this thread wait for it, and no other room does.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from longshore_agent.path.device_stages import Copy, Stages
from longshore_agent.path.jobs import WriteJob, WriteResult, dropped_write, still_wanted
from longshore_agent.path.stage_log import StageLog
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import LaneStatus
from longshore_agent.status.spans import SpanRecorder
from longshore_wire.errors import LongshoreError
from longshore_wire.plan import Way

# Slabs that the device has been given: all that one pair may have under way by default, so that the device never waits for
# this thread. Alone each takes 0.7 ms, after which a room that was given up, or an engine that left, waits no longer.
_COPIES_OPEN_MAX = 16
# All that one stream does is the work of one lane.
_LANE = 0


class _Slab(NamedTuple):
    """One slab that the device has been given."""

    job: WriteJob
    copy: Copy
    queued_ns: int


class DeviceDirectLanes:
    """See the module. The sessions' windows bound what waits here, as they do for `lanes`."""

    def __init__(self, lane_count: int, stages: Stages, metrics: Metrics, spans: SpanRecorder) -> None:
        self._lane_count = lane_count
        self._stages = stages
        self._log = StageLog(metrics, spans)
        self._queue: deque[WriteJob] = deque()
        # Those whose kernel is being compiled, in their order; kernels come in that order too.
        self._unready: list[WriteJob] = []
        self._copies: deque[_Slab] = deque()
        self._done: list[WriteResult] = []
        self._passed_ns = 0
        self._slabs = 0
        self._bytes = 0

    @property
    def copying(self) -> bool:
        """Whether the device has been given slabs, of which nobody else tells that they are over."""
        return bool(self._copies)

    @property
    def busy(self) -> bool:
        """Whether something is under way that only `turn` brings on, or something is to be written down."""
        return bool(self._queue or self._unready or self._copies or self._done or self._log)

    def put(self, job: WriteJob) -> None:
        """Queue one slab whose target's pages are mapped here; on the device at once, unless that has enough to do."""
        assert job.effect.way is Way.DIRECT, job.effect.way
        self._queue.append(job)
        self._begin()

    def turn(self) -> list[WriteResult]:
        """Take notice of what is over and begin what can be; return what has ended since the last turn.

        Raises:
            DeviceError: the device has failed: only a new process mends that.
        """
        ended = False
        while self._copies and self._copies[0].copy.passed():
            self._end(self._copies.popleft())
            ended = True
        if ended:
            # The device has had time: the queue may be long, and whoever was given up in it waits for no other room.
            self._drop_given_up()
        if self._unready:
            self._ask_again()
        self._begin()
        if not self._done:
            # The device needs nothing of this thread meanwhile.
            self._log.write()
        done, self._done = self._done, []
        return done

    def status(self) -> tuple[LaneStatus, ...]:
        """Return what each lane has done."""
        idle = tuple(LaneStatus(index, False, 0, 0) for index in range(self._lane_count))
        return (LaneStatus(_LANE, self.copying, self._slabs, self._bytes), *idle[_LANE + 1 :])

    def added_to(self, others: tuple[LaneStatus, ...]) -> tuple[LaneStatus, ...]:
        """Return what each lane has done by any way, where `others` are the lanes of the other ways."""
        return tuple(
            LaneStatus(one.lane, one.busy or near.busy, one.slabs + near.slabs, one.bytes_moved + near.bytes_moved)
            for one, near in zip(others, self.status(), strict=True)
        )

    def stop(self) -> None:
        """Give the device nothing more."""
        for job in (*self._queue, *self._unready):
            job.cancelled = True

    def _drop_given_up(self) -> None:
        if any(job.cancelled for job in self._queue):
            self._queue = deque(still_wanted(self._queue, self._drop))

    def _drop(self, job: WriteJob) -> None:
        self._done.append(dropped_write(job))

    def _ask_again(self) -> None:
        """Let the slabs that wait for kernels go on once the first one's is there: asking for each would take too long."""
        waiting, self._unready = still_wanted(self._unready, self._drop), []
        if not waiting or len(self._copies) >= _COPIES_OPEN_MAX:
            self._unready = waiting
            return
        self._launch(waiting[0])
        if self._unready:
            self._unready = waiting
        else:
            self._queue.extendleft(reversed(waiting[1:]))

    def _begin(self) -> None:
        while self._queue:
            job = self._queue[0]
            if not job.cancelled and len(self._copies) >= _COPIES_OPEN_MAX:
                return
            self._queue.popleft()
            if job.cancelled:
                self._drop(job)
                continue
            self._launch(job)

    def _launch(self, job: WriteJob) -> None:
        queued_ns = time.monotonic_ns()
        try:
            copy = self._stages.direct(job)
        except LongshoreError as error:
            self._done.append(WriteResult(job, str(error), dropped=False, notify=False))
            return
        if copy is None:
            self._unready.append(job)
        else:
            self._copies.append(_Slab(job, copy, queued_ns))

    def _end(self, slab: _Slab) -> None:
        job, effect, end_ns = slab.job, slab.job.effect, time.monotonic_ns()
        slab.copy.end()
        # The device began it when it was done with the one before.
        self._log.stage("write", effect, _LANE, max(slab.queued_ns, self._passed_ns), end_ns)
        self._passed_ns = end_ns
        self._log.count("longshore_writes_total", 1, way="direct")
        if job.cancelled:
            self._log.count("longshore_overtaken_writes_total", 1, way="direct")
            # Its bytes are there, and nobody waits for them.
            self._drop(job)
            return
        self._slabs += 1
        self._bytes += effect.payload_bytes
        self._log.count("longshore_lane_slabs_total", 1, lane=_LANE)
        self._log.count("longshore_lane_bytes_total", effect.payload_bytes, lane=_LANE)
        self._done.append(WriteResult(job, "", dropped=False, notify=True))
