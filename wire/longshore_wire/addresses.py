"""Reads and writes a worker's address: one `host:port#key` for each server key that it listens with, joined by commas.

Used by the supervisor, the protocol cores, the peer net and the liveness probes. `key` is a fingerprint: it selects one of the
keys that an agent holds, and never carries one. The address of a worker without keys is `host:port`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Two revisions of keys at once; further listeners of an address are ignored.
LISTENERS_MAX = 2


class Listener(NamedTuple):
    """One place where a worker listens, and the fingerprint of its server key; empty: no key."""

    address: str
    key: str = ""


def join(listeners: Iterable[Listener]) -> str:
    """Return the address of these listeners, the newest key first."""
    return ",".join(f"{each.address}#{each.key}" if each.key else each.address for each in listeners)


def split(text: str) -> tuple[Listener, ...]:
    """Return the listeners of an address, at least one. Checks nothing."""
    entries = text.split(",", LISTENERS_MAX)[:LISTENERS_MAX]
    return tuple(Listener(address, key) for address, _, key in (entry.partition("#") for entry in entries))


def main_address(text: str) -> str:
    """Return `host:port` of the first listener. It stays the same while keys change, and a host gives it to one process at a time."""
    return split(text)[0].address
