"""Pools of other ranks of this node, mapped into this worker so that it may write their pages: way DIRECT.

Held by the worker's `Mover`. Their owners give file descriptors, through the supervisor, and say when a pool is gone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from longshore_agent.memory.pools import KVPool
from longshore_wire.effects import PeerId
from longshore_wire.layout import KVLayout, PoolGeometry

ALL_POOLS = -1


@dataclass(slots=True)
class Neighbours:
    """What is mapped, and the descriptors of pools that have come in part."""

    _pools: dict[tuple[PeerId, int], KVPool] = field(default_factory=dict)
    _parts: dict[tuple[PeerId, int], list[int]] = field(default_factory=dict)

    def pool(self, owner: PeerId, number: int) -> KVPool | None:
        """Return a mapped pool; None: ask its owner for it."""
        return self._pools.get((owner, number))

    def take(self, owner: PeerId, number: int, count: int, descriptor: int) -> list[int] | None:
        """Keep the descriptor of one region; return all `count` of them, the caller's now, once they are there."""
        parts = self._parts.setdefault((owner, number), [])
        parts.append(descriptor)
        if len(parts) < count:
            return None
        return self._parts.pop((owner, number))

    def map(
        self, owner: PeerId, number: int, layout: KVLayout, geometry: PoolGeometry, descriptors: list[int]
    ) -> KVPool:
        """Map a pool in place of an older one; closes the descriptors.

        Raises:
            PoolError: the memory is not what the owner declared.
        """
        try:
            mapped = KVPool(layout, geometry, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.forget(owner, number)
        self._pools[owner, number] = mapped
        return mapped

    def forget(self, owner: PeerId, number: int = ALL_POOLS) -> None:
        """Unmap a pool, or all of an owner, at once or when the job that runs on it ends."""
        for key in [key for key in self._pools if key[0] == owner and number in (ALL_POOLS, key[1])]:
            self._pools.pop(key).close()
        for key in [key for key in self._parts if key[0] == owner and number in (ALL_POOLS, key[1])]:
            for descriptor in self._parts.pop(key):
                os.close(descriptor)
