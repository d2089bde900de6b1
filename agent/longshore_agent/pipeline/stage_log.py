"""Records spans and metrics for each stage of a slab.

`life` adds records; the control thread of a GPU's worker writes them when it has no slab to move. A slab has ten
records, and writing them takes as long as a GPU's slab takes on the wire. Do not assume that a record is visible at
once.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_wire.effects import StartScatter, StartWrite

# When so many records are pending, each new one first writes the oldest.
_PENDING_MAX = 4096


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
    """See the module.

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
