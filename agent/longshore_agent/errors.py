"""Typed errors of the agent. Each has one Reason, which engines and peers receive."""

from __future__ import annotations

from longshore_wire.errors import LongshoreError, Reason


class ShapeError(LongshoreError):
    """An argument of a kernel breaks its contract; names the argument. Nothing was launched."""

    reason = Reason.INTERNAL


class PoolError(LongshoreError):
    """An engine's pages cannot be mapped or do not match their geometry; names the region or plane."""

    reason = Reason.LAYOUT_MISMATCH


class MemoryLostError(LongshoreError):
    """An engine has truncated its shared memory; names the region. Bytes copied from or to it are invalid."""

    reason = Reason.MEMORY_LOST


class TransportError(LongshoreError):
    """A transport refused or lost an operation; names the backend, the peer and the cause."""

    reason = Reason.TRANSFER_FAILED


class PeerMetadataError(TransportError):
    """A peer's transport metadata is invalid."""

    reason = Reason.MALFORMED_MESSAGE


class DeviceError(LongshoreError):
    """The CUDA driver is missing or refused a call; names the call, and the device or memory."""

    reason = Reason.INTERNAL


class EngineClosedError(LongshoreError):
    """The other end of a link is closed."""

    reason = Reason.ENGINE_LOST


class EngineStuckError(LongshoreError):
    """An engine does not read its messages; the owner closes the link."""

    reason = Reason.ENGINE_LOST


class ListenError(LongshoreError):
    """The engine socket cannot be created at its path; names the path and the remedy."""

    reason = Reason.UNSUPPORTED
