"""Finds the network sockets of this process, including those that a library has opened.

Called by `wires` to count sent bytes, by `drain` to count unread bytes, and by `data_ports` to watch listening sockets.
Reads /proc only. Finding sockets needs two free descriptors; checking one that was found needs none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_FD_DIRECTORY = Path("/proc/self/fd")
_LINK = "socket:["
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


# Of Linux's struct tcp_info: the state is its first byte, and `tcpi_bytes_acked` and `tcpi_bytes_received` come after 8
# single bytes, 24 words and two rates.
_TCP_INFO_BYTES = 232
_TCP_TOTALS, _TCP_TOTALS_OFFSET = struct.Struct("<QQ"), 120


class TcpCounts(NamedTuple):
    """The kernel's data on one TCP socket: its state, a number of <net/tcp_states.h>, and its total bytes."""

    state: int
    acked_bytes: int
    received_bytes: int


def tcp_counts(own: socket.socket) -> TcpCounts | None:
    """Return the counts of one socket; None: its kind has none (SCTP, MPTCP)."""
    try:
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _TCP_TOTALS_OFFSET + _TCP_TOTALS.size:
        return None
    return TcpCounts(info[0], *_TCP_TOTALS.unpack_from(info, _TCP_TOTALS_OFFSET))


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield each stream socket over IP with its inode. The socket is borrowed: it is valid until the next step.

    A socket that is closed during the search is left out.

    Raises:
        OSError: no descriptor is left for the search.
    """
    for entry in _FD_DIRECTORY.iterdir():
        try:
            link = str(entry.readlink())
            if not link.startswith(_LINK):
                continue
            # A duplicate stays valid when the owner closes the socket, and closing it does not close the owner's.
            number = os.dup(int(entry.name))
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise
            continue
        try:
            copy = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            continue
        with copy:
            if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                yield int(link[len(_LINK) : -1]), copy


def listening_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the listening ones of `own_sockets`, borrowed in the same way. Raises OSError as `own_sockets`."""
    for inode, own in own_sockets():
        # Some kinds of socket lack this option.
        with contextlib.suppress(OSError):
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield inode, own


def descriptors_of(inodes: Collection[int]) -> dict[int, int]:
    """Return, by inode, this process's descriptor of each of these sockets. Raises OSError: no descriptor is left."""
    found: dict[int, int] = {}
    for entry in _FD_DIRECTORY.iterdir():
        with contextlib.suppress(OSError):
            inode = os.fstat(int(entry.name)).st_ino
            if inode in inodes:
                found.setdefault(inode, int(entry.name))
    return found


@contextlib.contextmanager
def borrowed(number: int, inode: int) -> Iterator[socket.socket | None]:
    """Lend the socket of a descriptor without another descriptor; None: its owner has closed it.

    A duplicate would keep the port open after the library has closed it.
    """
    try:
        own = socket.socket(fileno=number) if os.fstat(number).st_ino == inode else None
    except OSError:
        own = None
    try:
        yield own
    finally:
        if own is not None:
            own.detach()
