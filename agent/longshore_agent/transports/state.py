"""Keeps the state that all transports share: peers, registered memory, states of writes, landed notices, sealed metadata.

Extended by nixl.py, mooncake.py and loopback.py. Knows no library. Its users guard it by a lock.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports.base import (
    METADATA_BYTES_MAX,
    NOTICE_BYTES_MAX,
    Addresses,
    Pieces,
    Prepared,
    Selection,
    WriteState,
)
from longshore_agent.transports.own_network import host_identity
from longshore_wire.errors import Reason
from longshore_wire.names import Wire

NAME_BYTES_MAX = 200
_DIGEST_BYTES = 16
# Kept notices of workers that are not connected yet: both sides attach at about the same time, and a peer that is ready
# first may write first. If more wait, the oldest are lost, which the protocol above repairs.
_UNCLAIMED_COUNT_MAX = 256
_Content = TypeVar("_Content")


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """The part of a worker's metadata that precedes its transport's own fields.

    Attributes:
        name, life: see `TransportBase`.
        kernel: `host_identity` of the worker.
    """

    name: str
    life: str
    kernel: str

    @property
    def is_here(self) -> bool:
        """Whether that worker runs under the kernel of this process."""
        return self.kernel != "" and self.kernel == host_identity()


_T = TypeVar("_T", bound=Metadata)


def seal(magic: bytes, content: msgspec.Struct) -> bytes:
    """Return the bytes that `unseal` reads; `magic` names the library and the version of the content.

    Libraries crash on metadata with a few wrong bytes, so metadata with a wrong digest is refused before it reaches them.
    The digest detects damage only; the control protocol authenticates the sender.
    """
    body = msgspec.msgpack.encode(content)
    return magic + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def unseal(magic: bytes, data: bytes, kind: type[_T]) -> _T:
    """Return a peer's sealed content. Raises PeerMetadataError: another library or version, too long, or damaged."""
    head = len(magic) + _DIGEST_BYTES
    if not head < len(data) <= METADATA_BYTES_MAX or not data.startswith(magic):
        raise PeerMetadataError(
            f"peer metadata of {len(data)} bytes does not begin with {magic.decode()}: it is of another library or version"
        )
    body = data[head:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[len(magic) : head]:
        raise PeerMetadataError("peer metadata is damaged: its digest does not match")
    try:
        content = msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerMetadataError(f"peer metadata cannot be read: {error}") from error
    if not is_name(content.name) or not is_name(content.life):
        raise PeerMetadataError("peer metadata has a name that is too long or empty")
    return content


def is_name(name: str) -> bool:
    """Whether a worker may have this name."""
    return 1 <= len(name.encode()) <= NAME_BYTES_MAX


class Regions:
    """Ranges of one process's memory that do not overlap. Immutable.

    Args:
        ranges: (address, bytes) of each, in any order.
    Raises:
        ValueError: a range is empty, beyond 64 bits, or overlaps another.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges = tuple(sorted(ranges))
        end = 0
        for address, length_bytes in self.ranges:
            if address < end or length_bytes < 1 or address + length_bytes >= 1 << 64:
                raise ValueError(f"{length_bytes} bytes at {address:#x} are empty, beyond 64 bits or overlap others")
            end = address + length_bytes
        self._starts = np.array([address for address, _ in self.ranges], dtype=np.uint64)
        self._sizes = np.array([size for _, size in self.ranges], dtype=np.uint64)

    def stray(self, addresses: Addresses, lengths: Addresses) -> int | None:
        """Return the index of the first piece that does not lie within one range; None: all do.

        Args:
            addresses, lengths: [n] of the pieces.
        """
        if not self.ranges:
            return 0
        place = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        known = place >= 0
        place = np.maximum(place, 0)
        sizes = self._sizes[place]
        # Subtract only: the sum of a hostile address and a length could wrap around.
        fits = known & (lengths <= sizes)
        fits &= addresses - self._starts[place] <= np.where(fits, sizes - lengths, np.uint64(0))
        return None if fits.all() else int(np.argmin(fits))


def regions_of(peer: str, ranges: Iterable[tuple[int, int]]) -> Regions:
    """Return the memory in a peer's metadata. Raises PeerMetadataError if no process can have it."""
    try:
        return Regions(ranges)
    except ValueError as error:
        raise PeerMetadataError(f"peer metadata of {peer!r} has impossible memory: {error}") from error


class Arrivals:
    """The notices that have landed: to hand over, to keep until their sender connects, to drop.

    A sender is identified by one of its lives.
    """

    def __init__(self) -> None:
        self._senders: dict[Hashable, str] = {}
        self._arrived: list[tuple[str, bytes]] = []
        self._unclaimed: deque[tuple[Hashable, bytes]] = deque(maxlen=_UNCLAIMED_COUNT_MAX)
        self._forgotten: deque[Hashable] = deque(maxlen=_UNCLAIMED_COUNT_MAX)

    def connect(self, sender: Hashable, peer: str) -> None:
        """Assign the notices of `sender`, kept ones included, to a connected peer."""
        self._senders[sender] = peer
        if sender in self._forgotten:
            self._forgotten.remove(sender)
        waiting = list(self._unclaimed)
        self._unclaimed.clear()
        for other, notice in waiting:
            self.land(other, notice)

    def forget(self, sender: Hashable) -> None:
        """Drop all later notices of an ended life of a peer."""
        self._senders.pop(sender, None)
        self._forgotten.append(sender)

    def drop(self, peer: str) -> None:
        """Drop the landed notices of a peer that were not taken."""
        self._arrived = [item for item in self._arrived if item[0] != peer]

    def land(self, sender: Hashable, notice: bytes) -> None:
        """Add a notice that has landed."""
        peer = self._senders.get(sender)
        if peer is not None:
            self._arrived.append((peer, notice))
        elif sender not in self._forgotten:
            self._unclaimed.append((sender, notice))

    def take(self) -> list[tuple[str, bytes]]:
        """Remove and return (peer, notice) of all notices of connected peers, in their order."""
        arrived, self._arrived = self._arrived, []
        return arrived


class KnownPeer(Protocol):
    """One life of a peer."""

    name: str
    life: str


class CheckedPeer(KnownPeer, Protocol):
    """One life of a peer, and its memory that may be written."""

    regions: Regions


_Peer = TypeVar("_Peer", bound=KnownPeer)
_Checked = TypeVar("_Checked", bound=CheckedPeer)


class WriteBase(Generic[_Peer]):
    """One write; `release` returns `settled`."""

    backend: str
    __slots__ = ("error", "peer", "settled", "state")

    def __init__(self, peer: _Peer) -> None:
        self.peer = peer
        self.state = WriteState.DRAFT
        self.error = ""
        self.settled = False

    @property
    def title(self) -> str:
        """The write's description in errors."""
        return f"{self.backend} write to peer {self.peer.name!r}"

    def begin(self) -> None:
        """Set the state of a started draft. Called once."""
        assert self.state is WriteState.DRAFT, self.state
        self.state = WriteState.OPEN

    def complete(self) -> None:
        """Set the state after every byte has landed."""
        self.state, self.settled = WriteState.DONE, True

    def fail(self, why: str, *, settled: bool) -> None:
        """End the write without all of its bytes."""
        self.state, self.settled = WriteState.FAILED, settled
        self.error = f"{self.title}: {why}"

    def withdraw(self) -> None:
        """Fail a released draft, which must never begin."""
        if self.state is WriteState.DRAFT:
            self.fail("it was given back before it began", settled=True)


class PreparedList(Generic[_Content]):
    """Prepared pieces for one life of one peer; `content` is None after their release."""

    __slots__ = ("content", "life")

    def __init__(self, life: str, content: _Content) -> None:
        self.life = life
        self.content: _Content | None = content


class TransportBase(Generic[_Peer]):
    """The part of a transport that knows its peers; see `base.Transport` for the attributes.

    Attributes:
        magic: names the library and the version of its metadata.

    Args:
        name: this worker's name for peers.
    Raises:
        TransportError: the name is invalid.
    """

    backend: str
    magic: bytes
    announced_by_message: frozenset[Wire] = frozenset()
    swift: frozenset[Wire] = frozenset()
    driven: frozenset[Wire] = frozenset()

    def __init__(self, name: str) -> None:
        if not is_name(name):
            raise TransportError(f"transport name is {name!r}: give 1 to {NAME_BYTES_MAX} bytes")
        self.name = name
        # Distinguishes the lives of workers with the same name.
        self._life = os.urandom(8).hex()
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"{self.backend} transport {self.name!r} is closed", reason=Reason.SHUTTING_DOWN)

    def _peer(self, name: str) -> _Peer:
        self._check_open()
        peer = self._peers.get(name)
        if peer is None:
            raise TransportError(f"{self.backend} peer {name!r} is not connected: connect its metadata first")
        return peer

    def _sealed(self, content: Metadata) -> bytes:
        """Return this worker's metadata for peers. Raises TransportError if it is too long."""
        packed = seal(self.magic, content)
        if len(packed) > METADATA_BYTES_MAX:
            raise TransportError(
                f"{self.backend} metadata takes {len(packed)} bytes of {METADATA_BYTES_MAX}: register fewer regions"
            )
        return packed

    def _why_gone(self, peer: _Peer) -> str:
        """Return why no further write to a peer can begin; empty: it can."""
        if self._closed:
            return "the transport was closed"
        return "" if self._peers.get(peer.name) is peer else "the peer was disconnected"

    def _content(self, prepared: Prepared, peer: _Peer) -> Any:
        """Return the prepared content. Raises TransportError if it was for another peer or is released."""
        assert isinstance(prepared, PreparedList)
        if prepared.content is None or prepared.life != peer.life:
            raise TransportError(
                f"{self.backend} list was prepared for another life of peer {peer.name!r}, or released: prepare again"
            )
        return prepared.content


