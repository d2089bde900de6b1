"""The types of an agent's `/v1/status`, with counts and rates: of `status`, `check`, `verify` and the view of `up`. Pure.

The names are those of the page. Fields that an agent does not tell have the defaults, which `status` shows; `check` refuses
a page without the fields that it judges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from longshore_cli.faults import QUARANTINE_SHARE
from longshore_cli.metrics_page import MetricsPage
from longshore_cli.status_pages import AgentPageError

SOURCE, TARGET = "source", "target"
ATTACHED, READY = "attached", "ready"
# Workers answer within milliseconds. Also in `web_page.html`.
_SILENCE_S = 2.0
_BYTES_PER_GB = 1e9


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of ranks: the other one, as our worker sees it.

    Attributes:
        half: our half of its rooms: SOURCE if we send, TARGET if we receive.
        error: why it was refused or lost, or why no transport may carry its bytes.
        bytes_moved: of finished slabs since it attached.
        gb_per_s: since the read before; None: there is none of this life of the worker.
    """

    instance: str
    dp_rank: int = 0
    rank: int = 0
    half: str = ""
    state: str = ""
    ways: tuple[str, ...] = ()
    wire: str = ""
    epoch: str = ""
    memory: str = "device"
    error: str = ""
    bytes_moved: int = 0
    gb_per_s: float | None = None

    @property
    def name(self) -> str:
        """The name that its own agent gives its worker."""
        path = f"{self.instance}/{self.dp_rank}/{self.rank}"
        return f"{path}/host" if self.memory == "host" else path

    @property
    def healthy(self) -> bool:
        """Whether rooms with it can move."""
        return self.state == ATTACHED and not self.error


class Layout(msgspec.Struct, frozen=True):
    """The parallel layout of an engine rank."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_rank: int = 0
    page_size: int = 0


class Pool(msgspec.Struct, frozen=True):
    """Pages that an engine shares with its worker."""

    pool: int = 0
    page_count: int = 0
    total_bytes: int = 0


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine rank at its worker."""

    instance: str
    rank: int = 0
    roles: tuple[str, ...] = ()
    pid: int = 0
    connected_s: float = 0.0
    memory: str = "device"
    layout: Layout = Layout()
    pools: tuple[Pool, ...] = ()


class Ring(msgspec.Struct, frozen=True):
    """The staging ring of a worker. `held_bytes` are in quarantine and not in `used_bytes`."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    held_bytes: int = 0

    @property
    def used_share(self) -> float:
        """The part that is granted or holds slabs."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def held_share(self) -> float:
        """The part in quarantine."""
        return self.held_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """One half of an open room at a worker. `instance` is the prefill instance."""

    room: str
    instance: str
    half: str
    state: str
    age_s: float
    tokens_done: int = 0
    tokens_wanted: int = 0


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. Rates are sums over its pairs.

    Attributes:
        name: the engine's instance and rank.
        mps: its GPU is shared by MPS; None: it has none, or the driver does not tell.
        peer_access: all GPUs of the node can write its GPU's memory; None: it has none, or that is not known.
        data_path: the protection of its data ports; empty: it has none.
    """

    name: str = msgspec.field(name="worker")
    pid: int = 0
    epoch: str = ""
    state: str = ""
    silent_s: float = 0.0
    restarts: int = 0
    error: str = ""
    device: str = ""
    mps: bool | None = None
    peer_access: bool | None = None
    data_path: str = ""
    sent_gb_per_s: float | None = None
    received_gb_per_s: float | None = None
    rooms_open: int = 0
    oldest_rooms: tuple[Room, ...] = ()
    mismatches: int = 0
    mismatch: str = ""
    ring: Ring | None = None
    engines: tuple[Engine, ...] = ()
    pairs: tuple[Pair, ...] = msgspec.field(name="peers", default=())

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with it, the worst first."""
        if self.error:
            yield f"worker {self.name} is {self.state}: {self.error}"
        elif self.state != READY:
            yield f"worker {self.name} is {self.state}"
        if self.silent_s > _SILENCE_S:
            yield f"worker {self.name} is silent for {self.silent_s:.0f} s"
        for pair in self.pairs:
            if not pair.healthy:
                yield f"worker {self.name}: {pair.name} is {pair.state}" + (f": {pair.error}" if pair.error else "")
        if self.mismatches:
            yield f"worker {self.name}: {self.mismatches} slabs with differing digests: {self.mismatch}"
        if self.ring is not None and self.ring.held_share > QUARANTINE_SHARE:
            yield f"worker {self.name}: {self.ring.held_share:.0%} of its ring is in quarantine"


class Rank(msgspec.Struct, frozen=True):
    """The address at which the worker of one engine rank listens for peers."""

    address: str = ""


class Instance(msgspec.Struct, frozen=True):
    """One replica of an engine instance. `complete`: all of its ranks have registered."""

    instance: str
    roles: tuple[str, ...] = ()
    complete: bool = True
    ranks: tuple[Rank, ...] = ()


