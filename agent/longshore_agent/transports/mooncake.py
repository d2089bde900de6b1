"""Moves bytes over Mooncake's transfer engine; mooncake_engine makes its engines.

Made by `transports.create`. It moves host memory over TCP, or a GPU's inside one host over CUDA IPC; peers find each
other without a metadata server (P2PHANDSHAKE). Measured with mooncake-transfer-engine 0.3.13, and the reasons for this
design:

- A thread of the library copies; a write is complete once the target has acknowledged every byte in its memory. The
  target need not do anything for that. The target gets no notice, so the worker sends a control message.
- The synchronous calls spin on a core, and the status of a batch says FAILED while its other requests still read our
  memory. So each piece is a request of its own, submitted and polled without blocking (4 us each, like a batch's).
- Above 2,048 requests under way to one peer the library fails some of them. So at most 1,000 are, and the rest waits
  here.
- The first request to a peer shakes hands under a lock of the whole library, for a minute if the peer is stopped. So a
  thread of ours asks the peer for an answer first, which takes no lock.
- The library never forgets a peer's address. A later worker at an old address gets another spelling of it.
- It returns -1 without a reason, which is only in its log lines. Here only the call and its target are known.

And of GPUs' memory, with the CUDA 13 wheel 0.3.14 (see docs/design/2026-11-21-mooncake.md):

- A peer's memory stays mapped until the engine that wrote to it goes. So each life of a peer has an engine of its own
  there, which is dropped with the peer, once no copy runs any more.
- An engine keeps what it first learned of a peer's memory. So a peer that has registered more gets another engine.
- Copies run on a stream of the thread that starts them, and are over for the library when all of that stream is. The
  stream goes with the thread, and then nobody may ask after its copies: that thread outlives the write, and a probe
  forgets what it left.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports import mooncake_engine
from longshore_agent.transports.base import Pieces, Selection, Write, WriteState
from longshore_agent.transports.data_ports import DataPorts
from longshore_agent.transports.mooncake_engine import MooncakeMetadata, reach_fault, remote_address
from longshore_agent.transports.own_network import host_identity
from longshore_agent.transports.probe import find_wire
from longshore_agent.transports.state import CheckedTransport, Regions, WriteBase, check_notice, regions_of, unseal
from longshore_wire.errors import Reason
from longshore_wire.names import Wire

# Requests under way to one peer. The library holds 1,024 and lets 1,024 more wait, for a second.
_UNDER_WAY_COUNT_MAX = 1000
# Requests end nearly in order. This many open ones in a row mean that those behind them are open, too.
_LOOK_AHEAD_COUNT = 16
# Workers that may have had one address before, during this worker's life. Each draws one of 2,000 ports at random.
_LIVES_COUNT_MAX = 1000
_POLL_PAUSE_S = 0.0001
# A GPU's copies take milliseconds. One that runs longer than this hangs; its memory stays mapped until the process
# ends.
_COPIES_END_LIMIT_S = 5.0
# Limit for dropping the engine of a lost peer: the end of its copies, and of the library's listener.
_UNMAP_LIMIT_S = 10.0
# Results of `transfer_check_status`.
_OPEN, _DONE = 0, 1
# Python's types of the library's own exceptions. A peer's invalid answer raises them in our thread.
_LIBRARY_ERRORS = (RuntimeError, ValueError, IndexError)
# Results of `transfer_submit_write` if it cannot find the peer, in two of its versions.
_NO_REQUEST = (0, (1 << 64) - 1)


class Peer:
    """One life of a peer. All but `gone` is guarded by `lock`, which only threads that write take.

    Attributes:
        engine: for GPU memory, the library's engine that writes to this peer; None: not yet, or no more.
        left: requests that were open when the peer went; only this list still tracks them.
        fault: why its memory cannot be written; empty if it can.
    """

    def __init__(self, metadata: MooncakeMetadata, regions: Regions, address: str, fault: str = "") -> None:
        self.name = metadata.name
        self.life = metadata.life
        self.address = address
        self.fault = fault
        self.same_host = metadata.is_here
        self.device = metadata.device
        self.regions = regions
        self.engine: Any = None
        self.gone = False
        self.lock = threading.Lock()
        self.writes: deque[MooncakeWrite] = deque()
        self.left: list[int] = []
        self.under_way_count = 0
        self.answers = False
        self.greeter: threading.Thread | None = None


class MooncakeWrite(WriteBase[Peer]):
    """One write. Its fields are guarded by its peer's lock."""

    __slots__ = ("count", "failed_bytes", "failed_count", "open", "waiting")
    backend = "Mooncake"

    def __init__(self, peer: Peer, pieces: Pieces) -> None:
        super().__init__(peer)
        self.waiting = deque(zip(*(each.tolist() for each in pieces), strict=True))
        self.count = len(self.waiting)
        self.open: deque[tuple[int, int]] = deque()  # (request, bytes)
        self.failed_count = self.failed_bytes = 0

    @property
    def title(self) -> str:
        """The write's description in errors."""
        return f"Mooncake write of {self.count} pieces to peer {self.peer.name!r} at {self.peer.address}"

    def fail(self, why: str, *, settled: bool) -> None:
        """End it; pieces that were not submitted never will be."""
        self.waiting.clear()
        super().fail(why, settled=settled)


