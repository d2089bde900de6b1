"""Parses and formats a worker's address: comma-separated `host:port#key`, one for each server key of its listeners.

Used by the supervisor, the protocol cores, the peer net and the liveness probes. `key` is a fingerprint that selects one
of the keys that an agent holds; it is never a key itself. The address of a worker without keys is `host:port`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Two revisions of keys during a rotation. Further listeners of an address are ignored.
LISTENERS_MAX = 2


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


def main_address(text: str) -> str:
    """Return `host:port` of the first listener. It does not change with the keys, and only one process can own it."""
    return text.split(",", 1)[0].partition("#")[0]
