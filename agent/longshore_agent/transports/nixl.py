"""Moves bytes over NIXL with its UCX backend. Only this file knows NIXL's errors and names.

Made by `transports.create`. Measured here with NIXL 1.5.1, and the reasons for this design:

- A write over shared memory is copied inside the call that starts it (64 MiB: 6 ms), and one over TCP mostly so. No
  thread sync mode of NIXL lets another thread poll the same agent meanwhile (STRICT: 12 ms, RW: 6 ms between two
  polls). So a transport is two NIXL agents: `inbox`, which peers know and which receives, and `outbox`, which writes.
  Each has a lock of its own, and polling for notices takes 0.7 ms at most while another thread writes 64 MiB.
- NIXL crashes on metadata with a few wrong bytes, and metadata that fails to load makes its name permanently unusable.
  So metadata travels in an envelope with a digest, and each life of a transport has its own NIXL names.
- Releasing an open write does not stop it: over TCP its bytes landed later. So `release` never cancels.
- UCX aborts the process if an agent is closed right after a write to a dead peer failed; driving progress first helps.
- `deserialize_descs` of NIXL is pickle and is never called; addresses travel in our own messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from longshore_agent.errors import TransportError
from longshore_agent.transports import nixl_library
from longshore_agent.transports.base import Addresses, Pieces, Prepared, Selection, Write, WriteState
from longshore_agent.transports.data_ports import DataPorts
from longshore_agent.transports.nixl_library import Envelope, check_reach, inbox_name, outbox_name, unpack, unreachable
from longshore_agent.transports.own_network import host_identity
from longshore_agent.transports.probe import find_wire
from longshore_agent.transports.state import Arrivals, PreparedList, TransportBase, WriteBase, check_notice
from longshore_wire.names import Wire

_CLOSE_PROGRESS_LIMIT_NS = 200_000_000
_POLL_PAUSE_S = 0.0001


def kind_of(device_index: int) -> tuple[str, int]:
    """Return NIXL's name of a GPU's memory or of host memory (-1), and NIXL's number of the device."""
    return ("VRAM", device_index) if device_index >= 0 else ("DRAM", 0)


