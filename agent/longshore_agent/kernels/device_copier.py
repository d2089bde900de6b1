"""Queues the copies of a GPU's worker: gathers into the lanes' memory, scatters from the ring, and direct copies.

A copy with a digest key also queues the digests of its pages, in the order of its stream.

Made and called in the worker's control thread, which polls each copy's ticket; see `copier`. Tables of pools and page
lists stay on the device between slabs. A kernel that is not compiled yet blocks a gather or scatter for about a second.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from longshore_agent.errors import DeviceError, ShapeError
from longshore_agent.kernels.copier import Copy, IdentityCache, Pages, Parts, Slab, View, pool_view
from longshore_agent.kernels.device_digest import BoundDigest, CopyDigests, Digested, DigestMemories
from longshore_agent.kernels.device_kernel import CopyStream
from longshore_agent.kernels.device_launch import (
    BoundCopy,
    Paged,
    PageIds,
    Place,
    PlaneTable,
    Side,
    id_memory,
    shape_of,
)
from longshore_agent.kernels.digest import NO_DIGESTS
from longshore_agent.memory import cuda
from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.memory.pools import KVPool
from longshore_wire.errors import LongshoreError
from longshore_wire.slabs import ALIGNMENT_BYTES, TRAILER_BYTES, SealedTrailer, aligned

# A copy takes some milliseconds even beside an engine that computes without pause, and a queued one sees others end. A
# device that ends no copy for hundreds of times as long is not just busy.
QUIET_LIMIT_S = 5.0
# The limit while an engine waits for its pages. A killed engine's pages must be free after 2 s. The rest of that is for
# the worker to notice, for its last messages, and for the driver to free the memory.
LEAVING_LIMIT_S = 0.8


_log = logging.getLogger(__name__)

# Page lists that stay on the device, half a kilobyte and more each: more than the rooms that move at once, on both
# sides. A dropped list is copied again while its slab waits.
_HELD_LISTS_MAX = 4096
# Ids of a list whose memory is allocated before it is needed. An allocator of GPU memory gives no fewer bytes.
_SHORT_LIST = 128
# Shapes of slabs between two sides. A room has two for each peer: one for its last slab, one for all others.
_SHAPES_MAX = 4096
# Poll interval of `wait`, which a worker calls when it ends.
_WAIT_PAUSE_S = 0.0002

# Shows that the device has done a copy: an event behind it or, if the driver refused the event, the end of its stream.
Mark = cuda.Event | CopyStream
# Of each side of a copy, its pool (None: a slab) and then `shape_of`.
_Shape = tuple[KVPool | int | None, ...]
# A part of a copy: its shape, its sides and its tokens.
_Work = tuple[BoundCopy, Place, Place, tuple[int, int]]
# Digests have page ids of their own, so that a damaged list of a copy does not hide itself. This is in their cache key.
_FOR_DIGESTS = object()


class DeviceTicket:
    """One queued copy; see `copier.Ticket`. Its pools stay mapped and its page ids stay on the device until `end`.

    Attributes:
        digests: those of the copy; set by `end`.
    """

    __slots__ = (
        "_accepts",
        "_copier",
        "_copy_digests",
        "_failure",
        "_held",
        "_mark",
        "_queued_s",
        "_stream",
        "_trailer",
        "digests",
    )

    def __init__(
        self,
        copier: DeviceCopier,
        mark: Mark,
        stream: CopyStream,
        held: list[PageIds],
        trailer: cuda.HostBytes | None,
        accepts: Callable[[bytes], bool] | None,
        copy_digests: CopyDigests | None = None,
        failure: DeviceError | None = None,
    ) -> None:
        self._copier, self._mark, self._stream = copier, mark, stream
        self._held, self._trailer, self._accepts = held, trailer, accepts
        self._copy_digests, self._failure, self.digests = copy_digests, failure, NO_DIGESTS
        self._queued_s = time.monotonic()

    def passed(self) -> bool:
        """Whether the device has done it. Raises DeviceError if the device failed or hangs; the process must end."""
        passed, now_s = self._mark.passed(), time.monotonic()
        if passed:
            self._stream.ended_s = now_s
        elif now_s - self._queued_s >= LEAVING_LIMIT_S:
            self._check_progress(now_s, max(self._queued_s, self._stream.ended_s))
        return passed

    def end(self) -> bool:
        """Release pools, page ids and event, once, after `passed` returned True. Returns as `copier.Ticket.end`.

        Raises:
            DeviceError: a pool could not be unmapped, or the driver has queued only a part of the copy and its digests.
        """
        trailer = b"" if self._trailer is None else self._trailer.read()
        copy_digests, self._copy_digests = self._copy_digests, None
        failure = self._failure
        if copy_digests is not None and failure is None:
            self.digests = copy_digests.read()
        self._copier.take_back(self._mark, self._trailer, copy_digests)
        _let_go(self._held)
        if failure is not None:
            raise failure
        return self._accepts is None or self._accepts(trailer)

    def _check_progress(self, now_s: float, since_s: float) -> None:
        """Raise DeviceError if the stream has ended no copy within the limit. Only a new process recovers from that."""
        if now_s - since_s < LEAVING_LIMIT_S:
            return
        text = f"device {self._copier.name} has ended no copy for"
        if now_s - since_s >= QUIET_LIMIT_S:
            raise DeviceError(f"{text} {QUIET_LIMIT_S:g} s: it hangs")
        closed_s = min((held.pool.closed_s for held in self._held if held.pool.closed_s is not None), default=now_s)
        if now_s - max(since_s, closed_s) >= LEAVING_LIMIT_S:
            raise DeviceError(f"{text} {LEAVING_LIMIT_S:g} s, and an engine waits for its pages: it hangs")


class DeviceCopier:
    """See the module. Used by one thread, in which it must be made.

    Attributes:
        name: of the device, in errors.
    """

    def __init__(self, device: cuda.Device, lanes: StagingRange | None, ring: StagingRange | None) -> None:
        """Open the streams.

        Args:
            lanes, ring: staging memory of gathers and of scatters; None: this worker has none.
        """
        device.enter()
        self.name = device.name
        self._driver = device
        self._device = torch.device("cuda", device.index)
        torch.cuda.set_device(self._device)
        # One stream for each kind, so that no copy waits for one of another kind.
        self._gathers, self._scatters, self._directs = (CopyStream(self._device) for _ in range(3))
        self._lanes, self._ring = lanes, ring
        # By pool and section.
        self._tables: dict[tuple[KVPool, int], PlaneTable] = {}
        self._copies: dict[_Shape, BoundCopy] = {}
        # A room has one array of ids, and a new array after it has grown.
        self._lists: IdentityCache[PageIds] = IdentityCache(_HELD_LISTS_MAX)
        self._spare_ids: torch.Tensor | None = None
        self._events: list[cuda.Event] = []
        self._trailers: list[cuda.HostBytes] = []
        # Keys: a pool, the stream, and `shape_of`.
        self._bound_digests: dict[tuple[object, ...], BoundDigest] = {}
        self._digest_memories = DigestMemories(device)

    def prepare_pool(self, pool: KVPool, *, direct: bool) -> None:
        """See `copier.Copier`: copy a pool's table to the device and compile its kernels, a second each.

        A kernel's shape depends on the number of heads that a peer takes, so there is one for every TP size. Kernels of
        direct copies to pools of other page sizes, orders or alignments are compiled at the first such copy. The kernel of
        digests is compiled in another thread; a room that needs it earlier waits for it.

        Raises:
            DeviceError: a kernel cannot be compiled.
        """
        peers = self._peers(pool)
        for paged, tokens in peers:
            payload_bytes = paged.view.payload_bytes(tokens)
            if self._lanes is not None:
                BoundCopy(paged, Slab(self._lanes, 0, payload_bytes), tokens, self._gathers).prepare()
            if self._ring is not None:
                BoundCopy(Slab(self._ring, 0, payload_bytes), paged, tokens, self._scatters).prepare()
            if direct:
                BoundCopy(paged, paged, tokens, self._directs).prepare()
        # One kernel computes a section's digests for all TP sizes. Most rooms have none, so nobody waits for it here. Rows
        # that are too long for digests fail only a room that asks for them.
        for paged, tokens in {paged.view.section: (paged, tokens) for paged, tokens in reversed(peers)}.values():
            with contextlib.suppress(ShapeError):
                BoundDigest(paged, tokens, self._gathers).prepare()

    def prepare_pages(self, pool: KVPool, pages: Pages, *, to_write: bool, direct: bool) -> None:
        """See `copier.Copier`: queue a copy of the page ids to the device, if they are not there, before their readers.

        Raises:
            ShapeError, LongshoreError, DeviceError: as `PageIds`.
        """
        stream = self._directs if direct else self._scatters if to_write else self._gathers
        self._held(pool, pages, stream, to_write=to_write)
        if self._spare_ids is None:
            # For the first slab of the next room, which waits for its list.
            self._spare_ids = id_memory(_SHORT_LIST, self._device)

    def submit(self, copy: Copy) -> DeviceTicket | None:
        """See `copier.Copier`. Compiles gathers, scatters and digests in this thread, direct copies in another one.

        When a direct copy has passed, every later reader of the target's memory sees its bytes. If the driver refuses
        one of several launches, the ticket of those before it is returned, and its `end` raises DeviceError.
        """
        source = copy.source
        if isinstance(source, Slab):
            stream = self._scatters
        else:
            stream = self._gathers if isinstance(copy.target, Slab) else self._directs
        held: list[PageIds] = []
        work: list[_Work] = []
        is_ready = True
        try:
            parts = copy.parts()
            near, far, _ = parts[0]
            if not isinstance(near, Slab):
                held.append(self._hold(near, stream, to_write=False))
            if not isinstance(far, Slab):
                held.append(self._hold(far, stream, to_write=True))
            if len(parts) > 1:
                _check_lists(parts)
            for near, far, tokens in parts:
                begin: Place = near if isinstance(near, Slab) else (held[0], near.first_page)
                goal: Place = far if isinstance(far, Slab) else (held[-1], far.first_page)
                bound = self._bound(near, far, tokens, stream)
                is_ready = (stream is not self._directs or bound.ready()) and is_ready
                work.append((bound, begin, goal, tokens))
            if is_ready:
                # Take the event before the launch: without one, no launch may run, since its end could not be seen.
                event = self._event()
                digests: CopyDigests | None = None
                try:
                    found = None if copy.accepts is None else self._read_trailer(source)
                    if copy.digest_key:
                        digests = self._digests(parts, copy.digest_key, stream)
                    failure = _launched(_checked(work, copy.trailer), digests)
                except LongshoreError:
                    # Nothing was launched. The device may still write to `found`, so no copy uses that again.
                    self.take_back(event, None, digests)
                    raise
                mark = self._marked(event, stream)
                return DeviceTicket(self, mark, stream, held, found, copy.accepts, digests, failure)
        except LongshoreError:
            _let_go(held)
            raise
        _let_go(held)
        return None

    def digest(self, parts: Parts, key: bytes) -> DeviceTicket:
        """See `copier.Copier`. Compiles the kernel in this thread, and reads on the stream of gathers."""
        stream = self._gathers
        held: list[PageIds] = []
        try:
            for part in parts:
                # What is held before an error is let go.
                held.append(self._hold(part.view, stream, _FOR_DIGESTS, to_write=False))  # noqa: PERF401
            event = self._event()
            digests: CopyDigests | None = None
            try:
                digests = self._digests([(part.view, None, part.tokens) for part in parts], key, stream)
                failure = _launched([], digests)
            except LongshoreError:
                self.take_back(event, None, digests)
                raise
        except LongshoreError:
            _let_go(held)
            raise
        return DeviceTicket(self, self._marked(event, stream), stream, held, None, None, digests, failure)

    def take_back(self, mark: Mark, trailer: cuda.HostBytes | None, digests: CopyDigests | None) -> None:
        """Keep the event and the memory of an ended copy for the next one."""
        if isinstance(mark, cuda.Event):
            self._events.append(mark)
        if trailer is not None:
            self._trailers.append(trailer)
        if digests is not None:
            self._digest_memories.give_back(digests.memory)

    def wait(self, limit_s: float) -> None:
        """Wait until the device has done all queued copies. Raises DeviceError if it has not within `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while not all(stream.passed() for stream in (self._gathers, self._scatters, self._directs)):
            if time.monotonic() > deadline_s:
                raise DeviceError(f"device {self._device} has not ended its copies within {limit_s:g} s: it hangs")
            time.sleep(_WAIT_PAUSE_S)

    def _peers(self, pool: KVPool) -> list[tuple[Paged, tuple[int, int]]]:
        """Return, for each TP size of a peer, one page with the heads that it takes, and the page's tokens."""
        ids, layers = np.zeros(1, dtype=np.int32), range(pool.layer_count)
        views = [
            pool_view(pool, ids, 0, layers, range(count), number)
            for number, section in enumerate(pool.layout.sections)
            for count in pool.layout.shared_head_counts(section.heads)
        ]
        return [(Paged(view, self._table(pool, view.section)), (0, view.page_tokens)) for view in views]

    def _hold(self, view: View, stream: CopyStream, *purpose: object, to_write: bool) -> PageIds:
        """Return the page ids of a view, whose pool is held."""
        ids = self._held(view.own_pool, view.pages, stream, *purpose, to_write=to_write)
        ids.pool.hold()
        return ids

    def _held(self, pool: KVPool, pages: Pages, stream: CopyStream, *purpose: object, to_write: bool) -> PageIds:
        def make() -> PageIds:
            memory = None
            if pages.size <= _SHORT_LIST:
                memory, self._spare_ids = self._spare_ids, None
            return PageIds(pool, pages, self._device, stream, to_write=to_write, memory=memory)

        return self._lists.get(make, pages, pool, stream, *purpose)

    def _event(self) -> cuda.Event:
        return self._events.pop() if self._events else cuda.Event(self._driver)

    def _digests(
        self,
        parts: Iterable[tuple[View | Slab, View | Slab | None, tuple[int, int]]],
        key: bytes,
        stream: CopyStream,
    ) -> CopyDigests:
        """Return the digests of the sides that are pages, checked and compiled. Queues only their page ids."""
        source: list[Digested] = []
        target: list[Digested] = []
        for near, far, tokens in parts:
            for side, wanted in ((near, source), (far, target)):
                if isinstance(side, View):
                    wanted.append(self._digested(side, tokens, stream))
        return CopyDigests(self._digest_memories, stream, (source, target), key)

    def _digested(self, view: View, tokens: tuple[int, int], stream: CopyStream) -> Digested:
        ids = self._held(view.own_pool, view.pages, stream, _FOR_DIGESTS, to_write=False)
        key = (view.own_pool, stream, *shape_of(view, tokens))
        bound = self._bound_digests.get(key)
        if bound is None:
            if len(self._bound_digests) >= _SHAPES_MAX:
                self._bound_digests.clear()
            bound = self._bound_digests[key] = BoundDigest(self._paged(view), tokens, stream)
        return Digested(bound, (ids, view.first_page), tokens)

    def _read_trailer(self, slab: Parts | Slab) -> cuda.HostBytes:
        """Queue a copy of the 64 bytes behind a landed slab to the host; return the host memory."""
        assert isinstance(slab, Slab), "only a slab has a trailer"
        begin = slab.offset_bytes + aligned(slab.payload_bytes)
        if begin + TRAILER_BYTES > slab.memory.length_bytes:
            raise ShapeError(f"source has no trailer at {begin}: its memory has {slab.memory.length_bytes} bytes")
        trailer = self._trailers.pop() if self._trailers else cuda.HostBytes(self._driver, TRAILER_BYTES)
        trailer.fill(slab.memory.address + begin, self._scatters.handle)
        return trailer

    def _marked(self, event: cuda.Event, stream: CopyStream) -> Mark:
        """Return the mark of the last launch on `stream`. Must not fail, even if the driver does: the launch runs."""
        try:
            event.record(stream.handle)
        except DeviceError as error:
            _log.warning("a copy on %s is over when all of its stream is, as it has no event: %s", self._device, error)
            return stream
        return event

    def _bound(
        self, source: View | Slab, target: View | Slab, tokens: tuple[int, int], stream: CopyStream
    ) -> BoundCopy:
        """Return the copy that serves all slabs of this shape between two pools, or a pool and staging memory."""
        key: _Shape = ()
        for side in (source, target):
            # Pieces of slabs begin anywhere.
            key += (
                (side.offset_bytes % ALIGNMENT_BYTES,)
                if isinstance(side, Slab)
                else (side.pool, *shape_of(side, tokens))
            )
        copy = self._copies.get(key)
        if copy is None:
            if len(self._copies) >= _SHAPES_MAX:
                self._copies.clear()
            copy = self._copies[key] = BoundCopy(self._side(source), self._side(target), tokens, stream)
        return copy

    def _side(self, side: View | Slab) -> Side:
        return side if isinstance(side, Slab) else self._paged(side)

    def _paged(self, view: View) -> Paged:
        return Paged(view, self._table(view.own_pool, view.section))

    def _table(self, pool: KVPool, section: int) -> PlaneTable:
        found = self._tables.get((pool, section))
        if found is None:
            self._forget_closed()
            try:
                found = PlaneTable(pool, [address for address, _ in pool.regions], self._device, section)
                torch.cuda.current_stream(self._device).synchronize()
            except RuntimeError as error:
                raise DeviceError(f"a pool's table cannot be copied to {self._device}: {error}") from error
            self._tables[pool, section] = found
        return found

    def _forget_closed(self) -> None:
        """Drop tables and copies of unmapped pools: neighbours' pools come and go with their engines."""
        closed = {pool for pool, _ in self._tables if pool.wait_closed(0)}
        self._tables = {key: table for key, table in self._tables.items() if key[0] not in closed}
        self._copies = {key: copy for key, copy in self._copies.items() if closed.isdisjoint(key)}
        self._bound_digests = {key: bound for key, bound in self._bound_digests.items() if key[0] not in closed}


def _check_lists(parts: Sequence[tuple[View | Slab, View | Slab, tuple[int, int]]]) -> None:
    """Check that the parts of each side name one list of pages."""
    for sides in zip(*((near, far) for near, far, _ in parts), strict=True):
        assert len({id(side.pages) for side in sides if isinstance(side, View)}) <= 1, "parts of a side name two lists"


def _checked(work: Sequence[_Work], trailer: SealedTrailer | None) -> list[Callable[[], None]]:
    """Check all parts of a copy; return the calls that queue them. The last one writes the trailer."""
    calls, before_bytes = [], 0
    for bound, begin, goal, tokens in work[:-1]:
        calls.append(bound.checked(begin, goal, tokens))
        if isinstance(goal, Slab):
            before_bytes += goal.payload_bytes
    bound, begin, goal, tokens = work[-1]
    calls.append(bound.checked(begin, goal, tokens, trailer, before_bytes))
    return calls


def _launched(copies: list[Callable[[], None]], digests: CopyDigests | None) -> DeviceError | None:
    """Queue a copy and its digests. Raises DeviceError if nothing was queued; returns it if a later call was refused.

    Earlier launches use the pages until the stream has passed them, so the copy needs its ticket.
    """
    if digests is None and len(copies) == 1:
        copies[0]()
        return None
    calls = copies
    if digests is not None:
        calls = digests.calls(copies)
        digests.begin()
    for index, call in enumerate(calls):
        try:
            call()
        except DeviceError as error:
            if not index:
                raise
            return error
    return None


def _let_go(held: list[PageIds]) -> None:
    """Release all pools. Raises DeviceError afterwards if one could not be unmapped."""
    failed: DeviceError | None = None
    for side in held:
        try:
            side.pool.let_go()
        except DeviceError as error:
            failed = error
    if failed is not None:
        raise failed
