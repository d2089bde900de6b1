"""What an agent knows of itself at one moment: the values that workers hand to the supervisor, and HTTP to people.

Pure msgspec structs, msgpack between processes and JSON over HTTP; their docstrings become the OpenAPI page.
Ids and epochs of 64 bits are decimal text, because JSON readers lose digits of numbers above 2^53.
Nothing here holds a token or a byte of anybody's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from longshore_agent.status.metrics import MetricsSnapshot
from longshore_agent.status.spans import Span
from longshore_wire.engine_messages import Endpoint, RankAddress
from longshore_wire.layout import Attention, KVLayout, ModelShape, PageOrder, Parallel

# What one worker puts into a snapshot; counts are true beyond them. The oldest open rooms are the ones to
# look at, so those are listed; of the ended ones the newest. The room that was asked for is always there.
OPEN_ROOMS_LISTED_MAX = 1024
ENDED_ROOMS_LISTED_MAX = 256
SPANS_LISTED_MAX = 4096


class WorkerState(Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    SELF_TESTING = "self-testing"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class SelfTest(msgspec.Struct, frozen=True):
    """Bytes that a worker moved by the configured backend before any engine came.

    Attributes:
        wire: what they travelled over, as a probe found it.
        error: why it failed; empty: it did not.
    """

    backend: str
    wire: str
    bytes_moved: int
    seconds: float
    error: str = ""


class LayoutStatus(msgspec.Struct, frozen=True):
    """One rank's share of the cache; layers and heads are global, `end` is exclusive."""

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    attention: str
    page_size: int
    order: str
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    layers_given: bool
    stage_layers: tuple[int, ...] | None
    blob_bytes: int

    @classmethod
    def of(cls, layout: KVLayout) -> LayoutStatus:
        """Return `layout` in words."""
        model, parallel = layout.model, layout.parallel
        return cls(
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            element_bytes=model.element_bytes,
            attention=model.attention.name,
            page_size=layout.page_size,
            order=layout.order.name,
            tp=parallel.tp,
            tp_rank=parallel.tp_rank,
            pp=parallel.pp,
            pp_rank=parallel.pp_rank,
            dp=parallel.dp,
            dp_rank=parallel.dp_rank,
            first_layer=layout.layers.start,
            end_layer=layout.layers.stop,
            first_head=layout.heads.start,
            end_head=layout.heads.stop,
            layers_given=layout.layer_range is not None,
            stage_layers=layout.stage_layers,
            blob_bytes=layout.blob_bytes,
        )

    def layout(self) -> KVLayout:
        """Return the layout that `of` was given."""
        return KVLayout(
            model=ModelShape(self.layers, self.kv_heads, self.head_dim, self.element_bytes, Attention[self.attention]),
            parallel=Parallel(self.tp, self.tp_rank, self.pp, self.pp_rank, self.dp, self.dp_rank),
            page_size=self.page_size,
            order=PageOrder[self.order],
            layer_range=(self.first_layer, self.end_layer) if self.layers_given else None,
            stage_layers=self.stage_layers,
            blob_bytes=self.blob_bytes,
        )


class RankStatus(msgspec.Struct, frozen=True):
    """Where the worker of one rank listens for peers.

    Attributes:
        device: "cpu", or the UUID of the GPU that holds its pages.
        near: engines whose `agent` is the same write its pages by way DIRECT; empty: nobody does.
    """

    rank: int
    address: str
    epoch: str
    device: str = "cpu"
    near: str = ""


