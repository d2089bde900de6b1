"""Messages between the workers of two agents. Their numbers are frozen.

A released number never changes its meaning. New fields are added at the end, with a default.
The decode worker dials; both ends use that one connection. `PEER` checks sizes and types of every message, and
the session checks epochs before it acts on one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.codec import Codec
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, PoolGeometry, TargetMemory
from longshore_wire.names import room_name
from longshore_wire.slabs import TRAILER_KEY_BYTES_MAX
from longshore_wire.ways import Way, Why

# While CHANGELOG.md has no release, messages of this version may still change. A test records their fields.
PROTOCOL_VERSION = 2
# Length of a reason's text. It is passed to engines and siblings and kept with ended rooms, whose sizes are limited.
TEXT_CHARACTERS_MAX = 2000


class RoomKey(msgspec.Struct, frozen=True, array_like=True):
    """One request's transfer. `instance` is the prefill instance, within which `room` is unique."""

    instance: str
    room: int  # unsigned, 64 bits

    def __repr__(self) -> str:
        """Name the room, since messages may be logged."""
        return f"RoomKey({self.instance!r}, {room_name(self.room)})"


class PairKey(msgspec.Struct, frozen=True, array_like=True):
    """One cache of a room between one pair of ranks, in one life of each worker. Every message on a room begins with it."""

    key: RoomKey
    source_rank: int
    target_rank: int
    source_epoch: int
    target_epoch: int
    target_instance: str
    dp_rank: int = 0  # of the target
    memory: TargetMemory = TargetMemory.DEVICE  # of the target's pages
    cache: int = 0  # its index in both layouts


# The key length that a target uses, and the limit for peers.
DIGEST_KEY_BYTES = 16
DIGEST_KEY_BYTES_MAX = 32


class RegionInfo(msgspec.Struct, frozen=True, array_like=True):
    """Memory that the sender of an Attach has registered with its transport; addresses are the sender's."""

    address: int
    length_bytes: int
    extent_bytes: int = 0  # of each registration in it, which no piece of a write may cross; 0: it is one
    # For a ring: the key with which a source seals the trailers of its slabs, see `slabs.Trailer`.
    trailer_key: Annotated[bytes, msgspec.Meta(max_length=TRAILER_KEY_BYTES_MAX)] = b""

    def __repr__(self) -> str:
        """Omit the key, since messages may be logged."""
        return f"RegionInfo(address={self.address}, length_bytes={self.length_bytes}, extent_bytes={self.extent_bytes})"


class PoolInfo(msgspec.Struct, frozen=True, array_like=True):
    """The pool of one of the sender's caches, for peers that write its pages in place (`contiguous`, `slices`, `direct`)."""

    cache: int
    geometry: PoolGeometry
    # One for each region; empty: pages are not registered, so only staged writes are possible.
    region_addresses: tuple[int, ...]


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of either side: its identity and its memory. Sent again after each change.

    A target numbers its Attaches (`attempt`). A source answers with its own Attach or a Refuse, which repeats the newest
    number that it has read, so that the target recognises late answers.
    """

    version: int
    deployment: str
    instance: str
    epoch: int
    layout: KVLayout
    backend: str
    metadata: bytes  # the transport's, opaque
    ring: RegionInfo | None  # None: this worker accepts no staged bytes
    pools: tuple[PoolInfo, ...]
    slab_bytes_max: int  # the longest slab, payload and trailer, that the sender's lanes hold
    generation: int = 0  # counts changes of this message within one epoch
    probe: RegionInfo | None = None  # scratch memory for a peer's probe of the wire
    # A transport can read this worker's pages in place; False: it stages them, or copies them directly.
    in_place: bool = True
    address: str = ""  # of the sender's own worker, see `addresses`
    engine: int = 0  # the life of the sender's engine; 0: not known
    attempt: int = 0
    memory: TargetMemory = TargetMemory.DEVICE  # of the sender's pages

    def pool(self, cache: int) -> PoolInfo | None:
        """Return the pool of a cache of the sender, or None."""
        return next((pool for pool in self.pools if pool.cache == cache), None)


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to an unacceptable Attach: a retry helps only after a change."""

    reason: Reason
    text: str
    epoch: int  # of the Attach that is refused
    attempt: int  # of that Attach

    def __post_init__(self) -> None:
        _shorten(self)


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A target's heartbeat, answered by a Pong. A side that is silent for the peer timeout counts as lost."""

    epoch: int  # the target's
    number: int
    absent_ns: int = 0  # total time in which this worker's loop did not run


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The answer to a Ping; repeats its epoch and number."""

    epoch: int  # the source's; 0: it does not know the target
    ping_epoch: int
    ping_number: int
    absent_ns: int = 0


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The target wants tokens [first, end) of a room from this source. Repeated until a Demand answers it.

    The target chooses the way and never changes it; the source follows it. Page ids are present only if the way
    writes pages in place: int32, little endian, from the first page of `KVLayout.pages_of` on, in as many Claims as
    needed, each with its offset in the list.
    """

    pair: PairKey
    first_token: int
    end_token: int
    way: Way
    page_offset: int = 0
    page_count: int = 0  # of the whole list
    pages: bytes = b""
    why: Why = Why.UNDECIDED  # of the way, for status only
    serial: int = 0  # number of the claim, counted from 1 within the target's life and this source
    # Of the digests that each SlabReady has; empty: none.
    digest_key: Annotated[bytes, msgspec.Meta(max_length=DIGEST_KEY_BYTES_MAX)] = b""
    binding: Binding = UNBOUND

    def __repr__(self) -> str:
        """Omit pages and key, since messages may be logged."""
        return f"Claim(pair={self.pair}, tokens=[{self.first_token}, {self.end_token}), way={self.way.name})"


