"""The types of an agent's `/v1/status`: its workers, engines, peers, rings and rooms. Agent, operator and command line share them.

Pure msgspec structs, JSON over HTTP. Their docstrings are part of the agent's OpenAPI page. Ids and epochs of 64 bits are
decimal text, because many JSON parsers lose digits of numbers above 2^53. No field holds a token or a byte of a cache.

Agents and readers of two releases meet during an upgrade: a reader ignores fields that it does not know, and a field that is
added later has a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from longshore_wire.engine_messages import Endpoint, RankAddress
from longshore_wire.layout import Attention, KVLayout, ModelShape, PageOrder, Parallel, Plane, TargetMemory

# Of the oldest open rooms of a worker on the status page.
OLDEST_ROOMS_MAX = 3
# Of the engines that have left on the status page.
LEFT_LISTED_MAX = 16
# States of a peer: rooms can move with an attached one.
CONNECTING, ATTACHED, LOST, REFUSED = "connecting", "attached", "lost", "refused"


class WorkerState(Enum):
    """The state of a worker."""

    STARTING = "starting"
    SELF_TESTING = "self-testing"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, _value: object) -> WorkerState:
        """Return the state of an agent of another release."""
        return cls.UNKNOWN


class Severity(Enum):
    """How bad a finding is."""

    CRITICAL = "critical"  # engines cannot use the agent: `/readyz` answers 503
    ERROR = "error"  # rooms fail
    WARNING = "warning"  # rooms move, but more slowly or with less safety than they should

    @classmethod
    def _missing_(cls, _value: object) -> Severity:
        """Return the severity of an agent of another release."""
        return cls.WARNING


class Finding(msgspec.Struct, frozen=True):
    """One thing that an agent finds wrong with itself. `longshore_spec.findings` lists all codes.

    Attributes:
        code: a CamelCase word.
        text: the observation. It contains no age, so that it stays the same while nothing changes.
        way_out: what to do about it.
        link: the page about it, below the documentation's root.
        worker: the worker that it is about; empty: the agent.
        since_unix_s: when the agent first found it.
    """

    code: str
    severity: Severity
    text: str
    way_out: str
    link: str
    worker: str = ""
    since_unix_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


class SelfTest(msgspec.Struct, frozen=True):
    """The result of a self-test, which moves bytes by the configured backend.

    Attributes:
        wire: the wire that the bytes used, as a probe found it.
        error: why it failed; empty if it passed.
    """

    backend: str
    wire: str
    bytes_moved: int
    seconds: float
    error: str = ""


class LayoutStatus(msgspec.Struct, frozen=True):
    """One rank's share of a cache; layers and heads are global, `end` is exclusive.

    Attributes:
        planes: (heads, bytes of a row, rows) of each; empty: K and V, or a latent, as the fields say.
        others: the rank's other caches, each without others.
    """

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
    planes: tuple[Plane, ...] = ()
    name: str = "kv"
    others: tuple[LayoutStatus, ...] = ()

    @classmethod
    def of(cls, layout: KVLayout) -> LayoutStatus:
        """Return the status of `layout`."""
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
            planes=() if model == _usual(model) else model.planes,
            name=layout.name,
            others=tuple(map(cls.of, layout.caches[1:])),
        )

    def layout(self) -> KVLayout:
        """Return the layout: the inverse of `of`."""
        return KVLayout(
            model=ModelShape(self.layers, self.planes, self.element_bytes)
            if self.planes
            else ModelShape.of(
                Attention[self.attention], self.layers, self.kv_heads, self.head_dim, self.element_bytes
            ),
            parallel=Parallel(self.tp, self.tp_rank, self.pp, self.pp_rank, self.dp, self.dp_rank),
            page_size=self.page_size,
            order=PageOrder[self.order],
            layer_range=(self.first_layer, self.end_layer) if self.layers_given else None,
            stage_layers=self.stage_layers,
            blob_bytes=self.blob_bytes,
            name=self.name,
            others=tuple(other.layout() for other in self.others),
        )


def _usual(model: ModelShape) -> ModelShape:
    """Return the model that the fields other than `planes` describe."""
    return ModelShape.of(model.attention, model.layers, model.kv_heads, model.head_dim, model.element_bytes)


class RankStatus(msgspec.Struct, frozen=True):
    """The address at which one rank's worker listens for peers.

    Attributes:
        device: "cpu", or the UUID of the GPU that holds its pages.
        near: engines with the same `agent`, or with this name and `.gpu`, write its pages by way DIRECT; empty if none does.
        host: the host name of its engine, in a cluster that of its pod; empty if unknown.
    """

    rank: int
    address: str
    epoch: str
    device: str = "cpu"
    near: str = ""
    host: str = ""


class InstanceStatus(msgspec.Struct, frozen=True):
    """One replica of an engine instance that is registered with this agent.

    Attributes:
        complete: every rank of the replica is known, so peers may use it.
        agent: the endpoint's name for the agent's life and kind of devices, which ranks compare with their `near`.
        memory: of these workers' pages: `device` or `host`.
    """

    instance: str
    roles: tuple[str, ...]
    layout: LayoutStatus
    ranks: tuple[RankStatus, ...]
    complete: bool
    agent: str = ""
    memory: str = "device"

    @classmethod
    def of(
        cls,
        endpoint: Endpoint,
        roles: tuple[str, ...] = (),
        places: Mapping[int, tuple[str, ...]] | None = None,
        memory: TargetMemory = TargetMemory.DEVICE,
    ) -> InstanceStatus:
        """Return the status of `endpoint`.

        Args:
            roles: names of `Half` in lower case.
            places: (`device`, `near`, `host`) by rank; the default is a CPU without the others.
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
            memory=memory.label,
        )

    def endpoint(self) -> Endpoint:
        """Return the endpoint: the inverse of `of`."""
        ranks = tuple(RankAddress(rank.rank, rank.address, int(rank.epoch)) for rank in self.ranks)
        return Endpoint(self.instance, self.layout.layout(), ranks, self.agent)