class InstanceStatus(msgspec.Struct, frozen=True):
    """One replica of an engine instance that is registered with this agent.

    Attributes:
        complete: every rank of the replica is known, so peers may be sent here.
        agent: as its endpoint names the agent's life and the kind of its devices, which ranks compare with their `near`.
    """

    instance: str
    roles: tuple[str, ...]
    layout: LayoutStatus
    ranks: tuple[RankStatus, ...]
    complete: bool
    agent: str = ""

    @classmethod
    def of(
        cls, endpoint: Endpoint, roles: tuple[str, ...] = (), places: Mapping[int, tuple[str, str]] | None = None
    ) -> InstanceStatus:
        """Return `endpoint` in words.

        Args:
            roles: names of `Half` in lower case.
            places: (`device`, `near`) of ranks; a rank that is not there is on a CPU, and nobody is near.
        """
        known = places or {}
        return cls(
            instance=endpoint.instance,
            roles=roles,
            layout=LayoutStatus.of(endpoint.layout),
            ranks=tuple(
                RankStatus(rank.rank, rank.address, str(rank.epoch), *known.get(rank.rank, ()))
                for rank in endpoint.ranks
            ),
            complete=endpoint.complete,
            agent=endpoint.agent,
        )

    def endpoint(self) -> Endpoint:
        """Return the endpoint that `of` was given."""
        ranks = tuple(RankAddress(rank.rank, rank.address, int(rank.epoch)) for rank in self.ranks)
        return Endpoint(self.instance, self.layout.layout(), ranks, self.agent)


