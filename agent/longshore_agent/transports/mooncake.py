"""Transport over Mooncake's transfer engine: the only file that imports mooncake, and that knows its errors and names.

Made by `transports.create`. It moves host memory over TCP; peers find each other without a metadata server
(P2PHANDSHAKE). What was measured here, with mooncake-transfer-engine 0.3.13, and why this file is as it is:

- A thread of the library copies; a write is complete once the target has acknowledged every byte in its memory. The target
  need not do anything for that. Nobody is told there, so the worker sends a control message.
- The synchronous calls spin on a core, and the status of a batch says FAILED while its other requests still read our memory.
  So each piece is a request of its own, submitted and looked at without blocking (4 us each, like a batch's).
- Above 2,048 requests under way to one peer the library fails some of them. So at most 1,000 are, and the rest waits here.
- The first request to a peer shakes hands under a lock of the whole library, for a minute if the peer is stopped. So a
  thread of ours asks the peer for an answer first, which takes no lock.
- The library remembers a peer by its address for good. A later worker at an old address is written with another spelling.
- It says -1 and no more; why is in the lines that it logs. Only what failed, and where to, is known here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports import wires
from longshore_agent.transports.base import METADATA_BYTES_MAX, Prepared, Wire, Write, WriteState
from longshore_agent.transports.envelope import NAME_BYTES_MAX, is_name, seal, unseal
from longshore_agent.transports.mooncake_address import own_host, remote_address
from longshore_agent.transports.probe import check_notice, find_wire, row
from longshore_agent.transports.regions import Addresses, Regions
from longshore_wire.errors import Reason

_MAGIC = b"LSMOON01"
# Requests under way to one peer. The library holds 1,024 and lets 1,024 more wait, for a second.
_UNDER_WAY_COUNT_MAX = 1000
# Requests end nearly in order; so many open ones in a row mean that those behind them are open too.
_LOOK_AHEAD_COUNT = 16
# Workers that may have had one address before, in the life of this one; a port of 2,000 is drawn for each at random.
_LIVES_COUNT_MAX = 1000
_POLL_PAUSE_S = 0.0001
# What `transfer_check_status` says.
_OPEN, _DONE = 0, 1
# What the library's own exceptions become in Python; an answer of a peer that makes no sense raises them in our thread.
_LIBRARY_ERRORS = (RuntimeError, ValueError, IndexError)
# What `transfer_submit_write` says when it cannot find the peer, in two of its versions.
_NO_REQUEST = (0, (1 << 64) - 1)


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    name: str
    life: str
    kernel: str
    host: str
    port: int
    regions: tuple[tuple[int, int], ...]  # (address, bytes)


class _Peer:
    """One life of a peer. All but `gone` is guarded by `lock`, which only threads that write take."""

    def __init__(self, metadata: _Metadata, regions: Regions, address: str) -> None:
        self.name = metadata.name
        self.life = metadata.life
        self.address = address
        self.same_host = metadata.kernel != "" and metadata.kernel == wires.host_identity()
        self.regions = regions
        self.gone = False
        self.lock = threading.Lock()
        self.writes: deque[MooncakeWrite] = deque()
        self.under_way_count = 0
        self.answers = False
        self.greeter: threading.Thread | None = None


class MooncakeWrite:
    """One posted write. Its fields are guarded by its peer's lock."""

    __slots__ = ("count", "error", "failed_bytes", "failed_count", "open", "peer", "settled", "state", "waiting")

    def __init__(self, peer: _Peer, pieces: list[tuple[int, int, int]]) -> None:
        self.peer = peer
        self.count = len(pieces)
        self.waiting = deque(pieces)
        self.open: deque[tuple[int, int]] = deque()  # (request, bytes)
        self.failed_count = self.failed_bytes = 0
        self.state = WriteState.OPEN
        self.error = ""
        self.settled = False

    def fail(self, why: str, *, settled: bool) -> None:
        """End it; what was not submitted never will be."""
        self.waiting.clear()
        self.state = WriteState.FAILED
        self.settled = settled
        self.error = f"Mooncake write of {self.count} pieces to peer {self.peer.name!r} at {self.peer.address}: {why}"


class MooncakePrepared:
    """Pieces whose places were checked; belongs to one life of one peer."""

    __slots__ = ("count", "life", "pieces")

    def __init__(self, life: str, pieces: tuple[Addresses, Addresses, Addresses]) -> None:
        self.life = life
        self.pieces: tuple[Addresses, Addresses, Addresses] | None = pieces
        self.count = len(pieces[0])