class NodeFacts(msgspec.Struct, frozen=True):
    """What an agent has on its node. None is no limit, or a limit that is not known."""

    memlock_bytes: int | None = None
    descriptors: int = 0
    memory_limit_bytes: int | None = None
    gpus: int = 0
    infiniband: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's answer.

    Attributes:
        restarts: of its workers.
        node_facts: None: an agent of an earlier release does not tell them.
        unready: why it is not ready, as "reason: message"; empty: it is.
        rooms_done, rooms_failed, failures: ended halves of rooms at its running workers; failures by reason.
    """

    deployment: str = ""
    node: str = ""
    version: str = ""
    backend: str = ""
    started_unix_s: float = 0.0
    uptime_s: float = 0.0
    restarts: int = 0
    node_facts: NodeFacts | None = None
    config: dict[str, str] = {}
    draining: bool = False
    dying: tuple[str, ...] = ()
    unready: tuple[str, ...] = ()
    rooms_done: int = 0
    rooms_failed: int = 0
    failures: dict[str, int] = {}
    instances: tuple[Instance, ...] = ()
    workers: tuple[Worker, ...] = ()

    @property
    def rooms_open(self) -> int:
        """Open halves of rooms."""
        return sum(worker.rooms_open for worker in self.workers)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of its engines: by its config, else by the engines themselves."""
        halves = {role for worker in self.workers for engine in worker.engines for role in engine.roles}
        found = set(self.config) or {{SOURCE: "prefill", TARGET: "decode"}.get(half, half) for half in halves}
        return tuple(sorted(found, reverse=True))

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with it, the worst first."""
        yield from self.unready
        yield from self.dying
        for worker in self.workers:
            yield from worker.faults()


# Before any thread: msgspec crashes if two threads convert to a type of which it has not made its description yet.
msgspec.json.Decoder(Report)


def report_of(
    name: str, status: Mapping[str, Any], metrics: MetricsPage | None = None, *, needed: Sequence[str] = ()
) -> Report:
    """Return an agent's report without rates.

    Args:
        status: its `/v1/status`, decoded.
        metrics: its `/metrics`; None: the report has no ended rooms.
        needed: paths of fields that the page must have, such as `workers.peers.wire`.
    Raises:
        AgentPageError: the page is none of an agent, or lacks a needed field.
    """
    try:
        found = msgspec.convert(status, Report)
    except msgspec.ValidationError as error:
        raise AgentPageError(f"{name}/v1/status: {error}: is an agent of this release there?") from error
    if untold := [path for path in needed if not _tells(status, path.split("."))]:
        raise AgentPageError(f"the agent at {name} does not tell {', '.join(untold)}: update it")
    if metrics is None:
        return found
    outcomes = metrics.by("outcome", "longshore_rooms_total")
    reasons = metrics.by("reason", "longshore_rooms_total", outcome="failed")
    return msgspec.structs.replace(
        found,
        rooms_done=int(outcomes.get("done", 0)),
        rooms_failed=int(outcomes.get("failed", 0)),
        failures={reason: int(count) for reason, count in sorted(reasons.items()) if count},
    )


def _tells(found: Any, path: Sequence[str]) -> bool:
    """Return whether there is something at a path below all items of a list. Below null nothing is missing."""
    if isinstance(found, list):
        return all(_tells(item, path) for item in found)
    if not path or found is None:
        return True
    return path[0] in found and _tells(found[path[0]], path[1:])


def with_rates(report: Report, before: Report | None) -> Report:
    """Return a report with the rates since an earlier one of the same agent; without it, as it is.

    The time between the two is that of the agent's clock.
    """
    if before is None or before.started_unix_s != report.started_unix_s or before.uptime_s >= report.uptime_s:
        return report
    passed_s = report.uptime_s - before.uptime_s
    known = {worker.epoch: {_key(pair): pair.bytes_moved for pair in worker.pairs} for worker in before.workers}
    workers = [
        _with_rates(worker, known[worker.epoch], passed_s) if worker.epoch in known else worker
        for worker in report.workers
    ]
    return msgspec.structs.replace(report, workers=tuple(workers))


def _with_rates(worker: Worker, before: Mapping[object, int], passed_s: float) -> Worker:
    pairs = []
    for pair in worker.pairs:
        moved = pair.bytes_moved - before.get(_key(pair), 0)
        # A pair that was lost and has attached again counts from 0.
        moved = moved if moved >= 0 else pair.bytes_moved
        pairs.append(msgspec.structs.replace(pair, gb_per_s=moved / passed_s / _BYTES_PER_GB))
    sums = {half: sum(pair.gb_per_s or 0.0 for pair in pairs if pair.half == half) for half in (SOURCE, TARGET)}
    return msgspec.structs.replace(
        worker, pairs=tuple(pairs), sent_gb_per_s=sums[SOURCE], received_gb_per_s=sums[TARGET]
    )


def _key(pair: Pair) -> object:
    return pair.half, pair.instance, pair.dp_rank, pair.rank, pair.memory
