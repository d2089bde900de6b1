"""The messages between the soak and its engines: lines of JSON on an engine's stdin and stdout.

Used by `soak_engine` (an engine's process) and `soak_nodes` (the soak's side). Every engine has one role, so a message
names the room alone.
"""

from __future__ import annotations

import msgspec

from longshore_client import Half, ModelShape, PageOrder
from longshore_wire.engine_messages import Endpoint
from longshore_wire.errors import Reason

# Six heads fit TP 1, 2 and 3. A token is 2,304 bytes at TP1.
MODEL = ModelShape.kv(layers=3, kv_heads=6, head_dim=16, element_bytes=4)


class EngineSpec(msgspec.Struct, frozen=True):
    """The description of an engine; the argument of its program."""

    socket: str
    instance: str
    half: Half
    tp: int
    page_size: int
    order: PageOrder
    page_count: int
    damage_directory: str  # folder for wrong bytes, together with the expected ones


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Compute a prompt and offer it in chunks that end at `cuts` and at `total`, with a pause before each but the first."""

    room: int
    total: int
    cuts: tuple[int, ...]
    pause_s: float


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Claim tokens [prefix, total)."""

    room: int
    endpoint: Endpoint
    prefix: int
    total: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a room."""

    room: int


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare every byte of every page that no open room has."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Close the clients and end."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All ranks are registered."""


class Reachable(msgspec.Struct, frozen=True, tag=True):
    """The engine's endpoint has changed."""

    endpoint: Endpoint


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Every rank has accepted the claim, or the first chunk."""

    room: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A half has ended and its pages are the engine's again.

    Attributes:
        reason: NONE: done on every rank.
        refused: the agent refused it, so there were no events.
    """

    room: int
    reason: Reason
    text: str
    refused: bool = False


class Corrupt(msgspec.Struct, frozen=True, tag=True):
    """Bytes are wrong."""

    text: str


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Check`, after a `Corrupt` for each rank that has any."""

    byte_count: int


class Repeated(msgspec.Struct, frozen=True, tag=True):
    """A call was refused for `reason` and is repeated."""

    reason: Reason


ToEngine = Offer | Claim | Cancel | Check | Leave
FromEngine = Ready | Reachable | Opened | Ended | Corrupt | Checked | Repeated
