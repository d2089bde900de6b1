"""Messages between an engine's client and its agent over a UNIX socket. Their numbers are frozen.

One message a datagram (SOCK_SEQPACKET) of at most 64 KiB. File descriptors of memory are attached to RegisterPool.
Lists of pages are packed int32, little endian; long ones are split over several messages. `TO_AGENT` and `TO_ENGINE`
check sizes and types. Engines import this module: it must load no module of the data path.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Annotated

import msgspec

from longshore_wire.addresses import LISTENERS_MAX, is_numeric, main_address
from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.codec import Codec
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import KVLayout, PoolGeometry, TargetMemory
from longshore_wire.names import Labelled, is_instance_name

# While CHANGELOG.md has no release, messages of this version may still change. A test records their fields.
ENGINE_PROTOCOL_VERSION = 2
# Pages in one message: 8192 * 4 bytes stays well below the 64 KiB of a datagram.
PAGES_PER_MESSAGE_MAX = 8192
# Tokens of a sequence, far above any real one. Offers have the same limit as claims.
TOKENS_MAX = 1 << 30


class Half(Labelled):
    """The half of a room that an engine holds."""

    SOURCE = 0  # it offers pages: prefill
    TARGET = 1  # it claims them: decode


class RoomEventKind(IntEnum):
    """A change of an engine's half of a room."""

    DONE = 1  # source: all claimed tokens have arrived; target: all claimed tokens are in the pages
    FAILED = 2  # see the reason; the pages stay leased until RELEASED
    RELEASED = 3  # no writer or reader of ours accesses the room's pages any more
    OFFERED = 4  # target: prefill has offered the first tokens of a room for which the engine has asked


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address at which one rank's worker listens for peers."""

    rank: int
    address: str  # "host:port"
    epoch: int
    engine: int = 0  # the life of the engine that the worker serves; 0: not known


# Of an endpoint, above those that agents give.
_AGENT_CHARACTERS_MAX = 64
_SEAL_BYTES_MAX = 64
# A worker meets few engines.
_ENDPOINTS_KEPT_MAX = 256


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of all ranks of one engine instance. Engines pass it on by their own channel.

    Attributes:
        agent: the agent that serves all ranks; ranks of one agent may copy into each other's pages.
        seals: of the agent that gave it, one for each revision of the deployment's keys; empty if it has no keys. A decode
            worker with keys dials no endpoint without a seal that is theirs.
    """

    instance: str
    layout: KVLayout  # of any one rank: only the model and the parallel sizes matter
    ranks: tuple[RankAddress, ...]
    agent: str = ""
    seals: tuple[bytes, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every rank of the replica is known."""
        return len(self.ranks) == self.layout.parallel.tp * self.layout.parallel.pp

    def check(self) -> None:
        """Raise LongshoreError unless an agent can have given it, apart from its layout. Clients of an engine's API may have made it."""
        if not is_instance_name(self.instance):
            raise _malformed(f"instance is {self.instance[:120]!r}: give the name of the prefill instance")
        if len(self.agent) > _AGENT_CHARACTERS_MAX:
            raise _malformed(f"agent has {len(self.agent)} characters: give the endpoint as prefill's agent gave it")
        if self.seals and (len(self.seals) > LISTENERS_MAX or max(map(len, self.seals)) > _SEAL_BYTES_MAX):
            longest = max(map(len, self.seals))
            raise _malformed(
                f"there are {len(self.seals)} seals of up to {longest} bytes: give the endpoint as prefill's agent gave it"
            )
        _check_ranks(self.ranks, self.layout.parallel.tp * self.layout.parallel.pp)


# All rooms of a pair of engines have one endpoint.
@lru_cache(_ENDPOINTS_KEPT_MAX)
def _check_ranks(ranks: tuple[RankAddress, ...], rank_count: int) -> None:
    numbers, addresses = set(), set()
    for each in ranks:
        if not 0 <= each.rank < rank_count or each.rank in numbers:
            raise _malformed(f"ranks has rank {each.rank}: give each of 0 to {rank_count - 1} once")
        if not is_numeric(each.address):
            raise _malformed(
                f"rank {each.rank} is at {each.address[:120]!r}: give the endpoint of an agent, with numeric IPv4 addresses"
            )
        if (place := main_address(each.address)) in addresses:
            raise _malformed(f"two ranks are at {place}: give the endpoint of an agent, where each rank has its own")
        numbers.add(each.rank)
        addresses.add(place)


