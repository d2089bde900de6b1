"""Checks which pieces lie inside a transport's registered memory.

Used by mooncake.py, loopback.py and writes.py, since Mooncake and the kernel read any source address. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from longshore_agent.transports.base import Addresses


class Regions:
    """Ranges of one process's memory that do not overlap. Immutable.

    Args:
        ranges: (address, bytes) of each, in any order.
    Raises:
        ValueError: a range is empty, beyond 64 bits, or overlaps another.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges = tuple(sorted(ranges))
        end = 0
        for address, length_bytes in self.ranges:
            if address < end or length_bytes < 1 or address + length_bytes >= 1 << 64:
                raise ValueError(f"{length_bytes} bytes at {address:#x} are empty, beyond 64 bits or overlap others")
            end = address + length_bytes
        self._starts = np.array([address for address, _ in self.ranges], dtype=np.uint64)
        self._sizes = np.array([size for _, size in self.ranges], dtype=np.uint64)

    def stray(self, addresses: Addresses, lengths: Addresses) -> int | None:
        """Return the index of the first piece that does not lie within one range; None: all do.

        Args:
            addresses, lengths: [n] of the pieces.
        """
        if not self.ranges:
            return 0
        place = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        known = place >= 0
        place = np.maximum(place, 0)
        sizes = self._sizes[place]
        # Subtract only: the sum of a hostile address and a length could wrap around.
        fits = known & (lengths <= sizes)
        fits &= addresses - self._starts[place] <= np.where(fits, sizes - lengths, np.uint64(0))
        return None if fits.all() else int(np.argmin(fits))


class OwnMemory:
    """Memory of this process that is registered, by token.

    Attributes:
        regions: all ranges; each change replaces the object.
    """

    def __init__(self) -> None:
        self.regions = Regions()
        self._ranges: dict[int, tuple[int, int]] = {}
        self._next_token = 1

    def add(self, address: int, length_bytes: int) -> int:
        """Add a range and return its token. Raises ValueError as `Regions`."""
        self.regions = Regions([*self.regions.ranges, (address, length_bytes)])
        token = self._next_token
        self._next_token += 1
        self._ranges[token] = (address, length_bytes)
        return token

    def remove(self, token: int) -> tuple[int, int] | None:
        """Remove a range and return it; None: no range has that token."""
        region = self._ranges.pop(token, None)
        if region is not None:
            self.regions = Regions(self._ranges.values())
        return region