class PoolStatus(msgspec.Struct, frozen=True):
    """Pages of one cache, which an engine shares with its worker.

    Attributes:
        pool: the index of the cache in the engine's layout.
        mappable: the engine cannot truncate its memory. If it can, no worker writes it by way DIRECT.
        adjacent: the elements of every row are adjacent. If not, no GPU writes it by way DIRECT.
    """

    pool: int
    page_count: int
    total_bytes: int
    mappable: bool = True
    adjacent: bool = True


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine rank at its worker.

    Attributes:
        memory: of the pages which the worker serves: `device` or `host`.
        connected_s: seconds since it connected.
    """

    instance: str
    rank: int
    roles: tuple[str, ...]
    layout: LayoutStatus
    pools: tuple[PoolStatus, ...] = ()
    pid: int = 0
    memory: str = "device"
    connected_s: float = 0.0


class PeerStatus(msgspec.Struct, frozen=True):
    """A worker of another engine rank, as one of our workers sees it.

    Attributes:
        state: one of `metric_table.PEER_STATES`.
        wire: the wire between the two, as a probe found it.
        error: why it was refused or lost, or why no transport may carry bytes between the two, with the wire, the allowed
            wires and the remedy.
        ways: the ways of its rooms so far. If it has only `direct`, no transport is used and the wire is irrelevant.
        half: our half of its rooms: `source` if we send to it, `target` if we receive from it.
        bytes_moved: bytes of finished slabs of all its rooms. Begins at 0 again if the peer is lost and attaches again.
    """

    instance: str
    dp_rank: int
    rank: int
    state: str
    wire: str
    epoch: str
    error: str = ""
    ways: tuple[str, ...] = ()
    memory: str = "device"
    half: str = ""
    bytes_moved: int = 0

    @property
    def name(self) -> str:
        """The name that its own agent gives its worker."""
        path = f"{self.instance}/{self.dp_rank}/{self.rank}"
        return f"{path}/host" if self.memory == "host" else path

    @property
    def healthy(self) -> bool:
        """Whether rooms with it can move."""
        return self.state == ATTACHED and not self.error


class RingStatus(msgspec.Struct, frozen=True):
    """The staging ring of a decode rank. `held_bytes` are in quarantine and not included in `used_bytes`."""

    capacity_bytes: int
    used_bytes: int
    held_bytes: int
    rounds: int

    @property
    def used_share(self) -> float:
        """The part that is granted or holds slabs."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def held_share(self) -> float:
        """The part in quarantine."""
        return self.held_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


