"""The copies of one thread of a GPU's worker: gathers into its buffer, or scatters out of the ring, each waited for.

Made by `path.device_stages` in the thread that uses it. The tables of pools and page lists stay on the device from one
slab to the next, for all threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakKeyDictionary

import torch

from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.gather.device_launch import gather_slices
from longshore_agent.kernels.held_pages import HeldPages
from longshore_agent.kernels.scatter.device_launch import scatter_slices
from longshore_agent.kernels.slab import Pages
from longshore_agent.memory import cuda
from longshore_agent.memory.device_memory import DeviceStagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_wire.trailer import Trailer

# Rooms whose page ids stay on the device: more than lanes work on in turn. One that was forgotten is copied again.
_HELD_LISTS_MAX = 64


class DeviceTables:
    """What all threads of a worker have on the device beside pages and slabs."""

    def __init__(self, device: cuda.Device) -> None:
        self.device = torch.device("cuda", device.index)
        self._lock = threading.Lock()
        self._pools: WeakKeyDictionary[KVPool, DevicePages] = WeakKeyDictionary()
        # By the identity of the ids, which are kept beside: a room has one array of them, and a new one when it grows.
        self._lists: OrderedDict[int, tuple[Pages, HeldPages]] = OrderedDict()

    def pages(self, pool: KVPool) -> DevicePages:
        """Return the table of a pool's planes; they are there on return."""
        with self._lock:
            found = self._pools.get(pool)
            if found is None:
                found = DevicePages(pool, [address for address, _ in pool.regions], self.device)
                torch.cuda.current_stream(self.device).synchronize()
                self._pools[pool] = found
            return found

    def held(self, pool: KVPool, pages: tuple[Pages, int]) -> HeldPages:
        """Return page ids on the device; `pages` are ids, and which page of the sequence the first is."""
        ids, first_page = pages
        with self._lock:
            found = self._lists.get(id(ids))
            if found is None or found[1].pool is not pool:
                found = (ids, HeldPages(pool, ids, self.device, first_page))
                self._lists[id(ids)] = found
                if len(self._lists) > _HELD_LISTS_MAX:
                    self._lists.popitem(last=False)
            self._lists.move_to_end(id(ids))
            return found[1]


class DeviceCopier:
    """See the module. Used by one thread, in which it must be made."""

    def __init__(self, device: cuda.Device, buffer: DeviceStagingBuffer, tables: DeviceTables) -> None:
        device.enter()
        torch.cuda.set_device(tables.device)
        self._tables = tables
        self._stream = CopyStream(tables.device)
        self._buffer = torch.as_tensor(buffer, device=tables.device)

    def gather(
        self,
        pool: KVPool,
        pages: tuple[Pages, int],
        tokens: tuple[int, int],
        layers: range,
        heads: range,
        length_bytes: int,
        trailer: Trailer,
    ) -> None:
        """Gather into the first `length_bytes` of the buffer; they are there on return.

        Args:
            pages: ids, and which page of the sequence the first is.
        Raises:
            PoolError: the engine has let its pages go.
            ShapeError, DeviceError: as `gather_slices`.
        """
        with pool.in_use():
            # Kept here until the device is done: another room may push it out of the tables.
            held = self._tables.held(pool, pages)
            target = self._buffer[:length_bytes]
            gather_slices(self._tables.pages(pool), held, tokens, layers, heads, target, trailer, self._stream)
            self._stream.synchronize()

    def scatter(
        self,
        pool: KVPool,
        pages: tuple[Pages, int],
        tokens: tuple[int, int],
        layers: range,
        heads: range,
        offset_bytes: int,
        payload_bytes: int,
    ) -> None:
        """Scatter `payload_bytes` at `offset_bytes` of the buffer; they are in the pages on return. As `gather` otherwise."""
        with pool.in_use():
            held = self._tables.held(pool, pages)
            source = self._buffer[offset_bytes : offset_bytes + payload_bytes]
            scatter_slices(self._tables.pages(pool), held, tokens, layers, heads, source, self._stream)
            self._stream.synchronize()