class MooncakeTransport:
    """Moves host memory between workers over TCP; the library's own thread copies.

    Args:
        name: by which peers know this worker.
        host: the address at which peers reach this machine. The library listens on every address all the same.
    Raises:
        TransportError: Mooncake is not installed or does not start, or nobody can reach `host`.
    """

    backend = "Mooncake"
    notifies = False
    # The target checks every request against what it has registered.
    fences = True
    # It asks nobody who sent it, and a request that had begun goes on to its end.
    revocable: frozenset[Wire] = frozenset()

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        if not is_name(name):
            raise TransportError(f"transport name is {name!r}: give 1 to {NAME_BYTES_MAX} bytes")
        self.name = name
        self._life = os.urandom(8).hex()
        self._host = own_host(host)
        self._engine: Any = _start_engine(self._host)
        self._port = int(self._engine.get_rpc_port())
        # The gate keeps posts out of a probe. The lock guards what is below it and is never held while the library writes.
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._lives: dict[tuple[str, int], list[str]] = {}
        self._regions: dict[int, tuple[int, int]] = {}
        self._sources = Regions()
        self._next_token = 1
        self._closed = False

    def register(self, address: int, length_bytes: int) -> int:
        """Register host memory; see `Transport.register`. Ranges may not overlap."""
        with self._lock:
            engine = self._open_engine()
            try:
                sources = Regions([*self._sources.ranges, (address, length_bytes)])
            except ValueError as error:
                raise TransportError(f"Mooncake cannot register memory: {error}") from error
            said = engine.register_memory(address, length_bytes)
            if said:
                raise TransportError(f"Mooncake cannot register {length_bytes} bytes at {address:#x}: it says {said}")
            self._sources = sources
            token = self._next_token
            self._next_token += 1
            self._regions[token] = (address, length_bytes)
            return token

    def deregister(self, token: int) -> None:
        """Let go of registered memory; see `Transport.deregister`. Writes of peers that begin later are refused."""
        with self._lock:
            engine = self._open_engine()
            region = self._regions.pop(token, None)
            if region is None:
                raise TransportError(f"Mooncake memory token {token} is not registered")
            self._sources = Regions(self._regions.values())
            said = engine.unregister_memory(region[0])
            if said:
                raise TransportError(f"Mooncake cannot deregister {region[1]} bytes at {region[0]:#x}: it says {said}")

    def metadata(self) -> bytes:
        """Return this life's name, address and memory in an envelope; see `Transport.metadata`."""
        with self._lock:
            self._open_engine()
            regions = self._sources.ranges
        kernel = wires.host_identity()
        packed = seal(_MAGIC, _Metadata(self.name, self._life, kernel, self._host, self._port, regions))
        if len(packed) > METADATA_BYTES_MAX:
            raise TransportError(
                f"Mooncake metadata takes {len(packed)} bytes of {METADATA_BYTES_MAX}: register fewer regions"
            )
        return packed

    def connect(self, metadata: bytes) -> str:
        """Learn a peer, its newer metadata, or its next life under the same name; see `Transport.connect`."""
        fresh = unseal(_MAGIC, metadata, _Metadata)
        if not is_name(fresh.name) or not is_name(fresh.life):
            raise PeerMetadataError("peer metadata has a name that is too long or empty")
        try:
            regions = Regions(fresh.regions)
        except ValueError as error:
            raise PeerMetadataError(f"peer metadata of {fresh.name!r} has impossible memory: {error}") from error
        with self._lock:
            self._open_engine()
            known = self._peers.get(fresh.name)
            if known is not None and known.life == fresh.life:
                known.regions = regions
                return fresh.name
            lives = self._lives.setdefault((fresh.host, fresh.port), [])
            if fresh.life not in lives:
                if len(lives) >= _LIVES_COUNT_MAX:
                    raise PeerMetadataError(
                        f"peer {fresh.name!r} is number {len(lives) + 1} at {fresh.host} port {fresh.port}: restart this worker"
                    )
                lives.append(fresh.life)
            address = remote_address(fresh.host, fresh.port, lives.index(fresh.life))
            if known is not None:
                known.gone = True
            self._peers[fresh.name] = _Peer(fresh, regions, address)
            return fresh.name

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its open writes fail; see `Transport.disconnect`."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                known.gone = True

    def post(
        self,
        peer: str,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        notice: bytes,
    ) -> MooncakeWrite:
        """Begin one write of n pieces; see `Transport.post`. The notice is ignored, as `notifies` says."""
        check_notice(notice)
        with self._gate:
            return self._begin(self._peer(peer), sources, targets, lengths)

    def state(self, write: Write) -> WriteState:
        """Look at what is under way, submit what waits, and return the state of `write`; see `Transport.state`."""
        assert isinstance(write, MooncakeWrite)
        if write.state is WriteState.OPEN:
            with write.peer.lock:
                self._drive(write.peer)
        return write.state

    def release(self, write: Write) -> bool:
        """Give a write back; see `Transport.release`.

        A FAILED write is settled only if none of it was submitted: bytes that the kernel took may land after a failure. After
        a disconnect the library goes on reading what was submitted, so what lands late may be later bytes of that memory.
        """
        assert isinstance(write, MooncakeWrite)
        self.state(write)
        return write.settled

    def notices(self) -> list[tuple[str, bytes]]:
        """Return nothing: Mooncake tells the target of nothing."""
        with self._lock:
            self._open_engine()
        return []

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire:
        """Write once and read the kernel's counters; see `Transport.probe_wire` and `probe`."""
        with self._gate:
            known = self._peer(peer)

            def begin() -> MooncakeWrite:
                return self._begin(known, row(source), row(target), row(length_bytes))

            return find_wire(self, begin, self._settle_open, length_bytes, same_host=known.same_host)

    def prepare(
        self,
        peer: str,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
    ) -> MooncakePrepared:
        """Check where n pieces lie, once; see `PreparingTransport.prepare`."""
        known = self._peer(peer)
        self._check_inside(known, sources, targets, lengths)
        return MooncakePrepared(known.life, (sources.copy(), targets.copy(), lengths.copy()))

    def post_prepared(
        self, peer: str, prepared: Prepared, indices: npt.NDArray[np.int32], notice: bytes
    ) -> MooncakeWrite:
        """Begin one write of prepared pieces; see `PreparingTransport.post_prepared`."""
        assert isinstance(prepared, MooncakePrepared)
        check_notice(notice)
        with self._gate:
            known = self._peer(peer)
            if prepared.pieces is None or prepared.life != known.life:
                raise TransportError(
                    f"Mooncake list was prepared for another life of peer {peer!r}, or released: prepare again"
                )
            sources, targets, lengths = prepared.pieces
            return self._launch(known, sources[indices], targets[indices], lengths[indices])

    def release_prepared(self, prepared: Prepared) -> None:
        """Forget the pieces; see `PreparingTransport.release_prepared`."""
        assert isinstance(prepared, MooncakePrepared)
        prepared.pieces = None

    def close(self) -> None:
        """Stop the library; open writes are given up. Takes up to a second, which the library's listener sleeps."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                peer.gone = True
            self._peers.clear()
            # The library stops when its last reference goes; a thread that is in the middle of a call still has one.
            self._engine = None

    def _begin(self, peer: _Peer, sources: Addresses, targets: Addresses, lengths: Addresses) -> MooncakeWrite:
        self._check_inside(peer, sources, targets, lengths)
        return self._launch(peer, sources, targets, lengths)

    def _launch(self, peer: _Peer, sources: Addresses, targets: Addresses, lengths: Addresses) -> MooncakeWrite:
        write = MooncakeWrite(peer, list(zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True)))
        with peer.lock:
            peer.writes.append(write)
            self._drive(peer)
        return write

    def _drive(self, peer: _Peer) -> None:
        """Look at the peer's requests and submit what waits. Called with the peer's lock."""
        engine = self._engine
        for write in peer.writes:
            if engine is not None:
                self._look(engine, write)
        for write in peer.writes:
            if peer.gone or engine is None:
                if write.state is WriteState.OPEN:
                    why = "the transport was closed" if self._closed else "the peer was disconnected"
                    write.fail(f"{why} before {_left(write)}", settled=not write.open)
            elif write.waiting and self._has_answered(engine, peer, write):
                self._submit(engine, write)
        peer.writes = deque(write for write in peer.writes if write.state is WriteState.OPEN)

    def _look(self, engine: Any, write: MooncakeWrite) -> None:
        """Ask after requests of a write, the oldest first, and judge it when none is left."""
        still: list[tuple[int, int]] = []
        while write.open and len(still) < _LOOK_AHEAD_COUNT:
            request, length_bytes = write.open.popleft()
            said = engine.transfer_check_status(request)
            if said == _OPEN:
                still.append((request, length_bytes))
                continue
            write.peer.under_way_count -= 1
            if said != _DONE:
                write.failed_count += 1
                write.failed_bytes += length_bytes
        write.open.extendleft(reversed(still))
        if write.failed_count:
            # Those that are under way go on; there is no use in sending more.
            write.waiting.clear()
        if write.open or write.waiting:
            return
        if write.failed_count:
            why = f"{write.failed_count} of them, {write.failed_bytes} bytes, failed; Mooncake says no more than -1"
            write.fail(why, settled=False)
        else:
            write.state = WriteState.DONE
            write.settled = True

    def _submit(self, engine: Any, write: MooncakeWrite) -> None:
        """Hand waiting pieces to the library, as many as it takes."""
        peer = write.peer
        while write.waiting and peer.under_way_count < _UNDER_WAY_COUNT_MAX and not peer.gone:
            source, target, length_bytes = write.waiting.popleft()
            try:
                request = engine.transfer_submit_write(peer.address, source, target, length_bytes)
                said = "Mooncake says no more than -1"
            except _LIBRARY_ERRORS as error:
                request, said = _NO_REQUEST[0], str(error)
            if request in _NO_REQUEST:
                peer.answers = False
                peer.greeter = None
                write.failed_count += 1
                write.failed_bytes += length_bytes
                write.waiting.clear()
                if not write.open:
                    write.fail(f"the peer does not shake hands: {said}", settled=True)
                return
            peer.under_way_count += 1
            write.open.append((request, length_bytes))

    def _has_answered(self, engine: Any, peer: _Peer, write: MooncakeWrite) -> bool:
        """Whether the peer is known to answer; begin to ask it, or fail the write if it does not."""
        if peer.answers:
            return True
        if peer.greeter is None:
            peer.greeter = threading.Thread(target=_greet, args=(engine, peer), name="mooncake-greeter", daemon=True)
            peer.greeter.start()
        elif not peer.greeter.is_alive() and not peer.answers:
            # It has ended without an answer (looked at in this order: it may end just now); the next write asks again.
            peer.greeter = None
            write.fail("the peer cannot be reached", settled=not write.open)
        return peer.answers

    def _settle_open(self, deadline_ns: int) -> bool:
        """Drive writes to all peers until none is open. False if the deadline came first."""
        while True:
            with self._lock:
                peers = list(self._peers.values())
            open_count = 0
            for peer in peers:
                with peer.lock:
                    self._drive(peer)
                    open_count += len(peer.writes)
            if not open_count:
                return True
            if time.monotonic_ns() >= deadline_ns:
                return False
            time.sleep(_POLL_PAUSE_S)

    def _check_inside(self, peer: _Peer, sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
        assert len(sources) == len(targets) == len(lengths) >= 1
        for side, regions, addresses in (("source", self._sources, sources), ("target", peer.regions, targets)):
            piece = regions.stray(addresses, lengths)
            if piece is not None:
                raise TransportError(
                    f"Mooncake {side} piece {piece} for peer {peer.name!r}, {int(lengths[piece])} bytes at "
                    f"{int(addresses[piece]):#x}, is not in registered memory"
                )

    def _peer(self, name: str) -> _Peer:
        with self._lock:
            self._open_engine()
            peer = self._peers.get(name)
        if peer is None:
            raise TransportError(f"Mooncake peer {name!r} is not connected: connect its metadata first")
        return peer

    def _open_engine(self) -> Any:
        if self._closed:
            raise TransportError(f"Mooncake transport {self.name!r} is closed", reason=Reason.SHUTTING_DOWN)
        return self._engine


def _start_engine(host: str) -> Any:
    """Import Mooncake quietly and start an engine."""
    # Read when the library loads: its INFO lines, several for each write, belong in nobody's log.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # What this file promises was proven over TCP alone; where a machine has RDMA devices the library would take those.
    os.environ.setdefault("MC_FORCE_TCP", "1")
    if os.environ.get("MC_TCP_PROTO"):
        raise TransportError(
            "MC_TCP_PROTO is set: with the old protocol Mooncake calls a write complete before its bytes are there; unset it",
            reason=Reason.UNSUPPORTED,
        )
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransportError(
            f"Mooncake does not load: install longshore[mooncake] and Debian's libcurl4 libibverbs1 libnuma1 ({error})",
            reason=Reason.UNSUPPORTED,
        ) from error
    engine = TransferEngine()
    said = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if said:
        raise TransportError(f"Mooncake does not start on {host}: it says {said}; its own lines are in the log")
    return engine


def _greet(engine: Any, peer: _Peer) -> None:
    try:
        peer.answers = cast("int", engine.send_probe(peer.address)) == 0
    except _LIBRARY_ERRORS:
        # What answers there is no Mooncake; the write that waits is told that nobody can be reached.
        return


def _left(write: MooncakeWrite) -> str:
    return f"{len(write.open) + len(write.waiting)} of its pieces had ended"
