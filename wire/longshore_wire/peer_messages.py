"""Messages between the workers of two agents, with their frozen numbers.

A number, once released, never changes its meaning; fields are only ever added at the end, with a default.
The decode worker dials; both ends speak over that one connection. Nothing here is trusted before `codec`
has checked sizes and types, and nothing is obeyed before the session has checked epochs.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from longshore_wire.crossover import Why
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, PoolGeometry
from longshore_wire.plan import Way

PROTOCOL_VERSION = 1


class TargetMemory(IntEnum):
    """Where the decode side wants a room's bytes."""

    DEVICE = 0
    HOST = 1


class RoomKey(msgspec.Struct, frozen=True, array_like=True):
    """One request's transfer of one pool. `instance` is the prefill instance, within which `room` is unique."""

    instance: str
    room: int  # unsigned, 64 bits
    pool: int


class PairKey(msgspec.Struct, frozen=True, array_like=True):
    """One room between one pair of ranks, in one life of each worker. Every room message begins with it."""

    key: RoomKey
    source_rank: int
    target_rank: int
    source_epoch: int
    target_epoch: int
    target_instance: str
    dp_rank: int = 0  # of the target


class RegionInfo(msgspec.Struct, frozen=True, array_like=True):
    """Memory that the sender of an Attach has registered with its transport, as it sees it."""

    address: int
    length_bytes: int
    extent_bytes: int = 0  # registered in pieces of this size: no piece of a write may cross their ends; 0: one piece


class PoolInfo(msgspec.Struct, frozen=True, array_like=True):
    """One pool of the sender, so that a peer may write its pages in place (`contiguous`, `slices`, `direct`)."""

    pool: int
    geometry: PoolGeometry
    region_addresses: tuple[int, ...]  # one a region; empty: pages are not registered, staged writes only
    memory: TargetMemory = TargetMemory.DEVICE


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of either side: who I am and how to write to me. Sent again when something of it changes."""

    version: int
    deployment: str
    instance: str
    epoch: int
    layout: KVLayout
    backend: str
    metadata: bytes  # the transport's, opaque
    ring: RegionInfo | None  # None: this worker takes no staged bytes
    pools: tuple[PoolInfo, ...]
    slab_bytes_max: int  # the longest slab, payload and trailer, that the sender's lanes hold
    generation: int = 0  # counts changes of this message within one epoch
    reply: bool = False
    probe: RegionInfo | None = None  # scratch memory into which a peer may write to find out the wire
    in_place: bool = (
        True  # a transport can read this worker's pages where they lie; False: it stages them, or copies them directly
    )


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to an Attach that cannot be: it will not be accepted before something changes."""

    reason: Reason
    text: str
    epoch: int = 0  # of the Attach that is refused; 0: any


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """I live. Answered by a Pong; silence of either side for the peer timeout means that it is lost."""

    epoch: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """I live too."""

    epoch: int


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The target wants tokens [first, end) of a room from this source. Repeated until a Demand answers it.

    The target chooses the way and never changes it; the source obeys. The pages' ids follow only where the way writes pages in place: int32, little endian, from page number
    `first_token // page_size` on, in as many Claims as needed, each with its offset in the list.
    """

    pair: PairKey
    first_token: int
    end_token: int
    way: Way
    page_offset: int = 0
    page_count: int = 0  # of the whole list
    pages: bytes = b""
    digest: bool = False
    memory: TargetMemory = TargetMemory.DEVICE
    why: Why = Why.UNDECIDED  # of the way, for people


class Demand(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """How the source cuts what was claimed, and how much of it is ready. Reserves nothing; idempotent.

    Slab k holds tokens [first + k * slab_tokens, first + (k + 1) * slab_tokens), cut at the end.
    """

    pair: PairKey
    slab_tokens: int
    slab_count: int
    ready_count: int  # slabs 0..ready_count-1 have all their tokens offered
    total_tokens: int = -1  # of the whole sequence, as the prefill engine said with `last`; -1: not said yet


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Ring memory for one slab. Repeated until its bytes have arrived."""

    pair: PairKey
    slab: int
    offset_bytes: int
    length_bytes: int
    generation: int
    watermark: tuple[int, int] = (0, 0)  # (round, tail)


class SlabReady(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """All bytes of one slab have landed. Also the notice that travels with a write."""

    pair: PairKey
    slab: int
    generation: int  # of the grant; 0 where pages were written in place
    payload_bytes: int
    total_tokens: int = -1


class SlabAck(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The slab is in the target's pages; its region is free again."""

    pair: PairKey
    slab: int
    generation: int
    watermark: tuple[int, int] = (0, 0)


class Watermark(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Cumulative credit of the target's ring: everything granted before (round, tail) is free again."""

    epoch: int
    round: int
    tail_bytes: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The sender gives this pair's room up. Repeated until an AbortAck answers it."""

    pair: PairKey
    reason: Reason
    text: str = ""


class AbortAck(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """From a source: no write of this pair is open and none will begin. From a target: the room is given up."""

    pair: PairKey


class WireFound(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """What the source's probe write to this target travelled over."""

    source_epoch: int
    target_epoch: int
    wire: str


PeerMessage = (
    Attach
    | Refuse
    | Ping
    | Pong
    | Claim
    | Demand
    | Grant
    | SlabReady
    | SlabAck
    | Watermark
    | Abort
    | AbortAck
    | WireFound
)
