"""Sorts the notices that have landed at a transport: to hand over, to keep until their sender connects, to drop.

Called by nixl.py and loopback.py under their locks. A sender is identified by one of its lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

# Kept notices of workers that are not connected yet: both sides attach at about the same time, and a peer that is ready
# first may write first. If more wait, the oldest are lost, which the protocol above repairs.
_UNCLAIMED_COUNT_MAX = 256


class Arrivals:
    """See the module."""

    def __init__(self) -> None:
        self._senders: dict[Hashable, str] = {}
        self._arrived: list[tuple[str, bytes]] = []
        self._unclaimed: deque[tuple[Hashable, bytes]] = deque(maxlen=_UNCLAIMED_COUNT_MAX)
        self._forgotten: deque[Hashable] = deque(maxlen=_UNCLAIMED_COUNT_MAX)

    def meet(self, sender: Hashable, peer: str) -> None:
        """Assign the notices of `sender`, kept ones included, to a connected peer."""
        self._senders[sender] = peer
        if sender in self._forgotten:
            self._forgotten.remove(sender)
        waiting = list(self._unclaimed)
        self._unclaimed.clear()
        for other, notice in waiting:
            self.land(other, notice)

    def part(self, sender: Hashable) -> None:
        """Drop all later notices of an ended life of a peer."""
        self._senders.pop(sender, None)
        self._forgotten.append(sender)

    def drop(self, peer: str) -> None:
        """Drop the landed notices of a peer that were not taken."""
        self._arrived = [item for item in self._arrived if item[0] != peer]

    def land(self, sender: Hashable, notice: bytes) -> None:
        """Add a notice that has landed."""
        peer = self._senders.get(sender)
        if peer is not None:
            self._arrived.append((peer, notice))
        elif sender not in self._forgotten:
            self._unclaimed.append((sender, notice))

    def take(self) -> list[tuple[str, bytes]]:
        """Remove and return (peer, notice) of all notices of connected peers, in their order."""
        arrived, self._arrived = self._arrived, []
        return arrived
