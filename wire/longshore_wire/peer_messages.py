"""Messages between the workers of two agents, with their frozen numbers.

A number, once released, never changes its meaning; fields are only ever added at the end, with a default.
The decode worker dials; both ends speak over that one connection. Nothing here is trusted before `codec`
has checked sizes and types, and nothing is obeyed before the session has checked epochs.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from longshore_wire.crossover import Why
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, PoolGeometry
from longshore_wire.plan import Way
from longshore_wire.trailer import TRAILER_KEY_BYTES_MAX

PROTOCOL_VERSION = 1


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
    # Of a ring: with it a source seals the trailers of its slabs, see `trailer`.
    trailer_key: Annotated[bytes, msgspec.Meta(max_length=TRAILER_KEY_BYTES_MAX)] = b""

    def __repr__(self) -> str:
        """Leave the key out: messages may be shown to people."""
        return f"RegionInfo(address={self.address}, length_bytes={self.length_bytes}, extent_bytes={self.extent_bytes})"


class PoolInfo(msgspec.Struct, frozen=True, array_like=True):
    """One pool of the sender, so that a peer may write its pages in place (`contiguous`, `slices`, `direct`)."""

    pool: int
    geometry: PoolGeometry
    region_addresses: tuple[int, ...]  # one a region; empty: pages are not registered, staged writes only


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of either side: who I am and how to write to me. Sent again when something of it changes.

    A target numbers those that it sends (`attempt`). A source answers with its own Attach or with a Refuse, each of which repeats
    the newest number that it has read: an answer that comes late is told from the newest one.
    """

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
    probe: RegionInfo | None = None  # scratch memory into which a peer may write to find out the wire
    # A transport can read this worker's pages where they lie; False: it stages them, or copies them directly.
    in_place: bool = True
    address: str = ""  # of the sender's own worker, see `addresses`
    engine: int = 0  # the life of the sender's engine; 0: not known
    attempt: int = 0


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to an Attach that cannot be: it will not be accepted before something changes."""

    reason: Reason
    text: str
    epoch: int  # of the Attach that is refused
    attempt: int  # of that Attach


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A target lives. Answered by a Pong; silence of either side for the peer timeout means that it is lost."""

    epoch: int  # the target's
    number: int
    absent_ns: int = 0  # the time that this worker's loop did not run, over its whole life


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The answer to a Ping, whose epoch and number it repeats."""

    epoch: int  # the source's; 0: it does not know the target
    ping_epoch: int
    ping_number: int
    absent_ns: int = 0


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
    why: Why = Why.UNDECIDED  # of the way, for people
    serial: int = 0  # counts the claims of the target's life to this source, from 1 on


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


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The sender gives this pair's room up. Repeated until an EndAck answers it."""

    pair: PairKey
    reason: Reason
    text: str = ""
    serial: int = 0  # from a target: of the claim that it gives up; 0: it has claimed nothing


class EndAck(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answer to an Abort or a Complete. From a source, also: no write of this pair is open and none will begin."""

    pair: PairKey


class WireFound(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """What the source's probe write to this target travelled over."""

    source_epoch: int
    target_epoch: int
    wire: str


class Complete(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A target has everything that it wanted of this pair from an earlier life of the source. Repeated until an EndAck answers it."""

    pair: PairKey


PeerMessage = (
    Attach | Refuse | Ping | Pong | Claim | Demand | Grant | SlabReady | SlabAck | Abort | EndAck | WireFound | Complete
)
