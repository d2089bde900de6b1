"""Notices that have landed at a transport: which may be handed over, which wait for their sender, and which are dropped.

Called by nixl.py and loopback.py, which guard it by their locks. Knows senders by an identity of one life each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

# Notices of workers that are not connected yet: both sides attach at about the same time, and a peer that is ready first may
# write first. More than this many are lost, which the protocol above repairs.
_UNCLAIMED_COUNT_MAX = 256


class Arrivals:
    """See the module."""

    def __init__(self) -> None:
        self._senders: dict[Hashable, str] = {}
        self._arrived: list[tuple[str, bytes]] = []
        self._unclaimed: deque[tuple[Hashable, bytes]] = deque(maxlen=_UNCLAIMED_COUNT_MAX)
        self._forgotten: deque[Hashable] = deque(maxlen=_UNCLAIMED_COUNT_MAX)

    def meet(self, sender: Hashable, peer: str) -> None:
        """A peer is connected: notices of `sender` are its own, also those that wait."""
        self._senders[sender] = peer
        if sender in self._forgotten:
            self._forgotten.remove(sender)
        waiting = list(self._unclaimed)
        self._unclaimed.clear()
        for other, notice in waiting:
            self.land(other, notice)

    def part(self, sender: Hashable) -> None:
        """A life of a peer has gone: drop what comes of it from now on."""
        self._senders.pop(sender, None)
        self._forgotten.append(sender)

    def drop(self, peer: str) -> None:
        """Drop what has landed of a peer and was not taken."""
        self._arrived = [item for item in self._arrived if item[0] != peer]

    def land(self, sender: Hashable, notice: bytes) -> None:
        """A notice has come."""
        peer = self._senders.get(sender)
        if peer is not None:
            self._arrived.append((peer, notice))
        elif sender not in self._forgotten:
            self._unclaimed.append((sender, notice))

    def take(self) -> list[tuple[str, bytes]]:
        """Return (peer, notice) of all that may be handed over, in their order, each once."""
        arrived, self._arrived = self._arrived, []
        return arrived
