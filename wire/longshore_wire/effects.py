"""What the cores ask of the world, as data, in the order in which it must happen; and their settings.

The worker carries effects out and tells the core of the result. A core never calls anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from longshore_wire.crossover import WHOLE_PAGES, Crossover
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import Attach, PairKey, PeerMessage, RoomKey
from longshore_wire.plan import Pair, Staging, Way

SECOND_NS = 1_000_000_000


class PeerId(NamedTuple):
    """A worker of another engine rank, over all its lives."""

    instance: str
    dp_rank: int
    rank: int


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a core knows of its own worker and of its limits. Times in ns, sizes in bytes."""

    deployment: str
    instance: str
    epoch: int
    layout: KVLayout
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
    write_timeout_ns: int = 120 * SECOND_NS  # ring memory that is granted for ready tokens waits so long for bytes
    room_timeout_ns: int = 600 * SECOND_NS  # an open room in which nothing happens for so long fails
    rooms_max: int = 16_384
    ended_rooms_max: int = 65_536
    force_way: Way | None = None  # for benchmarks and tests; None: what the plan says
    staging: Staging = Staging.AUTO
    crossover: Crossover = WHOLE_PAGES  # chooses the way where `staging` is AUTO
    agent: str = ""  # of the worker, for way DIRECT; empty: it takes no part in that
    engine: int = 0  # the life of the worker's engine
    near_staging: Staging | None = None  # between ranks of one agent, where it differs from `staging`
    in_place: bool = True  # a transport can read and write this worker's pages where they lie; False: they are on a GPU
    wires: tuple[str, ...] = ()  # over which a transport may bring bytes, by name; empty: any
    direct_slab_bytes: int = 0  # of way DIRECT, where one slab at a time keeps the device busy; 0: cut as in other ways


@dataclass(frozen=True, slots=True)
class PeerAttached:
    """A peer's newest Attach: connect the transport to it before any later effect."""

    peer: PeerId
    attach: Attach


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A peer is lost or replaced: forget its transport metadata."""

    peer: PeerId
    epoch: int


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection to a source worker.

    Attributes:
        admits: its host may reach our data ports at once; False: not before it attaches, which may never be.
    """

    peer: PeerId
    address: str
    admits: bool = True


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection to a source worker that is gone and of which no room is left."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class ProbeLiveness:
    """Ask a peer's host whether a life of its worker still listens; answer with `peer_dead` or `peer_listens`."""

    peer: PeerId
    epoch: int
    address: str


@dataclass(frozen=True, slots=True)
class DrainWriter:
    """A life of a source has ended: read all that its host still delivers, then answer with `writer_drained`.

    A kernel delivers what a process has sent after that process was killed, and it waits in our sockets until it is read.
    """

    peer: PeerId
    epoch: int
    address: str


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Bring one slab to its target; answer with `write_done` (of 0 bytes if it was dropped) or `write_failed`."""

    peer: PeerId
    pair: PairKey
    slab: int
    tokens: tuple[int, int]
    route: Pair
    way: Way
    payload_bytes: int
    offset_bytes: int  # in the target's ring; 0 where pages are written in place
    generation: int
    total_tokens: int  # -1: the engine has not said `last` yet
    target_pages: bytes  # int32, little endian, from page number first claimed token // page size; empty where staged
    first_claimed_token: int


@dataclass(frozen=True, slots=True)
class StartScatter:
    """Copy one landed slab into pages; answer with `scatter_done` or `scatter_failed`."""

    peer: PeerId
    pair: PairKey
    slab: int
    tokens: tuple[int, int]
    route: Pair
    payload_bytes: int
    offset_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class RoomEnded:
    """A half of a room is done (Reason.NONE) or has failed: tell its engine."""

    half: Half
    key: RoomKey
    reason: Reason
    text: str
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class RoomReleased:
    """Nothing of ours, and no peer, touches the room's pages any more: tell its engine, forget the pages."""

    half: Half
    key: RoomKey


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer, now or not at all."""

    peer: PeerId
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Stale:
    """A message was refused because it belongs to another life, another grant or no room: count it."""

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
    | Stale
)
