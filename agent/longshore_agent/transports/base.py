"""The one interface that every transport implements; the contract suite in tests/agent holds each to it.

Called by the worker's control thread and its lane threads: every method may be called from any thread.
A transport knows addresses, lengths and opaque notices; it knows no rooms and no layouts.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from longshore_wire.names import UNKNOWN_WIRE

# What `draft` takes as a notice at most; both transports that notify carry it in one small message.
NOTICE_BYTES_MAX = 1024
# What `connect` reads at most: room for some 20,000 registered regions.
METADATA_BYTES_MAX = 1 << 20

Addresses = npt.NDArray[np.uint64]


class Wire(StrEnum):
    """What the bytes between two workers really travel over, found by a probe write."""

    UNKNOWN = UNKNOWN_WIRE
    LOOPBACK = "Loopback"
    SHARED_MEMORY = "SharedMemory"
    TCP = "TCP"
    RDMA = "RDMA"
    CUDA_IPC = "CudaIPC"
    NVLINK = "NVLink"


class WriteState(Enum):
    """The life of one write. FAILED says nothing on which bytes landed: ask `release`."""

    DRAFT = "draft"  # looked up, not begun
    OPEN = "open"
    DONE = "done"  # every byte is in the target's memory
    FAILED = "failed"


class Write(Protocol):
    """One write; made by `Transport.draft`, owned by its caller until `release`."""

    @property
    def error(self) -> str:
        """What the transport said when the write failed, else empty."""


class Prepared(Protocol):
    """A list of pieces that a transport has looked up once, to be written in parts and repeatedly."""

    @property
    def count(self) -> int:
        """How many pieces it holds."""


class Pieces(NamedTuple):
    """n >= 1 pieces, each from a local to a remote address, inside registered memory of either side.

    Attributes:
        sources, targets, lengths: [n] addresses and bytes.
    """

    sources: Addresses
    targets: Addresses
    lengths: Addresses

    @classmethod
    def one(cls, source: int, target: int, length_bytes: int) -> Pieces:
        """Return a single piece."""
        return cls(*(np.array([value], dtype=np.uint64) for value in (source, target, length_bytes)))

    def at(self, indices: npt.NDArray[np.int32]) -> Pieces:
        """Return a copy of the pieces at `indices` ([m])."""
        return Pieces(self.sources[indices], self.targets[indices], self.lengths[indices])


class Part(NamedTuple):
    """Pieces of a list that was looked up before: those at `indices` ([m], m >= 1, each in [0, prepared.count))."""

    prepared: Prepared
    indices: npt.NDArray[np.int32]


class Transport(Protocol):
    """Moves bytes from memory registered here into memory registered by a peer.

    Attributes:
        backend: the name in the CR and in metrics, for example `NIXL`.
        notifies: a notice drafted with a write reaches the target by the transport itself, after the bytes.
            Where it is False, `draft` ignores `notice`, the worker sends a control message after DONE, and bytes arrive
            without anybody calling `notices`.
        fences: a peer's write that begins after `deregister` of that memory is refused. A fact proven by the contract
            suite. One that had begun may still land, whatever the transport.
        revocable: the wires over which `disconnect` takes a peer's access away: no byte of it lands here afterwards, also
            of a write that had begun. Proven by the contract suite, which writes after revocation; a wire that it has not
            seen is not among them. Where it is not, only the peer's word, its end or ours proves memory free.
        announced_by_message: the wires over which the worker's control message announces a slab: all of them where `notifies` is False.
        swift: the wires, not among `announced_by_message`, over which a slab takes microseconds: a target polls for notices, and does not sleep.
        driven: the wires, not among `announced_by_message`, over which bytes move only while their target calls `notices`.
    """

    backend: str
    notifies: bool
    fences: bool
    revocable: frozenset[Wire]
    announced_by_message: frozenset[Wire]
    swift: frozenset[Wire]
    driven: frozenset[Wire]

    def register(self, address: int, length_bytes: int) -> int:
        """Register memory of this process; return a token for `deregister`. Raises TransportError."""

    def deregister(self, token: int) -> None:
        """Let go of registered memory. No write of ours may be open on it."""

    def metadata(self) -> bytes:
        """Everything a peer needs for `connect`, with all memory registered so far. Opaque, at most 1 MiB."""

    def connect(self, metadata: bytes) -> str:
        """Learn a peer, or its newer metadata; return the peer's name. Raises PeerMetadataError on junk."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its notices are dropped from now on. Unknown names are ignored."""

    def prepare(self, peer: str, sources: Addresses, targets: Addresses, lengths: Addresses) -> Prepared:
        """Look up n pieces once, as `Pieces` has them, for writes of parts of them. Raises TransportError."""

    def release_prepared(self, prepared: Prepared) -> None:
        """Let go of the list; no write of it may be open. Idempotent."""

    def draft(self, peer: str, pieces: Pieces | Part, notice: bytes) -> Write:
        """Look up one write without beginning it, so that beginning it costs little. The bytes need not be there yet.

        Args:
            peer: a name that `connect` returned.
            pieces: what to write. A part is of a list that was prepared for this life of the peer.
            notice: at most 1 KiB, handed to the peer's `notices` once every byte has landed; empty: none.
        Raises:
            TransportError: nothing was begun, and there is nothing to release.
        """

    def start(self, write: Write) -> None:
        """Begin a drafted write, once; may copy before it returns. Waits while a probe runs.

        A write that fails at once is FAILED then, with its `error`. So is one whose peer was disconnected after the draft, or
        whose transport was closed: nothing of it was begun.
        """

    def state(self, write: Write) -> WriteState:
        """Drive progress and return the state of `write`. Cheap; callers poll it while a write is open."""

    def release(self, write: Write) -> bool:
        """Give a write back. True: it is settled, no byte of it will move any more, on either side.

        A draft that was never started is settled, and cannot be started any more.
        False for an OPEN write: nothing was cancelled (no backend can), the write stays the caller's and so does
        its source memory; ask again. False for a FAILED one: the write is given back and its source is free,
        but bytes on their way may still land, so the target memory counts as written until the peer confirms.
        Asking again is allowed at any time.
        """

    def notices(self) -> list[tuple[str, bytes]]:
        """Drive progress and return (peer, notice) of writes that have landed here since the last call.

        Only of peers that are connected here too: earlier notices (256 at least are kept) wait for `connect`.
        """

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire:
        """Write `length_bytes` to a peer and find out what they travelled over. Blocking, at most 5 s."""

    def close(self) -> None:
        """Let go of everything. Idempotent."""
