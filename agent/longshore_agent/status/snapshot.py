"""An agent's state at one moment: its status, with the rooms, spans and metrics that have pages of their own.

Workers send their part to the supervisor as msgpack, and HTTP shows it as JSON.
"""

from __future__ import annotations

import msgspec

from longshore_agent.status.metrics import MetricsSnapshot
from longshore_agent.status.spans import Span
from longshore_spec.status import OLDEST_ROOMS_MAX, AgentStatus, Finding, RoomStatus, WorkerStatus

# Limits of one worker's lists in a snapshot; the counts are exact. The oldest open rooms are the interesting
# ones, so these are listed, and the newest ended ones. A requested room is always included.
OPEN_ROOMS_LISTED_MAX = 1024
ENDED_ROOMS_LISTED_MAX = 256
SPANS_LISTED_MAX = 4096
# Limits of a worker's last snapshot, which the supervisor keeps. It fits the socket between the two, so that a worker need
# not wait.
LEFT_ROOMS_MAX = 64
LEFT_SPANS_MAX = 512
# A worker's restart is a finding for this long.
LATELY_S = 900.0


class WorkerSnapshot(WorkerStatus, frozen=True, kw_only=True):
    """A worker's answer to the supervisor. The supervisor creates it for a worker that is dead or starting.

    Attributes:
        rooms: the oldest open ones, at most OPEN_ROOMS_LISTED_MAX, and a requested one.
        ended: the newest ended ones, at most ENDED_ROOMS_LISTED_MAX, and a requested one.
        spans: spans of the requested room, at most SPANS_LISTED_MAX. In a worker's last snapshot the newest of all rooms.
        spans_cut: its first ones are not kept, or are more than are listed.
    """

    rooms: tuple[RoomStatus, ...] = ()
    ended: tuple[RoomStatus, ...] = ()
    spans: tuple[Span, ...] = ()
    spans_cut: bool = False
    metrics: MetricsSnapshot = MetricsSnapshot()

    def status(self) -> WorkerStatus:
        """Return this without spans, metrics and most rooms, which have pages of their own."""
        oldest = sorted(self.rooms, key=lambda room: -room.age_s)[:OLDEST_ROOMS_MAX]
        fields = {name: getattr(self, name) for name in WorkerStatus.__struct_fields__}
        return WorkerStatus(
            **fields | {"oldest_rooms": tuple(msgspec.structs.replace(room, pairs=()) for room in oldest)}
        )


class AgentSnapshot(AgentStatus, frozen=True, kw_only=True):
    """One agent with all of its workers' answers. `metrics` are the supervisor's own.

    Attributes:
        dying: one message for each rank whose worker dies repeatedly.
        refused: who was refused lately, and why, one message for each engine rank.
        restarts_lately: restarts of workers in the last LATELY_S.
        left_workers: the last snapshots of the workers of `left.last`.
        sends_traces: whether it sends ended rooms to OpenTelemetry.
        findings: empty, since only the page judges.
    """

    findings: tuple[Finding, ...] = ()
    workers: tuple[WorkerSnapshot, ...] = ()
    dying: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    restarts_lately: int = 0
    left_workers: tuple[WorkerSnapshot, ...] = ()
    metrics: MetricsSnapshot = MetricsSnapshot()
    sends_traces: bool = False

    @property
    def all_workers(self) -> tuple[WorkerSnapshot, ...]:
        """All that is known of workers, also of those that have ended."""
        return (*self.workers, *self.left_workers)

    def status(self, findings: tuple[Finding, ...] = ()) -> AgentStatus:
        """Return this with findings, without rooms, spans and metrics, which have pages of their own."""
        fields = {name: getattr(self, name) for name in AgentStatus.__struct_fields__}
        workers = tuple(worker.status() for worker in self.workers)
        return AgentStatus(**fields | {"workers": workers, "findings": findings})
