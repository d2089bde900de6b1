"""Carries pools between the workers of a node, for way DIRECT: from their owners to the workers that write their pages.

Called by the supervisor. Tracks which workers map another worker's pool, and which owners wait until it is unmapped.
Maps nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from longshore_agent.control.node_link import (
    ALL_POOLS,
    PoolGone,
    PoolMessage,
    PoolRegion,
    PoolUnmapped,
    PoolWanted,
)
from longshore_agent.supervisor.slots import Slot
from longshore_spec.status import WorkerState
from longshore_wire.effects import PeerId

_Pool = tuple[PeerId, int]


class PoolBroker:
    """See the module."""

    def __init__(self, slots: Mapping[PeerId, Slot]) -> None:
        """`slots` are the node's workers, kept up to date by the caller."""
        self._slots = slots
        self._holders = PoolHolders()

    def forward(self, sender: Slot, message: PoolMessage, descriptor: int | None) -> None:
        """Send a worker's message on to the workers that it is for."""
        if isinstance(message, PoolWanted):
            owner = self._slots.get(message.owner)
            if owner is not None and owner.state is WorkerState.READY:
                owner.link.send(message)
            else:
                sender.link.send(PoolRegion(message.owner, message.asker, message.cache, 0))
        elif isinstance(message, PoolRegion):
            if asker := self._slots.get(message.asker):
                if message.count:
                    self._holders.give(message.owner, message.cache, message.asker)
                asker.link.send(message, descriptor)
        elif isinstance(message, PoolGone):
            self._tell_gone(message)
            if self._holders.take(message.owner, message.cache):
                self._tell_unmapped(message.owner, message.cache)
        elif self._holders.unmapped(message.owner, message.cache, sender.key):
            self._tell_unmapped(message.owner, message.cache)

    def writers(self, owner: PeerId) -> list[PeerId]:
        """Return the workers that may still write pages which an ended worker of `owner` had."""
        return self._holders.holders(owner)

    def ended(self, worker: PeerId) -> None:
        """Tell the other workers that one has ended, with all of its mappings and pools."""
        for owner, pool in self._holders.left(worker):
            self._tell_unmapped(owner, pool)
        for pool in (ALL_POOLS, *self._holders.take_all(worker)):
            self._tell_gone(PoolGone(worker, pool))

    def _tell_gone(self, gone: PoolGone) -> None:
        for slot in self._slots.values():
            if slot.key != gone.owner and slot.state is not WorkerState.STARTING:
                slot.link.send(gone)

    def _tell_unmapped(self, owner: PeerId, pool: int) -> None:
        if slot := self._slots.get(owner):
            slot.link.send(PoolUnmapped(owner, pool))


@dataclass(slots=True)
class PoolHolders:
    """Who maps which pool. Bounded by the pools of the node's workers, times those workers."""

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
