"""Maps the pools of neighbours (other ranks of this node) for way DIRECT, and holds the slabs that wait for one.

Called by `moving` and by `loop`, in the control thread. Copies nothing itself. Each slab's `neighbour` is set here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from longshore_agent.control.node_link import PoolPart, PoolWanted
from longshore_agent.errors import PoolError
from longshore_agent.kernels.copier import Copier, IdentityCache
from longshore_agent.memory.cuda import Device
from longshore_agent.memory.neighbours import ALL_POOLS, Neighbours, Part, close_parts
from longshore_agent.memory.pools import KVPool
from longshore_agent.pipeline.slabs import Ends, OutboundEnd, OutboundSlab, PageTable, page_ids, still_wanted
from longshore_agent.worker.engine_requests import Pool
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.errors import LongshoreError
from longshore_wire.peer_messages import Attach

# Claims whose pages are kept until their pool is mapped. The pages of further claims are prepared with their first
# slab.
_EXPECTED_MAX = 64
# Claims whose page tables are kept from slab to slab.
_TABLES_MAX = 2048


def shown_parts(pool: Pool | None, wanted: PoolWanted) -> Iterator[tuple[PoolPart, int | None]]:
    """Yield the regions of a pool, each with its file descriptor if any, for a worker that will write its pages."""
    if pool is None or not pool.pages.sealed:
        # If the engine could truncate the memory, that would end the asking worker, too.
        yield PoolPart(wanted.owner, wanted.asker, wanted.pool, 0), None
        return
    pool.shown = True
    for index, part in enumerate(pool.parts):
        region, descriptor = (None, part) if isinstance(part, int) else (part, None)
        yield PoolPart(wanted.owner, wanted.asker, wanted.pool, len(pool.parts), index, region), descriptor


class NeighbourPools:
    """See the module."""

    def __init__(
        self,
        device: Device | None,
        attached: Mapping[tuple[Half, PeerId], Attach],
        ends: Ends,
        ask_pool: Callable[[PeerId, int], None],
        send: Callable[[OutboundSlab], None],
        copier: Copier,
    ) -> None:
        """Map nothing yet.

        Args:
            attached: the peers' Attach messages, kept up to date by the caller.
            ask_pool: requests a pool from its owner.
            send: begins the life of a slab whose target's pages are mapped.
            copier: prepares pages before their slabs come.
        """
        self._neighbours = Neighbours(device)
        self._attached = attached
        self._ends = ends
        self._ask_pool = ask_pool
        self._send = send
        self._copier = copier
        # All slabs of a claim carry its page ids as the same object.
        self._tables: IdentityCache[PageTable] = IdentityCache(_TABLES_MAX)
        self._waiting: dict[tuple[PeerId, int], list[OutboundSlab]] = {}
        # Packed page ids and their first token, of claims on pools that are not mapped yet.
        self._expected: dict[tuple[PeerId, int], list[tuple[bytes, int]]] = {}

    def put(self, slab: OutboundSlab) -> None:
        """Begin the life of a slab once the target's pages are mapped here."""
        owner, number = slab.effect.peer, slab.effect.pair.key.pool
        mapped = self._neighbours.pool(owner, number)
        if mapped is not None:
            self._begin(slab, mapped)
            return
        self._sought(owner, number).append(slab)

    def expect(self, owner: PeerId, number: int, pages: bytes, first_token: int) -> None:
        """Map the pool and prepare the pages of a claim, before its slabs need them.

        Args:
            pages, first_token: of the claim; its slabs carry the same `pages` object.
        """
        mapped = self._neighbours.pool(owner, number)
        if mapped is None:
            self._sought(owner, number)
            expected = self._expected.setdefault((owner, number), [])
            if len(expected) < _EXPECTED_MAX:
                expected.append((pages, first_token))
            return
        self._admit_pages(mapped, pages, first_token)

    def pool_given(self, owner: PeerId, number: int, index: int, count: int, part: Part | None) -> None:
        """Take region `index` of a neighbour's pool (`count` 0: it has none). Map the pool when all have arrived."""
        if count == 0 or part is None:
            self._refuse(owner, number, f"no worker of this node has pool {number} of {owner.instance} now")
            return
        if (owner, number) not in self._waiting:
            # The owner was lost after the request. Its late part must not be taken for one of the next answer.
            close_parts([part])
            return
        parts = self._neighbours.take(owner, number, index, count, part)
        if parts is None:
            return
        attach = self._attached.get((Half.SOURCE, owner))
        info = next((pool for pool in attach.pools if pool.pool == number), None) if attach is not None else None
        if attach is None or info is None:
            close_parts(parts)
            self._refuse(owner, number, f"rank {owner.rank} of {owner.instance} has left")
            return
        try:
            mapped = self._neighbours.map(owner, number, attach.layout, info.geometry, parts)
        except PoolError as error:
            self._refuse(owner, number, f"pool {number} of {owner.instance} cannot be mapped: {error}")
            return
        for pages, first_token in self._expected.pop((owner, number), []):
            self._admit_pages(mapped, pages, first_token)
        for slab in self._waiting.pop((owner, number), []):
            self._begin(slab, mapped)

    def pool_gone(self, owner: PeerId, number: int = ALL_POOLS) -> None:
        """Unmap a neighbour's pool, which is not registered any more."""
        if number == ALL_POOLS:
            self._neighbours.forget(owner)
        else:
            self._neighbours.release(owner, number)
        for waited, pool in list(self._waiting):
            if waited == owner and number in (ALL_POOLS, pool):
                why = "was unregistered" if number == pool else f"is gone: rank {owner.rank} has left"
                self._refuse(owner, pool, f"pool {pool} of {owner.instance} {why}")

    def drop_cancelled(self) -> None:
        """Drop cancelled slabs that wait for a pool. The pool is still expected."""
        for sought, waiting in self._waiting.items():
            self._waiting[sought] = still_wanted(waiting, self._ends.put)

    def take_unmapped(self) -> list[tuple[PeerId, int]]:
        """Return the gone pools that were unmapped here since the last call."""
        return self._neighbours.take_unmapped()

    def _sought(self, owner: PeerId, number: int) -> list[OutboundSlab]:
        """Request a pool once; return the list of slabs that wait for it."""
        if (owner, number) not in self._waiting:
            self._waiting[owner, number] = []
            self._ask_pool(owner, number)
        return self._waiting[owner, number]

    def _table(self, mapped: KVPool, pages: bytes, first_token: int) -> PageTable:
        """Return the page table of a claim; the same `pages` object gives the same table."""
        first_page = first_token // mapped.layout.page_size
        return self._tables.get(lambda: PageTable(first_page, page_ids(pages)), pages)

    def _admit_pages(self, mapped: KVPool, pages: bytes, first_token: int) -> None:
        table = self._table(mapped, pages, first_token)
        # The claim's slabs will fail with the same error, if any come.
        with contextlib.suppress(LongshoreError):
            if len(table.pages):
                self._copier.admit(mapped, table.pages, table.first_page, to_write=True, direct=True)

    def _begin(self, slab: OutboundSlab, mapped: KVPool) -> None:
        effect = slab.effect
        slab.neighbour = mapped
        slab.neighbour_pages = self._table(mapped, effect.target_pages, effect.first_claimed_token)
        self._send(slab)

    def _refuse(self, owner: PeerId, number: int, text: str) -> None:
        self._neighbours.drop_parts(owner, number)
        self._expected.pop((owner, number), None)
        for slab in self._waiting.pop((owner, number), []):
            self._ends.put(OutboundEnd(slab, text))
