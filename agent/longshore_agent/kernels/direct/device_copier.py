"""Direct copies of one thread of a GPU's worker: from its engine's pages into a neighbour's, each waited for.

Made by `path.device_direct` in the thread that uses it. Tables of pools stay on the source's device for all threads, page lists
for the one that copied them there.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch

from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.direct.device_launch import copy_pages, prepare
from longshore_agent.kernels.direct.launch import Side
from longshore_agent.kernels.held_pages import HeldPages
from longshore_agent.kernels.kept import Kept
from longshore_agent.memory import cuda
from longshore_agent.memory.pools import KVPool

# Lists of rooms that a lane works on in turn, two a room; one that was forgotten is copied again.
_HELD_LISTS_MAX = 64


class DeviceTables:
    """Tables of pools on the source's device, for all threads of a worker."""

    def __init__(self, device: cuda.Device) -> None:
        self.device = torch.device("cuda", device.index)
        self._driver = device
        self._lock = threading.Lock()
        self._pools: WeakKeyDictionary[KVPool, DevicePages] = WeakKeyDictionary()

    def pages(self, pool: KVPool) -> DevicePages:
        """Return the table of a pool's planes; they are there on return."""
        with self._lock:
            found = self._pools.get(pool)
            if found is None:
                found = DevicePages(pool, [address for address, _ in pool.regions], self.device)
                torch.cuda.current_stream(self.device).synchronize()
                self._pools[pool] = found
            return found

    def prepare(self, pool: KVPool) -> None:
        """Make the table of a source's pool, and compile the kernels that copy out of it: see `device_launch.prepare`.

        Raises:
            DeviceError: the device has failed.
        """
        self._driver.enter()
        torch.cuda.set_device(self.device)
        # An example of page ids: there are none yet.
        page_ids = torch.zeros(1, dtype=torch.int32, device=self.device)
        prepare(self.pages(pool), CopyStream(self.device), page_ids)


class DirectCopier:
    """See the module. Used by one thread, in which it must be made."""

    def __init__(self, device: cuda.Device, tables: DeviceTables) -> None:
        device.enter()
        torch.cuda.set_device(tables.device)
        self._tables = tables
        self._stream = CopyStream(tables.device)
        # A room has one array of ids on each side.
        self._lists: Kept[HeldPages] = Kept(_HELD_LISTS_MAX)

    def copy(self, source: Side, target: Side, tokens: tuple[int, int]) -> None:
        """Copy tokens [first, end); their bytes are in the target's memory on return: it may be told of them.

        Raises:
            PoolError: an engine has let its pages go.
            ShapeError, LongshoreError, DeviceError: as `device_launch.copy_pages`.
        """
        with source.pool.in_use(), target.pool.in_use():
            sides = (source, target)
            held = [self._held(side) for side in sides]
            tables = [self._tables.pages(side.pool) for side in sides]
            copy_pages(sides, (tables[0], tables[1]), (held[0], held[1]), tokens, self._stream)
            self._stream.synchronize()

    def _held(self, side: Side) -> HeldPages:
        """Return a side's page ids on the device, in the order of this thread's stream."""
        pool, pages = side.pool, side.pages
        return self._lists.get(
            lambda: HeldPages(pool, pages, self._tables.device, side.first_page, self._stream), pages, pool
        )
