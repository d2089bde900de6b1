"""Parses and formats a worker's address: comma-separated `host:port#key`, one for each server key of its listeners.

Used by the supervisor, the protocol cores, the peer net and the liveness probes. `key` is a fingerprint that selects one
of the keys that an agent holds; it is never a key itself. The address of a worker without keys is `host:port`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

# Two revisions of keys during a rotation. Further listeners of an address are ignored.
LISTENERS_MAX = 2
# Compiled at its first use, since every engine imports this module.
# Without leading zeros, which some programs read as octal numbers.
_LISTENER = r"(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2}):([1-9]\d{0,4})(?:#[0-9a-f]{1,64})?"
_OCTET_MAX, _PORT_MAX = 255, 65535
_MULTICAST, _LINK_LOCAL = 224, (169, 254)


class Listener(NamedTuple):
    """One endpoint of a worker, and the fingerprint of its server key; empty if it has no key."""

    address: str
    key: str = ""


def join(listeners: Iterable[Listener]) -> str:
    """Return the address of these listeners, which are in order of their keys, newest first."""
    return ",".join(f"{each.address}#{each.key}" if each.key else each.address for each in listeners)


def split(text: str) -> tuple[Listener, ...]:
    """Return the listeners of an address, at least one. Checks nothing."""
    entries = text.split(",", LISTENERS_MAX)[:LISTENERS_MAX]
    return tuple(Listener(address, key) for address, _, key in (entry.partition("#") for entry in entries))


@functools.lru_cache(4096)
def is_numeric(text: str) -> bool:
    """Whether an address is of a worker: IPv4 numbers of one host each, and ports. Nothing in a worker resolves names."""
    return all(_is_listener(entry) for entry in text.split(",", LISTENERS_MAX))


def _is_listener(entry: str) -> bool:
    found = re.fullmatch(_LISTENER, entry, re.ASCII)
    if found is None:
        return False
    *octets, port = map(int, found.groups())
    is_host = max(octets) <= _OCTET_MAX and 0 < octets[0] < _MULTICAST and (octets[0], octets[1]) != _LINK_LOCAL
    return is_host and 0 < port <= _PORT_MAX


def main_address(text: str) -> str:
    """Return `host:port` of the first listener. It does not change with the keys, and only one process can own it."""
    return text.split(",", 1)[0].partition("#")[0]
