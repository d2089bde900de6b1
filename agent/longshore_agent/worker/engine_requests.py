"""Handles an engine's requests: maps its pools, checks its page lists, and passes offers and claims to the cores.

Called by the worker's control thread with decoded messages. Each request except Renew is answered with Accepted, or
with Refused and a reason. The answer may come after the call. An accepted request is kept while this worker lives.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from longshore_agent.control.curve import KeyRing
from longshore_agent.errors import MemoryLostError, PoolError
from longshore_agent.memory.cuda import Device
from longshore_agent.memory.host_memory import torn_count
from longshore_agent.memory.pools import KVPool, RegionHandle, close_handles
from longshore_agent.pipeline.slabs import PageTable
from longshore_agent.transports.base import Transport
from longshore_wire.claims import Wanted
from longshore_wire.effects import RoomEnded, RoomOffered, RoomReleased
from longshore_wire.engine_messages import (
    TOKENS_MAX,
    Accepted,
    Ask,
    CachePages,
    Cancel,
    Endpoint,
    Half,
    Offer,
    Receive,
    Refused,
    RegisterPool,
    Renew,
    RoomEvent,
    RoomEventKind,
    ToAgent,
    ToEngine,
    UnregisterPool,
)
from longshore_wire.errors import LongshoreError, Reason, RoomError
from longshore_wire.layout import KVLayout
from longshore_wire.names import room_name
from longshore_wire.peer_messages import TEXT_CHARACTERS_MAX, PoolInfo, RoomKey
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way

# Retry hint of a Busy answer: about the time in which a few rooms end.
BUSY_RETRY_NS = 50_000_000
# Claims that lack the last part of their page list. An engine sends the parts of a claim one after another.
PARTIAL_CLAIMS_MAX = 1024


# By cache, the pages of a half of a room.
PageTables = dict[int, PageTable]


def _nothing(*_: object) -> None:
    """Prepare nothing."""


@dataclass(slots=True)
class RegisteredPool:
    """One registered pool: its mapping, and the registrations that peers need to write to it."""

    kv_pool: KVPool
    tokens: list[int]  # of the transport's registrations
    handles: list[RegionHandle]  # of its regions, for workers of this node that write its pages by way DIRECT
    claimed: npt.NDArray[np.bool_]  # by page: an open room writes it
    shown: bool = False  # was sent to a neighbour, which may have it mapped

    def info(self, cache: int) -> PoolInfo:
        """Return the pool's description for peers."""
        addresses = tuple(address for address, _ in self.kv_pool.regions)
        return PoolInfo(cache, self.kv_pool.geometry, addresses)


