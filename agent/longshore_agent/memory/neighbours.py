"""Maps pools of other ranks of this node, so that this worker can write their pages by way DIRECT.

Used by the worker's `Mover`. Owners send file descriptors, or handles of GPU memory, through the supervisor, and
announce when a pool is unregistered. The worker confirms when it is unmapped here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from longshore_agent.errors import PoolError
from longshore_agent.memory.cuda import Device
from longshore_agent.memory.device_memory import DeviceMapping
from longshore_agent.memory.pools import KVPool
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import DeviceRegion
from longshore_wire.layout import KVLayout, PoolGeometry

ALL_POOLS = -1

Part = int | DeviceRegion  # of a pool: a region's descriptor, ours to close, or its place on a GPU


@dataclass(slots=True)
class Neighbours:
    """Mapped pools, incomplete pools, and pools to unmap when their last job ends.

    Attributes:
        device: our engine's GPU, which must reach the neighbours' pages.
    """

    device: Device | None = None
    _pools: dict[tuple[PeerId, int], KVPool] = field(default_factory=dict)
    _parts: dict[tuple[PeerId, int], dict[int, Part]] = field(default_factory=dict)
    _leaving: dict[tuple[PeerId, int], list[KVPool]] = field(default_factory=dict)
    _owed: list[tuple[PeerId, int]] = field(default_factory=list)

    def pool(self, owner: PeerId, number: int) -> KVPool | None:
        """Return a mapped pool, or None if the owner must be asked for it."""
        return self._pools.get((owner, number))

    def take(self, owner: PeerId, number: int, index: int, count: int, part: Part) -> list[Part] | None:
        """Keep one region's part, in place of an older one; return all `count` of them, the caller's now, once they are there."""
        parts = self._parts.setdefault((owner, number), {})
        if index in parts:
            close_parts([parts[index]])
        parts[index] = part
        if set(parts) != set(range(count)):
            return None
        del self._parts[owner, number]
        return [parts[each] for each in range(count)]

    def drop_parts(self, owner: PeerId, number: int) -> None:
        """Close the parts of an answer that was refused: they are no parts of the next."""
        close_parts(list(self._parts.pop((owner, number), {}).values()))

    def map(self, owner: PeerId, number: int, layout: KVLayout, geometry: PoolGeometry, parts: list[Part]) -> KVPool:
        """Map a pool and replace an older one. Closes the descriptors.

        Raises:
            PoolError: the memory does not match the owner's declaration, or is out of reach.
        """
        regions = [part for part in parts if isinstance(part, DeviceRegion)]
        try:
            if regions or self.device is not None:
                mapped = self._map_device(layout, geometry, regions)
            else:
                mapped = KVPool(layout, geometry, _descriptors(parts))
        finally:
            close_parts(parts)
        self.forget(owner, number)
        self._pools[owner, number] = mapped
        return mapped

    def _map_device(self, layout: KVLayout, geometry: PoolGeometry, regions: list[DeviceRegion]) -> KVPool:
        if self.device is None or len(regions) != len(geometry.region_bytes):
            raise PoolError("one engine's pages are on a GPU and the other's are not: their ranks cannot be neighbours")
        mappings: list[DeviceMapping] = []
        try:
            for region, length_bytes in zip(regions, geometry.region_bytes, strict=True):
                mappings.append(DeviceMapping(self.device, region, length_bytes))
            return KVPool(layout, geometry, (), mappings)
        except PoolError:
            for mapping in mappings:
                mapping.unmap()
            raise

    def forget(self, owner: PeerId, number: int = ALL_POOLS) -> None:
        """Unmap a pool, or all pools of an owner, at once or when the last job on it ends."""
        for key in [key for key in self._pools if key[0] == owner and number in (ALL_POOLS, key[1])]:
            pool = self._pools.pop(key)
            if not pool.close():
                self._leaving.setdefault(key, []).append(pool)
        for key in [key for key in self._parts if key[0] == owner and number in (ALL_POOLS, key[1])]:
            self.drop_parts(*key)

    def release(self, owner: PeerId, number: int) -> None:
        """Unmap a pool whose owner waits for that; `take_unmapped` returns it when it is unmapped."""
        self.forget(owner, number)
        self._owed.append((owner, number))

    def take_unmapped(self) -> list[tuple[PeerId, int]]:
        """Return the pools of `release` that are unmapped now. Call it after each job's end."""
        for key, pools in list(self._leaving.items()):
            if all(pool.wait_closed(0) for pool in pools):
                del self._leaving[key]
        done = [key for key in self._owed if key not in self._leaving]
        self._owed = [key for key in self._owed if key in self._leaving]
        return done


def close_parts(parts: list[Part]) -> None:
    """Close the descriptors among the parts."""
    for descriptor in _descriptors(parts):
        os.close(descriptor)


def _descriptors(parts: list[Part]) -> list[int]:
    return [part for part in parts if isinstance(part, int)]