def _malformed(text: str) -> LongshoreError:
    return LongshoreError(f"endpoint: {text}", reason=Reason.MALFORMED_MESSAGE)


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """Engine to agent, first message: the engine's identity and layout.

    Attributes:
        device: "cpu" or a GPU's UUID, never an index.
        engine: a random number for the life of this engine, the same at each reconnect; 0 if unknown.
        pid: its process in its own PID namespace, as CUDA writes it into handles; 0 if unknown.
        memory: of the pages of this connection. An engine rank has one connection for each memory. The one for HOST has
            device "cpu", claims only, and may have another page size and order.
        host: the name of its machine, in a cluster that of its pod; for texts alone.
    """

    version: int
    instance: str
    layout: KVLayout
    device: str
    roles: tuple[Half, ...]
    engine: int = 0
    pid: int = 0
    memory: TargetMemory = TargetMemory.DEVICE
    host: str = ""

    @property
    def shown_host(self) -> str:
        """The host's name; empty if the engine gives none, or none that may be shown."""
        return self.host if is_instance_name(self.host) else ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=65):
    """Agent to engine: the connection is assigned to its worker. `epoch` differs after a restart.

    Attributes:
        target: the deployment's memory for decode's pages.
        steps: after each half of a room, send its EngineSteps.
        engine_keys: by which engines of the deployment seal messages to each other: one for each revision of the deployment's
            keys, the newest first; none if it has no keys.
    """

    version: int
    epoch: int
    deployment: str
    lease_ns: int
    target: TargetMemory = TargetMemory.DEVICE
    steps: bool = False
    engine_keys: tuple[bytes, ...] = ()

    def __repr__(self) -> str:
        """Show no key, since messages may be logged."""
        return f"Welcome(epoch={self.epoch}, deployment={self.deployment!r})"


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=66):
    """Agent to engine: the request (0: the Hello) was refused. BUSY has a hint when to retry."""

    request: int
    reason: Reason
    text: str
    retry_after_ns: int = 0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=67):
    """Agent to engine: the request was accepted and is kept while this worker lives."""

    request: int


class DeviceRegion(msgspec.Struct, frozen=True, array_like=True):
    """One region in GPU memory: the CUDA IPC handle of its allocation, and its offset there."""

    handle: bytes
    offset_bytes: int


class RegisterPool(msgspec.Struct, frozen=True, array_like=True, tag=68):
    """Engine to agent: map these pages of one cache. File descriptors of regions are attached, in order; GPU regions are inline."""

    request: int
    cache: int  # its index in the layout
    geometry: PoolGeometry
    device_regions: tuple[DeviceRegion, ...] = ()


class UnregisterPool(msgspec.Struct, frozen=True, array_like=True, tag=69):
    """Engine to agent: unmap these pages. Their rooms fail. Accepted once no access to the pages is left."""

    request: int
    cache: int


class CachePages(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one cache that hold tokens [first, end) of the sequence.

    Which pages hold them, `KVLayout.pages_of` says. A long list is split over several messages that
    differ in `page_offset` and `pages`; a list of an Offer never is.
    """

    cache: int  # its index in the layout
    first_token: int
    end_token: int
    page_count: int  # of the whole list
    pages: bytes
    page_offset: int = 0


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=70):
    """Prefill engine to agent: these tokens of the sequence are in these pages, computed and visible.

    Each cache at most once. `last`: every cache is offered up to the total now.
    """

    request: int
    room: int
    caches: tuple[CachePages, ...]
    last: bool
    binding: Binding = UNBOUND


class Receive(msgspec.Struct, frozen=True, array_like=True, tag=71):
    """Decode engine to agent: write these tokens of a room into these pages; `end_token` is the total.

    Lists of pages that are too long for one message are split over several. The one that completes the list of every
    cache of the layout completes the request and is answered.
    """

    request: int
    room: int
    endpoint: Endpoint
    caches: tuple[CachePages, ...]
    digest: bool = False
    binding: Binding = UNBOUND


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=72):
    """Engine to agent: cancel this half of a room. RELEASED follows when its pages are no longer accessed."""

    request: int
    half: Half
    instance: str  # of the prefill engine
    room: int


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=73):
    """Engine to agent: the engine lives; renew the leases of all of its rooms, as any message does. Not answered."""


class RoomEvent(msgspec.Struct, frozen=True, array_like=True, tag=74):
    """Agent to engine: a half of a room has changed."""

    half: Half
    instance: str
    room: int
    kind: RoomEventKind
    reason: Reason = Reason.NONE
    text: str = ""
    bytes_moved: int = 0


class EndpointUpdate(msgspec.Struct, frozen=True, array_like=True, tag=75):
    """Agent to engine: the ranks of its instance that have registered so far."""

    endpoint: Endpoint


# Above those of a prompt that is offered in many chunks. All of them fit a datagram.
ENGINE_STEPS_MAX = 256
_StepName = Annotated[str, msgspec.Meta(max_length=32)]


class EngineStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of an engine's client, by its host's monotonic clock."""

    name: _StepName
    start_ns: int
    end_ns: int
    waits: bool = False  # nothing ran: it waited for an answer, or for the engine to take an event


class EngineSteps(msgspec.Struct, frozen=True, array_like=True, tag=76):
    """Engine to agent: what the client did for an ended half of a room. Only if Welcome asks for it; not answered."""

    half: Half
    instance: str  # of the prefill engine
    room: int
    steps: Annotated[tuple[EngineStep, ...], msgspec.Meta(max_length=ENGINE_STEPS_MAX)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=77):
    """Decode engine to agent: send OFFERED when prefill has offered the first tokens of a room. A Receive may follow."""

    request: int
    room: int
    endpoint: Endpoint
    binding: Binding = UNBOUND


ToAgent = Hello | RegisterPool | UnregisterPool | Offer | Receive | Cancel | Renew | EngineSteps | Ask
ToEngine = Welcome | Refused | Accepted | RoomEvent | EndpointUpdate

# A datagram of this size passes through a UNIX socket with default buffers.
ENGINE_MESSAGE_BYTES_MAX = 64 << 10
TO_AGENT: Codec[ToAgent] = Codec(ENGINE_PROTOCOL_VERSION, ENGINE_MESSAGE_BYTES_MAX, ToAgent)
TO_ENGINE: Codec[ToEngine] = Codec(ENGINE_PROTOCOL_VERSION, ENGINE_MESSAGE_BYTES_MAX, ToEngine)
