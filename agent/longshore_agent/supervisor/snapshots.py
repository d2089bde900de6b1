"""Passes requests for snapshots from HTTP's threads to the supervisor's loop, and the answers back. Keeps workers' last ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from longshore_agent.status.metrics import MetricsSnapshot
from longshore_agent.status.snapshot import AgentSnapshot, WorkerSnapshot
from longshore_spec.status import LEFT_LISTED_MAX, LeftEngine, LeftEngines
from longshore_wire.effects import PeerId
from longshore_wire.errors import LongshoreError, Reason

# A worker answers within milliseconds. After this limit it is shown as silent.
_ANSWER_LIMIT_S = 0.7
# Above the time in which the loop may be busy with the start of a worker.
_LOOP_LIMIT_S = 5.0


class LeftWorkers:
    """The last snapshots of workers whose engines have left, and the sums of all that ever did."""

    def __init__(self) -> None:
        self._sums = LeftEngines()
        self._last: deque[tuple[LeftEngine, WorkerSnapshot, float]] = deque(maxlen=LEFT_LISTED_MAX)

    def add(self, snapshot: WorkerSnapshot, roles: tuple[str, ...], now_s: float) -> None:
        """Keep the last snapshot of a worker."""
        value, sums = snapshot.metrics.value, self._sums
        done, failed = (int(value("longshore_rooms_total", outcome=outcome)) for outcome in ("done", "failed"))
        moved = sum(peer.bytes_moved for peer in snapshot.peers)
        self._sums = LeftEngines(
            sums.count + 1, sums.rooms_done + done, sums.rooms_failed + failed, sums.bytes_moved + moved
        )
        kept = msgspec.structs.replace(snapshot, rooms_open=0, rooms=(), metrics=MetricsSnapshot())
        self._last.appendleft((LeftEngine(snapshot.worker, roles, 0.0, done, failed, moved), kept, now_s))

    def engines(self, now_s: float) -> LeftEngines:
        """Return what the status page says of them."""
        last = tuple(msgspec.structs.replace(engine, left_s=now_s - since_s) for engine, _, since_s in self._last)
        return msgspec.structs.replace(self._sums, last=last)

    def snapshots(self) -> tuple[WorkerSnapshot, ...]:
        """Return the last snapshots, of the newest first."""
        return tuple(snapshot for _, snapshot, _ in self._last)


class Call:
    """One request for a snapshot."""

    def __init__(self, number: int, room: str | None) -> None:
        self.number = number
        self.room = room
        self.future: Future[AgentSnapshot] = Future()
        self._missing: set[PeerId] = set()
        self._asked_s = time.monotonic()

    def ask(self, asked: set[PeerId]) -> None:
        """Record the workers that must answer."""
        self._missing = asked

    def heard(self, key: PeerId) -> None:
        """Record one worker's answer."""
        self._missing.discard(key)

    @property
    def done(self) -> bool:
        """Whether all have answered or the limit has passed."""
        return not self._missing or time.monotonic() - self._asked_s > _ANSWER_LIMIT_S

    def answer(self, snapshot: AgentSnapshot) -> None:
        """Give the snapshot to the waiting thread."""
        self.future.set_result(snapshot)


class Snapshots:
    """All open requests. Any thread may call `ask`; the loop calls the rest."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._new: list[Call] = []
        self._open: dict[int, Call] = {}
        self._number = 0
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether a request is open."""
        return bool(self._open or self._new)

    def ask(self, room: str | None) -> AgentSnapshot:
        """Request a snapshot and wait for it. Raises LongshoreError if the loop hangs or has ended."""
        with self._lock:
            if self._closed:
                raise LongshoreError("the agent is stopping", reason=Reason.SHUTTING_DOWN)
            self._number += 1
            call = Call(self._number, room)
            self._new.append(call)
            # Never after `close`, since the loop then closes the descriptor that wakes it.
            self._wake()
        try:
            return call.future.result(_LOOP_LIMIT_S)
        except TimeoutError as error:
            raise LongshoreError("the supervisor's loop does not turn", reason=Reason.INTERNAL) from error

    def take_new(self) -> list[Call]:
        """Return requests that were not yet sent to workers."""
        with self._lock:
            new, self._new = self._new, []
        self._open.update((call.number, call) for call in new)
        return new

    def answered(self, number: int, key: PeerId) -> None:
        """Record one worker's answer to one request."""
        call = self._open.get(number)
        if call is not None:
            call.heard(key)

    def take_done(self) -> list[Call]:
        """Remove and return the requests that can be answered now."""
        done = [call for call in self._open.values() if call.done]
        for call in done:
            del self._open[call.number]
        return done

    def close(self) -> None:
        """Refuse all open and future requests."""
        with self._lock:
            self._closed = True
            calls, self._new = self._new, []
        for call in [*calls, *self._open.values()]:
            call.future.set_exception(LongshoreError("the agent is stopping", reason=Reason.SHUTTING_DOWN))
