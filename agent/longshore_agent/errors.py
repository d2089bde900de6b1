"""Errors of the agent's own parts; each maps to one Reason that engines and peers see."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError, Reason


class ShapeError(LongshoreError):
    """An argument of a kernel breaks its contract; names the argument. Nothing was launched."""

    reason = Reason.INTERNAL


class PoolError(LongshoreError):
    """An engine's pages cannot be mapped or do not match their geometry; names the region or plane."""

    reason = Reason.LAYOUT_MISMATCH


class MemoryLostError(LongshoreError):
    """An engine has truncated the memory that it shares; names the region. Bytes copied from or to it are worthless."""

    reason = Reason.MEMORY_LOST


class TransportError(LongshoreError):
    """A transport refused or lost an operation; names the backend, the peer and what it said."""

    reason = Reason.TRANSFER_FAILED


class PeerMetadataError(TransportError):
    """What a peer sent as its transport metadata cannot be used."""

    reason = Reason.MALFORMED_MESSAGE


class DeviceError(LongshoreError):
    """The CUDA driver is not there or refused a call; names the call, and the device or memory it was about."""

    reason = Reason.INTERNAL
