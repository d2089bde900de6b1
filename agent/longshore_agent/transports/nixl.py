"""Transport over NIXL with its UCX backend: the only file that knows NIXL's errors and names.

Made by `transports.create`. What was measured here, with NIXL 1.5.1, and why this file is as it is:

- A write over shared memory is copied inside the call that posts it (64 MiB: 6 ms), and one over TCP mostly so. No
  thread sync mode of NIXL lets another thread poll the same agent meanwhile (STRICT: 12 ms, RW: 6 ms between two
  polls). So a transport is two NIXL agents: `inbox`, which peers know and which receives, and `outbox`, which writes.
  Each has a lock of its own, and polling for notices takes 0.7 ms at most while another thread posts 64 MiB.
- NIXL crashes on metadata with a few wrong bytes, and metadata that fails to load makes the name in it unusable for
  good. So metadata travels in an envelope with a digest, and each life of a transport has NIXL names of its own.
- Releasing an open write does not stop it: over TCP its bytes landed later. So `release` never cancels.
- UCX aborts the process if an agent is closed right after a write to a dead peer failed; driving progress first helps.
- `deserialize_descs` of NIXL is pickle and is never called; addresses travel in our own messages.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import TransportError
from longshore_agent.transports import nixl_library
from longshore_agent.transports.base import METADATA_BYTES_MAX, Prepared, Wire, Write, WriteState
from longshore_agent.transports.data_ports import DataPorts
from longshore_agent.transports.device_wire import find_device_wire
from longshore_agent.transports.envelope import NAME_BYTES_MAX, is_name
from longshore_agent.transports.nixl_envelope import Envelope, check_reach, inbox_name, outbox_name, pack, unpack
from longshore_agent.transports.nixl_handles import NixlPeer, NixlPrepared, NixlWrite
from longshore_agent.transports.nixl_rows import kind_of, rows_of
from longshore_agent.transports.probe import check_notice, find_wire, row
from longshore_agent.transports.wires import host_identity
from longshore_wire.errors import Reason

# Notices of workers that we have not connected yet: both sides attach at about the same time, and a peer that is
# ready first may write first. More than this many are lost, which the protocol above repairs.
_UNCLAIMED_COUNT_MAX = 256
_CLOSE_PROGRESS_LIMIT_NS = 200_000_000
_POLL_PAUSE_S = 0.0001

Addresses = npt.NDArray[np.uint64]


class NixlTransport:
    """Moves host memory between workers over UCX, progress driven by its callers; no thread of its own copies.

    Over TCP a write moves on only while its target calls `notices` too.

    Args:
        name: by which peers know this worker.
        ports: takes over the ports on which UCX listens; None: UCX listens on the loopback interface.
        wires: those that may carry bytes; empty: any. UCX opens no port that none of them needs.
        device_index: of the GPU that all memory here is on, which must be current in every calling thread; -1: the host's.
        device: its UUID, by which NVLink is told from CUDA IPC over PCIe; empty: not known.
        fabric: that memory can be reached over NVLink from other nodes.
    Raises:
        TransportError: NIXL is not installed or does not start, or it listens where it should not.
    """

    backend = "NIXL"
    notifies = True
    # After deregistration a write still reports DONE and lands, over shared memory and over TCP.
    fences = False
    # Nor does forgetting the peer stop it.
    revocable: frozenset[Wire] = frozenset()

    def __init__(
        self,
        name: str,
        *,
        ports: DataPorts | None = None,
        wires: Collection[Wire] = (),
        device_index: int = -1,
        device: str = "",
        fabric: bool = False,
    ) -> None:
        if not is_name(name) or "~" in name:
            raise TransportError(f"transport name is {name!r}: give 1 to {NAME_BYTES_MAX} bytes without '~'")
        self.name = name
        self._device_index, self._device = device_index, device
        self._life = os.urandom(8).hex()
        inbox = inbox_name(name, self._life)
        self._inbox, self._outbox, self._errors, self._alone = nixl_library.start(
            inbox, outbox_name(inbox), ports or DataPorts(), wires, fabric=fabric
        )
        # Where both are needed, the inbox's is taken first. The gate is taken before either: it keeps posts out of a probe.
        self._gate = threading.Lock()
        self._inbox_lock = threading.Lock()
        self._outbox_lock = threading.Lock()
        self._peers: dict[str, NixlPeer] = {}
        self._senders: dict[str, str] = {}
        self._writes: set[NixlWrite] = set()
        self._arrived: list[tuple[str, bytes]] = []
        self._unclaimed: deque[tuple[str, bytes]] = deque(maxlen=_UNCLAIMED_COUNT_MAX)
        self._forgotten: deque[str] = deque(maxlen=_UNCLAIMED_COUNT_MAX)
        self._regions: dict[int, tuple[Any, Any]] = {}
        self._next_token = 1
        self._has_failed = False
        self._closed = False

    def register(self, address: int, length_bytes: int) -> int:
        """Register memory with both agents; see `Transport.register`."""
        with self._inbox_lock, self._outbox_lock:
            self._check_open()
            kind, device = kind_of(self._device_index)
            region = [(address, length_bytes, device, "")]
            try:
                received = self._inbox.register_memory(region, kind)
                try:
                    sent = self._outbox.register_memory(region, kind)
                except self._errors:
                    self._inbox.deregister_memory(received)
                    raise
            except self._errors as error:
                raise TransportError(f"NIXL cannot register {length_bytes} bytes at {address:#x}: {error}") from error
            token = self._next_token
            self._next_token += 1
            self._regions[token] = (received, sent)
            return token

    def deregister(self, token: int) -> None:
        """Let go of registered memory; see `Transport.deregister`. It does not stop a peer that knows the memory."""
        with self._inbox_lock, self._outbox_lock:
            self._check_open()
            lists = self._regions.pop(token, None)
            if lists is None:
                raise TransportError(f"NIXL memory token {token} is not registered")
            try:
                self._inbox.deregister_memory(lists[0])
                self._outbox.deregister_memory(lists[1])
            except self._errors as error:
                raise TransportError(f"NIXL cannot deregister token {token}: {error}") from error

    def metadata(self) -> bytes:
        """Return this life's name, host and NIXL metadata in an envelope; see `Transport.metadata`."""
        with self._inbox_lock:
            self._check_open()
            try:
                blob = self._inbox.get_agent_metadata()
            except self._errors as error:
                raise TransportError(f"NIXL gives no metadata: {error}") from error
        device = (self._device_index, self._device)
        packed = pack(Envelope(self.name, self._life, host_identity(), blob, *device, self._alone))
        if len(packed) > METADATA_BYTES_MAX:
            raise TransportError(
                f"NIXL metadata takes {len(packed)} bytes of {METADATA_BYTES_MAX}: register fewer regions"
            )
        return packed

    def connect(self, metadata: bytes) -> str:
        """Learn a peer, its newer metadata, or its next life under the same name; see `Transport.connect`."""
        envelope = unpack(metadata)
        check_reach(envelope, host_identity(), alone=self._alone)
        nixl_name = inbox_name(envelope.name, envelope.life)
        with self._inbox_lock, self._outbox_lock:
            self._check_open()
            known = self._peers.get(envelope.name)
            if known is not None and known.nixl_name == nixl_name and known.blob == envelope.blob:
                return envelope.name
            try:
                self._outbox.add_remote_agent(envelope.blob)
            except self._errors as error:
                raise TransportError(
                    f"NIXL cannot reach peer {envelope.name!r}, which may have ended: {error}"
                ) from error
            if known is not None and known.nixl_name == nixl_name:
                known.blob = envelope.blob
                return envelope.name
            if known is not None:
                self._remove(known)
            same_host = envelope.host != "" and envelope.host == host_identity()
            self._peers[envelope.name] = NixlPeer(
                envelope.name, nixl_name, envelope.blob, same_host, envelope.device_index, envelope.device
            )
            self._senders[outbox_name(nixl_name)] = envelope.name
            if outbox_name(nixl_name) in self._forgotten:
                self._forgotten.remove(outbox_name(nixl_name))
            waiting = list(self._unclaimed)
            self._unclaimed.clear()
            self._sort_notices(waiting)
            return envelope.name

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its open writes fail; see `Transport.disconnect`."""
        with self._inbox_lock, self._outbox_lock:
            known = self._peers.pop(peer, None)
            if known is not None and not self._closed:
                self._remove(known)
                self._arrived = [item for item in self._arrived if item[0] != peer]

    def post(
        self,
        peer: str,
        sources: Addresses,
        targets: Addresses,
        lengths: Addresses,
        notice: bytes,
    ) -> NixlWrite:
        """Begin one write of n pieces; see `Transport.post`. Over shared memory it has copied when it returns."""
        with self._gate:
            return self._begin(peer, sources, targets, lengths, notice)

    def draft(self, peer: str, sources: Addresses, targets: Addresses, lengths: Addresses, notice: bytes) -> NixlWrite:
        """Let NIXL look up all of one write; see `DraftingTransport.draft`."""
        with self._outbox_lock:
            return self._drafted(peer, sources, targets, lengths, notice)

    def start(self, write: Write) -> None:
        """Begin a drafted write; see `DraftingTransport.start`."""
        assert isinstance(write, NixlWrite)
        with self._gate, self._outbox_lock:
            self._launch(write)

    def drop(self, write: Write) -> None:
        """Give a draft back; see `DraftingTransport.drop`."""
        assert isinstance(write, NixlWrite)
        with self._outbox_lock:
            if not self._closed:
                self._give_up(write)

    def state(self, write: Write) -> WriteState:
        """Drive the outbox and return the state of `write`; see `Transport.state`."""
        assert isinstance(write, NixlWrite)
        with self._outbox_lock:
            self._refresh(write)
            return write.state

    def release(self, write: Write) -> bool:
        """Give a write back; see `Transport.release`.

        A FAILED write is settled only towards a peer whose wire is known to be shared memory, where bytes move
        inside our own calls. Over a network, bytes that the kernel took may land after the failure.
        """
        assert isinstance(write, NixlWrite)
        with self._outbox_lock:
            self._refresh(write)
            if write.state is WriteState.OPEN or write.handle is None:
                return write.settled
            try:
                write.handle.release()
            except self._errors as error:
                write.error = write.error or str(error)
                return False
            write.handle = None
            self._writes.discard(write)
            write.settled = write.state is WriteState.DONE or write.peer.wire is Wire.SHARED_MEMORY
            return write.settled

    def notices(self) -> list[tuple[str, bytes]]:
        """Drive the inbox and return what has landed; see `Transport.notices`."""
        with self._inbox_lock:
            self._check_open()
            self._drain_inbox()
            arrived, self._arrived = self._arrived, []
            return arrived

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire:
        """Write once and read the kernel's counters; see `Transport.probe_wire`.

        Other posts wait meanwhile, and writes that are open are brought to their end first, so that the counters
        show the probe alone. Both inboxes are driven, so that two workers may probe each other at once.
        Unknown if that takes too long, and for anything that these counters cannot prove.
        """
        with self._gate:
            known = self._peers.get(peer)

            def begin() -> NixlWrite:
                return self._begin(peer, row(source), row(target), row(length_bytes), b"")

            same_host = known is not None and known.same_host
            wire = find_wire(self, begin, self._settle_open, length_bytes, same_host=same_host)
            if known is not None:
                if self._device_index >= 0 and wire is Wire.SHARED_MEMORY:
                    wire = find_device_wire(self, begin, length_bytes, (self._device, known.device))
                known.wire = wire
            return wire

    def prepare(
        self,
        peer: str,
        sources: Addresses,
        targets: Addresses,
        lengths: Addresses,
    ) -> NixlPrepared:
        """Let NIXL look up n pieces once; see `PreparingTransport.prepare`."""
        assert len(sources) == len(targets) == len(lengths) >= 1
        with self._outbox_lock:
            known = self._peer(peer)
            try:
                source_list = self._outbox.prep_xfer_dlist(
                    "NIXL_INIT_AGENT", *rows_of(sources, lengths, self._device_index)
                )
                target_list = self._outbox.prep_xfer_dlist(
                    known.nixl_name, *rows_of(targets, lengths, known.device_index)
                )
            except self._errors as error:
                raise TransportError(f"NIXL cannot prepare {len(sources)} pieces for peer {peer!r}: {error}") from error
            return NixlPrepared(known.nixl_name, source_list, target_list, len(sources))

    def post_prepared(self, peer: str, prepared: Prepared, indices: npt.NDArray[np.int32], notice: bytes) -> NixlWrite:
        """Begin one write of prepared pieces; see `PreparingTransport.post_prepared`."""
        assert isinstance(prepared, NixlPrepared)
        check_notice(notice)
        with self._gate, self._outbox_lock:
            known = self._peer(peer)
            if prepared.source_list is None or prepared.nixl_name != known.nixl_name:
                raise TransportError(
                    f"NIXL list was prepared for another life of peer {peer!r}, or released: prepare again"
                )
            try:
                handle = self._outbox.make_prepped_xfer(
                    "WRITE", prepared.source_list, indices, prepared.target_list, indices, notice
                )
            except self._errors as error:
                raise TransportError(
                    f"NIXL refuses {len(indices)} prepared pieces for peer {peer!r}: {error}"
                ) from error
            return self._launch(NixlWrite(known, handle, notice))

    def release_prepared(self, prepared: Prepared) -> None:
        """Let go of a prepared list; see `PreparingTransport.release_prepared`."""
        assert isinstance(prepared, NixlPrepared)
        with self._outbox_lock:
            lists = (prepared.source_list, prepared.target_list)
            prepared.source_list = prepared.target_list = None
            for descriptors in lists:
                if descriptors is None or self._closed:
                    continue
                try:
                    descriptors.release()
                except self._errors as error:
                    raise TransportError(f"NIXL cannot let go of a prepared list: {error}") from error

    def close(self) -> None:
        """Let go of everything; open writes are given up and may still land. Idempotent."""
        with self._gate, self._inbox_lock, self._outbox_lock:
            if self._closed:
                return
            self._closed = True
            if self._has_failed:
                self._drain_outbox()
            for write in self._writes:
                self._give_up(write)
            self._writes.clear()
            for peer in self._peers.values():
                self._remove(peer)
            self._peers.clear()
            self._regions.clear()
            # NIXL agents close when their last reference goes; registered memory goes with them.
            self._inbox = self._outbox = None

    def _begin(self, peer: str, sources: Addresses, targets: Addresses, lengths: Addresses, notice: bytes) -> NixlWrite:
        with self._outbox_lock:
            return self._launch(self._drafted(peer, sources, targets, lengths, notice))

    def _drafted(
        self, peer: str, sources: Addresses, targets: Addresses, lengths: Addresses, notice: bytes
    ) -> NixlWrite:
        assert len(sources) == len(targets) == len(lengths) >= 1
        check_notice(notice)
        known = self._peer(peer)
        try:
            source_list = self._outbox.get_xfer_descs(*rows_of(sources, lengths, self._device_index))
            target_list = self._outbox.get_xfer_descs(*rows_of(targets, lengths, known.device_index))
            handle = self._outbox.initialize_xfer("WRITE", source_list, target_list, known.nixl_name, notice)
        except self._errors as error:
            raise TransportError(
                f"NIXL refuses {len(sources)} pieces for peer {peer!r}: {error}; is the memory registered on both sides?"
            ) from error
        return NixlWrite(known, handle, notice)

    def _launch(self, write: NixlWrite) -> NixlWrite:
        self._writes.add(write)
        if self._closed:
            self._fail(write, "the transport was closed")
            return write
        try:
            said = self._outbox.transfer(write.handle, write.notice)
        except self._errors as error:
            # NIXL does not say whether a part of it left, so this is a write that failed, not one that never began.
            self._fail(write, str(error))
            return write
        self._judge(write, said)
        return write

    def _refresh(self, write: NixlWrite) -> None:
        if write.state is not WriteState.OPEN:
            return
        if self._closed:
            self._fail(write, "the transport was closed")
            return
        try:
            said = self._outbox.check_xfer_state(write.handle)
        except self._errors as error:
            self._fail(write, str(error))
            return
        self._judge(write, said)

    def _judge(self, write: NixlWrite, said: str) -> None:
        if said == "DONE":
            write.state = WriteState.DONE
        elif said != "PROC":
            self._fail(write, f"NIXL said {said}")

    def _fail(self, write: NixlWrite, error: str) -> None:
        write.state = WriteState.FAILED
        write.error = f"NIXL write to peer {write.peer.name!r}: {error}"
        self._has_failed = True

    def _settle_open(self, deadline_ns: int) -> bool:
        """Drive both agents until no write is open. False if the deadline came first."""
        while True:
            with self._outbox_lock:
                for write in self._writes:
                    self._refresh(write)
                if all(write.state is not WriteState.OPEN for write in self._writes):
                    return True
            with self._inbox_lock:
                self._drain_inbox()
            if time.monotonic_ns() >= deadline_ns:
                return False
            # The target may share this core; without a pause it would run only when our time slice ends.
            time.sleep(_POLL_PAUSE_S)

    def _drain_inbox(self) -> None:
        try:
            fresh = self._inbox.get_new_notifs()
        except self._errors as error:
            raise TransportError(f"NIXL gives no notices: {error}") from error
        for sender, notices in fresh.items():
            self._sort_notices([(sender, notice) for notice in notices])

    def _sort_notices(self, notices: list[tuple[str, bytes]]) -> None:
        for sender, notice in notices:
            peer = self._senders.get(sender)
            if peer is not None:
                self._arrived.append((peer, notice))
            elif sender not in self._forgotten:
                self._unclaimed.append((sender, notice))

    def _drain_outbox(self) -> None:
        deadline_ns = time.monotonic_ns() + _CLOSE_PROGRESS_LIMIT_NS
        while time.monotonic_ns() < deadline_ns:
            try:
                self._outbox.get_new_notifs()
            except self._errors:
                return
            time.sleep(_POLL_PAUSE_S)

    def _give_up(self, write: NixlWrite) -> None:
        if write.state is WriteState.OPEN:
            self._fail(write, "the transport was closed")
        try:
            write.handle.release()
        except self._errors as error:
            write.error += f" ({error})"
        write.handle = None

    def _remove(self, peer: NixlPeer) -> None:
        self._senders.pop(outbox_name(peer.nixl_name), None)
        self._forgotten.append(outbox_name(peer.nixl_name))
        try:
            self._outbox.remove_remote_agent(peer.nixl_name)
            # Nobody drives the outbox of a worker that writes nothing: it would keep a connection to each peer that was.
            self._outbox.get_new_notifs()
        except self._errors as error:
            # Forgotten on our side all the same; NIXL raises for a peer that it dropped by itself when it died.
            logging.getLogger(__name__).debug("NIXL on removing peer %s: %s", peer.name, error)

    def _peer(self, name: str) -> NixlPeer:
        self._check_open()
        peer = self._peers.get(name)
        if peer is None:
            raise TransportError(f"NIXL peer {name!r} is not connected: connect its metadata first")
        return peer

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"NIXL transport {self.name!r} is closed", reason=Reason.SHUTTING_DOWN)
