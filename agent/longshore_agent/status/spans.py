"""Records what one worker does for its rooms: the newest spans, and the metrics of each stage.

Lanes, scatter threads and the control thread record stages of slabs, and `steps` the control thread's messages; the
status page and tests read the spans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

import msgspec

from longshore_agent.status.metrics import Count, Metrics
from longshore_wire.effects import StartScatter, StartWrite
from longshore_wire.names import room_name
from longshore_wire.peer_messages import PairKey, RoomKey
from longshore_wire.ways import Way

# Spans beyond the capacity that are dropped together.
_SURPLUS_MAX = 256


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
        cache, source_rank, target_rank, slab: -1 if the step is of no cache, no rank there, or of no slab.
        lane: index of the lane or thread; -1 if none.
        woken_ns: when the control thread woke for the turn of this step; 0 for a step of another thread.
        worker: the name of the worker that has recorded it, or whose engine has.
    """

    stage: str
    instance: str
    room: str
    cache: int
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
    """Keeps the newest `capacity` spans, of any thread.

    Attributes:
        append: adds a record. The caller calls `trim` after a while: a control thread once a turn.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, capacity
        self.capacity = capacity
        self._lock = threading.Lock()
        self._spans: list[Record] = []
        self.append: Callable[[Record], None] = self._spans.append
        self._dropped_count = 0
        self._lost_ns = -1

    def __len__(self) -> int:
        return min(len(self._spans), self.capacity)

    @property
    def lost_ns(self) -> int:
        """The latest end of a span that is no longer kept; -1 if all are."""
        with self._lock:
            self._drop()
            return self._lost_ns

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
        self.append((stage, key, slab, lane, start_ns, end_ns, kind, woken_ns))
        self.trim()

    def trim(self) -> None:
        """Drop old spans if there are many more than `capacity`. Dropping each one alone would take longer."""
        if len(self._spans) >= self.capacity + _SURPLUS_MAX:
            with self._lock:
                self._drop()

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
            self._drop()
            first = max(cursor, self._dropped_count)
            found = self._spans[first - self._dropped_count :]
        return found, first + len(found), first - cursor

    def _copy(self) -> list[Record]:
        """Return a copy of all spans, so that recorders do not wait for a search."""
        with self._lock:
            self._drop()
            return self._spans.copy()

    def _drop(self) -> None:
        """Drop all but the newest `capacity` spans. Called under the lock; other threads may append meanwhile."""
        surplus = len(self._spans) - self.capacity
        if surplus > 0:
            self._lost_ns = max(self._lost_ns, *(span[5] for span in self._spans[:surplus]))
            del self._spans[:surplus]
            self._dropped_count += surplus


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
        room=room_name(room.room),
        cache=pair.cache if pair is not None else -1,
        source_rank=pair.source_rank if pair is not None else -1,
        target_rank=pair.target_rank if pair is not None else -1,
        slab=slab,
        lane=lane,
        start_ns=start_ns,
        end_ns=end_ns,
        kind=kind,
        woken_ns=woken_ns,
    )


class StageLog:
    """Records the stages of slabs and counts them in the metrics.

    Args:
        later: True: the log is of a control thread, which counts when nothing waits; see `Metrics.later`. False: count at
            once, in any thread.
    """

    def __init__(self, metrics: Metrics, spans: SpanRecorder, *, later: bool) -> None:
        self._metrics, self._spans = metrics, spans
        self._do: Callable[..., None] = metrics.later if later else _now
        # Looking a series up takes longer than counting in it.
        self._stages: dict[str, tuple[Count, Count]] = {}
        self._written: dict[tuple[str, str, int], tuple[Count, Count, Count]] = {}
        self._writes = metrics.counter("longshore_writes_total", way=Way.STAGED.label)
        self._pieces = metrics.counter("longshore_write_pieces_total", way=Way.STAGED.label)

    def stage(self, stage: str, effect: StartWrite | StartScatter, lane: int, start_ns: int, end_ns: int) -> None:
        """Record that a slab was in `stage` from `start_ns` to `end_ns` (time.monotonic_ns)."""
        self._spans.record(stage, effect.pair, effect.slab, lane, start_ns, end_ns)
        self._do(self._count_stage, stage, end_ns - start_ns, effect.payload_bytes)

    def gathered(self, effect: StartWrite, lane: int, start_ns: int, end_ns: int, piece_count: int) -> None:
        """Record that a staged slab was gathered, and that its write has begun, of `piece_count` pieces."""
        self._spans.record("gather", effect.pair, effect.slab, lane, start_ns, end_ns)
        self._do(self._count_gathered, end_ns - start_ns, effect.payload_bytes, piece_count)

    def written(self, effect: StartWrite, lane: int, start_ns: int, end_ns: int, wire: str) -> None:
        """Record that all bytes of a slab were written from `start_ns` to `end_ns` over a wire."""
        self._spans.record("write", effect.pair, effect.slab, lane, start_ns, end_ns)
        way, cache = effect.way.label, effect.pair.cache
        self._do(self._count_written, end_ns - start_ns, effect.payload_bytes, way, wire, cache)

    def count(self, name: str, value: float = 1, **labels: str | int) -> None:
        """Add `value` to a counter."""
        self._do(self._metrics.add, name, value, **labels)

    def _count_stage(self, stage: str, length_ns: int, payload_bytes: int) -> None:
        found = self._stages.get(stage)
        if found is None:
            found = self._stages[stage] = (
                self._metrics.histogram("longshore_stage_seconds", stage=stage),
                self._metrics.counter("longshore_stage_bytes_total", stage=stage),
            )
        observe, add = found
        observe(length_ns / 1e9)
        add(payload_bytes)

    def _count_gathered(self, length_ns: int, payload_bytes: int, piece_count: int) -> None:
        self._count_stage("gather", length_ns, payload_bytes)
        self._writes(1)
        self._pieces(piece_count)

    def _count_written(self, length_ns: int, payload_bytes: int, way: str, wire: str, cache: int) -> None:
        self._count_stage("write", length_ns, payload_bytes)
        found = self._written.get((way, wire, cache))
        if found is None:
            found = self._written[way, wire, cache] = (
                self._metrics.counter("longshore_written_bytes_total", way=way, wire=wire),
                self._metrics.counter("longshore_written_seconds_total", way=way, wire=wire),
                self._metrics.counter("longshore_cache_bytes_total", cache=cache),
            )
        add_bytes, add_seconds, add_cache_bytes = found
        add_bytes(payload_bytes)
        add_cache_bytes(payload_bytes)
        add_seconds(length_ns / 1e9)


def _now(count: Callable[..., None], *arguments: object, **labels: str | int) -> None:
    count(*arguments, **labels)
