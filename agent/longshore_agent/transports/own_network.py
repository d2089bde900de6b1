"""Lists addresses, interfaces and sockets of this process's machine (or pod), and parses addresses of peers.

Called by the transports, to choose where a library listens, by `probe` to count sent bytes, by `drain` to count unread
bytes, and by `data_ports` to watch listening sockets. It resolves only our own name; a peer's address must be numeric.
Sockets, those that a library has opened included, come from /proc. Finding them needs two free descriptors; checking one
that was found needs none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from longshore_agent.errors import TransportError
from longshore_wire.errors import Reason

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_WAY_OUT = "give the pod's own address to LONGSHORE_BIND_HOST"
# Offset and size of the address in `struct sockaddr_in` and `struct sockaddr_in6`, in bytes.
_ADDRESS_AT = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
_FD_DIRECTORY = Path("/proc/self/fd")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_LINK = "socket:["
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# Of Linux's struct tcp_info: the state is its first byte, and `tcpi_bytes_acked` and `tcpi_bytes_received` come after 8
# single bytes, 24 words and two rates.
_TCP_INFO_BYTES = 232
_TCP_TOTALS, _TCP_TOTALS_OFFSET = struct.Struct("<QQ"), 120


class Place(NamedTuple):
    """One address of one network interface."""

    interface: str
    address: Address


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs` of the C library, up to the address."""


# Set after the class, since the struct points to itself.
_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def numeric(host: str) -> Address:
    """Return the address of `host`. Raises TransportError: it has none, or it means every address of the machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(str(found[0][4][0]))
    except (OSError, ValueError) as error:
        raise TransportError(f"no host can be reached at {host!r}: {error}; {_WAY_OUT}") from error
    if address.is_unspecified:
        raise TransportError(
            f"no host can be reached at {host}, which means every address: {_WAY_OUT}", reason=Reason.UNSUPPORTED
        )
    return address


def read_address(text: str) -> Address:
    """Parse a numeric address. Raises ValueError for a name."""
    address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    # A socket of both families shows an IPv4 peer as a mapped address.
    return getattr(address, "ipv4_mapped", None) or address


def number_of(host: str) -> Address | None:
    """Return `host` as an address; None: it is a name."""
    with contextlib.suppress(ValueError):
        return read_address(host)
    return None


def interface_of(address: Address) -> str:
    """Return the name of the interface that has `address`. Raises TransportError: none has."""
    for place in places():
        # Every address of 127.0.0.0/8 belongs to the loopback interface, which lists only one.
        if place.address == address or (address.is_loopback and place.address.is_loopback):
            return place.interface
    found = ", ".join(str(place.address) for place in places())
    raise TransportError(f"no network interface has the address {address}; those here have {found}: {_WAY_OUT}")


def host_identity() -> str:
    """Return an id that is equal exactly for processes under one kernel; empty if it cannot be read."""
    try:
        return _BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""


def places() -> tuple[Place, ...]:
    """Return the addresses of all interfaces, in the order in which the kernel lists them."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if library.getifaddrs(ctypes.byref(first)):
        raise TransportError(f"cannot list network interfaces: error {ctypes.get_errno()}")
    try:
        return tuple(_listed(first))
    finally:
        library.freeifaddrs(first)


def _listed(entry: Any) -> Iterator[Place]:
    while entry:
        found = entry.contents
        if found.address:
            # The first field is two bytes in native byte order.
            family = ctypes.c_uint16.from_address(found.address).value
            if family in _ADDRESS_AT:
                offset, length_bytes = _ADDRESS_AT[family]
                raw = ctypes.string_at(found.address + offset, length_bytes)
                yield Place(found.name.decode(), ipaddress.ip_address(raw))
        entry = found.next


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
