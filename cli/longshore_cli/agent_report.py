"""An agent's status with the counts of its metrics and the rates since an earlier read: of `status`, `check`, `verify` and `up`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from longshore_cli.metrics_page import MetricsPage
from longshore_cli.status_pages import AgentPageError
from longshore_spec.status import AgentStatus, PeerStatus, WorkerStatus

SOURCE, TARGET = "source", "target"
_BYTES_PER_GB = 1e9


class Pair(PeerStatus, frozen=True):
    """One pair of ranks: the other one, as our worker sees it.

    Attributes:
        gb_per_s: since the read before; None: there is none of this life of the worker.
    """

    gb_per_s: float | None = None


class Worker(WorkerStatus, frozen=True, kw_only=True):
    """One worker. Rates are sums over its pairs."""

    sent_gb_per_s: float | None = None
    received_gb_per_s: float | None = None
    peers: tuple[Pair, ...] = ()


class Report(AgentStatus, frozen=True, kw_only=True):
    """One agent's answer.

    Attributes:
        rooms_done, rooms_failed: ended halves of rooms, also of engines that have left.
        failures: those that failed at its running workers, by reason.
    """

    rooms_done: int = 0
    rooms_failed: int = 0
    failures: Mapping[str, int] = {}
    workers: tuple[Worker, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of its engines: by its config, else by the engines themselves."""
        halves = {role for worker in self.workers for engine in worker.engines for role in engine.roles}
        roles = set(self.config) or {{SOURCE: "prefill", TARGET: "decode"}.get(half, half) for half in halves}
        return tuple(sorted(roles, reverse=True))


# Before any thread: msgspec crashes if two threads convert to a type of which it has not made its description yet.
msgspec.json.Decoder(Report)


def report_of(name: str, status: Mapping[str, Any], metrics: MetricsPage | None = None) -> Report:
    """Return an agent's report without rates.

    Args:
        status: its `/v1/status`, decoded.
        metrics: its `/metrics`; None: the report has no ended rooms.
    Raises:
        AgentPageError: the page is none of an agent, or of an agent whose release is too old.
    """
    try:
        report = msgspec.convert(status, Report)
    except msgspec.ValidationError as error:
        raise AgentPageError(f"{name}/v1/status: {error}: is an agent of this release there?") from error
    if metrics is None:
        return report
    outcomes = metrics.by("outcome", "longshore_rooms_total")
    reasons = metrics.by("reason", "longshore_rooms_total", outcome="failed")
    return msgspec.structs.replace(
        report,
        rooms_done=int(outcomes.get("done", 0)) + report.left.rooms_done,
        rooms_failed=int(outcomes.get("failed", 0)) + report.left.rooms_failed,
        failures={reason: int(count) for reason, count in sorted(reasons.items()) if count},
    )


def with_rates(report: Report, before: Report | None) -> Report:
    """Return a report with the rates since an earlier one of the same agent; without it, as it is.

    The time between the two is that of the agent's clock.
    """
    if before is None or before.started_unix_s != report.started_unix_s or before.uptime_s >= report.uptime_s:
        return report
    passed_s = report.uptime_s - before.uptime_s
    moved = {worker.epoch: {_key(pair): pair.bytes_moved for pair in worker.peers} for worker in before.workers}
    workers = [
        _with_rates(worker, moved[worker.epoch], passed_s) if worker.epoch in moved else worker
        for worker in report.workers
    ]
    return msgspec.structs.replace(report, workers=tuple(workers))


def _with_rates(worker: Worker, before: Mapping[object, int], passed_s: float) -> Worker:
    pairs = []
    for pair in worker.peers:
        moved = pair.bytes_moved - before.get(_key(pair), 0)
        # A pair that was lost and has attached again counts from 0.
        moved = moved if moved >= 0 else pair.bytes_moved
        pairs.append(msgspec.structs.replace(pair, gb_per_s=moved / passed_s / _BYTES_PER_GB))
    sums = {half: sum(pair.gb_per_s or 0.0 for pair in pairs if pair.half == half) for half in (SOURCE, TARGET)}
    return msgspec.structs.replace(
        worker, peers=tuple(pairs), sent_gb_per_s=sums[SOURCE], received_gb_per_s=sums[TARGET]
    )


def _key(pair: Pair) -> object:
    return pair.half, pair.instance, pair.dp_rank, pair.rank, pair.memory
