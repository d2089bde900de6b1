"""Typed errors that every Longshore process shares, and the codes by which they travel between processes.

Each error names the field or the peer that is at fault and the way out. A code, once released, never
changes its meaning: engines and peers of other versions read it.
"""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Why a room, a registration or a message was refused or failed; travels on the wire as its number."""

    NONE = 0
    UNKNOWN_VERSION = 1
    MALFORMED_MESSAGE = 2
    LAYOUT_MISMATCH = 3
    PAGE_OUT_OF_RANGE = 4
    TOKENS_OVERLAP = 5
    TOKENS_MISSING = 6
    OFFER_AFTER_LAST = 7
    ROOM_REUSED = 8
    RING_TOO_SMALL = 9
    TOTAL_MISMATCH = 10
    LEASE_EXPIRED = 11
    CANCELLED = 12
    PEER_LOST = 13
    ENGINE_LOST = 14
    WORKER_LOST = 15
    TRANSFER_FAILED = 16
    TRAILER_MISMATCH = 17
    UNKNOWN_POOL = 18
    UNKNOWN_INSTANCE = 19
    BUSY = 20
    UNSUPPORTED = 21
    STALE_EPOCH = 22
    AUTHENTICATION = 23
    WIRE_NOT_ALLOWED = 24
    SHUTTING_DOWN = 25
    INTERNAL = 26
    DIGEST_MISMATCH = 27
    TIMED_OUT = 28
    MEMORY_LOST = 29


class LongshoreError(Exception):
    """Base of every error that Longshore raises on purpose.

    Attributes:
        reason: the code that travels to engines and peers.
    """

    reason: Reason = Reason.INTERNAL

    def __init__(self, message: str, *, reason: Reason | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class LayoutError(LongshoreError):
    """A layout cannot exist, or two layouts cannot exchange pages; names the field and both values."""

    reason = Reason.LAYOUT_MISMATCH


class CodecError(LongshoreError):
    """Bytes from a peer are not a message of a version that we speak."""

    reason = Reason.MALFORMED_MESSAGE


class RoomError(LongshoreError):
    """An offer or a claim breaks the rules of its room; names the room and what to send instead."""


class RingError(LongshoreError):
    """A ring cannot serve what it is asked for, ever; names both sizes."""

    reason = Reason.RING_TOO_SMALL


class ConfigError(LongshoreError):
    """A configuration is wrong; lists every fault with its path.

    Attributes:
        faults: one line a fault, each begins with the path of the field.
    """

    reason = Reason.UNSUPPORTED

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults
