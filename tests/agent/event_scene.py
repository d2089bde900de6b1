"""Provides a worker's event runner over a fake device and a fake transport that a test controls."""

from __future__ import annotations

from typing import Any

from fake_device import TRAILER_KEY, FakeDevice, FakeTransport

from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.pipeline.life import InboundTools, LaneCounts, OutboundTools
from longshore_agent.pipeline.runners import COPIES_AHEAD_MAX, DIRECT_COPIES_MAX, WRITES_OPEN_MAX, EventRunner
from longshore_agent.pipeline.slabs import Ends
from longshore_agent.pipeline.waits import Gate, StagingMemory
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder, StageLog

BASE = 1 << 30
HOUR_NS = 3600 * 10**9


class EventScene:
    """An idle runner of both halves; `ended` lists the ends of lives in order."""

    def __init__(
        self,
        *,
        memory_bytes: int = 1 << 20,
        lane_count: int = 1,
        deadline_ns: int = HOUR_NS,
        transport: Any = None,
        base: int = BASE,
        **device: Any,
    ) -> None:
        self.device = FakeDevice(**device)
        self.transport: Any = transport or FakeTransport()
        self.metrics, self.spans, self.ends = Metrics(), SpanRecorder(100), Ends()
        log = StageLog(self.metrics, self.spans, later=True)
        counts = LaneCounts([0] * lane_count, [0] * lane_count)
        buffer = StagingRange(base, memory_bytes, memory_bytes)
        copier: Any = self.device
        direct = OutboundTools(copier, self.transport, None, counts, log, 1, Gate(DIRECT_COPIES_MAX))
        memory = StagingMemory(buffer, range(lane_count))
        gates = Gate(COPIES_AHEAD_MAX), Gate(WRITES_OPEN_MAX)
        staged = OutboundTools(copier, self.transport, memory, counts, log, 1, *gates)
        target = InboundTools(copier, buffer, log, TRAILER_KEY, deadline_ns)
        self.runner = EventRunner(direct, staged, target, self.ends, probe_address=base, enter=lambda: None)
        self.ended: list[Any] = []

    def turn(self) -> list[Any]:
        self.ended += self.runner.advance()
        return self.ended

    def outcomes(self) -> list[tuple[int, str, bool]]:
        return [(end.slab.effect.slab, end.error, end.dropped) for end in self.ended]