@dataclass(slots=True)
class EngineRequests:
    """The pools and rooms that one engine has registered at its worker."""

    caches: tuple[KVLayout, ...]  # of the engine's rank
    transport: Transport
    source: SourceSession | None
    target: TargetSession | None
    pools: dict[int, RegisteredPool] = field(default_factory=dict)  # by cache
    tables: dict[tuple[Half, RoomKey], PageTables] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)  # cache: request that waits until its rooms are released
    pools_changed: bool = False
    unmapped: list[int] = field(default_factory=list)  # caches whose pools neighbours must still be told to unmap, too
    parting: dict[int, int] = field(
        default_factory=dict
    )  # cache: request that waits until no neighbour has its pool mapped
    device: Device | None = None  # the engine's GPU
    prepare_pool: Callable[[KVPool], None] = _nothing  # called before a pool is registered
    # Called after a room's pages are accepted, before a copy of them begins, with the ways that were claimed so far.
    prepare_pages: Callable[[KVPool, PageTable, Half, frozenset[Way]], None] = _nothing
    keys: KeyRing | None = None  # of the deployment; None: endpoints have no seals
    closing: str = ""  # why new rooms are refused; empty: they are accepted
    finishes_claimed: bool = False  # while closing, a room that decode has claimed may still be offered
    _partial_claims: dict[tuple[str, int], dict[int, tuple[CachePages, bytearray]]] = field(default_factory=dict)
    _torn_count: int = 0  # as of the last `fail_torn`
    unprepared: list[tuple[RoomKey, PageTables, Half, frozenset[Way]]] = field(default_factory=list)

    def handle(self, message: ToAgent, descriptors: list[int], now_ns: int) -> ToEngine | None:
        """Handle one request, which also renews the lease; return its answer, or None if that comes later or is not due."""
        self.renew(now_ns)
        request = getattr(message, "request", 0)
        try:
            return self._dispatch(message, descriptors, now_ns)
        except LongshoreError as error:
            retry_ns = BUSY_RETRY_NS if error.reason is Reason.BUSY else 0
            return Refused(request, error.reason, str(error)[:TEXT_CHARACTERS_MAX], retry_ns)
        finally:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def renew(self, now_ns: int) -> None:
        """Renew the leases of all rooms: the engine has sent a message. A client sends Renew only if it has no other."""
        for session in (self.source, self.target):
            if session is not None:
                session.renew(now_ns)

    def _dispatch(self, message: ToAgent, descriptors: list[int], now_ns: int) -> ToEngine | None:
        if isinstance(message, Renew):
            return None
        if isinstance(message, RegisterPool):
            self._register(message, descriptors)
        elif isinstance(message, UnregisterPool):
            return self._unregister(message, now_ns)
        elif isinstance(message, Offer):
            self._offer(message, now_ns)
        elif isinstance(message, Receive):
            return self._receive(message, now_ns)
        elif isinstance(message, Ask):
            self._ask(message, now_ns)
        elif isinstance(message, Cancel):
            self._cancel(message, now_ns)
        else:
            raise RoomError("this connection has said Hello already", reason=Reason.MALFORMED_MESSAGE)
        return Accepted(message.request)

    def prepare_new(self) -> Iterator[RoomKey]:
        """Prepare the pages that the last requests have added, and yield each one's room.

        Neither the engine nor peers wait for this: their messages have left. A slab that starts earlier prepares its pages.
        Rooms that were released since are left out, and so are lists that a later request has made longer.
        """
        unprepared, self.unprepared = self.unprepared, []
        for key, tables, half, ways in unprepared:
            if self.tables.get((half, key)) is not tables or not tables.keys() <= self.pools.keys():
                continue
            for cache, table in tables.items():
                # A copy prepares them again, and fails its room alone.
                with contextlib.suppress(LongshoreError):
                    self.prepare_pages(self.pools[cache].kv_pool, table, half, ways)
            yield key

    # -- pools -----------------------------------------------------------------------------------------------------

    def _register(self, message: RegisterPool, descriptors: list[int]) -> None:
        if message.cache in self.pools or message.cache in self.parting:
            raise RoomError(f"cache {message.cache} has a pool already: unregister it first", reason=Reason.ROOM_REUSED)
        self._check_cache(message.cache)
        kv_pool = self._map(message, descriptors)
        tokens: list[int] = []
        try:
            # Pages on a GPU are not registered: a transport would keep them mapped after their engine's end.
            self.prepare_pool(kv_pool)
            if not kv_pool.on_device:
                tokens.extend(
                    self.transport.register(address, length_bytes) for address, length_bytes in kv_pool.regions
                )
        except LongshoreError:
            self._deregister(tokens)
            kv_pool.close()
            raise
        handles: list[RegionHandle] = [*map(os.dup, descriptors), *message.device_regions]
        self.pools[message.cache] = RegisteredPool(kv_pool, tokens, handles, np.zeros(kv_pool.page_count, np.bool_))
        self.pools_changed = True

    def _map(self, message: RegisterPool, descriptors: list[int]) -> KVPool:
        if self.device is None and not message.device_regions:
            return KVPool(self.caches[message.cache], message.geometry, descriptors)
        if self.device is None or descriptors or len(message.device_regions) != len(message.geometry.region_bytes):
            raise PoolError(
                f"{len(descriptors)} file descriptors and {len(message.device_regions)} CUDA handles for "
                f"{len(message.geometry.region_bytes)} regions: give one descriptor each for an engine whose device is "
                "'cpu', else one handle each"
            )
        return KVPool(self.caches[message.cache], message.geometry, message.device_regions, self.device)

    def _unregister(self, message: UnregisterPool, now_ns: int) -> ToEngine | None:
        self._pool(message.cache)
        self.leaving[message.cache] = message.request
        for session in (self.source, self.target):
            if session is not None:
                session.fail_all(Reason.CANCELLED, f"the pool of cache {message.cache} was unregistered", now_ns)
        return None

    def take_left(self) -> list[ToEngine]:
        """Unmap leaving pools whose rooms are all released; return the pending answers that are now due."""
        answers: list[ToEngine] = []
        if not self.leaving or self.tables:
            return answers
        for cache, request in list(self.leaving.items()):
            shown = self.pools[cache].shown
            self.let_go(cache)
            del self.leaving[cache]
            if shown:
                # The answer lets the engine free the memory, so it waits until no neighbour has the pool mapped.
                self.parting[cache] = request
            else:
                answers.append(Accepted(request))
        return answers

    def free(self, cache: int) -> list[ToEngine]:
        """Return the answer that is pending for a cache's pool, if any, now that no neighbour has it mapped."""
        request = self.parting.pop(cache, None)
        return [] if request is None else [Accepted(request)]

    def let_go(self, cache: int) -> bool:
        """Unmap a cache's pool now, or when the copy or write that uses it ends; return whether it is unmapped now."""
        found = self.pools.pop(cache)
        # Memory that a write of ours still reads must stay registered; then it is released with the process.
        if not found.kv_pool.busy:
            self._deregister(found.tokens)
        close_handles(found.handles)
        self.unmapped.append(cache)
        self.pools_changed = True
        return found.kv_pool.close()

    def fail_torn(self, now_ns: int) -> None:
        """Fail the rooms if memory of their pools was truncated since the last call. New rooms are refused."""
        if torn_count() == self._torn_count:
            return
        self._torn_count = torn_count()
        for cache, pool in self.pools.items():
            try:
                pool.kv_pool.check_whole()
            except MemoryLostError as error:
                for session in (self.source, self.target):
                    if session is not None:
                        session.fail_all(error.reason, f"cache {cache}: {error}", now_ns)

    def explained(self, effect: RoomEnded) -> RoomEnded:
        """Return a room's end with its real reason: MEMORY_LOST if it failed because our engine's memory is gone."""
        if effect.reason is not Reason.TRANSFER_FAILED:
            return effect
        for cache, pool in self.pools.items():
            try:
                pool.kv_pool.check_whole(touch=not pool.kv_pool.sealed)
            except MemoryLostError as error:
                return msgspec.structs.replace(effect, reason=error.reason, text=f"cache {cache}: {error}")
        return effect

    def _deregister(self, tokens: list[int]) -> None:
        for token in tokens:
            self.transport.deregister(token)

    def _check_cache(self, cache: int) -> None:
        if not 0 <= cache < len(self.caches):
            raise RoomError(
                f"cache is {cache}: give the index of a cache in this engine's layout, from 0 to {len(self.caches) - 1}",
                reason=Reason.UNSUPPORTED,
            )

    def _check_named(self, message: Offer | Receive) -> None:
        count = len(message.caches)
        if count != 1 and not 0 < len({each.cache for each in message.caches}) == count <= len(self.caches):
            raise RoomError(
                f"room {room_name(message.room)}: {count} caches are named of {len(self.caches)}: name at least one, and each once",
                reason=Reason.MALFORMED_MESSAGE,
            )

    def _pool(self, cache: int) -> RegisteredPool:
        found = self.pools.get(cache)
        if found is None or cache in self.leaving:
            raise RoomError(f"cache {cache} has no registered pool: register_pool first", reason=Reason.UNKNOWN_POOL)
        return found

    def _whole_pool(self, cache: int) -> RegisteredPool:
        """Return the pool of a cache for a new room. Raises MemoryLostError if its memory was truncated."""
        self._check_cache(cache)
        pool = self._pool(cache)
        pool.kv_pool.check_whole(touch=not pool.kv_pool.sealed)
        return pool

    # -- rooms -----------------------------------------------------------------------------------------------------

    def _offer(self, message: Offer, now_ns: int) -> None:
        if self.source is None:
            raise RoomError("this engine did not register as a source", reason=Reason.UNSUPPORTED)
        self._check_named(message)
        key = RoomKey(self.source.config.instance, message.room)
        old = self.tables.get((Half.SOURCE, key))
        tables: PageTables = {} if old is None else dict(old)
        ranges = []
        if old is None and len(message.caches) < len(self.caches):
            # A room moves every cache, so that it would never end without one's pool.
            for cache in range(len(self.caches)):
                self._pool(cache)
        for each in message.caches:
            pool = self._whole_pool(each.cache)
            pages = _page_ids(each.pages)
            first_page = self._first_page(each, len(pages))
            pool.kv_pool.check_pages(pages)
            tables[each.cache] = self._extended(tables.get(each.cache), message.room, first_page, pages)
            ranges.append((each.cache, each.first_token, each.end_token))
        if old is None and not (self.finishes_claimed and key in self.source.rooms):
            self._check_open()
        # The core may begin to write at once, which needs the pages.
        self.tables[Half.SOURCE, key] = tables
        try:
            self.source.offer(message.room, ranges, last=message.last, now_ns=now_ns, binding=message.binding)
        except LongshoreError:
            if old is None:
                del self.tables[Half.SOURCE, key]
            else:
                self.tables[Half.SOURCE, key] = old
            raise
        self.unprepared.append((key, tables, Half.SOURCE, self._claimed_ways(key)))

    def _claimed_ways(self, key: RoomKey) -> frozenset[Way]:
        room = self.source.rooms.get(key) if self.source is not None else None
        pairs = room.pairs.values() if room is not None else ()
        return frozenset(pair.way for pair in pairs if pair.route is not None)

    def _extended(self, old: PageTable | None, room: int, first_page: int, pages: np.ndarray) -> PageTable:
        if old is None:
            return PageTable(first_page, pages)
        kept = first_page - old.first_page
        if not 0 <= kept <= len(old.pages):
            return old  # The core refuses this offer with the right numbers.
        if kept < len(old.pages) and len(pages) and old.pages[kept] != pages[0]:
            raise RoomError(
                f"room {room_name(room)}: page number {first_page} was {old.pages[kept]} in the last chunk and is "
                f"{pages[0]} now: a sequence keeps its pages",
                reason=Reason.TOKENS_OVERLAP,
            )
        return PageTable(old.first_page, np.concatenate([old.pages[:kept], pages]) if len(pages) else old.pages)

    def _ask(self, message: Ask, now_ns: int) -> None:
        target = self._target()
        for cache in range(len(self.caches)):
            self._pool(cache)
        self._check_endpoint(message.endpoint)
        key = RoomKey(message.endpoint.instance, message.room)
        self._check_new(key)
        # The core has no pages to look up before the engine claims some.
        caches = tuple(CachePages(cache, 0, 1, 0, b"") for cache in range(len(self.caches)))
        target.ask(Wanted(key, message.endpoint, caches, binding=message.binding), now_ns)
        self.tables[Half.TARGET, key] = {}

    def _receive(self, message: Receive, now_ns: int) -> ToEngine | None:
        target = self._target()
        self._check_named(message)
        for each in message.caches:
            self._whole_pool(each.cache)
        caches = self._joined(message)
        if caches is None:
            return None
        self._check_endpoint(message.endpoint)
        tables: PageTables = {}
        mappable = adjacent = True
        for each in caches:
            if each.end_token != caches[0].end_token:
                raise RoomError(
                    f"cache {self.caches[each.cache].name!r} ends at token {each.end_token}, and the first one at "
                    f"{caches[0].end_token}: the end of every cache is the sequence's length",
                    reason=Reason.TOTAL_MISMATCH,
                )
            pool = self._pool(each.cache).kv_pool
            pages = _page_ids(each.pages)
            first_page = self._first_page(each, len(pages))
            pool.check_claimed(pages)
            tables[each.cache] = PageTable(first_page, pages)
            mappable, adjacent = mappable and pool.sealed, adjacent and pool.adjacent
        key = RoomKey(message.endpoint.instance, message.room)
        asked = self.tables.get((Half.TARGET, key))
        if asked is None or not target.is_asked(key):
            self._check_new(key)
        for cache, table in tables.items():
            self._check_unclaimed(cache, table.pages)
        self.tables[Half.TARGET, key] = tables
        wanted = Wanted(
            key,
            message.endpoint,
            caches,
            mappable=mappable,
            adjacent=adjacent,
            digest=message.digest,
            binding=message.binding,
        )
        try:
            target.claim(wanted, now_ns)
        except LongshoreError:
            if asked is None:
                del self.tables[Half.TARGET, key]
            else:
                self.tables[Half.TARGET, key] = asked
            raise
        for cache, table in tables.items():
            self.pools[cache].claimed.put(table.pages, True)
        self.unprepared.append((key, tables, Half.TARGET, frozenset()))
        return Accepted(message.request)

    def _target(self) -> TargetSession:
        if self.target is None:
            raise RoomError("this engine did not register as a target", reason=Reason.UNSUPPORTED)
        return self.target

    def _check_endpoint(self, endpoint: Endpoint) -> None:
        endpoint.check()
        if self.keys is not None:
            self.keys.check_sealed(endpoint)

    def _check_new(self, key: RoomKey) -> None:
        if (Half.TARGET, key) in self.tables:
            raise RoomError(f"room {room_name(key.room)} was claimed before: use a new id", reason=Reason.ROOM_REUSED)
        self._check_open()

    def release(self, half: Half, key: RoomKey) -> bool:
        """Forget the pages of a released room; return whether its engine had opened it."""
        tables = self.tables.pop((half, key), None)
        if tables is not None and half is Half.TARGET:
            for cache, table in tables.items():
                if cache in self.pools:
                    self.pools[cache].claimed.put(table.pages, False)
        return tables is not None

    def _check_unclaimed(self, cache: int, pages: npt.NDArray[np.int32]) -> None:
        """Raise RoomError for a page that another open room writes: both would be DONE, one with wrong bytes."""
        index = self.pools[cache].claimed.take(pages).tobytes().find(1)
        if index < 0:
            return
        page = int(pages[index])
        owner = next(
            key
            for (half, key), tables in self.tables.items()
            if half is Half.TARGET and cache in tables and page in tables[cache].pages
        )
        raise RoomError(
            f"pages[{index}] is {page}, which room {room_name(owner.room)} of {owner.instance} writes: give other pages, or wait until that "
            "room is RELEASED",
            reason=Reason.TOKENS_OVERLAP,
        )

    def _joined(self, message: Receive) -> tuple[CachePages, ...] | None:
        """Return the pages of every cache, in order, or None until their last part has arrived."""
        is_whole = len(message.caches) == len(self.caches) and all(map(_is_whole, message.caches))
        found = message.caches if is_whole else self._join(message)
        return found if found is None else tuple(sorted(found, key=lambda each: each.cache))

    def _join(self, message: Receive) -> list[CachePages] | None:
        """Add parts of page lists to those that came before; return the whole lists once all are there."""
        name = (message.endpoint.instance, message.room)
        if name not in self._partial_claims and len(self._partial_claims) >= PARTIAL_CLAIMS_MAX:
            raise RoomError("too many claims with missing parts: send a claim's parts together", reason=Reason.BUSY)
        # The link keeps the order, and no list is longer than its pool.
        is_first = message.caches[0].cache == message.caches[0].page_offset == 0
        if not is_first and name not in self._partial_claims:
            raise RoomError(
                f"room {room_name(message.room)}: a part of a claim without the parts before: send the parts in order",
                reason=Reason.MALFORMED_MESSAGE,
            )
        lists = self._partial_claims.setdefault(name, {})
        if is_first:
            lists.clear()
        for part in message.caches:
            _page_ids(part.pages)
            first, pages = lists.setdefault(part.cache, (part, bytearray()))
            pool_count = self.pools[part.cache].kv_pool.page_count
            free_bytes = 4 * min(first.page_count, pool_count) - len(pages)
            is_next = 4 * part.page_offset == len(pages) and (part.pages or not first.page_count)
            if not is_next or len(part.pages) > free_bytes:
                del self._partial_claims[name]
                raise RoomError(
                    f"room {room_name(message.room)}: {len(part.pages) // 4} pages at {part.page_offset}, after {len(pages) // 4} of "
                    f"{first.page_count} pages (the pool has {pool_count}): send the parts in order",
                    reason=Reason.MALFORMED_MESSAGE,
                )
            pages += part.pages
        if len(lists) < len(self.caches) or any(len(pages) < 4 * first.page_count for first, pages in lists.values()):
            return None
        del self._partial_claims[name]
        return [msgspec.structs.replace(first, pages=bytes(pages)) for first, pages in lists.values()]

    def _cancel(self, message: Cancel, now_ns: int) -> None:
        key = RoomKey(message.instance, message.room)
        if message.half is Half.TARGET:
            self._partial_claims.pop((message.instance, message.room), None)
        session = self.source if message.half is Half.SOURCE else self.target
        if session is not None:
            session.cancel(key, Reason.CANCELLED, "cancelled by its engine", now_ns)

    def _check_open(self) -> None:
        if self.closing:
            raise RoomError(
                f"this worker is being replaced, as {self.closing}: try again, the next one takes it",
                reason=Reason.BUSY,
            )

    def _first_page(self, each: CachePages, count: int) -> int:
        """Return the number of the first page of a list. Raises RoomError unless it has the pages of its tokens."""
        first_token, end_token = each.first_token, each.end_token
        if not 0 <= first_token <= end_token <= TOKENS_MAX:
            raise RoomError(
                f"tokens [{first_token}, {end_token}) are not a range: give 0 <= first <= end <= {TOKENS_MAX}",
                reason=Reason.TOKENS_MISSING,
            )
        layout = self.caches[each.cache]
        first_page, needed = layout.pages_of(first_token, end_token)
        if count != needed:
            raise RoomError(
                f"tokens [{first_token}, {end_token}) lie in {needed} {layout.pages_text}, and {count} were given",
                reason=Reason.PAGE_OUT_OF_RANGE,
            )
        return first_page


