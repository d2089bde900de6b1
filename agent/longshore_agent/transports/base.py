"""Defines the interface that every transport implements. The contract suite in tests/agent checks each of them.

Called by the worker's control thread and its lane threads: every method may be called from any thread.
A transport knows addresses, lengths and opaque notices; it knows no rooms and no layouts.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from longshore_wire.names import Wire

# The longest notice of a `draft`. Both transports that notify carry it in one small message.
NOTICE_BYTES_MAX = 1024
# The longest metadata that `connect` accepts: some 20,000 registered regions.
METADATA_BYTES_MAX = 1 << 20

Addresses = npt.NDArray[np.uint64]
# A list of n pieces that a transport has looked up once, for repeated writes of some of them. Only the transport reads it.
Prepared = object


class WriteState(Enum):
    """The state of one write. FAILED does not tell which bytes have landed; see `release`."""

    DRAFT = "draft"  # looked up, not begun
    OPEN = "open"
    DONE = "done"  # every byte is in the target's memory
    FAILED = "failed"


class Write(Protocol):
    """One write; made by `Transport.draft`, owned by its caller until `release`."""

    @property
    def error(self) -> str:
        """The transport's error if the write failed, otherwise empty."""


class Pieces(NamedTuple):
    """n >= 1 pieces, each from a local to a remote address, inside registered memory on both sides.

    Attributes:
        sources, targets, lengths: [n] addresses and bytes.
    """

    sources: Addresses
    targets: Addresses
    lengths: Addresses

    @classmethod
    def one(cls, source: int, target: int, length_bytes: int) -> Pieces:
        """Return a single piece."""
        values = np.array((source, target, length_bytes), dtype=np.uint64)
        return cls(values[:1], values[1:2], values[2:])

    def at(self, indices: npt.NDArray[np.int32]) -> Pieces:
        """Return a copy of the pieces at `indices` ([m])."""
        return Pieces(self.sources[indices], self.targets[indices], self.lengths[indices])


class Selection(NamedTuple):
    """The pieces of a prepared list at `indices` ([m], m >= 1, each in [0, n))."""

    prepared: Prepared
    indices: npt.NDArray[np.int32]


class Transport(Protocol):
    """Moves bytes from memory registered here into memory registered by a peer.

    Attributes:
        backend: the name in the CR and in metrics, for example `NIXL`.
        notifies: True: the transport itself delivers a write's notice to the target, after the bytes. False: `draft`
            ignores `notice`, the worker sends a control message after DONE, and bytes arrive without a call of
            `notices`.
        announced_by_message: the wires over which the worker's control message announces a slab; all if `notifies` is
            False.
        swift: the other wires over which a slab takes microseconds: a target then polls for notices without sleeping.
        driven: the other wires over which bytes move only while their target calls `notices`.
    """

    backend: str
    notifies: bool
    announced_by_message: frozenset[Wire]
    swift: frozenset[Wire]
    driven: frozenset[Wire]

    def register(self, address: int, length_bytes: int) -> int:
        """Register memory of this process; return a token for `deregister`. Raises TransportError."""

    def deregister(self, token: int) -> None:
        """Deregister memory. No write of ours may be open on it.

        A peer's write may still land there, even one that begins later: only Mooncake over TCP refuses that one.
        """

    def metadata(self) -> bytes:
        """Return the argument of a peer's `connect`, with all memory registered so far. Opaque, at most 1 MiB."""

    def connect(self, metadata: bytes) -> str:
        """Learn a peer, or its newer metadata; return the peer's name. Raises PeerMetadataError if it is invalid."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its notices are dropped from now on. Unknown names are ignored."""

    def prepare(self, peer: str, pieces: Pieces) -> Prepared:
        """Look up n pieces once, for writes of some of them. Raises TransportError."""

    def release_prepared(self, prepared: Prepared) -> None:
        """Release the list. No write of it may be open. Idempotent."""

    def draft(self, peer: str, pieces: Pieces | Selection, notice: bytes) -> Write:
        """Look up one write without beginning it, so that `start` costs little. The source bytes need not be ready.

        Args:
            peer: a name that `connect` returned.
            pieces: the pieces to write. A selection is of a list that was prepared for this life of the peer.
            notice: at most 1 KiB, returned by the peer's `notices` after every byte has landed; empty: none.
        Raises:
            TransportError: nothing was begun, and there is nothing to release.
        """

    def start(self, write: Write) -> None:
        """Begin a drafted write, once. May copy before it returns. Waits while a probe runs.

        Raises nothing: a write that fails at once is FAILED, with its `error`. If the peer was disconnected after the
            draft, or
        the transport was closed, the write is FAILED and nothing of it was begun.
        """

    def state(self, write: Write) -> WriteState:
        """Drive progress and return the state of `write`. Cheap; callers poll it while a write is open."""

    def release(self, write: Write) -> bool:
        """Release a write. May be called again at any time.

        Returns:
            True: the write is settled, so none of its bytes will move any more on either side. A draft is settled, too,
                and cannot be started any more.
            False for an OPEN write: nothing was cancelled (no backend can); the write and its source memory stay in
                use. Call again.
            False for a FAILED write: it is released and its source memory is free, but bytes on the wire may still
                land. The target memory counts as written until the peer confirms.
        """

    def notices(self) -> list[tuple[str, bytes]]:
        """Drive progress and return (peer, notice) of writes that have landed here since the last call.

        Notices of peers that are not connected here wait for `connect`; at least 256 are kept.
        """

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire | None:
        """Write `length_bytes` to a peer; return the wire that carried them, or None. Blocks for at most 5 s."""

    def close(self) -> None:
        """Release everything. Idempotent."""
