"""Where an engine's requests enter the data path: pools are mapped, page lists checked, offers and claims handed to the cores.

Called by the worker's control thread with decoded messages. Every request is answered: Accepted, or Refused with
a reason; nothing accepted is lost while this worker lives.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import PoolError
from longshore_agent.memory.cuda import Device
from longshore_agent.memory.device_memory import DeviceMapping
from longshore_agent.memory.neighbours import Part, close_parts
from longshore_agent.memory.pools import KVPool
from longshore_agent.path.jobs import PageTable
from longshore_agent.transports.base import Transport
from longshore_wire.claims import Wanted
from longshore_wire.engine_messages import (
    Accepted,
    Cancel,
    Half,
    Offer,
    Receive,
    Refused,
    RegisterPool,
    Renew,
    ToAgent,
    ToEngine,
    UnregisterPool,
)
from longshore_wire.errors import LongshoreError, Reason, RoomError
from longshore_wire.layout import KVLayout
from longshore_wire.peer_messages import PoolInfo, RoomKey, TargetMemory
from longshore_wire.plan import Way
from longshore_wire.source_session import SourceSession
from longshore_wire.target_session import TargetSession

# A hint for an engine that was told Busy: about the time in which a few rooms end.
BUSY_RETRY_NS = 50_000_000
# Claims whose pages come in parts and whose last part has not come; an engine sends them one after another.
PARTIAL_CLAIMS_MAX = 1024


def _nothing(*_: object) -> None:
    """What a worker does that has nothing to prepare."""


@dataclass(slots=True)
class Pool:
    """One registered pool: the mapping, and what peers need to write to it."""

    pages: KVPool
    memory: TargetMemory
    tokens: list[int]  # of the transport's registrations
    parts: list[Part]  # its regions, for workers of this node that write its pages themselves
    shown: bool = False  # to such a worker

    def info(self, pool: int) -> PoolInfo:
        """Return what peers are told."""
        addresses = tuple(address for address, _ in self.pages.regions)
        return PoolInfo(pool, self.pages.geometry, addresses, self.memory)


@dataclass(slots=True)
class Desk:
    """One engine's registrations at its worker."""

    layout: KVLayout
    transport: Transport
    source: SourceSession | None
    target: TargetSession | None
    pools: dict[int, Pool] = field(default_factory=dict)
    tables: dict[tuple[Half, RoomKey], PageTable] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)  # pool: request that waits for its rooms to be released
    pools_changed: bool = False
    taken: list[int] = field(default_factory=list)  # pools that were let go and of which others must hear
    parting: dict[int, int] = field(default_factory=dict)  # pool: request that waits until no neighbour has it mapped
    device: Device | None = None  # the engine's GPU
    prepare: Callable[[KVPool], None] = _nothing  # before a pool is registered
    # Before a core hears of a room's pages, with the ways that were claimed so far.
    admit: Callable[[KVPool, PageTable, Half, frozenset[Way]], None] = _nothing
    closing: str = ""  # why no new room is taken; empty: they are
    finishes_claimed: bool = False  # while closing, a room that decode has claimed may still be offered
    _parts: dict[tuple[str, int, int], dict[int, bytes]] = field(default_factory=dict)

    def handle(self, message: ToAgent, descriptors: list[int], now_ns: int) -> ToEngine | None:
        """Obey one request; return its answer, or None where none is due yet."""
        request = getattr(message, "request", 0)
        try:
            return self._dispatch(message, descriptors, now_ns)
        except LongshoreError as error:
            retry_ns = BUSY_RETRY_NS if error.reason is Reason.BUSY else 0
            return Refused(request, error.reason, str(error), retry_ns)
        finally:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _dispatch(self, message: ToAgent, descriptors: list[int], now_ns: int) -> ToEngine | None:
        if isinstance(message, Renew):
            for session in (self.source, self.target):
                if session is not None:
                    session.renew(now_ns)
            return None
        if isinstance(message, RegisterPool):
            self._register(message, descriptors)
        elif isinstance(message, UnregisterPool):
            return self._unregister(message, now_ns)
        elif isinstance(message, Offer):
            self._offer(message, now_ns)
        elif isinstance(message, Receive):
            return self._receive(message, now_ns)
        elif isinstance(message, Cancel):
            self._cancel(message, now_ns)
        else:
            raise RoomError("this connection has said Hello already", reason=Reason.MALFORMED_MESSAGE)
        return Accepted(message.request)

    # -- pools -----------------------------------------------------------------------------------------------------

    def _register(self, message: RegisterPool, descriptors: list[int]) -> None:
        if message.pool in self.pools or message.pool in self.parting:
            raise RoomError(f"pool {message.pool} is registered already", reason=Reason.ROOM_REUSED)
        pages = self._map(message, descriptors)
        tokens: list[int] = []
        try:
            # Pages on a GPU are ours alone to read and write: a transport would keep them mapped after their engine's end.
            self.prepare(pages)
            if not pages.on_device:
                tokens.extend(self.transport.register(address, length_bytes) for address, length_bytes in pages.regions)
        except LongshoreError:
            self._deregister(tokens)
            pages.close()
            raise
        parts: list[Part] = [*map(os.dup, descriptors), *message.device_regions]
        self.pools[message.pool] = Pool(pages, message.memory, tokens, parts)
        self.pools_changed = True

    def _map(self, message: RegisterPool, descriptors: list[int]) -> KVPool:
        if self.device is None and not message.device_regions:
            return KVPool(self.layout, message.geometry, descriptors)
        if self.device is None or descriptors or len(message.device_regions) != len(message.geometry.region_bytes):
            raise PoolError(
                f"{len(descriptors)} file descriptors and {len(message.device_regions)} CUDA handles for "
                f"{len(message.geometry.region_bytes)} regions: give one descriptor each for an engine whose device is "
                "'cpu', else one handle each"
            )
        mappings: list[DeviceMapping] = []
        try:
            for region, length_bytes in zip(message.device_regions, message.geometry.region_bytes, strict=True):
                mappings.append(DeviceMapping(self.device, region, length_bytes))
            return KVPool(self.layout, message.geometry, (), mappings)
        except LongshoreError:
            for mapping in mappings:
                mapping.unmap()
            raise

    def _unregister(self, message: UnregisterPool, now_ns: int) -> ToEngine | None:
        self._pool(message.pool)
        self.leaving[message.pool] = message.request
        for session in (self.source, self.target):
            if session is not None:
                session.fail_pool(message.pool, Reason.CANCELLED, f"pool {message.pool} was unregistered", now_ns)
        return None

    def take_left(self) -> list[ToEngine]:
        """Unmap pools whose rooms are all released; return the answers that were owed."""
        answers: list[ToEngine] = []
        for pool, request in list(self.leaving.items()):
            if any(key.pool == pool for _, key in self.tables):
                continue
            shown = self.pools[pool].shown
            self.let_go(pool)
            del self.leaving[pool]
            if shown:
                # The engine may free its memory once it is answered, and must not while a neighbour has it mapped.
                self.parting[pool] = request
            else:
                answers.append(Accepted(request))
        return answers

    def free(self, pool: int) -> list[ToEngine]:
        """No neighbour has a pool mapped any more: return the answer that was owed for it, if any."""
        request = self.parting.pop(pool, None)
        return [] if request is None else [Accepted(request)]

    def let_go(self, pool: int) -> bool:
        """Unmap a pool at once, or when the job that runs on it ends; return whether it is unmapped now."""
        found = self.pools.pop(pool)
        # A transport must not lose memory that a write of ours still reads; then it goes with the process.
        if not found.pages.busy:
            self._deregister(found.tokens)
        close_parts(found.parts)
        self.taken.append(pool)
        self.pools_changed = True
        return found.pages.close()

    def _deregister(self, tokens: list[int]) -> None:
        for token in tokens:
            self.transport.deregister(token)

    def _pool(self, pool: int) -> Pool:
        found = self.pools.get(pool)
        if found is None or pool in self.leaving:
            raise RoomError(f"pool {pool} is not registered: register_pool first", reason=Reason.UNKNOWN_POOL)
        return found

    # -- rooms -----------------------------------------------------------------------------------------------------

    def _offer(self, message: Offer, now_ns: int) -> None:
        if self.source is None:
            raise RoomError("this engine did not register as a source", reason=Reason.UNSUPPORTED)
        pool = self._pool(message.pool)
        pages = _page_ids(message.pages)
        self._check_count(message.first_token, message.end_token, len(pages))
        pool.pages.check_pages(pages)
        key = RoomKey(self.source.config.instance, message.room, message.pool)
        old = self.tables.get((Half.SOURCE, key))
        if old is None and not (self.finishes_claimed and key in self.source.rooms):
            self._check_open()
        table = self._extended(old, message, pages)
        self.admit(pool.pages, table, Half.SOURCE, self._claimed_ways(key))
        # The core may begin to write at once: the pages must be known by then.
        self.tables[Half.SOURCE, key] = table
        try:
            self.source.offer(
                message.room, message.pool, message.first_token, message.end_token, last=message.last, now_ns=now_ns
            )
        except LongshoreError:
            if old is None:
                del self.tables[Half.SOURCE, key]
            else:
                self.tables[Half.SOURCE, key] = old
            raise

    def _claimed_ways(self, key: RoomKey) -> frozenset[Way]:
        room = self.source.rooms.get(key) if self.source is not None else None
        pairs = room.pairs.values() if room is not None else ()
        return frozenset(pair.way for pair in pairs if pair.route is not None)

    def _extended(self, old: PageTable | None, message: Offer, pages: np.ndarray) -> PageTable:
        first_page = message.first_token // self.layout.page_size
        if old is None:
            return PageTable(first_page, pages)
        kept = first_page - old.first_page
        if not 0 <= kept <= len(old.pages):
            return old  # The core refuses this offer and says what would be right.
        if kept < len(old.pages) and len(pages) and old.pages[kept] != pages[0]:
            raise RoomError(
                f"room {message.room}: page number {first_page} was {old.pages[kept]} in the last chunk and is "
                f"{pages[0]} now: a sequence keeps its pages",
                reason=Reason.TOKENS_OVERLAP,
            )
        return PageTable(old.first_page, np.concatenate([old.pages[:kept], pages]) if len(pages) else old.pages)

    def _receive(self, message: Receive, now_ns: int) -> ToEngine | None:
        if self.target is None:
            raise RoomError("this engine did not register as a target", reason=Reason.UNSUPPORTED)
        pool = self._pool(message.pool)
        data = self._joined(message)
        if data is None:
            return None
        pages = _page_ids(data)
        self._check_count(message.first_token, message.end_token, len(pages))
        pool.pages.check_pages(pages, unique=True)
        key = RoomKey(message.endpoint.instance, message.room, message.pool)
        if (Half.TARGET, key) in self.tables:
            raise RoomError(f"room {message.room} was claimed before: use a new id", reason=Reason.ROOM_REUSED)
        self._check_open()
        table = PageTable(message.first_token // self.layout.page_size, pages)
        self.admit(pool.pages, table, Half.TARGET, frozenset())
        self.tables[Half.TARGET, key] = table
        wanted = Wanted(
            key,
            message.endpoint,
            message.first_token,
            message.end_token,
            len(pages),
            data,
            message.memory,
            message.digest,
        )
        try:
            self.target.claim(wanted, now_ns)
        except LongshoreError:
            del self.tables[Half.TARGET, key]
            raise
        return Accepted(message.request)

    def _joined(self, message: Receive) -> bytes | None:
        """Return the whole page list, or None until its last part has come."""
        if message.page_offset == 0 and len(message.pages) == 4 * message.page_count:
            return message.pages
        name = (message.endpoint.instance, message.room, message.pool)
        _page_ids(message.pages)
        if name not in self._parts and len(self._parts) >= PARTIAL_CLAIMS_MAX:
            raise RoomError("too many claims with missing parts: send a claim's parts together", reason=Reason.BUSY)
        parts = self._parts.setdefault(name, {})
        parts[message.page_offset] = message.pages
        given_bytes, length_bytes = sum(map(len, parts.values())), 4 * message.page_count
        inside = 0 <= 4 * message.page_offset <= 4 * message.page_offset + len(message.pages) <= length_bytes
        if inside and given_bytes < length_bytes:
            return None
        del self._parts[name]
        if not inside or given_bytes != length_bytes:
            raise RoomError(
                f"room {message.room}: {given_bytes // 4} pages, at {message.page_offset} among others, in parts that "
                f"announce {message.page_count}",
                reason=Reason.MALFORMED_MESSAGE,
            )
        return b"".join(part for _, part in sorted(parts.items()))

    def _cancel(self, message: Cancel, now_ns: int) -> None:
        key = RoomKey(message.instance, message.room, message.pool)
        if message.half is Half.TARGET:
            self._parts.pop((message.instance, message.room, message.pool), None)
        session = self.source if message.half is Half.SOURCE else self.target
        if session is not None:
            session.cancel(key, Reason.CANCELLED, "cancelled by its engine", now_ns)

    def _check_open(self) -> None:
        if self.closing:
            raise RoomError(
                f"this worker is being replaced, as {self.closing}: try again, the next one takes it",
                reason=Reason.BUSY,
            )

    def _check_count(self, first_token: int, end_token: int, count: int) -> None:
        size = self.layout.page_size
        needed = -(-end_token // size) - first_token // size if first_token < end_token else 0
        if count != needed:
            raise RoomError(
                f"tokens [{first_token}, {end_token}) lie in {needed} pages of {size} tokens, and {count} were given",
                reason=Reason.PAGE_OUT_OF_RANGE,
            )


def _page_ids(data: bytes) -> npt.NDArray[np.int32]:
    """Return packed page ids as numbers. Raises RoomError for bytes that are none."""
    if len(data) % 4:
        raise RoomError(f"{len(data)} bytes of pages: give int32 ids of 4 bytes each", reason=Reason.MALFORMED_MESSAGE)
    return np.frombuffer(data, dtype="<i4")