class LaneStatus(msgspec.Struct, frozen=True):
    """One transfer thread of a prefill rank, since its worker started."""

    lane: int
    busy: bool
    slabs: int
    bytes_moved: int


class DataPortStatus(msgspec.Struct, frozen=True):
    """A port on which the transport's library receives bytes. Every host that reaches it can write memory of the worker.

    Attributes:
        protection: its protection, one of `names.PROTECTIONS`.
        refused: attempts to connect that the kernel's filter dropped.
    """

    address: str
    port: int
    protection: str
    refused: int


class PairStatus(msgspec.Struct, frozen=True):
    """A room between one pair of ranks.

    Attributes:
        way: `none` if nothing is moved and the source only needs to know that.
        why: the reason of the way, as in the metrics; `undecided` while the wire is unknown.
        cache: the index of the cache in the engine's layout.
        slabs_total: 0 before the source's Demand.
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
    peer_memory: str = "device"
    cache: int = 0


class RoomStatus(msgspec.Struct, frozen=True):
    """One half of a room at one worker: an engine's offers, or its claim.

    Attributes:
        room, instance: the room's key; `instance` is the prefill instance.
        ways, why: the distinct ways of its pairs, and their reasons.
        pool: always 0; operators and commands of earlier releases need it.
        tokens_total: tokens of the sequence; -1 if unknown.
        tokens_done: at a source, tokens that every target has acknowledged; at a target, tokens in the pages.
        reason, text: why it failed; empty if it did not.
    """

    room: str
    instance: str
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
    pool: int = 0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker on the status page.

    Attributes:
        worker: its name in metrics, unique within its agent: the engine's instance and rank, or the GPU.
        state_age_s: seconds since it entered `state`.
        silent_s: seconds without an answer; set by the supervisor.
        restarts: number of its restarts.
        error: why it failed; empty if it did not.
        mps: whether its GPU is shared by CUDA's Multi-Process Service; null: a CPU, or the driver does not tell.
        peer_access: whether all other GPUs that it sees can write its GPU's memory; null: a CPU.
        data_path: the weakest protection of its `data_ports`, one of `names.PROTECTIONS`; empty until its first answer.
        rooms_open, rooms_ended: exact counts; the lists are bounded.
        oldest_rooms: the oldest open ones, oldest first, at most OLDEST_ROOMS_MAX, without their pairs.
        mismatches, mismatch: slabs whose digests differed, and the text of the newest one's room.
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
    mps: bool | None = None
    peer_access: bool | None = None
    self_test: SelfTest | None = None
    engines: tuple[EngineStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    ring: RingStatus | None = None
    lanes: tuple[LaneStatus, ...] = ()
    data_path: str = ""
    data_ports: tuple[DataPortStatus, ...] = ()
    rooms_open: int = 0
    rooms_ended: int = 0
    oldest_rooms: tuple[RoomStatus, ...] = ()
    mismatches: int = 0
    mismatch: str = ""


class NodeFacts(msgspec.Struct, frozen=True):
    """What an agent has on its node.

    Attributes:
        memlock_bytes: memory that a process may lock, as RDMA does; null: without limit.
        descriptors: files that a process may open.
        memory_limit_bytes: of the agent's container; null: none is known.
        shared_memory_bytes: size of /dev/shm.
        gpus: device files of NVIDIA GPUs that the agent sees.
        infiniband: names in /dev/infiniband, which RDMA opens.
    """

    memlock_bytes: int | None = None
    descriptors: int = 0
    memory_limit_bytes: int | None = None
    shared_memory_bytes: int = 0
    gpus: int = 0
    infiniband: tuple[str, ...] = ()


class LeftEngine(msgspec.Struct, frozen=True):
    """An engine rank that has left the agent, with what its worker did for it. `/v1/rooms` has its last rooms.

    Attributes:
        left_s: seconds since its worker ended.
        rooms_done, rooms_failed: halves of rooms that ended at that worker.
        bytes_moved: bytes of finished slabs, to and from the peers that the worker knew at its end.
    """

    worker: str
    roles: tuple[str, ...]
    left_s: float
    rooms_done: int
    rooms_failed: int
    bytes_moved: int


class LeftEngines(msgspec.Struct, frozen=True):
    """All engine ranks that have left the agent since its start, without those of `longshore verify`.

    Attributes:
        count, rooms_done, rooms_failed, bytes_moved: sums over all of them.
        last: the last ones, the newest first, at most LEFT_LISTED_MAX.
    """

    count: int = 0
    rooms_done: int = 0
    rooms_failed: int = 0
    bytes_moved: int = 0
    last: tuple[LeftEngine, ...] = ()


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One agent with all of its workers on the status page.

    Attributes:
        started_unix_s: start of the supervisor, in seconds since 1970.
        loop_age_s: seconds since the last turn of the supervisor's loop; above a limit the agent is not live.
        restarts: number of restarted workers.
        node_facts: what the kernel grants the agent on its node.
        config: the digest of the config file that the agent runs, by the role of its engines; empty without a file.
        draining: the agent is stopping and accepts nothing new.
        sealed_endpoints: it has the deployment's keys, so that its workers dial only endpoints that agents of the deployment
            gave.
        self_test: the result of the last self-test.
        findings: what is wrong, the worst first; empty: nothing.
    """

    deployment: str
    node: str
    version: str
    backend: str
    started_unix_s: float
    uptime_s: float
    loop_age_s: float = 0.0
    restarts: int = 0
    node_facts: NodeFacts = NodeFacts()
    config: Mapping[str, str] = {}
    draining: bool = False
    sealed_endpoints: bool = False
    self_test: SelfTest | None = None
    findings: tuple[Finding, ...]
    instances: tuple[InstanceStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    left: LeftEngines = LeftEngines()

    @property
    def ready(self) -> bool:
        """Whether engines may use it."""
        return not self.unready

    @property
    def unready(self) -> tuple[Finding, ...]:
        """The findings that keep engines from it."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.CRITICAL)

    @property
    def rooms_open(self) -> int:
        """Open halves of rooms."""
        return sum(worker.rooms_open for worker in self.workers)

    def without_measures(self) -> AgentStatus:
        """Return this without ages, counts of bytes, rings, lanes, rooms and engines that have left: no condition reads them."""
        replace = msgspec.structs.replace
        workers = tuple(
            replace(
                worker,
                state_age_s=0.0,
                silent_s=0.0,
                engines=tuple(replace(engine, connected_s=0.0) for engine in worker.engines),
                peers=tuple(replace(peer, bytes_moved=0) for peer in worker.peers),
                ring=None,
                lanes=(),
                data_ports=(),
                rooms_open=0,
                rooms_ended=0,
                oldest_rooms=(),
            )
            for worker in self.workers
        )
        return replace(self, uptime_s=0.0, loop_age_s=0.0, workers=workers, left=LeftEngines())