class Demand(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """How the source cuts the claimed tokens, of a slot its layers, into slabs, and how many are ready. Reserves nothing; idempotent.

    Slab k holds tokens, or layers, [first + k * slab_tokens, first + (k + 1) * slab_tokens), cut at the end.
    """

    pair: PairKey
    slab_tokens: int
    slab_count: int
    ready_count: int  # slabs 0..ready_count-1 have all their tokens offered
    total_tokens: int = -1  # of the whole sequence, known once the prefill engine has set `last`; -1: unknown


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Ring memory for one slab. Repeated until its bytes have arrived."""

    pair: PairKey
    slab: int
    offset_bytes: int
    length_bytes: int
    generation: int


class SlabReady(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """All bytes of one slab have landed. Also used as the notice of a write, without digests.

    The digests are those of the source's pages, [planes * heads] uint64, little-endian, if the claim has a key for
    them. With way DIRECT the source compares the digests of both sides itself.
    """

    pair: PairKey
    slab: int
    generation: int  # of the grant; 0 if pages were written in place
    payload_bytes: int
    total_tokens: int = -1
    digests: bytes = b""


class SlabAck(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The slab is in the target's pages; its region is free again."""

    pair: PairKey
    slab: int
    generation: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The sender has aborted this pair's room. Repeated until an EndAck answers it."""

    pair: PairKey
    reason: Reason
    text: str = ""
    serial: int = 0  # from a target: the claim that it aborts; 0: it has not claimed
    binding: Binding = UNBOUND  # from a target: of the claim

    def __post_init__(self) -> None:
        _shorten(self)


def _shorten(message: Refuse | Abort) -> None:
    """Cut a text that is too long, of a sender or a receiver."""
    if len(message.text) > TEXT_CHARACTERS_MAX:
        msgspec.structs.force_setattr(message, "text", f"{message.text[: TEXT_CHARACTERS_MAX - 1]}…")


class EndAck(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answer to an Abort or a Complete. A source's also confirms that no write of this pair is open or will begin."""

    pair: PairKey
    serial: int = 0  # of the Abort; 0: of any


class WireFound(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The wire that the source's probe write to this target used."""

    source_epoch: int
    target_epoch: int
    wire: str


class Complete(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A target got all of this pair from an earlier life of the source. Repeated until an EndAck answers it."""

    pair: PairKey


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The target will claim a room, and has no pages for it yet. Repeated until an Offered or an Abort answers it.

    It opens no room at the source.
    """

    pair: PairKey
    binding: Binding = UNBOUND


class Offered(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The answer to an Ask: the source's engine has offered the first tokens of the room."""

    pair: PairKey


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
    | Abort
    | EndAck
    | WireFound
    | Complete
    | Ask
    | Offered
)

# A peer's Attach carries transport metadata of up to 1 MiB. All other messages are much smaller.
PEER_MESSAGE_BYTES_MAX = 2 << 20
PEER: Codec[PeerMessage] = Codec(PROTOCOL_VERSION, PEER_MESSAGE_BYTES_MAX, PeerMessage)
