"""Transport between processes of one host (or objects of one process) that needs no library, with faults on demand.

Made by `transports.create`. It ships, so that anyone can try Longshore, and what it does when a wire fails, on any
Linux. Bytes are copied by the kernel from process to process, inside `post`; notices are datagrams on a UNIX socket.
Both processes must share a pid and a network namespace, and be allowed to ptrace each other (same user).

Faults are rules, see `loopback_faults.Fault`: set `transport.faults`, or start a worker with the environment variable
`LONGSHORE_LOOPBACK_FAULTS`. To hold a worker's write open from outside and let it go later:

    LONGSHORE_LOOPBACK_FAULTS='[{"kind": "hold", "first": 0, "count": 1, "until": "/tmp/t/go", "mark": "/tmp/t/held"}]'

The first write stays open; `/tmp/t/held` appears when it is posted; `touch /tmp/t/go` lets it go. Held, delayed and
late writes move on when their transport is driven (`state`, `release`, `notices`), as everything here.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports import wires
from longshore_agent.transports.base import METADATA_BYTES_MAX, NOTICE_BYTES_MAX, Prepared, Wire, Write, WriteState
from longshore_agent.transports.loopback_faults import ENVIRONMENT_NAME, Fault, FaultKind, FaultPlan, parse_faults
from longshore_agent.transports.process_memory import Addresses, ProcessMemory, start_time
from longshore_agent.transports.regions import Regions
from longshore_wire.errors import Reason

_NAME_BYTES_MAX = 200
# What reading somebody's bytes raises: texts that are none, and nesting without end, have errors of Python's.
_NOT_OURS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FORMAT = 1
# A datagram is one notice with its sender's name; larger ones are not ours.
_DATAGRAM_BYTES_MAX = 2048
# Datagrams read by one call of `notices`, so that a flood cannot hold its caller.
_DATAGRAMS_A_CALL = 1024
# Notices of workers that are not connected yet wait; more than this many are lost.
_UNCLAIMED_COUNT_MAX = 256


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    format: int
    name: str
    life: str
    host: str
    pid: int
    started: int
    regions: tuple[tuple[int, int], ...]  # (address, bytes), by address


class _Datagram(msgspec.Struct, frozen=True, array_like=True):
    name: str
    life: str
    notice: bytes


class _Peer(msgspec.Struct):
    name: str
    life: str
    memory: ProcessMemory
    regions: Regions


class LoopbackWrite:
    """One posted write. `number` is what fault rules count by. Guarded by the transport's lock."""

    __slots__ = ("_pieces", "due_ns", "error", "fault", "notices", "number", "peer", "settled", "state")

    def __init__(self, number: int, peer: _Peer, pieces: tuple[Addresses, Addresses, Addresses], notice: bytes) -> None:
        self.number = number
        self.peer = peer
        self.state = WriteState.OPEN
        self.error = ""
        self.settled = False
        self.fault: Fault | None = None
        self.due_ns = 0
        self.notices = [notice] if notice else []
        self._pieces: tuple[Addresses, Addresses, Addresses] | None = pieces

    @property
    def has_landed(self) -> bool:
        """Whether its bytes are where they belong, or never will be."""
        return self._pieces is None

    def keep_copy(self) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        """Copy the sources and write from the copies later; return them, to be kept alive."""
        assert self._pieces is not None
        sources, targets, lengths = self._pieces
        copies = [np.empty(int(length), dtype=np.uint8) for length in lengths]
        addresses = np.array([copy.ctypes.data for copy in copies], dtype=np.uint64)
        own = ProcessMemory(os.getpid(), start_time(os.getpid()))
        try:
            own.write(sources, addresses, lengths)
        finally:
            own.close()
        self._pieces = (addresses, targets, lengths)
        return copies

    def land(self) -> None:
        """Copy the bytes into the target. Raises TransportError."""
        assert self._pieces is not None
        pieces, self._pieces = self._pieces, None
        self.peer.memory.write(*pieces)

    def land_half(self) -> None:
        """Copy the first half of the first piece only. Raises TransportError."""
        assert self._pieces is not None
        (sources, targets, lengths), self._pieces = self._pieces, None
        if lengths[0] > 1:
            self.peer.memory.write(sources[:1], targets[:1], lengths[:1] // np.uint64(2))

    def give_up(self, error: str) -> None:
        """End the write without its bytes."""
        self._pieces = None
        self.notices = []
        self.state = WriteState.FAILED
        self.settled = True
        self.error = error


class LoopbackPrepared(msgspec.Struct):
    """Pieces of one peer; nothing is looked up ahead, this exists so that `slices` runs on every transport."""

    peer: str
    sources: Addresses
    targets: Addresses
    lengths: Addresses

    @property
    def count(self) -> int:
        """How many pieces it holds."""
        return len(self.sources)


class LoopbackTransport:
    """Copies between processes of one host, see the module.

    Args:
        name: by which peers know this worker.
        faults: what goes wrong; by default what the environment says. Assign `faults` to change it for writes to come.
    Raises:
        TransportError: a name that cannot be, or faults that cannot be read.
    """

    backend = "Loopback"
    notifies = True
    # A peer that knows the memory still writes after deregistration, as over NIXL's shared memory.
    fences = False
    revocable: frozenset[Wire] = frozenset()

    def __init__(self, name: str, faults: FaultPlan | None = None) -> None:
        if not 1 <= len(name.encode()) <= _NAME_BYTES_MAX:
            raise TransportError(f"transport name is {name!r}: give 1 to {_NAME_BYTES_MAX} bytes")
        self.name = name
        self.faults = parse_faults(os.environ.get(ENVIRONMENT_NAME, "")) if faults is None else faults
        self._life = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(_socket_name(self._life))
        self._tokens: dict[int, tuple[int, int]] = {}
        self._regions = Regions()
        self._next_token = 1
        self._next_number = 0
        self._peers: dict[str, _Peer] = {}
        self._waiting: list[LoopbackWrite] = []
        self._copies: dict[LoopbackWrite, object] = {}
        self._arrived: list[tuple[str, bytes]] = []
        self._unclaimed: deque[_Datagram] = deque(maxlen=_UNCLAIMED_COUNT_MAX)
        self._forgotten: deque[str] = deque(maxlen=_UNCLAIMED_COUNT_MAX)
        self._closed = False

    def register(self, address: int, length_bytes: int) -> int:
        """Note a range of this process's memory; see `Transport.register`."""
        if address <= 0 or length_bytes <= 0:
            raise TransportError(f"Loopback cannot register {length_bytes} bytes at {address:#x}")
        with self._lock:
            self._check_open()
            try:
                regions = Regions([*self._tokens.values(), (address, length_bytes)])
            except ValueError as error:
                raise TransportError(f"Loopback cannot register memory: {error}") from error
            token = self._next_token
            self._next_token += 1
            self._tokens[token], self._regions = (address, length_bytes), regions
            return token

    def deregister(self, token: int) -> None:
        """Forget a range; see `Transport.deregister`. It does not stop a peer that knows it."""
        with self._lock:
            if self._tokens.pop(token, None) is None:
                raise TransportError(f"Loopback memory token {token} is not registered")
            self._regions = Regions(self._tokens.values())

    def metadata(self) -> bytes:
        """Return this life's name, process and memory; see `Transport.metadata`."""
        with self._lock:
            self._check_open()
            regions = self._regions.ranges
        pid = os.getpid()
        return msgspec.msgpack.encode(
            _Metadata(_FORMAT, self.name, self._life, wires.host_identity(), pid, start_time(pid), regions)
        )

    def connect(self, metadata: bytes) -> str:
        """Learn a peer, its newer metadata, or its next life under the same name; see `Transport.connect`."""
        fresh, regions = _unpack(metadata)
        with self._lock:
            self._check_open()
            known = self._peers.get(fresh.name)
            if known is not None and known.life == fresh.life:
                known.regions = regions
                return fresh.name
            try:
                memory = ProcessMemory(fresh.pid, fresh.started)
            except TransportError as error:
                raise PeerMetadataError(f"Loopback peer {fresh.name!r} cannot be reached: {error}") from error
            if known is not None:
                self._forgotten.append(known.life)
                self._forget(known)
            self._peers[fresh.name] = _Peer(fresh.name, fresh.life, memory, regions)
            if fresh.life in self._forgotten:
                self._forgotten.remove(fresh.life)
            waiting = list(self._unclaimed)
            self._unclaimed.clear()
            for item in waiting:
                self._sort_notice(item)
            return fresh.name

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its open writes fail and never land; see `Transport.disconnect`."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                # What it sent before now is still in the socket; it must not wait there for the next connect.
                self._read_datagrams()
                self._arrived = [item for item in self._arrived if item[0] != peer]
                self._forgotten.append(known.life)
                self._forget(known)

    def post(
        self, peer: str, sources: Addresses, targets: Addresses, lengths: Addresses, notice: bytes
    ) -> LoopbackWrite:
        """Begin one write, which has landed when this returns unless a fault befalls it; see `Transport.post`."""
        if len(notice) > NOTICE_BYTES_MAX:
            raise TransportError(f"notice takes {len(notice)} bytes: give at most {NOTICE_BYTES_MAX}")
        assert len(sources) == len(targets) == len(lengths) >= 1
        with self._lock:
            known = self._peer(peer)
            _check_inside("source", self._regions, sources, lengths)
            _check_inside("target", known.regions, targets, lengths)
            write = LoopbackWrite(self._next_number, known, (sources, targets, lengths), notice)
            write.fault = self.faults.fault_of(write.number, peer)
            self._next_number += 1
            if write.fault is not None:
                self._befall(write, write.fault)
        if write.fault is None or write.fault.kind in (FaultKind.DROP, FaultKind.REPEAT):
            # Outside the lock: a copy takes milliseconds, and nobody else knows this write yet.
            self._finish(write)
        if write.state is WriteState.OPEN or not write.has_landed:
            with self._lock:
                self._waiting.append(write)
        return write

    def state(self, write: Write) -> WriteState:
        """Drive waiting writes and return the state of `write`; see `Transport.state`."""
        assert isinstance(write, LoopbackWrite)
        with self._lock:
            self._drive()
            return write.state

    def release(self, write: Write) -> bool:
        """Give a write back; see `Transport.release`. A late or held one goes on until it is let go."""
        assert isinstance(write, LoopbackWrite)
        with self._lock:
            self._drive()
            return write.settled

    def let_go(self, number: int | None = None) -> int:
        """Let go of held and late writes, or of the one with this number; return how many bytes-bearing ones there were."""
        with self._lock:
            chosen = [write for write in self._waiting if not write.has_landed and number in (None, write.number)]
            for write in chosen:
                self._finish(write)
            self._drive()
            return len(chosen)

    def notices(self) -> list[tuple[str, bytes]]:
        """Drive waiting writes and return what has landed here; see `Transport.notices`."""
        with self._lock:
            self._check_open()
            self._drive()
            self._read_datagrams()
            arrived, self._arrived = self._arrived, []
            return arrived

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire:
        """Write once, without faults, and return LOOPBACK: there is no other way here; see `Transport.probe_wire`."""
        row = [np.array([value], dtype=np.uint64) for value in (source, target, length_bytes)]
        with self._lock:
            known = self._peer(peer)
            _check_inside("target", known.regions, row[1], row[2])
        known.memory.write(row[0], row[1], row[2])
        return Wire.LOOPBACK

    def prepare(self, peer: str, sources: Addresses, targets: Addresses, lengths: Addresses) -> LoopbackPrepared:
        """Keep n pieces for later; see `PreparingTransport.prepare`."""
        assert len(sources) == len(targets) == len(lengths) >= 1
        with self._lock:
            known = self._peer(peer)
            _check_inside("target", known.regions, targets, lengths)
        return LoopbackPrepared(peer, sources.copy(), targets.copy(), lengths.copy())

    def post_prepared(
        self, peer: str, prepared: Prepared, indices: npt.NDArray[np.int32], notice: bytes
    ) -> LoopbackWrite:
        """Begin one write of prepared pieces; see `PreparingTransport.post_prepared`."""
        assert isinstance(prepared, LoopbackPrepared)
        if peer != prepared.peer:
            raise TransportError(f"Loopback list was prepared for peer {prepared.peer!r}, not {peer!r}: prepare again")
        return self.post(peer, prepared.sources[indices], prepared.targets[indices], prepared.lengths[indices], notice)

    def release_prepared(self, prepared: Prepared) -> None:
        """Nothing is held; see `PreparingTransport.release_prepared`."""

    def close(self) -> None:
        """Let go of everything; writes that wait never land. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                self._forget(peer)
            self._peers.clear()
            self._socket.close()

    def _befall(self, write: LoopbackWrite, fault: Fault) -> None:
        write.due_ns = time.monotonic_ns() + fault.delay_ns if fault.delay_ns else 0
        match fault.kind:
            case FaultKind.DROP:
                write.notices = []
            case FaultKind.REPEAT:
                write.notices = write.notices * 2
            case FaultKind.FAIL:
                write.land_half()
                write.give_up(f"Loopback write {write.number} failed on demand")
            case FaultKind.LATE:
                self._copies[write] = write.keep_copy()
                write.notices = []
                write.state = WriteState.FAILED
                write.error = f"Loopback write {write.number} failed on demand, its bytes land late"
            case FaultKind.MUTE:
                write.land()
            case FaultKind.DELAY | FaultKind.HOLD:
                pass
            case _:
                assert_never(fault.kind)
        if fault.mark is not None:
            with Path(fault.mark).open("a") as mark:
                mark.write(f"{write.number} {write.peer.name}\n")

    def _drive(self) -> None:
        if not self._waiting:
            return
        blocked: set[str] = set()
        for write in self._waiting:
            if not write.has_landed and self._is_due(write):
                self._finish(write)
            elif write.has_landed and self._may_tell(write) and write.peer.life not in blocked:
                self._notify(write)
                if write.state is WriteState.OPEN:
                    # Its target reads no notices now; trying those of the others would only cost time.
                    blocked.add(write.peer.life)
        self._waiting = [write for write in self._waiting if not write.settled]

    def _may_tell(self, write: LoopbackWrite) -> bool:
        muted = write.fault is not None and write.fault.kind is FaultKind.MUTE
        return write.state is WriteState.OPEN and (not muted or self._is_due(write))

    def _is_due(self, write: LoopbackWrite) -> bool:
        fault = write.fault
        if fault is None:
            return True
        if fault.until is not None and Path(fault.until).exists():
            return True
        # A delay of 0 is no delay; a hold of 0 is one without end.
        if fault.kind is FaultKind.DELAY and write.due_ns == 0:
            return True
        return write.due_ns != 0 and time.monotonic_ns() >= write.due_ns

    def _finish(self, write: LoopbackWrite) -> None:
        try:
            write.land()
        except TransportError as error:
            self._copies.pop(write, None)
            write.give_up(f"Loopback write to peer {write.peer.name!r}: {error}")
            return
        self._copies.pop(write, None)
        if write.state is WriteState.FAILED:
            write.settled = True
        else:
            self._notify(write)

    def _notify(self, write: LoopbackWrite) -> None:
        """Send the notices that are left; a full queue at the target leaves the write open, to be tried again."""
        while write.notices:
            packed = msgspec.msgpack.encode(_Datagram(self.name, self._life, write.notices[0]))
            try:
                self._socket.sendto(packed, _socket_name(write.peer.life))
            except BlockingIOError:
                return
            except OSError as error:
                write.give_up(f"Loopback notice to peer {write.peer.name!r}: {error}")
                return
            write.notices.pop(0)
        write.state = WriteState.DONE
        write.settled = True

    def _read_datagrams(self) -> None:
        for _ in range(_DATAGRAMS_A_CALL):
            try:
                data = self._socket.recv(_DATAGRAM_BYTES_MAX)
            except BlockingIOError:
                return
            try:
                self._sort_notice(msgspec.msgpack.decode(data, type=_Datagram))
            except _NOT_OURS:
                # Anyone on this host can send to the socket; what is no notice of ours is nothing.
                continue

    def _sort_notice(self, item: _Datagram) -> None:
        peer = self._peers.get(item.name)
        if peer is not None and peer.life == item.life:
            self._arrived.append((item.name, item.notice))
        elif item.life not in self._forgotten:
            self._unclaimed.append(item)

    def _forget(self, peer: _Peer) -> None:
        for write in self._waiting:
            if write.peer is peer:
                write.give_up(f"Loopback peer {peer.name!r} was disconnected")
        self._waiting = [write for write in self._waiting if write.peer is not peer]
        for write in [write for write in self._copies if write.peer is peer]:
            del self._copies[write]
        peer.memory.close()

    def _peer(self, name: str) -> _Peer:
        self._check_open()
        peer = self._peers.get(name)
        if peer is None:
            raise TransportError(f"Loopback peer {name!r} is not connected: connect its metadata first")
        return peer

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"Loopback transport {self.name!r} is closed", reason=Reason.SHUTTING_DOWN)


def _socket_name(life: str) -> bytes:
    return b"\0longshore-loopback-" + life.encode()


def _unpack(data: bytes) -> tuple[_Metadata, Regions]:
    if len(data) > METADATA_BYTES_MAX:
        raise PeerMetadataError(f"peer metadata takes {len(data)} bytes: at most {METADATA_BYTES_MAX} are read")
    try:
        metadata = msgspec.msgpack.decode(data, type=_Metadata)
    except _NOT_OURS as error:
        raise PeerMetadataError(f"peer metadata is not that of a loopback transport: {error}") from error
    if metadata.format != _FORMAT or metadata.host != wires.host_identity() or metadata.pid <= 0:
        raise PeerMetadataError(f"peer {metadata.name[:_NAME_BYTES_MAX]!r} has another version or runs on another host")
    if not 1 <= len(metadata.name.encode()) <= _NAME_BYTES_MAX or len(metadata.life) > _NAME_BYTES_MAX // 4:
        raise PeerMetadataError("peer metadata has a name that is too long or empty")
    try:
        return metadata, Regions(metadata.regions)
    except (ValueError, OverflowError) as error:
        raise PeerMetadataError(f"peer metadata names no memory: {error}") from error


def _check_inside(side: str, regions: Regions, addresses: Addresses, lengths: Addresses) -> None:
    """Raise TransportError unless every piece lies in one registered region."""
    piece = regions.stray(addresses, lengths)
    if piece is not None:
        raise TransportError(
            f"Loopback {side} piece {piece}, {int(lengths[piece])} bytes at {int(addresses[piece]):#x}, is not registered"
        )
