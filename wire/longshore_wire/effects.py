"""Effects that the cores return as data, in the order in which the worker must execute them; and the cores' settings.

The worker executes effects and reports the results to the core. A core performs no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from longshore_wire.crossover import WHOLE_PAGES, Crossover
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, TargetMemory
from longshore_wire.names import room_name
from longshore_wire.peer_messages import Attach, PairKey, PeerMessage, RoomKey
from longshore_wire.plan import Pair
from longshore_wire.ways import Staging, Way

SECOND_NS = 1_000_000_000


class Named(Protocol):
    """What names a worker."""

    @property
    def instance(self) -> str:
        """The engine instance."""

    @property
    def layout(self) -> KVLayout:
        """Of one rank."""

    @property
    def memory(self) -> TargetMemory:
        """Of the pages that it serves."""


class Replica(NamedTuple):
    """What the workers of all ranks of one replica share in their identities."""

    instance: str
    dp_rank: int
    memory: TargetMemory

    def __str__(self) -> str:
        return f"{self.instance}{' (host memory)' if self.memory is TargetMemory.HOST else ''}"


class PeerId(NamedTuple):
    """The identity of a worker, over all of its lives. An engine rank has one worker for each memory that holds its pages."""

    instance: str
    dp_rank: int
    rank: int
    memory: TargetMemory = TargetMemory.DEVICE

    @classmethod
    def of(cls, named: Named) -> PeerId:
        """Return the identity of the worker that a Hello, an Attach or a configuration names."""
        return cls(named.instance, named.layout.parallel.dp_rank, named.layout.rank, named.memory)

    @property
    def replica(self) -> Replica:
        """The replica whose rank this is."""
        return Replica(self.instance, self.dp_rank, self.memory)

    @property
    def path(self) -> str:
        """Its name in logs, metrics and messages."""
        return f"{self.instance}/{self.dp_rank}/{self.rank}{'/host' if self.memory is TargetMemory.HOST else ''}"


# Names one pair of ranks of a room, by the peer and the cache.
PairName = tuple[PeerId, int]


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """A core's settings: its own worker and the limits. Times in ns, sizes in bytes."""

    deployment: str
    instance: str
    epoch: int
    layout: KVLayout
    memory: TargetMemory = TargetMemory.DEVICE  # of its pages
    backend: str = "Loopback"
    lane_count: int = 4
    slab_bytes_max: int = 64 << 20  # payload, padding and trailer
    slab_bytes_min: int = 8 << 20
    ring_bytes: int = 4 << 30  # 0: takes no staged slabs
    grant_window: int = 4  # slabs that one writer of one room may hold
    ring_share_divisor: int = 4  # a room holds at most this part of the ring
    lease_ns: int = 60 * SECOND_NS
    retry_ns: int = SECOND_NS // 5
    heartbeat_ns: int = SECOND_NS
    peer_timeout_ns: int = 5 * SECOND_NS
    # Limit of the wait for bytes in ring memory that is granted for ready tokens.
    write_timeout_ns: int = 120 * SECOND_NS
    room_timeout_ns: int = 600 * SECOND_NS  # an open room without progress for this long fails
    rooms_max: int = 16_384
    ended_rooms_max: int = 65_536
    force_way: Way | None = None  # for benchmarks and tests; None: the plan's way
    staging: Staging = Staging.AUTO
    crossover: Crossover = WHOLE_PAGES  # chooses the way where `staging` is AUTO
    agent: str = ""  # the worker's agent, for way DIRECT; empty: DIRECT is not used
    engine: int = 0  # the life of the worker's engine
    neighbour_staging: Staging | None = None  # between ranks of one agent; None: as `staging`
    in_place: bool = True  # a transport can access this worker's pages in place; False: they are on a GPU
    wires: tuple[str, ...] = ()  # names of the wires that a transport may use; empty: any
    digest: bool = False  # every room compares digests
    digest_key: bytes = field(default=b"", repr=False)  # of the digests of rooms that are received here
    direct_slab_bytes: int = 0  # slab size of way DIRECT, where one slab keeps the device busy; 0: as in other ways


class PeerAttached(msgspec.Struct, frozen=True):
    """A peer has attached: connect the transport with its newest Attach before any later effect."""

    peer: PeerId
    attach: Attach


class PeerGone(msgspec.Struct, frozen=True):
    """A peer is lost or replaced: drop its transport metadata."""

    peer: PeerId
    epoch: int


class Dial(msgspec.Struct, frozen=True):
    """Open a connection to a source worker."""

    peer: PeerId
    address: str


class HangUp(msgspec.Struct, frozen=True):
    """Close the connection to a source worker that is gone and has no rooms left."""

    peer: PeerId