def left(write: MooncakeWrite) -> str:
    """Return a text on the part of an open write that has not ended."""
    return f"{len(write.open) + len(write.waiting)} of its pieces had ended"


def forget_open(peer: Peer, begun: list[MooncakeWrite]) -> None:
    """Stop tracking a probe's open requests, since their stream ends with the probe's thread."""
    with peer.lock:
        for write in begun:
            if write.state is WriteState.OPEN:
                peer.under_way_count -= len(write.open)
                write.open.clear()
                write.fail("the probe did not end in time", settled=False)


class MooncakeTransport(CheckedTransport[Peer]):
    """Moves host memory between workers over TCP (the library's own thread copies), or a GPU's over CUDA IPC.

    Args:
        name: this worker's name for peers.
        ports: takes over the ports on which the library listens, always on every address; None: of the loopback
            interface alone.
        device_index: of the GPU that all memory here is on, which must be current in every calling thread; -1: the
            host's. There a thread that starts a write lives until it has ended. Each range that is registered is an
            allocation of its own, of which peers then reach all.
        device: its UUID, by which NVLink is told from CUDA IPC over PCIe; empty: not known.
        enter: makes that GPU current for a thread of ours.
    Raises:
        TransportError: Mooncake is not installed, has no transport for that memory, does not start, or is open where it
            may not be.
    """

    backend = "Mooncake"
    magic = b"LSMOON01"
    notifies = False
    announced_by_message = frozenset(Wire)

    def __init__(
        self,
        name: str,
        *,
        ports: DataPorts | None = None,
        device_index: int = -1,
        device: str = "",
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name)
        self._ports = ports or DataPorts()
        self._device_index, self._device, self._enter = device_index, device, enter
        start = mooncake_engine.start_on_host if device_index < 0 else mooncake_engine.start_on_device
        self._engine: Any = start(self._ports)
        self._port = int(self._engine.get_rpc_port())
        # The gate keeps writes out of a probe.
        self._gate = threading.Lock()
        # The lock also guards these. It is not held while the library writes.
        self._lives: dict[tuple[str, int], list[str]] = {}
        self._unmappers: list[threading.Thread] = []
        self._stuck: list[Peer] = []

    def register(self, address: int, length_bytes: int) -> int:
        """Register memory; see `Transport.register`. Ranges may not overlap."""
        with self._lock:
            self._check_open()
            token = self._add_memory(address, length_bytes)
            said = self._engine.register_memory(address, length_bytes)
            if said:
                self._remove_memory(token)
                raise TransportError(f"Mooncake cannot register {length_bytes} bytes at {address:#x}: it says {said}")
            return token

    def deregister(self, token: int) -> None:
        """Deregister memory; see `Transport.deregister`. Over TCP, writes of peers that begin later are refused."""
        with self._lock:
            self._check_open()
            address, length_bytes = self._remove_memory(token)
            said = self._engine.unregister_memory(address)
            if said:
                raise TransportError(f"Mooncake cannot deregister {length_bytes} bytes at {address:#x}: it says {said}")

    def metadata(self) -> bytes:
        """Return this life's name, address and memory in an envelope; see `Transport.metadata`."""
        with self._lock:
            self._check_open()
            regions = self._own.ranges
        place = (host_identity(), str(self._ports.address), self._port)
        return self._sealed(MooncakeMetadata(self.name, self._life, *place, regions, self._device_index, self._device))

    def connect(self, metadata: bytes) -> str:
        """Learn a peer, its newer metadata, or its next life under the same name; see `Transport.connect`."""
        fresh = unseal(self.magic, metadata, MooncakeMetadata)
        regions = regions_of(fresh.name, fresh.regions)
        fault = reach_fault(fresh, self._device_index)
        with self._lock:
            self._check_open()
            known = self._peers.get(fresh.name)
            # A GPU's engine would not find memory that was registered since its first request.
            is_whole = self._device_index < 0 or (known is not None and known.regions.ranges == regions.ranges)
            if known is not None and known.life == fresh.life and is_whole:
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
                self._forget_peer(known)
            self._peers[fresh.name] = Peer(fresh, regions, address, fault)
            return fresh.name

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its open writes fail; see `Transport.disconnect`."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                self._forget_peer(known)

    def draft(self, peer: str, pieces: Pieces | Selection, notice: bytes) -> MooncakeWrite:
        """Check where n pieces lie; see `Transport.draft`. The notice is ignored, as `notifies` says."""
        check_notice(notice)
        known = self._reached(peer)
        return MooncakeWrite(known, self._looked_up(known, pieces))

    def start(self, write: Write) -> None:
        """Submit as many pieces as the library accepts; see `Transport.start`."""
        assert isinstance(write, MooncakeWrite)
        with self._gate:
            self._begin(write)

    def state(self, write: Write) -> WriteState:
        """Poll open requests, submit waiting pieces, and return the state of `write`; see `Transport.state`."""
        assert isinstance(write, MooncakeWrite)
        if write.state is WriteState.OPEN:
            with write.peer.lock:
                self._drive(write.peer)
        return write.state

    def release(self, write: Write) -> bool:
        """Release a write; see `Transport.release`.

        A FAILED write is settled only if none of it was submitted: bytes in the kernel's buffers may land after a
        failure. After a disconnect the library still reads the submitted memory, so late bytes may be newer ones of
        that memory.
        """
        assert isinstance(write, MooncakeWrite)
        write.withdraw()
        self.state(write)
        return write.settled

    def notices(self) -> list[tuple[str, bytes]]:
        """Return nothing: Mooncake delivers no notices."""
        self._check_open()
        return []

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire | None:
        """Write once and read the kernel's counters; see `Transport.probe_wire` and `probe`."""
        with self._gate:
            known = self._reached(peer)
            pieces = self._looked_up(known, Pieces.one(source, target, length_bytes))
            begun: list[MooncakeWrite] = []

            def begin() -> MooncakeWrite:
                begun.append(MooncakeWrite(known, pieces))
                self._begin(begun[-1])
                return begun[-1]

            devices = (self._device, known.device) if self._device_index >= 0 else None
            try:
                return find_wire(
                    self, begin, self._is_any_open, length_bytes, same_host=known.same_host, devices=devices
                )
            finally:
                if devices is not None:
                    forget_open(known, begun)

    def close(self) -> None:
        """Stop the library and abandon open writes. Takes up to a second, the sleep of the library's listener."""
        super().close()
        unmappers, self._unmappers = self._unmappers, []
        for unmapper in unmappers:
            unmapper.join(_UNMAP_LIMIT_S)

    def _stop(self) -> None:
        # The library stops with its last reference; a thread inside a call still has one.
        self._engine = None

    def _reached(self, name: str) -> Peer:
        """Return a peer. Raises TransportError if its memory cannot be written from here."""
        known = self._peer(name)
        if known.fault:
            raise TransportError(known.fault, reason=Reason.UNSUPPORTED)
        return known

    def _begin(self, write: MooncakeWrite) -> None:
        """Start a draft. Called with the gate."""
        with write.peer.lock:
            write.begin()
            write.peer.writes.append(write)
            self._drive(write.peer)

    def _drive(self, peer: Peer) -> None:
        """Poll the peer's requests and submit waiting pieces. Called with the peer's lock."""
        engine = self._engine_for(peer)
        for write in peer.writes:
            if engine is not None:
                self._look(engine, write)
        for write in peer.writes:
            if peer.gone or self._closed:
                if write.state is WriteState.OPEN:
                    why = "the transport was closed" if self._closed else "the peer was disconnected"
                    peer.left.extend(request for request, _ in write.open)
                    write.fail(f"{why} before {left(write)}", settled=not write.open)
            elif write.waiting and self._has_answered(peer, write):
                self._submit(self._engine_for(peer), write)
        peer.writes = deque(write for write in peer.writes if write.state is WriteState.OPEN)

    def _look(self, engine: Any, write: MooncakeWrite) -> None:
        """Poll a write's requests, the oldest first, and set its state when none is open."""
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
            # Submitted requests continue, but further ones would be useless.
            write.waiting.clear()
        if write.open or write.waiting:
            return
        if write.failed_count:
            why = f"{write.failed_count} of them, {write.failed_bytes} bytes, failed; Mooncake says no more than -1"
            write.fail(why, settled=False)
        else:
            write.complete()

    def _submit(self, engine: Any, write: MooncakeWrite) -> None:
        """Submit as many waiting pieces as the library accepts."""
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
                    what = (
                        "the peer does not shake hands" if self._device_index < 0 else "the library does not begin it"
                    )
                    write.fail(f"{what}: {said}", settled=True)
                return
            peer.under_way_count += 1
            write.open.append((request, length_bytes))

    def _has_answered(self, peer: Peer, write: MooncakeWrite) -> bool:
        """Whether the peer is known to answer. If unknown, begin to ask it; if it does not answer, fail the write."""
        if peer.answers:
            return True
        if peer.greeter is None:
            peer.greeter = threading.Thread(target=self._greet, args=(peer,), name="mooncake-greeter", daemon=True)
            peer.greeter.start()
        elif not peer.greeter.is_alive() and not peer.answers:
            # The thread has ended without an answer, so the next write asks again. `answers` is checked after the
            # thread's end, since the thread may set it and end just now.
            peer.greeter = None
            write.fail("the peer cannot be reached", settled=not write.open)
        return peer.answers

    def _greet(self, peer: Peer) -> None:
        self._enter()
        try:
            if self._device_index >= 0 and peer.engine is None:
                peer.engine = mooncake_engine.start_writer(self._ports)
            engine = self._engine_for(peer)
            peer.answers = engine is not None and int(engine.send_probe(peer.address)) == 0
        except (*_LIBRARY_ERRORS, TransportError):
            # The answer is not Mooncake's, or no engine starts. The waiting write fails as unreachable.
            return

    def _forget_peer(self, peer: Peer) -> None:
        """Begin no more writes to a peer, and release its memory. Called with the lock."""
        peer.gone = True
        if self._device_index < 0:
            return
        self._unmappers = [each for each in self._unmappers if each.is_alive()]
        self._unmappers.append(
            threading.Thread(target=self._unmap, args=(peer,), name="mooncake-unmapper", daemon=True)
        )
        self._unmappers[-1].start()

    def _unmap(self, peer: Peer) -> None:
        """Drop the engine that wrote to a peer, but only after its copies, which need the mapping, have ended."""
        self._enter()
        with peer.lock:
            self._drive(peer)
        if peer.greeter is not None:
            peer.greeter.join()
        end_s = time.monotonic() + _COPIES_END_LIMIT_S
        for request in peer.left:
            while peer.engine.transfer_check_status(request) == _OPEN:
                if time.monotonic() >= end_s:
                    self._stuck.append(peer)
                    return
                time.sleep(_POLL_PAUSE_S)
        with peer.lock:
            peer.engine = None

    def _is_any_open(self) -> bool:
        """Drive writes to all peers once, and return whether one is still open."""
        with self._lock:
            peers = list(self._peers.values())
        open_count = 0
        for peer in peers:
            with peer.lock:
                self._drive(peer)
                open_count += len(peer.writes)
        return open_count > 0

    def _engine_for(self, peer: Peer) -> Any:
        return self._engine if self._device_index < 0 else peer.engine
