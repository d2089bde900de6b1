"""Moves bytes between processes of one host (or objects of one process) without a library, with faults on demand.

Made by `transports.create`. It is part of the product, so that anyone can try Longshore and its handling of failed
wires on any Linux. The kernel copies bytes from process to process, inside `start`; notices are datagrams on a UNIX
socket. Both processes must share a pid and a network namespace, and be allowed to ptrace each other (same user).

Faults are rules, see `Fault`: set `transport.faults`, or start a worker with the environment variable
`LONGSHORE_LOOPBACK_FAULTS`. To hold a worker's write open from outside and release it later:

    LONGSHORE_LOOPBACK_FAULTS='[{"kind": "hold", "first": 0, "count": 1, "until": "/tmp/t/go", "mark": "/tmp/t/held"}]'

The first write stays open; `/tmp/t/held` appears when it begins; `touch /tmp/t/go` releases it. Held, delayed and late
writes progress only when their transport is driven (`state`, `release`, `notices`).
"""

from __future__ import annotations

import os
import socket
import time
from enum import Enum
from pathlib import Path
from typing import assert_never

import msgspec
import numpy as np

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports.base import Pieces, Selection, Write, WriteState
from longshore_agent.transports.own_network import host_identity
from longshore_agent.transports.process_memory import ProcessMemory, start_time
from longshore_agent.transports.state import (
    Arrivals,
    CheckedTransport,
    Metadata,
    Regions,
    WriteBase,
    check_notice,
    regions_of,
    unseal,
)
from longshore_wire.errors import Reason
from longshore_wire.names import Wire

ENVIRONMENT_NAME = "LONGSHORE_LOOPBACK_FAULTS"
# Errors that decoding untrusted bytes can raise.
_NOT_OURS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# A datagram is one notice with its sender's name. A larger one is not ours.
_DATAGRAM_BYTES_MAX = 2048
# Datagrams read by one call of `notices`, so that a flood cannot block the caller.
_DATAGRAMS_A_CALL = 1024


class FaultKind(Enum):
    """The kind of a write's fault."""

    DROP = "drop"  # the bytes land and the write is DONE, but its notice is lost
    DELAY = "delay"  # nothing lands before `delay_ns` have passed; then the write succeeds
    REPEAT = "repeat"  # the notice arrives twice
    FAIL = "fail"  # the first half of the first piece lands, then the write is FAILED and settled
    LATE = "late"  # FAILED at once, but its bytes (as they were when it began) land when it is released
    HOLD = "hold"  # OPEN until it is released; then the bytes of that moment land and the write succeeds
    DAMAGE = "damage"  # one bit of the first piece lands changed; the write succeeds
    MUTE = "mute"  # the bytes land, but it is OPEN and its notice waits until it is released; then the write succeeds


# A write with one of these faults lands when it begins.
_AT_ONCE = (FaultKind.DROP, FaultKind.REPEAT, FaultKind.DAMAGE)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule: `kind` hits the writes numbered `first`, `first + every`, … of one transport, `count` of them.

    Writes are numbered from 0 in the order of `start`, over all peers. Probe writes are not numbered and never fail.
    """

    kind: FaultKind
    first: int = 0
    count: int | None = 1  # None: no limit
    every: int = 1
    peer: str | None = None  # only writes to this peer; the numbering stays that of all writes
    delay_ns: int = 0  # DELAY: its length; LATE, HOLD and MUTE: time until release, 0: never by itself
    until: str | None = None  # LATE, HOLD and MUTE: release when a file of this path exists
    when: str | None = None  # the rule hits only writes that begin while a file of this path exists
    mark: str | None = None  # a file that is created, and gets `<number> <peer>\n` appended, when a write is hit

    def hits(self, number: int, peer: str) -> bool:
        """Whether the rule hits write `number`, to `peer`."""
        if number < self.first or (self.peer is not None and peer != self.peer):
            return False
        if self.when is not None and not Path(self.when).exists():
            return False
        turn, rest = divmod(number - self.first, self.every)
        return rest == 0 and (self.count is None or turn < self.count)


class FaultPlan(msgspec.Struct, frozen=True):
    """Rules in order. The first rule that hits a write applies."""

    rules: tuple[Fault, ...] = ()

    def fault_of(self, number: int, peer: str) -> Fault | None:
        """Return the rule that hits write `number` to `peer`; None: no rule."""
        return next((rule for rule in self.rules if rule.hits(number, peer)), None)


def parse_faults(text: str) -> FaultPlan:
    """Return the plan of a JSON list of rules; an empty text has no rule. Raises TransportError."""
    if not text.strip():
        return FaultPlan()
    try:
        rules = msgspec.json.decode(text, type=tuple[Fault, ...])
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"{ENVIRONMENT_NAME} is not a list of faults: {error}", reason=Reason.UNSUPPORTED
        ) from error
    for rule in rules:
        if rule.first < 0 or rule.every < 1 or rule.delay_ns < 0 or (rule.count is not None and rule.count < 1):
            raise TransportError(
                f"{ENVIRONMENT_NAME}: give first >= 0, every >= 1, count >= 1 and delay_ns >= 0, not {rule}",
                reason=Reason.UNSUPPORTED,
            )
    return FaultPlan(rules)


class _Metadata(Metadata, frozen=True, array_like=True):
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


class LoopbackWrite(WriteBase[_Peer]):
    """One write. Fault rules use `number`, which it gets in `start`. Guarded by the transport's lock."""

    __slots__ = ("_pieces", "due_ns", "fault", "notices", "number")
    backend = "Loopback"

    def __init__(self, peer: _Peer, pieces: Pieces, notice: bytes) -> None:
        super().__init__(peer)
        self.number = -1
        self.fault: Fault | None = None
        self.due_ns = 0
        self.notices = [notice] if notice else []
        self._pieces: Pieces | None = pieces

    @property
    def has_landed(self) -> bool:
        """Whether its bytes have landed or never will."""
        return self._pieces is None

    def keep_copy(self) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        """Copy the sources, to write from the copies later. Return the copies, which the caller keeps alive."""
        assert self._pieces is not None
        sources, targets, lengths = self._pieces
        copies = [np.empty(int(length), dtype=np.uint8) for length in lengths]
        addresses = np.array([copy.ctypes.data for copy in copies], dtype=np.uint64)
        own = ProcessMemory(os.getpid(), start_time(os.getpid()))
        try:
            own.write(sources, addresses, lengths)
        finally:
            own.close()
        self._pieces = Pieces(addresses, targets, lengths)
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

    def give_up(self, why: str) -> None:
        """End the write without its bytes."""
        self._pieces = None
        self.notices = []
        self.fail(why, settled=True)