class PoolStatus(msgspec.Struct, frozen=True):
    """Pages that an engine shares with its worker."""

    pool: int
    page_count: int
    total_bytes: int


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine rank at its worker."""

    instance: str
    rank: int
    roles: tuple[str, ...]
    layout: LayoutStatus
    pools: tuple[PoolStatus, ...] = ()
    pid: int = 0


class PeerStatus(msgspec.Struct, frozen=True):
    """A worker of another engine rank, as one of ours sees it.

    Attributes:
        state: one of `metric_table.PEER_STATES`.
        wire: what a transport's bytes between the two travel over, as a probe found it.
        error: why it was refused or lost, or why no transport may carry bytes between the two: both, the wire, the allowed
            ones and the way out.
        ways: of the rooms so far; with `direct` alone, no transport is used and the wire does not matter.
    """

    instance: str
    dp_rank: int
    rank: int
    state: str
    wire: str
    epoch: str
    error: str = ""
    ways: tuple[str, ...] = ()


class RingStatus(msgspec.Struct, frozen=True):
    """The staging ring of a decode rank. `held_bytes` are in quarantine and no part of `used_bytes`."""

    capacity_bytes: int
    used_bytes: int
    held_bytes: int
    rounds: int


class LaneStatus(msgspec.Struct, frozen=True):
    """One transfer thread of a prefill rank, since its worker started."""

    lane: int
    busy: bool
    slabs: int
    bytes_moved: int


class DataPortStatus(msgspec.Struct, frozen=True):
    """A port on which the transport's library listens for bytes; whoever reaches it may write memory of the worker.

    Attributes:
        protection: what keeps strangers from it, one of `names.PROTECTIONS`.
        refused: attempts to connect that the kernel has dropped there.
    """

    address: str
    port: int
    protection: str
    refused: int


class PairStatus(msgspec.Struct, frozen=True):
    """A room between one pair of ranks.

    Attributes:
        way: `none`: nothing is to move, the source is only told so.
        why: how the way was chosen, in the words of the metrics; `undecided`: the wire is still being found out.
        slabs_total: 0 before the source has said how it cuts what is claimed.
        busy: slabs that a lane or a scatter holds.
    """

    peer_instance: str
    peer_dp_rank: int
    peer_rank: int
    way: str
    state: str
    slabs_done: int
    slabs_total: int
    busy: int = 0
    reason: str = ""
    why: str = ""


class RoomStatus(msgspec.Struct, frozen=True):
    """One half of a room at one worker: what an engine offers, or claims.

    Attributes:
        room, instance, pool: the room's key; `instance` is the prefill's.
        ways, why: of its pairs, each once; why each was chosen.
        tokens_total: of the sequence; -1: not known yet.
        tokens_done: source: acknowledged by every target; target: in the pages.
        reason, text: why it failed, if it did.
    """

    room: str
    instance: str
    pool: int
    half: str
    state: str
    ways: tuple[str, ...]
    tokens_wanted: int
    tokens_done: int
    tokens_total: int
    slabs_done: int
    slabs_total: int
    bytes_moved: int
    age_s: float
    reason: str = ""
    text: str = ""
    pairs: tuple[PairStatus, ...] = ()
    why: tuple[str, ...] = ()


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as the status page shows it.

    Attributes:
        worker: its name in metrics, unique in its agent: the engine's instance and rank, or the GPU.
        state_age_s: how long it has been in `state`.
        silent_s: how long it has not answered; set by the supervisor.
        restarts: how often it was started again.
        error: why it failed, if it did.
        data_path: what protects the least protected of `data_ports`, one of `names.PROTECTIONS`; empty: it has not answered yet.
        rooms_open, rooms_ended: true counts, where lists are bounded.
    """

    worker: str
    pid: int
    epoch: str
    state: WorkerState
    state_age_s: float = 0.0
    silent_s: float = 0.0
    restarts: int = 0
    error: str = ""
    device: str = "cpu"
    self_test: SelfTest | None = None
    engines: tuple[EngineStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    ring: RingStatus | None = None
    lanes: tuple[LaneStatus, ...] = ()
    data_path: str = ""
    data_ports: tuple[DataPortStatus, ...] = ()
    rooms_open: int = 0
    rooms_ended: int = 0


class WorkerSnapshot(WorkerStatus, frozen=True, kw_only=True):
    """What a worker answers to its supervisor; the supervisor makes one for a worker that is dead or starts.

    Attributes:
        rooms: the oldest open ones, at most OPEN_ROOMS_LISTED_MAX, and the one that was asked for.
        ended: the newest, at most ENDED_ROOMS_LISTED_MAX, and the one that was asked for.
        spans: of the room that was asked for, at most SPANS_LISTED_MAX.
    """

    rooms: tuple[RoomStatus, ...] = ()
    ended: tuple[RoomStatus, ...] = ()
    spans: tuple[Span, ...] = ()
    metrics: MetricsSnapshot = MetricsSnapshot()

    def status(self) -> WorkerStatus:
        """Return this without rooms, spans and metrics, which have pages of their own."""
        return WorkerStatus(**{name: getattr(self, name) for name in WorkerStatus.__struct_fields__})


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One agent with all its workers, as the status page shows it.

    Attributes:
        started_unix_s: when the supervisor started, seconds since 1970.
        loop_age_s: how long ago the supervisor's loop last turned; beyond a limit the agent is not live.
        restarts: workers that were started again.
        config_generation: of the configuration that is in force; 0: none was given.
        draining: the agent stops and takes nothing new.
        dying: of each rank whose worker dies again and again, what is to be said of it.
        self_test: kept from the worker that made it, which may be gone.
        unready: each check of readiness that does not hold, as "reason: message". They name no age, so that they stay the same
            while nothing happens.
    """

    deployment: str
    node: str
    version: str
    backend: str
    started_unix_s: float
    uptime_s: float
    loop_age_s: float = 0.0
    restarts: int = 0
    config_generation: int = 0
    draining: bool = False
    dying: tuple[str, ...] = ()
    self_test: SelfTest | None = None
    unready: tuple[str, ...] = ()
    instances: tuple[InstanceStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()


class AgentSnapshot(AgentStatus, frozen=True, kw_only=True):
    """One agent with all that its workers answered; `metrics` are the supervisor's own."""

    workers: tuple[WorkerSnapshot, ...] = ()
    metrics: MetricsSnapshot = MetricsSnapshot()

    def status(self) -> AgentStatus:
        """Return this without rooms, spans and metrics, which have pages of their own."""
        fields = {name: getattr(self, name) for name in AgentStatus.__struct_fields__}
        return AgentStatus(**fields | {"workers": tuple(worker.status() for worker in self.workers)})
