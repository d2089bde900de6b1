"""Tracks which workers of a node map another worker's pool, for way DIRECT, and which owners wait until it is unmapped.

Held by the supervisor, through which pools are given. Maps nothing and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from longshore_wire.effects import PeerId

_Pool = tuple[PeerId, int]


@dataclass(slots=True)
class PoolHolders:
    """Bounded by the pools of the node's workers, times those workers."""

    _given: dict[_Pool, set[PeerId]] = field(default_factory=dict)
    _awaited: dict[_Pool, set[PeerId]] = field(default_factory=dict)

    def give(self, owner: PeerId, pool: int, holder: PeerId) -> None:
        """Record that a worker gets a pool, or a region of it."""
        self._given.setdefault((owner, pool), set()).add(holder)

    def take(self, owner: PeerId, pool: int) -> bool:
        """Unregister an owner's pool; return whether no worker maps it. Otherwise the owner waits for `unmapped`."""
        holders = self._given.pop((owner, pool), set())
        if holders:
            self._awaited.setdefault((owner, pool), set()).update(holders)
        return (owner, pool) not in self._awaited

    def take_all(self, owner: PeerId) -> list[int]:
        """Unregister all pools of an ended worker; return those that others still map."""
        for _, pool in [key for key in self._given if key[0] == owner]:
            self.take(owner, pool)
        return [pool for peer, pool in self._awaited if peer == owner]

    def holders(self, owner: PeerId) -> list[PeerId]:
        """Return the workers that still map a pool which its owner has unregistered."""
        return sorted({holder for key, holders in self._awaited.items() if key[0] == owner for holder in holders})

    def unmapped(self, owner: PeerId, pool: int, holder: PeerId) -> bool:
        """Record that a worker has unmapped a pool; return whether it was the last one that the owner waits for."""
        awaited = self._awaited.get((owner, pool))
        if awaited is None:
            return False
        awaited.discard(holder)
        if not awaited:
            del self._awaited[owner, pool]
        return not awaited

    def left(self, worker: PeerId) -> list[_Pool]:
        """Remove an ended worker with all of its mappings; return the pools that no worker maps any more."""
        for holders in self._given.values():
            holders.discard(worker)
        return [pool for pool in list(self._awaited) if self.unmapped(*pool, worker)]
