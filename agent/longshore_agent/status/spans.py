"""Records what one worker does for its rooms: the newest spans, and the metrics of each stage.

Lanes, scatter threads and the control thread record stages of slabs, and `steps` the control thread's messages; the
status page and tests read the spans.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import NamedTuple

import msgspec

from longshore_agent.status.metrics import Metrics
from longshore_wire.effects import StartScatter, StartWrite
from longshore_wire.peer_messages import PairKey, RoomKey

# When so many records are pending, each new one first writes the oldest.
_PENDING_MAX = 4096


class Kind(Enum):
    """What a span is."""

    STAGE = "stage"  # a slab in a stage of its pipeline
    HANDLE = "handle"  # the control thread reads and handles a message
    SEND = "send"  # the control thread sends a message
    START = "start"  # the control thread starts a slab, or prepares pages
    CALL = "call"  # the engine's client works
    WAIT = "wait"  # the engine's client waits: for an answer, or for the engine to take an event


class Span(msgspec.Struct, frozen=True):
    """One step of a room. Times are of the host's monotonic clock, which all processes share.

    Attributes:
        stage: the stage of a slab, the name of a message, or the call of an engine.
        room: the room's id as decimal text, because many JSON parsers lose digits of large numbers.
        source_rank, target_rank, slab: -1 if the step is of no rank there, or of no slab.
        lane: index of the lane or thread; -1 if none.
        woken_ns: when the control thread woke for the turn of this step; 0 for a step of another thread.
        worker: the name of the worker that has recorded it, or whose engine has.
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
    kind: Kind = Kind.STAGE
    woken_ns: int = 0
    worker: str = ""


# stage, pair or room, slab, lane, start, end, kind, woken
Record = tuple[str, PairKey | RoomKey, int, int, int, int, Kind, int]


class SpanRecorder:
    """Keeps the newest `capacity` spans. `record` never blocks, and allocates nothing once it is full.

    Attributes:
        lost_ns: the latest end of a span that is no longer kept; -1 if all are.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, capacity
        self.capacity = capacity
        self.lost_ns = -1
        self._lock = threading.Lock()
        self._spans: list[Record] = []
        self._total = 0

    def __len__(self) -> int:
        return len(self._spans)

    def record(
        self,
        stage: str,
        key: PairKey | RoomKey,
        slab: int,
        lane: int,
        start_ns: int,
        end_ns: int,
        kind: Kind = Kind.STAGE,
        woken_ns: int = 0,
    ) -> None:
        """Record that `slab` of a pair or a room was in `stage` from `start_ns` to `end_ns` (time.monotonic_ns)."""
        assert start_ns <= end_ns, (stage, start_ns, end_ns)
        span = (stage, key, slab, lane, start_ns, end_ns, kind, woken_ns)
        with self._lock:
            if self._total < self.capacity:
                self._spans.append(span)
            else:
                place = self._total % self.capacity
                self.lost_ns = max(self.lost_ns, self._spans[place][5])
                self._spans[place] = span
            self._total += 1

    def of_room(self, room: int, *, limit: int, instance: str | None = None) -> tuple[Span, ...]:
        """Return the newest `limit` spans of a room of any prefill instance, or of `instance`, sorted by start."""
        found = []
        for span in self._copy():
            # A call for each span would double the time in which the control thread does nothing else.
            key = span[1].key if isinstance(span[1], PairKey) else span[1]
            if key.room == room and instance in (None, key.instance):
                found.append(span)
        return _ordered(found, limit)

    def newest(self, *, limit: int) -> tuple[Span, ...]:
        """Return the newest `limit` spans of all rooms, sorted by start."""
        return _ordered(self._copy(), limit)

    def since(self, cursor: int) -> tuple[list[Record], int, int]:
        """Return the records after a cursor in the order of `record`, the next cursor, and how many are gone.

        Args:
            cursor: of the last call; 0: from the beginning.
        """
        with self._lock:
            total, kept = self._total, len(self._spans)
            first = max(cursor, total - kept)
            start, end = first % self.capacity, total % self.capacity
            if first == total:
                found = []
            elif start < end:
                found = self._spans[start:end]
            else:
                found = self._spans[start:] + self._spans[:end]
        return found, total, first - cursor

    def _copy(self) -> list[Record]:
        """Return a copy of all spans, so that recorders do not wait for a search."""
        with self._lock:
            return list(self._spans)


def room_key(record: Record) -> RoomKey:
    """Return the key of a record's room."""
    return record[1].key if isinstance(record[1], PairKey) else record[1]


def _ordered(found: list[Record], limit: int) -> tuple[Span, ...]:
    assert limit > 0, limit
    found.sort(key=lambda span: span[4:6])
    return tuple(_span(record) for record in found[-limit:])


def _span(record: Record) -> Span:
    stage, key, slab, lane, start_ns, end_ns, kind, woken_ns = record
    room, pair = (key.key, key) if isinstance(key, PairKey) else (key, None)
    return Span(
        stage=stage,
        instance=room.instance,
        room=str(room.room),
        pool=room.pool,
        source_rank=pair.source_rank if pair is not None else -1,
        target_rank=pair.target_rank if pair is not None else -1,
        slab=slab,
        lane=lane,
        start_ns=start_ns,
        end_ns=end_ns,
        kind=kind,
        woken_ns=woken_ns,
    )


class _Span(NamedTuple):
    stage: str
    effect: StartWrite | StartScatter
    lane: int
    start_ns: int
    end_ns: int


class _Count(NamedTuple):
    name: str
    value: float
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

    def count(self, name: str, value: float = 1, **labels: str | int) -> None:
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
