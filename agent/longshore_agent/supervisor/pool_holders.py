"""Which workers of a node have been given the pool of another one, for way DIRECT, and who waits until they have unmapped it.

Held by the supervisor, through which pools are given. Knows names only; maps nothing and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from longshore_wire.effects import PeerId

_Pool = tuple[PeerId, int]


@dataclass(slots=True)
class PoolHolders:
    """Holders by their workers' names. Bounded by the pools of the node's workers, times those workers."""

    _given: dict[_Pool, set[str]] = field(default_factory=dict)
    _awaited: dict[_Pool, set[str]] = field(default_factory=dict)

    def give(self, owner: PeerId, pool: int, holder: str) -> None:
        """A worker is given a pool, or a region of it."""
        self._given.setdefault((owner, pool), set()).add(holder)

    def take(self, owner: PeerId, pool: int) -> bool:
        """An owner's pool is not registered any more; return whether nobody has it, else wait for `unmapped`."""
        holders = self._given.pop((owner, pool), set())
        if holders:
            self._awaited.setdefault((owner, pool), set()).update(holders)
        return (owner, pool) not in self._awaited

    def unmapped(self, owner: PeerId, pool: int, holder: str) -> bool:
        """A worker has unmapped a pool; return whether it was the last one that its owner waits for."""
        awaited = self._awaited.get((owner, pool))
        if awaited is None:
            return False
        awaited.discard(holder)
        if not awaited:
            del self._awaited[owner, pool]
        return not awaited

    def left(self, worker: str, peer: PeerId) -> list[_Pool]:
        """A worker has ended, and with it all its mappings; return the pools of others that nobody has any more."""
        for known in (self._given, self._awaited):
            for pool in [pool for pool in known if pool[0] == peer]:
                del known[pool]
        for holders in self._given.values():
            holders.discard(worker)
        return [pool for pool in list(self._awaited) if self.unmapped(*pool, worker)]