def _is_whole(part: CachePages) -> bool:
    return part.page_offset == 0 and len(part.pages) == 4 * part.page_count


def _page_ids(data: bytes) -> npt.NDArray[np.int32]:
    """Return packed page ids as [n] int32. Raises RoomError if the bytes are no such list."""
    if len(data) % 4:
        raise RoomError(f"{len(data)} bytes of pages: give int32 ids of 4 bytes each", reason=Reason.MALFORMED_MESSAGE)
    return np.frombuffer(data, dtype="<i4")


def ended_event(effect: RoomEnded) -> RoomEvent:
    """Return the engine's event for a room that is done or has failed."""
    kind = RoomEventKind.DONE if effect.reason is Reason.NONE else RoomEventKind.FAILED
    key = effect.key
    return RoomEvent(effect.half, key.instance, key.room, kind, effect.reason, effect.text, effect.bytes_moved)


def offered_event(effect: RoomOffered) -> RoomEvent:
    """Return the engine's event for a room for which it has asked and that prefill has offered."""
    key = effect.key
    return RoomEvent(Half.TARGET, key.instance, key.room, RoomEventKind.OFFERED)


def released_event(effect: RoomReleased) -> RoomEvent:
    """Return the engine's event for a room whose pages are no longer used."""
    key = effect.key
    return RoomEvent(effect.half, key.instance, key.room, RoomEventKind.RELEASED)