def rows_of(
    addresses: Addresses, lengths: Addresses, device_index: int
) -> tuple[Addresses | list[tuple[int, int, int]], str]:
    """Return the pieces as NIXL's rows [n, 3], and the kind of their memory."""
    kind, device = kind_of(device_index)
    if len(addresses) == 1:
        # Most writes of slabs have one piece, for which an array costs more than it saves.
        return [(int(addresses[0]), int(lengths[0]), device)], kind
    rows = np.full((len(addresses), 3), device, dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    return rows, kind


class NixlPeer(msgspec.Struct):
    """One peer in one of its lives."""

    name: str
    life: str
    nixl_name: str
    blob: bytes
    same_host: bool
    device_index: int
    device: str
    wire: Wire | None = None


class NixlWrite(WriteBase[NixlPeer]):
    """One write. Its fields are guarded by the transport's outbox lock."""

    __slots__ = ("handle", "notice")
    backend = "NIXL"

    def __init__(self, peer: NixlPeer, handle: Any, notice: bytes) -> None:
        super().__init__(peer)
        self.handle = handle
        self.notice = notice


class NixlTransport(TransportBase[NixlPeer]):
    """Moves host memory or a GPU's between workers over UCX. Its callers drive progress; it has no thread of its own.

    Over TCP a write progresses only while its target calls `notices`, too.

    Args:
        name: this worker's name for peers.
        ports: takes over the ports on which UCX listens; None: UCX listens on the loopback interface.
        wires: the allowed wires; empty: any. UCX opens no port that none of them needs.
        device_index: of the GPU that holds all memory here and must be current in every calling thread; -1: host
            memory.
        device: the GPU's UUID, to distinguish NVLink from CUDA IPC over PCIe; empty: unknown.
        fabric: True: other nodes can reach that memory over NVLink.
    Raises:
        TransportError: NIXL is not installed or does not start, or it listens where it should not.
    """

    backend = "NIXL"
    magic = nixl_library.MAGIC
    notifies = True
    # A write over shared memory ends only after the target has taken the previous write's notice: a lane would wait for
    # the target's next poll, 1 ms or more.
    announced_by_message = frozenset({Wire.SHARED_MEMORY})
    swift = frozenset({Wire.CUDA_IPC, Wire.NVLINK})
    driven = frozenset({Wire.TCP})

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
        if "~" in name:
            raise TransportError(f"transport name is {name!r}: give one without '~'")
        super().__init__(name)
        self._device_index, self._device = device_index, device
        inbox = inbox_name(name, self._life)
        self._inbox, self._outbox, self._errors, self._alone = nixl_library.start(
            inbox, outbox_name(inbox), ports or DataPorts(), wires, fabric=fabric
        )
        # Lock order: gate, inbox, outbox. The gate keeps writes out of a probe.
        self._gate = threading.Lock()
        self._inbox_lock = threading.Lock()
        self._outbox_lock = threading.Lock()
        # Includes drafts, whose handles keep an agent alive.
        self._writes: set[NixlWrite] = set()
        self._arrivals = Arrivals()
        self._regions: dict[int, tuple[Any, Any]] = {}
        self._next_token = 1
        self._has_failed = False

    def register(self, address: int, length_bytes: int) -> int:
        """Register memory with both agents; see `Transport.register`."""
        with self._inbox_lock, self._outbox_lock:
            self._check_open()
            kind, device = kind_of(self._device_index)
            region = [(address, length_bytes, device, "")]
            with self._ours(f"NIXL cannot register {length_bytes} bytes at {address:#x}"):
                received = self._inbox.register_memory(region, kind)
                try:
                    sent = self._outbox.register_memory(region, kind)
                except self._errors:
                    self._inbox.deregister_memory(received)
                    raise
            token = self._next_token
            self._next_token += 1
            self._regions[token] = (received, sent)
            return token

    def deregister(self, token: int) -> None:
        """Deregister memory; see `Transport.deregister`. It does not stop a peer that knows the memory."""
        with self._inbox_lock, self._outbox_lock:
            self._check_open()
            lists = self._regions.pop(token, None)
            if lists is None:
                raise TransportError(f"NIXL memory token {token} is not registered")
            with self._ours(f"NIXL cannot deregister token {token}"):
                self._inbox.deregister_memory(lists[0])
                self._outbox.deregister_memory(lists[1])

    def metadata(self) -> bytes:
        """Return this life's name, host and NIXL metadata in an envelope; see `Transport.metadata`."""
        with self._inbox_lock:
            self._check_open()
            with self._ours("NIXL gives no metadata"):
                blob = self._inbox.get_agent_metadata()
        device = (self._device_index, self._device)
        return self._sealed(Envelope(self.name, self._life, host_identity(), blob, *device, self._alone))

    def connect(self, metadata: bytes) -> str:
        """Learn a peer, its newer metadata, or its next life under the same name; see `Transport.connect`."""
        fresh = unpack(metadata)
        check_reach(fresh, alone=self._alone)
        with self._inbox_lock, self._outbox_lock:
            self._check_open()
            known = self._peers.get(fresh.name)
            same_life = known is not None and known.life == fresh.life
            if known is not None and same_life and known.blob == fresh.blob:
                return fresh.name
            with self._ours(f"NIXL cannot reach peer {fresh.name!r}, {unreachable(alone=self._alone)}"):
                self._outbox.add_remote_agent(fresh.blob)
            if known is not None and same_life:
                known.blob = fresh.blob
                return fresh.name
            if known is not None:
                self._remove(known)
            nixl_name = inbox_name(fresh.name, fresh.life)
            self._peers[fresh.name] = NixlPeer(
                fresh.name, fresh.life, nixl_name, fresh.blob, fresh.is_here, fresh.device_index, fresh.device
            )
            self._arrivals.connect(outbox_name(nixl_name), fresh.name)
            return fresh.name

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its open writes fail; see `Transport.disconnect`."""
        with self._inbox_lock, self._outbox_lock:
            known = self._peers.pop(peer, None)
            if known is not None and not self._closed:
                self._remove(known)
                self._arrivals.drop(peer)

    def prepare(self, peer: str, pieces: Pieces) -> PreparedList[tuple[Any, Any]]:
        """Let NIXL look up n pieces once; see `Transport.prepare`."""
        sources, targets, lengths = pieces
        assert len(sources) == len(targets) == len(lengths) >= 1
        with self._outbox_lock:
            known = self._peer(peer)
            local = rows_of(sources, lengths, self._device_index)
            remote = rows_of(targets, lengths, known.device_index)
            with self._ours(f"NIXL cannot prepare {len(sources)} pieces for peer {peer!r}"):
                lists = (
                    self._outbox.prep_xfer_dlist("NIXL_INIT_AGENT", *local),
                    self._outbox.prep_xfer_dlist(known.nixl_name, *remote),
                )
            return PreparedList(known.life, lists)

    def release_prepared(self, prepared: Prepared) -> None:
        """Release a prepared list; see `Transport.release_prepared`."""
        assert isinstance(prepared, PreparedList)
        with self._outbox_lock:
            lists, prepared.content = prepared.content, None
            for descriptors in () if lists is None or self._closed else lists:
                with self._ours("NIXL cannot let go of a prepared list"):
                    descriptors.release()

    def draft(self, peer: str, pieces: Pieces | Selection, notice: bytes) -> NixlWrite:
        """Let NIXL look up one write; see `Transport.draft`."""
        check_notice(notice)
        with self._outbox_lock:
            known = self._peer(peer)
            write = NixlWrite(known, self._handle(known, pieces, notice), notice)
            self._writes.add(write)
            return write

    def start(self, write: Write) -> None:
        """Begin a drafted write; see `Transport.start`. Over shared memory, the bytes are copied when this returns."""
        assert isinstance(write, NixlWrite)
        with self._gate:
            self._begin(write)

    def state(self, write: Write) -> WriteState:
        """Drive the outbox and return the state of `write`; see `Transport.state`."""
        assert isinstance(write, NixlWrite)
        with self._outbox_lock:
            self._refresh(write)
            return write.state

    def release(self, write: Write) -> bool:
        """Release a write; see `Transport.release`.

        A FAILED write is settled only if the wire to its peer is known to be shared memory, where bytes move inside our
        own calls. Over a network, bytes in the kernel's buffers may land after the failure.
        """
        assert isinstance(write, NixlWrite)
        with self._outbox_lock:
            self._refresh(write)
            write.withdraw()
            if write.state is WriteState.OPEN or write.handle is None:
                return write.settled
            try:
                write.handle.release()
            except self._errors as error:
                write.error = write.error or str(error)
                return False
            write.handle = None
            self._writes.discard(write)
            return write.settled

    def notices(self) -> list[tuple[str, bytes]]:
        """Drive the inbox and return what has landed; see `Transport.notices`."""
        with self._inbox_lock:
            self._check_open()
            self._drain_inbox()
            return self._arrivals.take()

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire | None:
        """Write once and read the kernel's counters; see `Transport.probe_wire`.

        No other write begins during the probe, and open ones end first, so that the counters show the probe alone. Both
        inboxes are driven, so that two workers can probe each other at the same time. Returns UNKNOWN if that takes too
        long, or if the counters prove nothing.
        """
        with self._gate:
            known = self._peer(peer)

            def begin() -> NixlWrite:
                write = self.draft(peer, Pieces.one(source, target, length_bytes), b"")
                self._begin(write)
                return write

            devices = (self._device, known.device) if self._device_index >= 0 else None
            known.wire = find_wire(
                self, begin, self._is_any_open, length_bytes, same_host=known.same_host, devices=devices
            )
            return known.wire

    def close(self) -> None:
        """Release everything. Open writes are abandoned and may still land. Idempotent."""
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
            # NIXL agents close with their last reference, and deregister their memory.
            self._inbox = self._outbox = None

    def _handle(self, peer: NixlPeer, pieces: Pieces | Selection, notice: bytes) -> Any:
        """Return NIXL's handle of a write that has not begun. Called with the outbox's lock."""
        if isinstance(pieces, Selection):
            local, remote = self._content(pieces.prepared, peer)
            indices = pieces.indices
            with self._ours(f"NIXL refuses {len(indices)} prepared pieces for peer {peer.name!r}"):
                return self._outbox.make_prepped_xfer("WRITE", local, indices, remote, indices, notice)
        sources, targets, lengths = pieces
        assert len(sources) == len(targets) == len(lengths) >= 1
        with self._ours(
            f"NIXL refuses {len(sources)} pieces for peer {peer.name!r} (is the memory registered on both sides?)"
        ):
            local = self._outbox.get_xfer_descs(*rows_of(sources, lengths, self._device_index))
            remote = self._outbox.get_xfer_descs(*rows_of(targets, lengths, peer.device_index))
            return self._outbox.initialize_xfer("WRITE", local, remote, peer.nixl_name, notice)

    def _begin(self, write: NixlWrite) -> None:
        """Start a draft. Called with the gate."""
        with self._outbox_lock:
            write.begin()
            if gone := self._why_gone(write.peer):
                write.fail(gone, settled=True)
                return
            try:
                said = self._outbox.transfer(write.handle, write.notice)
            except self._errors as error:
                # NIXL does not say whether a part of it was sent, so the write has failed, as if it had begun.
                self._fail(write, str(error))
                return
            self._judge(write, said)

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
            write.complete()
        elif said != "PROC":
            self._fail(write, f"NIXL said {said}")

    def _fail(self, write: NixlWrite, why: str) -> None:
        write.fail(why, settled=write.peer.wire is Wire.SHARED_MEMORY)
        self._has_failed = True

    def _is_any_open(self) -> bool:
        """Drive both agents once, and return whether a write is still open."""
        with self._outbox_lock:
            for write in self._writes:
                self._refresh(write)
            if all(write.state is not WriteState.OPEN for write in self._writes):
                return False
        with self._inbox_lock:
            self._drain_inbox()
        return True

    def _drain_inbox(self) -> None:
        # Without `_ours`, which takes longer than this call, made many times a millisecond.
        try:
            fresh = self._inbox.get_new_notifs()
        except self._errors as error:
            raise TransportError(f"NIXL gives no notices: {error}") from error
        for sender, notices in fresh.items():
            for notice in notices:
                self._arrivals.land(sender, notice)

    def _drain_outbox(self) -> None:
        deadline_ns = time.monotonic_ns() + _CLOSE_PROGRESS_LIMIT_NS
        while time.monotonic_ns() < deadline_ns:
            try:
                self._outbox.get_new_notifs()
            except self._errors:
                return
            time.sleep(_POLL_PAUSE_S)

    def _give_up(self, write: NixlWrite) -> None:
        """Abandon a write at `close`. A draft may still be started, and then fails."""
        if write.state is WriteState.OPEN:
            write.fail("the transport was closed", settled=False)
        try:
            write.handle.release()
        except self._errors as error:
            write.error += f" ({error})"
        write.handle = None

    def _remove(self, peer: NixlPeer) -> None:
        self._arrivals.forget(outbox_name(peer.nixl_name))
        try:
            self._outbox.remove_remote_agent(peer.nixl_name)
            # The outbox of a worker that writes nothing is never driven, and would keep a connection to each old peer.
            self._outbox.get_new_notifs()
        except self._errors as error:
            # The peer is forgotten here anyway. NIXL raises for a dead peer that it has dropped by itself.
            logging.getLogger(__name__).debug(
                "NIXL on removing peer %s: %s", peer.name, error, extra={"peer": peer.name}
            )

    @contextmanager
    def _ours(self, what: str) -> Iterator[None]:
        """Turn NIXL's errors into ours, which name the failed operation."""
        try:
            yield
        except self._errors as error:
            raise TransportError(f"{what}: {error}") from error
