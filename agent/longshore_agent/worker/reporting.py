"""Reports each room that has ended to the supervisor, with its steps, if the agent sends rooms to OpenTelemetry.

The control thread calls `ended`, which only keeps the end. A thread of this module does the rest at a slow pace: it reads the
new spans of the recorder, sorts them by room, and sends reports. Whatever does not fit a limit is dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from longshore_agent.control.node_link import DATAGRAM_BYTES_MAX, NodeLink, RoomReported
from longshore_agent.status.metric_table import named_wire
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.room_report import PairReport, RoomReport, StepReport
from longshore_agent.status.snapshot import SPANS_LISTED_MAX
from longshore_agent.status.spans import Record, SpanRecorder, room_key
from longshore_wire.effects import PeerId, RoomEnded
from longshore_wire.errors import Reason
from longshore_wire.links import Link
from longshore_wire.names import room_name
from longshore_wire.peer_messages import PairKey, RoomKey

# Time between two turns of the thread.
_TURN_S = 0.25
# The steps of an engine arrive after the end of its room, when the engine has taken that.
_SETTLE_NS = 500_000_000
# Ends that wait for a turn: 16,000 rooms a second.
_ENDS_MAX = 4096
# Messages that wait because the supervisor has not read the last ones.
_UNSENT_MAX = 256
# Encoded, a message has its own length and tag besides the report.
_REPORT_BYTES_MAX = DATAGRAM_BYTES_MAX - 64
_DROPPED = "longshore_dropped_spans_total"


class _End(NamedTuple):
    effect: RoomEnded
    pairs: tuple[PairReport, ...]
    ended_ns: int


class RoomReporter:
    """See the module.

    Args:
        worker: the worker's name.
        link: to the supervisor; this module sends by `offer` only.
    """

    def __init__(self, worker: str, spans: SpanRecorder, metrics: Metrics, link: NodeLink) -> None:
        self._worker = worker
        self._recorder = spans
        self._metrics = metrics
        self._link = link
        self._ends: deque[_End] = deque()
        self._unsent: deque[RoomReported] = deque()
        self._cursor = 0
        self._steps: dict[RoomKey, list[Record]] = {}  # oldest room first
        self._step_count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="room-reports", daemon=True)
        self._thread.start()

    def ended(self, effect: RoomEnded, peers: Mapping[PeerId, Link], now_ns: int) -> None:
        """Keep the end of a room. Called by the control thread."""
        if len(self._ends) >= _ENDS_MAX:
            self._metrics.add(_DROPPED)
            return
        pairs = []
        for end in effect.pairs:
            way = end.way.label if end.way is not None else ""
            known = peers.get(end.peer)
            wire = named_wire(known.wire if known is not None else "", way) if way else ""
            pairs.append(PairReport(end.peer.path, way, wire, end.slab_count, end.cache))
        self._ends.append(_End(effect, tuple(pairs), now_ns))

    def close(self) -> None:
        """Send what can be sent now, and end the thread."""
        self._stop.set()
        self._thread.join()
        self._turn(time.monotonic_ns() + _SETTLE_NS)

    def _run(self) -> None:
        while not self._stop.wait(_TURN_S):
            self._turn(time.monotonic_ns())

    def _turn(self, now_ns: int) -> None:
        self._take_steps()
        while self._ends and self._ends[0].ended_ns + _SETTLE_NS <= now_ns:
            self._report(self._ends.popleft())
        while self._unsent and self._link.offer(self._unsent[0]):
            self._unsent.popleft()

    def _take_steps(self) -> None:
        """Sort the new spans by room. Those of the oldest rooms go if more wait than the recorder holds."""
        records, self._cursor, lost_count = self._recorder.since(self._cursor)
        for record in records:
            self._steps.setdefault(room_key(record), []).append(record)
        self._step_count += len(records)
        while self._step_count > self._recorder.capacity:
            lost_count += self._forget(next(iter(self._steps)))
        if lost_count:
            self._metrics.add(_DROPPED, lost_count)

    def _forget(self, key: RoomKey) -> int:
        count = len(self._steps.pop(key, ()))
        self._step_count -= count
        return count

    def _report(self, end: _End) -> None:
        effect = end.effect
        records = self._steps.get(effect.key, [])
        self._forget(effect.key)
        left_out_count = max(0, len(records) - SPANS_LISTED_MAX)
        report = RoomReport(
            worker=self._worker,
            half=effect.half.label,
            instance=effect.key.instance,
            room=room_name(effect.key.room),
            opened_ns=effect.opened_ns,
            ended_ns=end.ended_ns,
            outcome=effect.outcome,
            reason="" if effect.reason is Reason.NONE else effect.reason.name,
            text=effect.text,
            bytes_moved=effect.bytes_moved,
            pairs=end.pairs,
        )
        for part in report.parts([_step(record) for record in records[left_out_count:]]):
            data = part.to_bytes()
            if len(self._unsent) >= _UNSENT_MAX or len(data) > _REPORT_BYTES_MAX:
                left_out_count += part.span_count
            else:
                self._unsent.append(RoomReported(data, part.span_count))
        if left_out_count:
            self._metrics.add(_DROPPED, left_out_count)


def _step(record: Record) -> StepReport:
    stage, key, slab, lane, start_ns, end_ns, kind, _ = record
    source, target, cache = (key.source_rank, key.target_rank, key.cache) if isinstance(key, PairKey) else (-1, -1, -1)
    return StepReport(stage, kind.value, source, target, cache, slab, lane, start_ns, end_ns)
