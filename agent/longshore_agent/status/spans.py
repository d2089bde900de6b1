"""Records the stages of slabs in one worker: the newest spans, and the metrics of each stage.

Lanes, scatter threads and the control thread record stages; the status page and tests read the spans.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import msgspec

from longshore_agent.status.metrics import Metrics
from longshore_wire.effects import StartScatter, StartWrite
from longshore_wire.peer_messages import PairKey

# When so many records are pending, each new one first writes the oldest.
_PENDING_MAX = 4096


class Span(msgspec.Struct, frozen=True):
    """One slab in one stage. Times are of the host's monotonic clock, which all processes share.

    Attributes:
        room: the room's id as decimal text, because many JSON parsers lose digits of large numbers.
        lane: index of the lane or thread; -1 if none.
    """

    stage: str
    instance: str
    room: str
    pool: int
    source_rank: int
    target_rank: int
    slab: int
    lane: int
    start_ns: int
    end_ns: int


class SpanRecorder:
    """Keeps the newest `capacity` spans. `record` never blocks, and allocates nothing once it is full."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, capacity
        self._lock = threading.Lock()
        self._capacity = capacity
        self._spans: list[tuple[str, PairKey, int, int, int, int]] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._spans)

    def record(self, stage: str, pair: PairKey, slab: int, lane: int, start_ns: int, end_ns: int) -> None:
        """Record that `slab` of `pair` was in `stage` from `start_ns` to `end_ns` (time.monotonic_ns)."""
        assert start_ns <= end_ns, (stage, start_ns, end_ns)
        span = (stage, pair, slab, lane, start_ns, end_ns)
        with self._lock:
            if len(self._spans) < self._capacity:
                self._spans.append(span)
            else:
                self._spans[self._next] = span
            self._next = (self._next + 1) % self._capacity

    def of_room(self, room: int, *, limit: int, instance: str | None = None) -> tuple[Span, ...]:
        """Return the newest `limit` spans of a room of any prefill instance, or of `instance`, sorted by start."""
        found = [
            span
            for span in self._copy()
            if span[1].key.room == room and (instance is None or span[1].key.instance == instance)
        ]
        return _ordered(found, limit)

    def newest(self, *, limit: int) -> tuple[Span, ...]:
        """Return the newest `limit` spans of all rooms, sorted by start."""
        return _ordered(self._copy(), limit)

    def _copy(self) -> list[tuple[str, PairKey, int, int, int, int]]:
        """Return a copy of all spans, so that recorders do not wait for a search."""
        with self._lock:
            return list(self._spans)


def _ordered(found: list[tuple[str, PairKey, int, int, int, int]], limit: int) -> tuple[Span, ...]:
    assert limit > 0, limit
    found.sort(key=lambda span: span[4:])
    return tuple(
        Span(
            stage=stage,
            instance=pair.key.instance,
            room=str(pair.key.room),
            pool=pair.key.pool,
            source_rank=pair.source_rank,
            target_rank=pair.target_rank,
            slab=slab,
            lane=lane,
            start_ns=start_ns,
            end_ns=end_ns,
        )
        for stage, pair, slab, lane, start_ns, end_ns in found[-limit:]
    )


class _Span(NamedTuple):
    stage: str
    effect: StartWrite | StartScatter
    lane: int
    start_ns: int
    end_ns: int


class _Count(NamedTuple):
    name: str
    value: int
    labels: dict[str, str | int]


class StageLog:
    """Records the stages of slabs and counts them in the metrics.

    Args:
        deferred: True: keep records until `write_one`; one thread may use the log. False: write each at once, from any
            thread.
    """

    def __init__(self, metrics: Metrics, spans: SpanRecorder, *, deferred: bool) -> None:
        self._metrics = metrics
        self._spans = spans
        self._pending_max = _PENDING_MAX if deferred else 0
        self._pending: deque[_Span | _Count] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def stage(self, stage: str, effect: StartWrite | StartScatter, lane: int, start_ns: int, end_ns: int) -> None:
        """Record that a slab was in `stage` from `start_ns` to `end_ns` (time.monotonic_ns)."""
        self._keep(_Span(stage, effect, lane, start_ns, end_ns))

    def count(self, name: str, value: int = 1, **labels: str | int) -> None:
        """Add `value` to a counter."""
        self._keep(_Count(name, value, labels))

    def write_one(self) -> None:
        """Write the oldest pending record. It writes only one, so that a thread can check for new work in between."""
        if self._pending:
            self._write(self._pending.popleft())

    def _keep(self, record: _Span | _Count) -> None:
        if not self._pending_max:
            self._write(record)
            return
        if len(self._pending) >= self._pending_max:
            self.write_one()
        self._pending.append(record)

    def _write(self, record: _Span | _Count) -> None:
        if isinstance(record, _Count):
            self._metrics.add(record.name, record.value, **record.labels)
            return
        stage, effect, lane, start_ns, end_ns = record
        self._spans.record(stage, effect.pair, effect.slab, lane, start_ns, end_ns)
        self._metrics.observe("longshore_stage_seconds", (end_ns - start_ns) / 1e9, stage=stage)
        self._metrics.add("longshore_stage_bytes_total", effect.payload_bytes, stage=stage)
