"""Formats addresses for Mooncake: our own, and those of peers, which are not trusted.

Called by mooncake.py only. A peer's address must be a number, so nothing is looked up for it.
"""

from __future__ import annotations

import ipaddress

from longshore_agent.errors import PeerMetadataError
from longshore_agent.transports.own_address import Address

_PORT_MAX = 65535


def remote_address(host: str, port: int, earlier_lives: int) -> str:
    """Return a peer's address for Mooncake. Raises PeerMetadataError.

    Args:
        host, port: from the peer's metadata.
        earlier_lives: number of other workers that had this address before. Mooncake never contacts a known address
            anew; leading zeros of the port make it another one.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        raise PeerMetadataError(f"peer metadata has the host {host[:64]!r}: an address is needed") from error
    if address.is_unspecified or address.is_multicast or not 1 <= port <= _PORT_MAX:
        raise PeerMetadataError(f"peer metadata has the address {address} port {port}, which no worker can have")
    return f"{in_brackets(address)}:{'0' * earlier_lives}{port}"


def in_brackets(address: Address) -> str:
    """Return an address in the form that Mooncake expects before a port."""
    return f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004
