"""Detects when this process has read everything that an ended process had sent to it.

Called by `worker.moving` before memory that the ended process could write goes to another room. It reads no bytes
itself: the caller must keep driving the transport.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import socket
import termios
from collections.abc import Callable
from typing import NamedTuple

from longshore_agent.errors import TransportError
from longshore_agent.transports.own_network import number_of, own_sockets, places, read_address, tcp_counts

_log = logging.getLogger(__name__)

# A state of <net/tcp_states.h>.
_CLOSED = 7
# Time for packets of an ended process to arrive: longer than until the first retransmission of a lost packet.
_FLIGHT_NS = 300_000_000
# Time between two checks.
_LOOK_NS = 20_000_000
# More than a kernel buffers of bytes that one process has sent and its peer has not read.
_KEPT_BYTES_MAX = 128 << 20
# Checks in a row (2 s or more) in which a driven library has read nothing of the waiting bytes.
_IDLE_LOOKS_MAX = 100


class Unread(NamedTuple):
    """Bytes of one connection that wait to be read, and bytes received in all."""

    waiting_bytes: int
    received_bytes: int


def unread_of(host: str) -> dict[int, Unread]:
    """Return the connections of this process with a host, by inode. If `host` is a name: with every host.

    Raises:
        OSError: no descriptor is left for the check.
        TransportError: the addresses of this machine cannot be listed.
    """
    there, here = number_of(host), {place.address for place in places()}
    # Peers on this machine may connect from any of its addresses.
    hosts = here if there in here else {there}
    found = {}
    for inode, own in own_sockets():
        counts = tcp_counts(own)
        if counts is None:
            continue
        # The socket was closed since, or listens.
        with contextlib.suppress(OSError):
            # The kernel does not keep the peer's address of a reset connection.
            if there is not None and counts.state != _CLOSED and read_address(own.getpeername()[0]) not in hosts:
                continue
            found[inode] = Unread(_waiting_bytes(own), counts.received_bytes)
    return found


def _waiting_bytes(own: socket.socket) -> int:
    count = array.array("i", (0,))
    fcntl.ioctl(own, termios.FIONREAD, count)
    return count[0]


class _Connection:
    """One connection while it is drained."""

    def __init__(self, first: Unread) -> None:
        self._first_bytes = first.received_bytes
        self._read_bytes = -1
        self._idle_looks = 0

    def is_drained(self, now: Unread) -> bool:
        """Whether no further byte of an ended process will be read from it."""
        read_bytes = now.received_bytes - now.waiting_bytes
        self._idle_looks = self._idle_looks + 1 if read_bytes == self._read_bytes else 0
        self._read_bytes = read_bytes
        if not now.waiting_bytes or now.received_bytes - self._first_bytes > _KEPT_BYTES_MAX:
            return True
        if self._idle_looks < _IDLE_LOOKS_MAX:
            return False
        _log.info("the transport's library leaves %d bytes of a connection unread", now.waiting_bytes)
        return True


class Drain:
    """Watches the connections with the host of a process that has ended.

    The ended process's kernel keeps sending while we read. A connection counts as drained in three cases: no bytes
    wait; more bytes have come than a kernel buffers, so its sender lives; or nothing was read in `_IDLE_LOOKS_MAX`
    checks, because the library has dropped a failed connection. If no bytes wait, bytes that arrive later than
    `_FLIGHT_NS` after the beginning are not seen.
    """

    def __init__(self, host: str, now_ns: int, look: Callable[[str], dict[int, Unread]] = unread_of) -> None:
        self._host, self._look = host, look
        self._settles_ns = now_ns + _FLIGHT_NS
        self._connections: dict[int, _Connection] = {}
        self.due_ns = now_ns

    def is_over(self, now_ns: int) -> bool:
        """Whether all are drained. Checks at most once in `_LOOK_NS`; the transport must be driven between checks."""
        if now_ns < self.due_ns:
            return False
        self.due_ns = now_ns + _LOOK_NS
        try:
            unread = self._look(self._host)
        except (OSError, TransportError):
            return False
        if now_ns < self._settles_ns:
            for inode, each in unread.items():
                self._connections.setdefault(inode, _Connection(each))
        else:
            for inode, connection in list(self._connections.items()):
                if inode not in unread or connection.is_drained(unread[inode]):
                    del self._connections[inode]
        return not self._connections
