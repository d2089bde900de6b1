"""How a worker's address is written: one `host:port#key` for each server key that it listens with, joined by commas.

The supervisor, the peer net and the knocker use it; to the protocol cores an address is a word. `key` is a fingerprint:
it chooses among the keys that an agent has, and never brings one. `host:port` alone is a worker that has no keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Two revisions of keys at once; what a peer says beyond that is not read.
DOORS_MAX = 2


class Door(NamedTuple):
    """One place where a worker listens, and the fingerprint of the server key there; empty: none."""

    address: str
    key: str = ""


def join(doors: Iterable[Door]) -> str:
    """Return the address that these doors make; the newest key first."""
    return ",".join(f"{door.address}#{door.key}" if door.key else door.address for door in doors)


def split(text: str) -> tuple[Door, ...]:
    """Return the doors of an address, at least one; nothing is checked."""
    entries = text.split(",", DOORS_MAX)[:DOORS_MAX]
    return tuple(Door(address, key) for address, _, key in (entry.partition("#") for entry in entries))


def main_door(text: str) -> str:
    """Return `host:port` of the first door: where any connection finds out whether the worker lives."""
    return split(text)[0].address