class ProbeLiveness(msgspec.Struct, frozen=True):
    """Probe whether a life of a peer's worker still listens; answer with `peer_dead` or `peer_listens`."""

    peer: PeerId
    epoch: int
    address: str


class DrainWriter(msgspec.Struct, frozen=True):
    """A life of a source has ended: read all of its remaining data, then answer with `writer_drained`.

    A kernel still delivers data of a killed process, and the data stays in our sockets until we read it.
    """

    peer: PeerId
    epoch: int
    address: str


class StartWrite(msgspec.Struct, frozen=True):
    """Bring one slab to its target; answer with `write_done` (of 0 bytes if it was dropped) or `write_failed`."""

    peer: PeerId
    pair: PairKey
    slab: int
    tokens: tuple[int, int]  # units of the route: of a slot, layers
    route: Pair
    way: Way
    payload_bytes: int
    offset_bytes: int  # in the target's ring; 0 if pages are written in place
    generation: int
    total_tokens: int  # -1: the engine has not said `last` yet
    target_pages: bytes  # int32, little endian, from the first claimed page on; empty if staged
    first_claimed_token: int
    digest_key: bytes = b""  # empty: no digests

    def __repr__(self) -> str:
        """Omit the key, since effects may be logged."""
        return f"StartWrite({self.pair}, slab={self.slab}, tokens={self.tokens}, way={self.way.name})"


class StartScatter(msgspec.Struct, frozen=True):
    """Copy one landed slab into pages and compare digests, or compare those of pages that were written in place.

    Answer with `scatter_done` or `scatter_failed`.
    """

    peer: PeerId
    pair: PairKey
    slab: int
    tokens: tuple[int, int]  # as of StartWrite
    route: Pair
    payload_bytes: int
    offset_bytes: int
    generation: int
    way: Way = Way.STAGED
    digest_key: bytes = b""  # empty: compare no digests
    digests: bytes = b""  # of the source's pages, see SlabReady

    def __repr__(self) -> str:
        """Omit the key, since effects may be logged."""
        return f"StartScatter({self.pair}, slab={self.slab}, tokens={self.tokens}, way={self.way.name})"


class PairEnd(NamedTuple):
    """A pair of ranks of a room that has ended. `way`: None if it had nothing to move. `slab_count`: slabs that arrived."""

    peer: PeerId
    way: Way | None
    slab_count: int
    cache: int


class RoomEnded(msgspec.Struct, frozen=True):
    """A half of a room is done (Reason.NONE) or has failed: notify its engine."""

    half: Half
    key: RoomKey
    reason: Reason
    text: str
    bytes_moved: int
    opened_ns: int
    pairs: tuple[PairEnd, ...]

    @property
    def outcome(self) -> str:
        """`done`, `cancelled` or `failed`."""
        return {Reason.NONE: "done", Reason.CANCELLED: "cancelled"}.get(self.reason, "failed")

    def about(self) -> dict[str, str]:
        """Return the fields of a log line on this end, see `log_lines`."""
        # One peer has a pair for each cache.
        peers = ",".join(dict.fromkeys(pair.peer.path for pair in self.pairs))
        return {
            "instance": self.key.instance,
            "room": room_name(self.key.room),
            "peer": peers,
            "reason": self.reason.name,
        }


class RoomReleased(msgspec.Struct, frozen=True):
    """No peer and no part of this worker accesses the room's pages any more: notify its engine, drop the page list."""

    half: Half
    key: RoomKey


class RoomGivenUp(msgspec.Struct, frozen=True):
    """A target ended a room that is not open at this source: tell the sibling ranks, whose engines may have offered it.

    A target that asks for a room asks one rank, and so can tell only that one. A target that has all slabs of this rank may be
    unable to reach the others.
    """

    key: RoomKey
    reason: Reason
    text: str
    capability: bytes  # that the target showed


class RoomOffered(msgspec.Struct, frozen=True):
    """Prefill has offered the first tokens of a room for which our engine has asked: notify the engine."""

    key: RoomKey


class Send(msgspec.Struct, frozen=True):
    """Send a message to a peer now, or drop it: the core repeats messages itself."""

    peer: PeerId
    message: PeerMessage


class Stale(msgspec.Struct, frozen=True):
    """A message was ignored because it belongs to another life, another grant or no room: count it."""

    message: str


Effect = (
    Send
    | PeerAttached
    | PeerGone
    | Dial
    | HangUp
    | ProbeLiveness
    | DrainWriter
    | StartWrite
    | StartScatter
    | RoomEnded
    | RoomReleased
    | RoomGivenUp
    | RoomOffered
    | Stale
)
