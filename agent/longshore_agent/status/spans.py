"""Records the newest spans of the data path's stages in one worker.

Lanes, scatter threads and the control thread record spans; the status page and tests read them.
"""

from __future__ import annotations

import threading

import msgspec

from longshore_wire.peer_messages import PairKey


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
