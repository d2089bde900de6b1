"""Messages between an engine's client and its agent, over a UNIX socket, with their frozen numbers.

One message a datagram (SOCK_SEQPACKET) of at most 64 KiB; memory handles travel beside RegisterPool.
Lists of pages are packed int32, little endian; long ones go in several messages.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, PoolGeometry

ENGINE_PROTOCOL_VERSION = 1
# Pages in one message: 8192 * 4 bytes stays well below the 64 KiB of a datagram.
PAGES_PER_MESSAGE_MAX = 8192
# Tokens of a sequence, far above any: a longer one could be offered and never claimed.
TOKENS_MAX = 1 << 30


class Half(IntEnum):
    """Which half of a room an engine holds."""

    SOURCE = 0  # it offers pages: prefill
    TARGET = 1  # it claims them: decode


class RoomEventKind(IntEnum):
    """What became of an engine's half of a room."""

    DONE = 1  # source: everything claimed has arrived; target: every token wanted is in the pages
    FAILED = 2  # the reason says why; pages are still leased until RELEASED
    RELEASED = 3  # no writer and no reader of ours touches the room's pages any more


class TargetMemory(IntEnum):
    """Where the decode side wants a room's bytes."""

    DEVICE = 0
    HOST = 1


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where the worker of one rank listens for peers."""

    rank: int
    address: str  # "host:port"
    epoch: int


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """How to reach all ranks of one engine instance; travels through the engines' own channel."""

    instance: str
    layout: KVLayout  # of any one rank: the model and the parallel sizes are what counts
    ranks: tuple[RankAddress, ...]
    agent: str = ""  # the agent that serves all ranks; ranks of one agent may copy into each other's pages

    @property
    def complete(self) -> bool:
        """Whether every rank of the replica is known."""
        return len(self.ranks) == self.layout.parallel.tp * self.layout.parallel.pp


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """Engine to agent, first: who I am.

    Attributes:
        device: "cpu" or a GPU's UUID, never an index.
        engine: a random number for the life of this engine, the same whenever it connects again; 0: not known.
    """

    version: int
    instance: str
    layout: KVLayout
    device: str
    roles: tuple[Half, ...]
    engine: int = 0


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=65):
    """Agent to engine: this connection now leads to your worker. `resumed_epoch` differs after a restart."""

    version: int
    epoch: int
    deployment: str
    lease_ns: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=66):
    """Agent to engine: the request (0: the Hello) was not accepted. BUSY comes with a hint when to try again."""

    request: int
    reason: Reason
    text: str
    retry_after_ns: int = 0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=67):
    """Agent to engine: the request was accepted and will not be lost while this worker lives."""

    request: int


class DeviceRegion(msgspec.Struct, frozen=True, array_like=True):
    """One region in a GPU's memory: the CUDA IPC handle of the allocation that holds it, and where in it it begins."""

    handle: bytes
    offset_bytes: int


class RegisterPool(msgspec.Struct, frozen=True, array_like=True, tag=68):
    """Engine to agent: map these pages. The regions' file descriptors come beside it, in order; those on a GPU in it."""

    request: int
    pool: int
    geometry: PoolGeometry
    memory: TargetMemory = TargetMemory.DEVICE
    device_regions: tuple[DeviceRegion, ...] = ()


class UnregisterPool(msgspec.Struct, frozen=True, array_like=True, tag=69):
    """Engine to agent: let these pages go. Accepted only once nobody touches them; rooms on it fail."""

    request: int
    pool: int


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=70):
    """Prefill engine to agent: tokens [first, end) of the sequence are in these pages, computed and visible.

    `pages[0]` is page number first_token // page_size of the sequence. `last`: end_token is the total.
    """

    request: int
    room: int
    pool: int
    first_token: int
    end_token: int
    last: bool
    pages: bytes


class Receive(msgspec.Struct, frozen=True, array_like=True, tag=71):
    """Decode engine to agent: bring tokens [first, end) of a room into these pages; `end_token` is the total.

    A long list of pages comes in several messages that differ in `page_offset` and `pages` only; the last
    one completes the request and is the one that is answered.
    """

    request: int
    room: int
    pool: int
    endpoint: Endpoint
    first_token: int
    end_token: int
    page_offset: int
    page_count: int
    pages: bytes
    memory: TargetMemory = TargetMemory.DEVICE
    digest: bool = False


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=72):
    """Engine to agent: I no longer want this half of a room. Only asks; RELEASED says that it is over."""

    request: int
    half: Half
    instance: str  # of the prefill engine
    room: int
    pool: int


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=73):
    """Engine to agent: I live; all my rooms keep their lease. Not answered."""


class RoomEvent(msgspec.Struct, frozen=True, array_like=True, tag=74):
    """Agent to engine: what became of a half of a room."""

    half: Half
    instance: str
    room: int
    pool: int
    kind: RoomEventKind
    reason: Reason = Reason.NONE
    text: str = ""
    bytes_moved: int = 0


class EndpointUpdate(msgspec.Struct, frozen=True, array_like=True, tag=75):
    """Agent to engine: the ranks of your instance that are registered so far."""

    endpoint: Endpoint


ToAgent = Hello | RegisterPool | UnregisterPool | Offer | Receive | Cancel | Renew
ToEngine = Welcome | Refused | Accepted | RoomEvent | EndpointUpdate
