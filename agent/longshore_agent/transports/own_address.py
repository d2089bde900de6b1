"""Lists addresses and interfaces of this machine (or the pod's network), and parses addresses of sockets and peers.

Called by the transports, to choose where a library listens, and by `data_ports` and `drain`. It resolves only our own
name; a peer's address must be numeric.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from longshore_agent.errors import TransportError
from longshore_wire.errors import Reason

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_WAY_OUT = "give the pod's own address to LONGSHORE_BIND_HOST"


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
# Offset and size of the address in `struct sockaddr_in` and `struct sockaddr_in6`, in bytes.
_ADDRESS_AT = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}


def numeric(host: str) -> Address:
    """Return the address of `host`. Raises TransportError: it has none, or it means every address of the machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(str(found[0][4][0]))
    except (OSError, ValueError) as error:
        raise TransportError(f"nobody can be reached at {host!r}: {error}; {_WAY_OUT}") from error
    if address.is_unspecified:
        raise TransportError(
            f"nobody can be reached at {host}, which stands for every address: {_WAY_OUT}", reason=Reason.UNSUPPORTED
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
