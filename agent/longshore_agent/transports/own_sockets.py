"""The network sockets of this process, also those that a library has opened.

Called by `wires`, which counts what they carry, and by `data_ports`, which watches those that listen. Reads /proc only. Finding sockets
takes two free descriptors; looking again at one that was found takes none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

_FD_DIRECTORY = Path("/proc/self/fd")
_LINK = "socket:["
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield each stream socket over IP with its inode, borrowed: it is valid until the next one is asked for.

    One that is closed meanwhile is left out.

    Raises:
        OSError: no descriptor is left to look with.
    """
    for entry in _FD_DIRECTORY.iterdir():
        try:
            link = str(entry.readlink())
            if not link.startswith(_LINK):
                continue
            # A duplicate stays valid when its owner closes the socket, and closing it leaves the owner's alone.
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
    """Yield those of `own_sockets` that listen, in the same way. Raises OSError as that does."""
    for inode, own in own_sockets():
        # Some kinds of socket have no such option.
        with contextlib.suppress(OSError):
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield inode, own


def descriptors_of(inodes: Collection[int]) -> dict[int, int]:
    """Return by inode a descriptor of each of these sockets that this process has. Raises OSError: no descriptor is left to look with."""
    found: dict[int, int] = {}
    for entry in _FD_DIRECTORY.iterdir():
        with contextlib.suppress(OSError):
            inode = os.fstat(int(entry.name)).st_ino
            if inode in inodes:
                found.setdefault(inode, int(entry.name))
    return found


@contextlib.contextmanager
def borrowed(number: int, inode: int) -> Iterator[socket.socket | None]:
    """Lend the socket of a descriptor, which takes no other one; None: its owner has closed it.

    A duplicate that lives as long as the port would keep it open when the library has closed it.
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
