"""Maps pools of neighbours, the other ranks of this node, so that slabs are copied into their pages by way DIRECT.

Called by `moving` and by `loop`, in the control thread. Host memory is mapped and unmapped for a GPU in a thread of its own,
since the driver takes seconds to register many GiB. Copies nothing itself. Holds the slabs that wait for a pool, and sets each slab's
`neighbour`. Owners send file descriptors, or handles of GPU memory, through the supervisor, and
announce when a pool is unregistered. The worker confirms when it is unmapped here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from longshore_agent.control.node_link import (
    ALL_POOLS,
    PoolGone,
    PoolMessage,
    PoolRegion,
    PoolUnmapped,
    PoolWanted,
)
from longshore_agent.errors import PoolError
from longshore_agent.kernels.copier import Copier, IdentityCache
from longshore_agent.memory.cuda import Device
from longshore_agent.memory.pools import KVPool, RegionHandle, close_handles
from longshore_agent.pipeline.slabs import Ends, OutboundEnd, OutboundSlab, PageTable, page_ids, still_wanted
from longshore_agent.worker.engine_requests import EngineRequests, RegisteredPool
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import DeviceRegion, Half, ToEngine
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import KVLayout, PoolGeometry
from longshore_wire.peer_messages import Attach

# Claims whose pages are kept until their pool is mapped. The pages of further claims are prepared with their first
# slab.
_EXPECTED_MAX = 64
# Claims whose page tables are kept from slab to slab.
_TABLES_MAX = 2048

_Key = tuple[PeerId, int]  # owner and number of a pool


@dataclass(slots=True)
class _Registering:
    """A pool in host memory that the thread maps or has mapped. `stop` ends that early."""

    pool: Future[KVPool]
    stop: threading.Event


@dataclass(slots=True)
class _Wanted:
    """A pool that its owner was asked for, until it is mapped or refused.

    Attributes:
        slabs: wait for it.
        expected: packed page ids and their first token, of claims on it.
        regions: handles of those that have arrived, by index.
    """

    slabs: list[OutboundSlab] = field(default_factory=list)
    expected: list[tuple[bytes, int]] = field(default_factory=list)
    regions: dict[int, RegionHandle] = field(default_factory=dict)


class NeighbourPools:
    """See the module."""

    def __init__(
        self,
        own: PeerId,
        device: Device | None,
        attached: Mapping[tuple[Half, PeerId], Attach],
        ends: Ends,
        tell: Callable[[PoolMessage, int | None], None],
        begin: Callable[[OutboundSlab], None],
        copier: Copier,
    ) -> None:
        """Map nothing yet.

        Args:
            own: this worker.
            device: our engine's GPU, which must reach the neighbours' pages.
            attached: the peers' Attach messages, kept up to date by the caller.
            tell: sends a message, with a descriptor if any, to other workers of this node.
            begin: begins the life of a slab whose target's pages are mapped.
            copier: prepares pages before their slabs come.
        """
        self._own = own
        self._device = device
        self._attached = attached
        self._ends = ends
        self._tell = tell
        self._begin_life = begin
        self._copier = copier
        # All slabs of a claim carry its page ids as the same object.
        self._tables: IdentityCache[PageTable] = IdentityCache(_TABLES_MAX)
        self._wanted: dict[_Key, _Wanted] = {}
        # Pools that the thread maps or has mapped, until `take_registered`, and those of them that are gone since.
        self._registering: dict[_Key, _Registering] = {}
        self._abandoned: dict[_Key, list[Future[KVPool]]] = {}
        self._registrar = ThreadPoolExecutor(1, "register")
        self._unmappings: list[Future[None]] = []
        self._mapped: dict[_Key, KVPool] = {}
        # Pools that are gone, until their last copy ends, and those of them whose owners wait for that.
        self._leaving: dict[_Key, list[KVPool]] = {}
        self._owed: list[_Key] = []

    def put(self, slab: OutboundSlab) -> None:
        """Begin the life of a slab once the target's pages are mapped here."""
        key = (slab.effect.peer, slab.effect.pair.cache)
        mapped = self._mapped.get(key)
        if mapped is not None:
            self._begin(slab, mapped)
        else:
            self._ask(key).slabs.append(slab)

    def expect(self, owner: PeerId, number: int, pages: bytes, first_token: int) -> None:
        """Map the pool and prepare the pages of a claim, before its slabs need them.

        Args:
            pages, first_token: of the claim; its slabs carry the same `pages` object.
        """
        mapped = self._mapped.get((owner, number))
        if mapped is not None:
            self._prepare_pages(mapped, pages, first_token)
            return
        expected = self._ask((owner, number)).expected
        if len(expected) < _EXPECTED_MAX:
            expected.append((pages, first_token))

    def drop_cancelled(self) -> None:
        """Drop cancelled slabs that wait for a pool. The pool is still expected."""
        for wanted in self._wanted.values():
            wanted.slabs = still_wanted(wanted.slabs, self._ends.put)

    # -- messages --------------------------------------------------------------------------------------------------

    def obey(self, message: PoolMessage, descriptor: int | None, requests: EngineRequests) -> list[ToEngine]:
        """Handle a message of another worker of this node; return the answers to our engine that are due now."""
        if isinstance(message, PoolWanted):
            pool = None if message.cache in requests.leaving else requests.pools.get(message.cache)
            for shown in _shown(pool, message):
                self._tell(*shown)
        elif isinstance(message, PoolRegion):
            handle = message.region if descriptor is None else descriptor
            self.pool_given(message.owner, message.cache, message.index, message.count, handle)
        elif isinstance(message, PoolGone):
            self.pool_gone(message.owner, message.cache)
        else:
            return requests.free(message.cache)
        return []

    def report(self, requests: EngineRequests) -> None:
        """Tell other workers which pools our engine has unregistered, and the owners which of theirs are unmapped."""
        for pool in requests.unmapped:
            self._tell(PoolGone(self._own, pool), None)
        requests.unmapped.clear()
        for owner, pool in self.take_unmapped():
            self._tell(PoolUnmapped(owner, pool), None)

    def pool_given(self, owner: PeerId, number: int, index: int, count: int, handle: RegionHandle | None) -> None:
        """Take region `index` of a neighbour's pool (`count` 0: it has none). Map the pool when all have arrived."""
        wanted = self._wanted.get((owner, number))
        if wanted is None or (owner, number) in self._registering:
            # The owner was lost after a request, whose late answer must not be taken for that of the next one.
            close_handles([] if handle is None else [handle])
            return
        if count == 0 or handle is None:
            self._refuse(owner, number, f"no worker of this node has pool {number} of {owner.instance} now")
            return
        if index in wanted.regions:
            close_handles([wanted.regions[index]])
        wanted.regions[index] = handle
        if set(wanted.regions) != set(range(count)):
            return
        attach = self._attached.get((Half.SOURCE, owner))
        info = attach.pool(number) if attach is not None else None
        if attach is None or info is None:
            self._refuse(owner, number, f"rank {owner.rank} of {owner.instance} has left")
            return
        handles = [wanted.regions[each] for each in range(count)]
        wanted.regions.clear()
        if self._device is None or all(isinstance(handle, DeviceRegion) for handle in handles):
            found: Future[KVPool] = Future()
            try:
                found.set_result(self._map(attach.layout.caches[number], info.geometry, handles))
            except PoolError as error:
                found.set_exception(error)
            self._take(owner, number, found)
            return
        stop = threading.Event()
        started = self._registrar.submit(self._map, attach.layout.caches[number], info.geometry, handles, stop)
        self._registering[owner, number] = _Registering(started, stop)
        started.add_done_callback(self._wake)

    def take_registered(self) -> None:
        """Take the pools that the thread has mapped since the last call, and begin the slabs that wait for them.

        Raises:
            DeviceError: the driver has refused what it must not: the memory may stay in its reach.
        """
        for key, made in [(key, made) for key, made in self._registering.items() if made.pool.done()]:
            del self._registering[key]
            self._take(*key, made.pool)
        for key, abandoned in list(self._abandoned.items()):
            for found in [found for found in abandoned if found.done()]:
                abandoned.remove(found)
                with contextlib.suppress(PoolError):
                    self._close(key, found.result())
            if not abandoned:
                del self._abandoned[key]
        for unmapping in [each for each in self._unmappings if each.done()]:
            self._unmappings.remove(unmapping)
            unmapping.result()

    def _wake(self, _: object) -> None:
        os.eventfd_write(self._ends.wake, 1)

    def _unmap_later(self, unmap: Callable[[], None]) -> None:
        unmapping = self._registrar.submit(unmap)
        self._unmappings.append(unmapping)
        unmapping.add_done_callback(self._wake)

    def _close(self, key: _Key, pool: KVPool) -> None:
        if not pool.close():
            self._leaving.setdefault(key, []).append(pool)

    def _take(self, owner: PeerId, number: int, found: Future[KVPool]) -> None:
        """Take a pool that was mapped, or could not be."""
        try:
            mapped = found.result()
        except PoolError as error:
            self._refuse(owner, number, f"pool {number} of {owner.instance} cannot be mapped: {error}")
            return
        wanted = self._wanted.pop((owner, number))
        self._mapped[owner, number] = mapped
        for pages, first_token in wanted.expected:
            self._prepare_pages(mapped, pages, first_token)
        for slab in wanted.slabs:
            self._begin(slab, mapped)

    def pool_gone(self, owner: PeerId, number: int = ALL_POOLS) -> None:
        """Unmap a neighbour's pool, which is not registered any more, at once or when the last copy into it ends."""
        for key in [key for key in self._mapped if _matches(key, owner, number)]:
            self._close(key, self._mapped.pop(key))
        if number != ALL_POOLS:
            self._owed.append((owner, number))
        for key in [key for key in self._registering if _matches(key, owner, number)]:
            made = self._registering.pop(key)
            made.stop.set()
            self._abandoned.setdefault(key, []).append(made.pool)
        for _, pool_number in [key for key in self._wanted if _matches(key, owner, number)]:
            why = "was unregistered" if number == pool_number else f"is gone: rank {owner.rank} has left"
            self._refuse(owner, pool_number, f"pool {pool_number} of {owner.instance} {why}")

    def take_unmapped(self) -> list[tuple[PeerId, int]]:
        """Return the unregistered pools that were unmapped here since the last call. Call it after each copy's end."""
        if not self._leaving and not self._owed:
            return []
        for key, pools in list(self._leaving.items()):
            if all(pool.wait_closed(0) for pool in pools):
                del self._leaving[key]
        used = self._leaving.keys() | self._abandoned.keys()
        done = [key for key in self._owed if key not in used]
        self._owed = [key for key in self._owed if key in used]
        return done

    # -- one pool --------------------------------------------------------------------------------------------------

    def _ask(self, key: _Key) -> _Wanted:
        """Ask the owner for a pool, once."""
        found = self._wanted.get(key)
        if found is None:
            found = self._wanted[key] = _Wanted()
            self._tell(PoolWanted(key[0], self._own, key[1]), None)
        return found

    def _map(
        self,
        layout: KVLayout,
        geometry: PoolGeometry,
        handles: list[RegionHandle],
        stop: threading.Event | None = None,
    ) -> KVPool:
        """Map a pool, and close its handles. Raises PoolError: it does not match its owner's declaration, or is out of reach."""
        try:
            on_gpu = {isinstance(handle, DeviceRegion) for handle in handles}
            if (
                len(handles) != len(geometry.region_bytes)
                or len(on_gpu) != 1
                or (self._device is None and True in on_gpu)
            ):
                raise PoolError(
                    "its pages are on a GPU, and a worker on a CPU cannot write them: they cannot be neighbours"
                )
            later = None if stop is None else self._unmap_later
            return KVPool(layout, geometry, handles, self._device, stop=stop, unmap_later=later)
        finally:
            close_handles(handles)

    def _refuse(self, owner: PeerId, number: int, text: str) -> None:
        """End the slabs that wait for a pool, and close its regions: they are no regions of the next answer."""
        wanted = self._wanted.pop((owner, number), None)
        if wanted is None:
            return
        close_handles(wanted.regions.values())
        for slab in wanted.slabs:
            self._ends.put(OutboundEnd(slab, text))

    def _table(self, mapped: KVPool, pages: bytes, first_token: int) -> PageTable:
        """Return the page table of a claim; the same `pages` object gives the same table."""
        first_page, _ = mapped.layout.pages_of(first_token, first_token + 1)
        return self._tables.get(lambda: PageTable(first_page, page_ids(pages)), pages)

    def _prepare_pages(self, mapped: KVPool, pages: bytes, first_token: int) -> None:
        table = self._table(mapped, pages, first_token)
        # The claim's slabs will fail with the same error, if any come.
        with contextlib.suppress(LongshoreError):
            if len(table.pages):
                self._copier.prepare_pages(mapped, table.pages, to_write=True, direct=True)

    def _begin(self, slab: OutboundSlab, mapped: KVPool) -> None:
        effect = slab.effect
        slab.neighbour = mapped
        slab.neighbour_table = self._table(mapped, effect.target_pages, effect.first_claimed_token)
        self._begin_life(slab)


def _matches(key: _Key, owner: PeerId, number: int) -> bool:
    return key[0] == owner and number in (ALL_POOLS, key[1])


def _shown(pool: RegisteredPool | None, wanted: PoolWanted) -> Iterator[tuple[PoolRegion, int | None]]:
    """Yield the regions of a pool, each with its file descriptor if any, for a worker that will write its pages."""
    if pool is None or not pool.kv_pool.sealed:
        # If the engine could truncate the memory, that would end the asking worker, too.
        yield PoolRegion(wanted.owner, wanted.asker, wanted.cache, 0), None
        return
    pool.shown = True
    for index, handle in enumerate(pool.handles):
        region, descriptor = (None, handle) if isinstance(handle, int) else (handle, None)
        yield PoolRegion(wanted.owner, wanted.asker, wanted.cache, len(pool.handles), index, region), descriptor
