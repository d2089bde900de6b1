"""The one interface that every transport implements; the contract suite in tests/agent holds each to it.

Called by the worker's control thread and its lane threads: every method may be called from any thread.
A transport knows addresses, lengths and opaque notices; it knows no rooms and no layouts.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longshore_wire.names import UNKNOWN_WIRE

# What `post` takes as a notice at most; both transports that notify carry it in one small message.
NOTICE_BYTES_MAX = 1024
# What `connect` reads at most: room for some 20,000 registered regions.
METADATA_BYTES_MAX = 1 << 20


class Wire(Enum):
    """What the bytes between two workers really travel over, found by a probe write."""

    UNKNOWN = UNKNOWN_WIRE
    LOOPBACK = "Loopback"
    SHARED_MEMORY = "SharedMemory"
    TCP = "TCP"
    RDMA = "RDMA"
    CUDA_IPC = "CudaIPC"
    NVLINK = "NVLink"


class WriteState(Enum):
    """The life of one posted write. FAILED says nothing on which bytes landed: ask `release`."""

    OPEN = "open"
    DONE = "done"  # every byte is in the target's memory
    FAILED = "failed"


class Write(Protocol):
    """One posted write; made by `Transport.post`, owned by its caller until `release`."""

    @property
    def error(self) -> str:
        """What the transport said when the write failed, else empty."""


class Transport(Protocol):
    """Moves bytes from memory registered here into memory registered by a peer.

    Attributes:
        backend: the name in the CR and in metrics, for example `NIXL`.
        notifies: a notice posted with a write reaches the target by the transport itself, after the bytes.
            Where it is False, `post` ignores `notice`, the worker sends a control message after DONE, and bytes arrive
            without anybody calling `notices`.
        fences: a peer's write that begins after `deregister` of that memory is refused. A fact proven by the contract
            suite. One that had begun may still land, whatever the transport.
        revocable: the wires over which `disconnect` takes a peer's access away: no byte of it lands here afterwards, also
            of a write that had begun. Proven by the contract suite, which writes after revocation; a wire that it has not
            seen is not among them. Where it is not, only the peer's word, its end or ours proves memory free.
    """

    backend: str
    notifies: bool
    fences: bool
    revocable: frozenset[Wire]

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

    def post(
        self,
        peer: str,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        notice: bytes,
    ) -> Write:
        """Begin one write of n pieces, each from a local to a remote address; may copy before it returns.

        Args:
            peer: a name that `connect` returned.
            sources, targets, lengths: [n], n >= 1, addresses and bytes inside registered memory of either side.
            notice: at most 1 KiB, handed to the peer's `notices` once every byte has landed; empty: none.
        Raises:
            TransportError: nothing was begun.
        """

    def state(self, write: Write) -> WriteState:
        """Drive progress and return the state of `write`. Cheap; callers poll it while a write is open."""

    def release(self, write: Write) -> bool:
        """Give a write back. True: it is settled, no byte of it will move any more, on either side.

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


class Prepared(Protocol):
    """A list of pieces that a transport has looked up once, to be posted in parts and repeatedly."""

    @property
    def count(self) -> int:
        """How many pieces it holds."""


class PreparingTransport(Transport, Protocol):
    """A transport that can look up a long list of pieces once; the way `slices` posts batches of it."""

    def prepare(
        self,
        peer: str,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
    ) -> Prepared:
        """Look up n pieces, arguments as of `post`. Raises TransportError."""

    def post_prepared(self, peer: str, prepared: Prepared, indices: npt.NDArray[np.int32], notice: bytes) -> Write:
        """Begin one write of the pieces at `indices` ([m], m >= 1, each in [0, prepared.count)). As `post` otherwise."""

    def release_prepared(self, prepared: Prepared) -> None:
        """Let go of the list; no write of it may be open. Idempotent."""


class DraftingTransport(PreparingTransport, Protocol):
    """A transport that can look a write up before its bytes are there, so that beginning it costs little."""

    def draft(
        self,
        peer: str,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        notice: bytes,
    ) -> Write:
        """Look up one write without beginning it; arguments as of `post`. Raises TransportError."""

    def start(self, write: Write) -> None:
        """Begin a drafted write, once. From here on it is as one that `post` returned; waits while a probe runs."""

    def drop(self, write: Write) -> None:
        """Give back a draft that was not begun."""
