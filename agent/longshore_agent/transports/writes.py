"""Keeps the state that all transports share: peers, the end of the transport's life, and the states of writes.

Extended by nixl.py, mooncake.py and loopback.py. Knows no library. It has no lock: each transport guards it by its own.
"""

from __future__ import annotations

import os
from typing import Any, Generic, Protocol, TypeVar

from longshore_agent.errors import TransportError
from longshore_agent.transports.base import NOTICE_BYTES_MAX, Addresses, Part, Pieces, Prepared, WriteState
from longshore_agent.transports.envelope import NAME_BYTES_MAX, is_name
from longshore_agent.transports.regions import OwnMemory, Regions
from longshore_wire.errors import Reason


class KnownPeer(Protocol):
    """One life of a peer."""

    name: str
    life: str


class CheckedPeer(KnownPeer, Protocol):
    """One life of a peer, and its memory that may be written."""

    regions: Regions


_Peer = TypeVar("_Peer", bound=KnownPeer)
_Checked = TypeVar("_Checked", bound=CheckedPeer)
_Content = TypeVar("_Content")


class OneWrite(Generic[_Peer]):
    """One write; `release` returns `settled`."""

    __slots__ = ("error", "peer", "settled", "state")

    def __init__(self, peer: _Peer) -> None:
        self.peer = peer
        self.state = WriteState.DRAFT
        self.error = ""
        self.settled = False

    @property
    def title(self) -> str:
        """The write's description in errors."""
        return f"write to peer {self.peer.name!r}"

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

    __slots__ = ("content", "count", "life")

    def __init__(self, life: str, count: int, content: _Content) -> None:
        self.life = life
        self.count = count
        self.content: _Content | None = content


class Connected(Generic[_Peer]):
    """The part of a transport that knows its peers.

    Args:
        name: this worker's name for peers.
    Raises:
        TransportError: the name is invalid.
    """

    backend: str

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


class Checked(Connected[_Checked]):
    """The part of a transport that checks pieces against registered memory, because the layer below does not."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._own = OwnMemory()

    def prepare(self, peer: str, sources: Addresses, targets: Addresses, lengths: Addresses) -> PreparedList[Pieces]:
        """Check n pieces once; see `Transport.prepare`."""
        known = self._peer(peer)
        return PreparedList(known.life, len(sources), self._looked_up(known, Pieces(sources, targets, lengths)))

    def release_prepared(self, prepared: Prepared) -> None:
        """Forget the pieces; see `Transport.release_prepared`."""
        assert isinstance(prepared, PreparedList)
        prepared.content = None

    def _looked_up(self, peer: _Checked, pieces: Pieces | Part) -> Pieces:
        """Return a copy of pieces, all in registered memory of both sides. Raises TransportError if some are not."""
        if isinstance(pieces, Part):
            listed: Pieces = self._content(pieces.prepared, peer)
            return listed.at(pieces.indices)
        assert len(pieces.sources) == len(pieces.targets) == len(pieces.lengths) >= 1
        sides = (("source", self._own.regions, pieces.sources), ("target", peer.regions, pieces.targets))
        for side, regions, addresses in sides:
            piece = regions.stray(addresses, pieces.lengths)
            if piece is not None:
                raise TransportError(
                    f"{self.backend} {side} piece {piece} for peer {peer.name!r}, {int(pieces.lengths[piece])} bytes at "
                    f"{int(addresses[piece]):#x}, is not in registered memory"
                )
        return Pieces(pieces.sources.copy(), pieces.targets.copy(), pieces.lengths.copy())

    def _add_memory(self, address: int, length_bytes: int) -> int:
        try:
            return self._own.add(address, length_bytes)
        except ValueError as error:
            raise TransportError(f"{self.backend} cannot register memory: {error}") from error

    def _remove_memory(self, token: int) -> tuple[int, int]:
        region = self._own.remove(token)
        if region is None:
            raise TransportError(f"{self.backend} memory token {token} is not registered")
        return region


def check_notice(notice: bytes) -> None:
    """Raise TransportError if a notice is too long."""
    if len(notice) > NOTICE_BYTES_MAX:
        raise TransportError(f"notice takes {len(notice)} bytes: give at most {NOTICE_BYTES_MAX}")