class CheckedTransport(TransportBase[_Checked]):
    """The part of a transport that checks pieces against registered memory, because the layer below does not.

    Its lock guards its peers and its memory.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = threading.Lock()
        # All registered ranges; each change replaces the object.
        self._own = Regions()
        self._ranges: dict[int, tuple[int, int]] = {}
        self._next_token = 1

    def prepare(self, peer: str, pieces: Pieces) -> PreparedList[Pieces]:
        """Check n pieces once; see `Transport.prepare`."""
        known = self._peer(peer)
        return PreparedList(known.life, self._looked_up(known, pieces))

    def release_prepared(self, prepared: Prepared) -> None:
        """Forget the pieces; see `Transport.release_prepared`."""
        assert isinstance(prepared, PreparedList)
        prepared.content = None

    def close(self) -> None:
        """Release everything. Idempotent; see `Transport.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                self._forget_peer(peer)
            self._peers.clear()
            self._stop()

    def _forget_peer(self, peer: _Checked) -> None:
        """Begin no more writes to a peer, and release what belongs to it. Called with the lock."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Release what belongs to no peer. Called once, with the lock."""
        raise NotImplementedError

    def _looked_up(self, peer: _Checked, pieces: Pieces | Selection) -> Pieces:
        """Return a copy of pieces, all in registered memory of both sides. Raises TransportError if some are not."""
        if isinstance(pieces, Selection):
            listed: Pieces = self._content(pieces.prepared, peer)
            return listed.at(pieces.indices)
        assert len(pieces.sources) == len(pieces.targets) == len(pieces.lengths) >= 1
        sides = (("source", self._own, pieces.sources), ("target", peer.regions, pieces.targets))
        for side, regions, addresses in sides:
            piece = regions.stray(addresses, pieces.lengths)
            if piece is not None:
                raise TransportError(
                    f"{self.backend} {side} piece {piece} for peer {peer.name!r}, {int(pieces.lengths[piece])} bytes at "
                    f"{int(addresses[piece]):#x}, is not in registered memory"
                )
        return Pieces(pieces.sources.copy(), pieces.targets.copy(), pieces.lengths.copy())

    def _add_memory(self, address: int, length_bytes: int) -> int:
        """Record a range and return its token. Raises TransportError if it is empty or overlaps another."""
        try:
            self._own = Regions([*self._own.ranges, (address, length_bytes)])
        except ValueError as error:
            raise TransportError(f"{self.backend} cannot register memory: {error}") from error
        token = self._next_token
        self._next_token += 1
        self._ranges[token] = (address, length_bytes)
        return token

    def _remove_memory(self, token: int) -> tuple[int, int]:
        """Forget a range and return it. Raises TransportError if no range has that token."""
        if token not in self._ranges:
            raise TransportError(f"{self.backend} memory token {token} is not registered")
        region = self._ranges.pop(token)
        self._own = Regions(self._ranges.values())
        return region


def check_notice(notice: bytes) -> None:
    """Raise TransportError if a notice is too long."""
    if len(notice) > NOTICE_BYTES_MAX:
        raise TransportError(f"notice takes {len(notice)} bytes: give at most {NOTICE_BYTES_MAX}")
