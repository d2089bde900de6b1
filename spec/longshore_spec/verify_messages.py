"""Lines between `longshore verify` or `longshore bench cluster` and their test engines: a JSON object a line.

The command sends the requests in `Ask`; the test engine beside an agent answers each by one line of `Answer`. An empty line
is no request; it keeps the connection alive. Test engines register instances named `names.TEST_INSTANCE_PREFIX` and the run,
and number their rooms from ROOM_FIRST. Rooms belong to their prefill instance, so no engine's room has the same key.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from longshore_spec.agent_config import AgentConfig, Unit
from longshore_wire.engine_messages import Endpoint

# Of the messages; a command refuses a test engine of another version, which an agent of another release has.
VERSION = 2
# Engines that number rooms from 0, or draw numbers below 2**63 as SGLang does, do not reach these.
ROOM_FIRST = 0xFFFF_0000_0000_0000
# Rooms of one Offer or Claim: each takes a few hundred bytes of an answer.
ROOMS_MAX = 256

# Where test pages are. Auto: on GPUs if the test engine sees any.
MemoryKind = Literal["gpu", "host"]
WantedMemory = Literal["auto", "gpu", "host"]


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first request: register the instances.

    Attributes:
        run: the end of the instances' names, new for each run and agent.
        prefill, decode: which instances to register.
        room_bytes: of the largest room that follows.
        room_count: rooms that decode receives at the same time.
        limit_s: for the registration, and for each later request.
        memory: of the pages.
    """

    run: str
    prefill: bool
    decode: bool
    room_bytes: int
    room_count: int
    limit_s: float
    memory: WantedMemory = "auto"
    version: int = VERSION


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Prefill: offer these rooms. With `flip_byte`, one byte of their pages is wrong until their End."""

    rooms: tuple[int, ...]
    room_bytes: int
    flip_byte: bool = False


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """Decode: receive these rooms, `concurrency` at a time, which were offered before.

    Attributes:
        compare_each: compare every room's bytes, not only those of the last room in each place.
    """

    endpoint: Endpoint
    rooms: tuple[int, ...]
    room_bytes: int
    concurrency: int = 1
    compare_each: bool = True


class End(msgspec.Struct, frozen=True, tag="end"):
    """Prefill: wait until these rooms have ended here. With `cancel`, cancel them first."""

    rooms: tuple[int, ...]
    cancel: bool = False


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The instances are registered. `prefill` is None and `decode` is empty if they were not asked for."""

    prefill: Endpoint | None
    decode: str
    memory: MemoryKind


class Done(msgspec.Struct, frozen=True, tag="done"):
    """An Offer or End was carried out."""


class RoomResult(msgspec.Struct, frozen=True):
    """How a room ended at decode.

    Attributes:
        seconds: from the claim to DONE at the last rank, by decode's clock; the room was offered before.
        bytes_moved: by all ranks.
        reason, text: why it failed, or which bytes are wrong; empty if it is right.
    """

    room: int
    seconds: float
    bytes_moved: int
    reason: str = ""
    text: str = ""


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """All rooms of a Claim have ended. `seconds`: from the first claim to the last end, without comparing."""

    rooms: tuple[RoomResult, ...]
    seconds: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request failed: the reason's name and a text."""

    reason: str
    text: str


Ask = Start | Offer | Claim | End
Answer = Started | Done | Claimed | Refused


def room_tokens(config: AgentConfig, room_bytes: int) -> int:
    """Return the tokens of a room of about `room_bytes`: rounded up to whole pages of both sides, at least one.

    Slots count with their bytes, which do not depend on the tokens.
    """
    unit, token_bytes = math.lcm(config.prefill.page_size, config.decode.page_size), 0
    for cache in config.model.all_caches:
        shape = cache.shape
        each_bytes = shape.layers * sum(plane.heads * plane.rows * plane.row_bytes for plane in shape.planes)
        if cache.unit is Unit.SLOT:
            room_bytes -= each_bytes
        else:
            token_bytes += each_bytes
    return -(-max(room_bytes, 1) // (token_bytes * unit)) * unit if token_bytes else unit