class LoopbackTransport(CheckedTransport[_Peer]):
    """Copies between processes of one host, see the module.

    Args:
        name: this worker's name for peers.
        faults: fault rules; by default those of the environment. Assign `faults` to change them for later writes.
    Raises:
        TransportError: the name or the faults are invalid.
    """

    backend = "Loopback"
    magic = b"LSLOOP02"
    notifies = True

    def __init__(self, name: str, faults: FaultPlan | None = None) -> None:
        super().__init__(name)
        self.faults = parse_faults(os.environ.get(ENVIRONMENT_NAME, "")) if faults is None else faults
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(_socket_name(self._life))
        self._next_number = 0
        self._waiting: list[LoopbackWrite] = []
        self._copies: dict[LoopbackWrite, object] = {}
        self._arrivals = Arrivals()

    def register(self, address: int, length_bytes: int) -> int:
        """Record a range of this process's memory; see `Transport.register`."""
        with self._lock:
            self._check_open()
            return self._add_memory(address, length_bytes)

    def deregister(self, token: int) -> None:
        """Forget a range; see `Transport.deregister`. It does not stop a peer that knows it."""
        with self._lock:
            self._remove_memory(token)

    def metadata(self) -> bytes:
        """Return this life's name, process and memory; see `Transport.metadata`."""
        with self._lock:
            self._check_open()
            regions = self._own.ranges
        pid = os.getpid()
        return self._sealed(_Metadata(self.name, self._life, host_identity(), pid, start_time(pid), regions))

    def connect(self, metadata: bytes) -> str:
        """Learn a peer, its newer metadata, or its next life under the same name; see `Transport.connect`."""
        fresh = unseal(self.magic, metadata, _Metadata)
        if fresh.kernel != host_identity() or fresh.pid <= 0:
            raise PeerMetadataError(f"peer {fresh.name!r} runs on another host")
        regions = regions_of(fresh.name, fresh.regions)
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
                self._forget_peer(known)
            self._peers[fresh.name] = _Peer(fresh.name, fresh.life, memory, regions)
            self._arrivals.connect((fresh.name, fresh.life), fresh.name)
            return fresh.name

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its open writes fail and never land; see `Transport.disconnect`."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                # Notices that it has sent are still in the socket. They must not wait there for the next connect.
                self._read_datagrams()
                self._arrivals.drop(peer)
                self._forget_peer(known)

    def draft(self, peer: str, pieces: Pieces | Selection, notice: bytes) -> LoopbackWrite:
        """Check where n pieces lie; see `Transport.draft`."""
        check_notice(notice)
        known = self._peer(peer)
        return LoopbackWrite(known, self._looked_up(known, pieces), notice)

    def start(self, write: Write) -> None:
        """Begin a write; unless a fault hits it, it has landed when this returns. See `Transport.start`."""
        assert isinstance(write, LoopbackWrite)
        with self._lock:
            write.begin()
            if gone := self._why_gone(write.peer):
                write.give_up(gone)
                return
            write.number = self._next_number
            self._next_number += 1
            write.fault = self.faults.fault_of(write.number, write.peer.name)
            if write.fault is not None:
                self._befall(write, write.fault)
        if write.fault is None or write.fault.kind in _AT_ONCE:
            # Outside the lock: a copy takes milliseconds, and no other thread knows this write yet.
            self._finish(write)
        if write.state is WriteState.OPEN or not write.has_landed:
            with self._lock:
                self._waiting.append(write)

    def state(self, write: Write) -> WriteState:
        """Drive waiting writes and return the state of `write`; see `Transport.state`."""
        assert isinstance(write, LoopbackWrite)
        with self._lock:
            self._drive()
            return write.state

    def release(self, write: Write) -> bool:
        """Release a write; see `Transport.release`. A late or held one continues until `let_go`."""
        assert isinstance(write, LoopbackWrite)
        with self._lock:
            write.withdraw()
            self._drive()
            return write.settled

    def let_go(self, number: int | None = None) -> int:
        """Release held and late writes, or the one with this number; return the number of those that carried bytes."""
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
            return self._arrivals.take()

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire | None:
        """Write once, without faults, and return LOOPBACK, the only wire here; see `Transport.probe_wire`."""
        pieces = Pieces.one(source, target, length_bytes)
        known = self._peer(peer)
        known.memory.write(*self._looked_up(known, pieces))
        return Wire.LOOPBACK

    def _forget_peer(self, peer: _Peer) -> None:
        """Fail the peer's waiting writes, which never land."""
        self._arrivals.forget((peer.name, peer.life))
        for write in self._waiting:
            if write.peer is peer:
                write.give_up("the peer was disconnected")
        self._waiting = [write for write in self._waiting if write.peer is not peer]
        for write in [write for write in self._copies if write.peer is peer]:
            del self._copies[write]
        peer.memory.close()

    def _stop(self) -> None:
        self._socket.close()

    def _befall(self, write: LoopbackWrite, fault: Fault) -> None:
        write.due_ns = time.monotonic_ns() + fault.delay_ns if fault.delay_ns else 0
        try:
            self._strike(write, fault.kind)
        except TransportError as error:
            write.give_up(str(error))
        if fault.mark is not None:
            with Path(fault.mark).open("a") as mark:
                mark.write(f"{write.number} {write.peer.name}\n")

    def _strike(self, write: LoopbackWrite, kind: FaultKind) -> None:
        match kind:
            case FaultKind.DROP:
                write.notices = []
            case FaultKind.REPEAT:
                write.notices = write.notices * 2
            case FaultKind.FAIL:
                write.land_half()
                write.give_up(f"number {write.number} failed on demand")
            case FaultKind.LATE:
                self._copies[write] = write.keep_copy()
                write.notices = []
                write.fail(f"number {write.number} failed on demand, its bytes land late", settled=False)
            case FaultKind.DAMAGE:
                copies = self._copies[write] = write.keep_copy()
                copies[0][0] ^= 1
            case FaultKind.MUTE:
                write.land()
            case FaultKind.DELAY | FaultKind.HOLD:
                pass
            case _:
                assert_never(kind)

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
                    # The target reads no notices now, so trying its other notices would only cost time.
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
        # A delay of 0 is no delay; a hold of 0 has no end.
        if fault.kind is FaultKind.DELAY and write.due_ns == 0:
            return True
        return write.due_ns != 0 and time.monotonic_ns() >= write.due_ns

    def _finish(self, write: LoopbackWrite) -> None:
        try:
            write.land()
        except TransportError as error:
            self._copies.pop(write, None)
            write.give_up(str(error))
            return
        self._copies.pop(write, None)
        if write.state is WriteState.FAILED:
            write.settled = True
        else:
            self._notify(write)

    def _notify(self, write: LoopbackWrite) -> None:
        """Send the remaining notices. If the target's queue is full, the write stays open and is tried again."""
        while write.notices:
            packed = msgspec.msgpack.encode(_Datagram(self.name, self._life, write.notices[0]))
            try:
                self._socket.sendto(packed, _socket_name(write.peer.life))
            except BlockingIOError:
                return
            except OSError as error:
                write.give_up(f"its notice cannot be sent: {error}")
                return
            write.notices.pop(0)
        write.complete()

    def _read_datagrams(self) -> None:
        for _ in range(_DATAGRAMS_A_CALL):
            try:
                data = self._socket.recv(_DATAGRAM_BYTES_MAX)
            except BlockingIOError:
                return
            try:
                datagram = msgspec.msgpack.decode(data, type=_Datagram)
            except _NOT_OURS:
                # Any process on this host can send to the socket. Ignore all but our notices.
                continue
            self._arrivals.land((datagram.name, datagram.life), datagram.notice)


def _socket_name(life: str) -> bytes:
    return b"\0longshore-loopback-" + life.encode()
