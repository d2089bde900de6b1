"""Addresses as Mooncake takes them: our own, and those of peers, which are not to be trusted.

Called by mooncake.py only. Looks names up for our own address; a peer's must be a number, so nothing is looked up for it.
"""

from __future__ import annotations

import ipaddress
import socket

from longshore_agent.errors import PeerMetadataError, TransportError

_PORT_MAX = 65535


def own_host(host: str) -> str:
    """Return the numeric address of `host`, at which peers reach this machine. Raises TransportError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(str(found[0][4][0]))
    except (OSError, ValueError) as error:
        raise TransportError(f"Mooncake cannot be reached at {host!r}: {error}") from error
    if address.is_unspecified:
        raise TransportError(f"Mooncake cannot be reached at {host}: give the pod's own address to LONGSHORE_BIND_HOST")
    return _in_brackets(address)


def remote_address(host: str, port: int, earlier_lives: int) -> str:
    """Return how a peer is named to Mooncake. Raises PeerMetadataError.

    Args:
        host, port: from the peer's metadata.
        earlier_lives: how many other workers had this address before. Mooncake never asks an address again that it knows,
            and the zeros before the port make it another one.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        raise PeerMetadataError(f"peer metadata has the host {host[:64]!r}: an address is needed") from error
    if address.is_unspecified or address.is_multicast or not 1 <= port <= _PORT_MAX:
        raise PeerMetadataError(f"peer metadata has the address {address} port {port}, which no worker can have")
    return f"{_in_brackets(address)}:{'0' * earlier_lives}{port}"


def _in_brackets(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004
