"""Typed errors that all Longshore processes share, and their codes in messages.

Each error names the faulty field or peer and the remedy. A released code never changes its meaning,
since engines and peers of other versions read it.
"""

from __future__ import annotations

from longshore_wire.names import Labelled


class Reason(Labelled):
    """Why a room, a registration or a message was refused or failed. Messages carry the number."""

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
    PROMPT_MISMATCH = 30


# Refusals of an engine that may pass: the same Hello can be accepted a moment later.
PASSING = frozenset({Reason.BUSY, Reason.SHUTTING_DOWN, Reason.WORKER_LOST, Reason.INTERNAL})


class LongshoreError(Exception):
    """Base class of all of Longshore's typed errors.

    Attributes:
        reason: the code in messages to engines and peers.
    """

    reason: Reason = Reason.INTERNAL

    def __init__(self, message: str, *, reason: Reason | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class LayoutError(LongshoreError):
    """A layout is invalid, or two layouts cannot exchange pages; names the field and both values."""

    reason = Reason.LAYOUT_MISMATCH


class CodecError(LongshoreError):
    """Bytes from a peer are not a message of a supported version."""

    reason = Reason.MALFORMED_MESSAGE


class RoomError(LongshoreError):
    """An offer or a claim breaks the rules of its room; names the room and the remedy."""


class RingError(LongshoreError):
    """A ring can never serve a request; names both sizes."""

    reason = Reason.RING_TOO_SMALL


class ConfigError(LongshoreError):
    """A configuration is invalid; lists all faults with their paths.

    Attributes:
        faults: one line for each fault, which begins with the path of the field.
    """

    reason = Reason.UNSUPPORTED

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults
