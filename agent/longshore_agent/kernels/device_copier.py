"""The copies of a GPU's worker: gathers into its lanes' memory, scatters out of its ring and direct ones into another
rank's pages, queued and never waited for.

Made and called by `path.device_stages` in the worker's control thread. Tables of pools and page lists stay on the device
from one slab to the next.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import torch

from longshore_agent.errors import DeviceError
from longshore_agent.kernels.copy_progress import CopyProgress
from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_kernel import BoundLaunch
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.direct.device_launch import BoundCopy, plan_copy, shape_of
from longshore_agent.kernels.direct.device_launch import prepare as prepare_copies
from longshore_agent.kernels.gather.device_launch import bind_gather, gather_words
from longshore_agent.kernels.held_pages import HeldPages
from longshore_agent.kernels.kept import Kept
from longshore_agent.kernels.scatter.device_launch import bind_scatter
from longshore_agent.kernels.view import Pages, View, payload_bytes
from longshore_agent.memory import cuda
from longshore_agent.memory.device_memory import DeviceStagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_wire.errors import LongshoreError
from longshore_wire.trailer import TRAILER_BYTES, SealedTrailer, aligned, slab_bytes

_log = logging.getLogger(__name__)

# Rooms whose page ids stay on the device, half a kilobyte and more each: more than are moved at once. One that was
# forgotten is copied again, while its slab waits.
_HELD_LISTS_MAX = 2048
# Shapes of slabs of one pool: a room has two, that of all its slabs and that of the last.
_LAUNCHES_MAX = 1024
# Between two looks at a device that is waited for: some copies of microseconds, when a worker ends.
_WAIT_PAUSE_S = 0.0002


class _Known(NamedTuple):
    """A pool on the device: its table of planes, and launches that are ready to be queued.

    `copies` are the direct ones into this pool, for each pool that they come from.
    """

    pages: DevicePages
    launches: dict[tuple[int, ...], BoundLaunch]
    copies: dict[KVPool, dict[tuple[int, ...], BoundCopy]]


# What tells that the device has done a copy: an event behind it or, where the driver has refused that, all of its stream.
Mark = cuda.Event | CopyStream


class DeviceCopy:
    """One queued copy. Its pools stay mapped, and its page ids stay, until `end`."""

    __slots__ = ("_copier", "_held", "_mark", "_place", "_progress", "_queued_s")

    def __init__(
        self,
        copier: DeviceCopier,
        mark: Mark,
        progress: CopyProgress,
        place: cuda.HostBytes | None,
        *held: HeldPages,
    ) -> None:
        self._copier = copier
        self._mark = mark
        self._progress = progress
        self._place = place
        self._held = held
        self._queued_s = time.monotonic()

    def passed(self) -> bool:
        """Whether the device has done it. Raises DeviceError if the device has failed or hangs: only a new process mends that."""
        passed, now_s = self._mark.passed(), time.monotonic()
        if passed:
            self._progress.ended(now_s)
        else:
            self._progress.check(now_s, self._queued_s, [held.pool for held in self._held])
        return passed

    def trailer(self) -> bytes:
        """Return the 64 bytes behind a scattered slab, as they were just before the scatter; valid once it has passed."""
        assert self._place is not None, "only a scatter reads a trailer"
        return self._place.read()

    def end(self) -> None:
        """Let everything go, once; the device must have passed it."""
        for held in self._held:
            held.pool.let_go()
        self._copier.take_back(self._mark, self._place)


class DeviceCopier:
    """See the module. Used by one thread, in which it must be made."""

    def __init__(
        self, device: cuda.Device, lanes: DeviceStagingBuffer | None, ring: DeviceStagingBuffer | None
    ) -> None:
        device.enter()
        self._driver = device
        self._device = torch.device("cuda", device.index)
        torch.cuda.set_device(self._device)
        # Streams of their own, so that none waits for one of another kind that was queued before it.
        self._gathers, self._scatters, self._directs = (CopyStream(self._device) for _ in range(3))
        self._progress = {
            stream: CopyProgress(f"device {device.name}") for stream in (self._gathers, self._scatters, self._directs)
        }
        self._lanes = None if lanes is None else torch.as_tensor(lanes, device=self._device)
        self._ring = None if ring is None else torch.as_tensor(ring, device=self._device)
        self._pools: dict[KVPool, _Known] = {}
        # An example of page ids, for what is compiled before there are any.
        self._no_pages = torch.zeros(1, dtype=torch.int32, device=self._device)
        # A room has one array of ids, and a new one when it grows.
        self._lists: Kept[HeldPages] = Kept(_HELD_LISTS_MAX)
        # Those that direct copies read, in the order of their stream.
        self._direct_lists: Kept[HeldPages] = Kept(_HELD_LISTS_MAX)
        self._events: list[cuda.Event] = []
        self._places: list[cuda.HostBytes] = []

    def prepare(self, pool: KVPool) -> None:
        """Put a pool's table on the device and compile the kernels for it: a second each, which no slab may wait for.

        The shape of a kernel depends on how many heads a peer takes: here are those for every TP size.
        """
        size = pool.layout.page_size
        for count in pool.layout.shared_head_counts:
            for buffer in (self._lanes, self._ring):
                if buffer is not None:
                    chosen = ((0, size), range(pool.layer_count), range(count))
                    self._launch(buffer, pool, *chosen, payload_bytes(pool, *chosen))

    def prepare_direct(self, pool: KVPool) -> None:
        """Compile the kernels of direct copies out of a pool: see `direct.device_launch.prepare`."""
        prepare_copies(self._known(pool).pages, self._directs, self._no_pages)

    def hold(self, pool: KVPool, pages: tuple[Pages, int], *, to_gather: bool) -> HeldPages:
        """Queue a copy of page ids to the device, unless they are there, before all that reads them.

        Args:
            pages: ids, and which page of the sequence the first is.
            to_gather: for gathers, else for scatters.
        Raises:
            ShapeError, LongshoreError: as `HeldPages`.
        """
        ids, first_page = pages
        stream = self._gathers if to_gather else self._scatters
        return self._lists.get(
            lambda: HeldPages(pool, ids, self._device, first_page, stream, to_write=not to_gather), ids, pool
        )

    def hold_direct(self, pool: KVPool, pages: tuple[Pages, int], *, to_write: bool) -> HeldPages:
        """Queue a copy of page ids to the device, unless they are there, before all direct copies. As `hold`.

        Args:
            to_write: for the targets of copies, else for their sources.
        """
        ids, first_page = pages
        return self._direct_lists.get(
            lambda: HeldPages(pool, ids, self._device, first_page, self._directs, to_write=to_write), ids, pool
        )

    def gather(
        self,
        pool: KVPool,
        pages: tuple[Pages, int],
        tokens: tuple[int, int],
        layers: range,
        heads: range,
        offset_bytes: int,
        trailer: SealedTrailer,
    ) -> DeviceCopy:
        """Queue a gather to `offset_bytes`, a multiple of 64, of the lanes' memory.

        Args:
            pages: as of `hold`.
        Raises:
            PoolError: the engine has let its pages go.
            ShapeError, DeviceError: as `gather.device_launch.gather_slices`.
        """
        assert self._lanes is not None
        assert offset_bytes + slab_bytes(trailer.payload_bytes) <= self._lanes.numel()
        held, page_first = self._begun(pool, pages, tokens, to_gather=True)
        try:
            launch = self._launch(self._lanes, pool, tokens, layers, heads, trailer.payload_bytes)
            event = self._event()
            launch.queue(held.address, page_first, self._lanes.data_ptr() + offset_bytes, gather_words(trailer))
            return self._queued(event, self._gathers, None, held)
        except LongshoreError:
            pool.let_go()
            raise

    def scatter(
        self,
        pool: KVPool,
        pages: tuple[Pages, int],
        tokens: tuple[int, int],
        layers: range,
        heads: range,
        offset_bytes: int,
        slab_payload_bytes: int,
    ) -> DeviceCopy:
        """Queue a look at the trailer of a slab of the ring, then the slab's scatter. As `gather` otherwise."""
        assert self._ring is not None
        assert offset_bytes + slab_bytes(slab_payload_bytes) <= self._ring.numel()
        held, page_first = self._begun(pool, pages, tokens, to_gather=False)
        try:
            launch = self._launch(self._ring, pool, tokens, layers, heads, slab_payload_bytes)
            event, place = self._event(), self._place()
            slab = self._ring.data_ptr() + offset_bytes
            place.fill(slab + aligned(slab_payload_bytes), self._scatters.handle)
            launch.queue(held.address, page_first, slab)
            return self._queued(event, self._scatters, place, held)
        except LongshoreError:
            pool.let_go()
            raise

    def direct(self, sides: tuple[View, View], tokens: tuple[int, int]) -> DeviceCopy | None:
        """Queue a copy of tokens [first, end) from a source's pages into those of a target, which are mapped here.

        Once it has passed, its bytes are in the target's memory for every later reader: it may be told of them.

        Returns:
            None: nothing was queued, as its kernel is being compiled beside this thread: ask again.
        Raises:
            PoolError: an engine has let its pages go.
            ShapeError, LongshoreError, DeviceError: as `direct.device_launch.plan_copy` and what it queues.
        """
        source, target = sides
        source_pool, target_pool = source.own_pool, target.own_pool
        near = self.hold_direct(source_pool, (source.pages, source.first_page), to_write=False)
        far = self.hold_direct(target_pool, (target.pages, target.first_page), to_write=True)
        source_pool.hold()
        try:
            target_pool.hold()
        except LongshoreError:
            source_pool.let_go()
            raise
        try:
            copy = self._bound_copy(sides, (near, far), tokens)
            if copy is not None:
                event = self._event()
                copy.queue((near, far), tokens)
                return self._queued(event, self._directs, None, near, far)
        except LongshoreError:
            source_pool.let_go()
            target_pool.let_go()
            raise
        source_pool.let_go()
        target_pool.let_go()
        return None

    def take_back(self, mark: Mark, place: cuda.HostBytes | None) -> None:
        """Keep what a copy that has ended used for the next one."""
        if isinstance(mark, cuda.Event):
            self._events.append(mark)
        if place is not None:
            self._places.append(place)

    def wait(self, limit_s: float) -> None:
        """Wait until the device has done all that was queued here. Raises DeviceError if it has not within `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while not all(stream.passed() for stream in (self._gathers, self._scatters, self._directs)):
            if time.monotonic() > deadline_s:
                raise DeviceError(f"device {self._device} has not ended its copies within {limit_s:g} s: it hangs")
            time.sleep(_WAIT_PAUSE_S)

    def _begun(
        self, pool: KVPool, pages: tuple[Pages, int], tokens: tuple[int, int], *, to_gather: bool
    ) -> tuple[HeldPages, int]:
        held = self.hold(pool, pages, to_gather=to_gather)
        page_first = held.index_of(tokens, unique=not to_gather)
        pool.hold()
        return held, page_first

    def _event(self) -> cuda.Event:
        # Taken before anything is queued: where there is none, nothing may run of which nobody would learn the end.
        return self._events.pop() if self._events else cuda.Event(self._driver)

    def _queued(
        self, event: cuda.Event, stream: CopyStream, place: cuda.HostBytes | None, *held: HeldPages
    ) -> DeviceCopy:
        """Return the copy that was launched on `stream` just now. It runs: nothing may fail here, whatever the driver says."""
        mark: Mark = event
        try:
            event.record(stream.handle)
        except DeviceError as error:
            _log.warning("a copy on %s is over when all of its stream is, as it has no event: %s", self._device, error)
            mark = stream
        return DeviceCopy(self, mark, self._progress[stream], place, *held)

    def _place(self) -> cuda.HostBytes:
        return self._places.pop() if self._places else cuda.HostBytes(self._driver, TRAILER_BYTES)

    def _launch(
        self, buffer: torch.Tensor, pool: KVPool, tokens: tuple[int, int], layers: range, heads: range, length: int
    ) -> BoundLaunch:
        """Return the gather into, or the scatter out of, `buffer` for all slabs of this shape and payload."""
        known = self._known(pool)
        to_slab = buffer is self._lanes
        count, slot = tokens[1] - tokens[0], tokens[0] % pool.layout.page_size
        key = (to_slab, count, slot, layers.start, layers.stop, heads.start, heads.stop)
        launch = known.launches.get(key)
        if launch is None:
            assert length == payload_bytes(pool, tokens, layers, heads)
            if len(known.launches) >= _LAUNCHES_MAX:
                known.launches.clear()
            bind, stream = (bind_gather, self._gathers) if to_slab else (bind_scatter, self._scatters)
            launch = bind(known.pages, self._no_pages, tokens, layers, heads, buffer, stream)
            known.launches[key] = launch
        return launch

    def _bound_copy(
        self, sides: tuple[View, View], lists: tuple[HeldPages, HeldPages], tokens: tuple[int, int]
    ) -> BoundCopy | None:
        """Return the direct copy for all slabs of this shape between two pools; None: its kernel is being compiled."""
        near, far = self._known(sides[0].own_pool), self._known(sides[1].own_pool)
        copies = far.copies.setdefault(sides[0].own_pool, {})
        key = shape_of(sides, tokens)
        copy = copies.get(key)
        if copy is None:
            planned = plan_copy(sides, (near.pages, far.pages), lists, tokens, self._directs)
            if not planned.ready():
                return None
            if len(copies) >= _LAUNCHES_MAX:
                copies.clear()
            copy = copies[key] = BoundCopy(planned)
        return copy

    def _known(self, pool: KVPool) -> _Known:
        found = self._pools.get(pool)
        if found is None:
            self._forget_closed()
            pages = DevicePages(pool, [address for address, _ in pool.regions], self._device)
            torch.cuda.current_stream(self._device).synchronize()
            found = self._pools[pool] = _Known(pages, {}, {})
        return found

    def _forget_closed(self) -> None:
        """Let go of what was made for pools that are unmapped: neighbours' come and go with their engines."""
        self._pools = {pool: known for pool, known in self._pools.items() if not pool.wait_closed(0)}
        for known in self._pools.values():
            for pool in [pool for pool in known.copies if pool.wait_closed(0)]:
                del known.copies[pool]
