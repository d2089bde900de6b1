"""What a GPU's lanes and scatters have done, kept for a moment: spans and counts are written down when no slab waits.

Called by `device_lanes` and `device_scatter`. A slab has ten counts, which take as long to write as a slab takes the wire.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_wire.effects import StartScatter, StartWrite

# Kept at most; a worker that is busy for so long writes them down as they come.
_KEPT_MAX = 4096


class _Stage(NamedTuple):
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
    """See the module."""

    def __init__(self, metrics: Metrics, spans: SpanRecorder) -> None:
        self._metrics = metrics
        self._spans = spans
        self._kept: deque[_Stage | _Count] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def stage(self, stage: str, effect: StartWrite | StartScatter, lane: int, start_ns: int, end_ns: int) -> None:
        """A slab was in `stage` from `start_ns` to `end_ns` (time.monotonic_ns)."""
        self._keep(_Stage(stage, effect, lane, start_ns, end_ns))

    def count(self, name: str, value: int = 1, **labels: str | int) -> None:
        """Something was counted."""
        self._keep(_Count(name, value, labels))

    def write(self) -> None:
        """Write one of them down: whoever becomes busy meanwhile waits for no more."""
        if self._kept:
            self._write_first()

    def _keep(self, entry: _Stage | _Count) -> None:
        if len(self._kept) >= _KEPT_MAX:
            self._write_first()
        self._kept.append(entry)

    def _write_first(self) -> None:
        entry = self._kept.popleft()
        if isinstance(entry, _Count):
            self._metrics.add(entry.name, entry.value, **entry.labels)
            return
        stage, effect, lane, start_ns, end_ns = entry
        self._spans.record(stage, effect.pair, effect.slab, lane, start_ns, end_ns)
        self._metrics.observe("longshore_stage_seconds", (end_ns - start_ns) / 1e9, stage=stage)
        self._metrics.add("longshore_stage_bytes_total", effect.payload_bytes, stage=stage)
