"""The copies of one thread of a GPU's worker: gathers into its buffer, or scatters out of the ring, each waited for.

Made by `path.device_stages` in the thread that uses it. Keeps the tables of pools and page lists on the device from
one slab to the next.
"""

from __future__ import annotations

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

# Rooms whose page ids stay on the device: more than a lane works on in turn. One that was forgotten is copied again.
_HELD_LISTS_MAX = 64


class DeviceCopier:
    """See the module. Used by one thread, in which it must be made."""

    def __init__(self, device: cuda.Device, buffer: DeviceStagingBuffer) -> None:
        device.enter()
        self._device = torch.device("cuda", device.index)
        torch.cuda.set_device(self._device)
        self._stream = CopyStream(self._device)
        self._buffer = torch.as_tensor(buffer, device=self._device)
        self._pools: WeakKeyDictionary[KVPool, DevicePages] = WeakKeyDictionary()
        # By the identity of the ids, which are kept beside: a room has one array of them, and a new one when it grows.
        self._lists: OrderedDict[int, tuple[Pages, HeldPages]] = OrderedDict()

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
            target = self._buffer[:length_bytes]
            gather_slices(
                self._pages(pool), self._held(pool, pages), tokens, layers, heads, target, trailer, self._stream
            )
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
            source = self._buffer[offset_bytes : offset_bytes + payload_bytes]
            scatter_slices(self._pages(pool), self._held(pool, pages), tokens, layers, heads, source, self._stream)
            self._stream.synchronize()

    def _pages(self, pool: KVPool) -> DevicePages:
        found = self._pools.get(pool)
        if found is None:
            found = DevicePages(pool, [address for address, _ in pool.regions], self._device)
            torch.cuda.current_stream(self._device).synchronize()
            self._pools[pool] = found
        return found

    def _held(self, pool: KVPool, pages: tuple[Pages, int]) -> HeldPages:
        ids, first_page = pages
        found = self._lists.get(id(ids))
        if found is None or found[1].pool is not pool:
            found = (ids, HeldPages(pool, ids, self._device, first_page))
            self._lists[id(ids)] = found
            if len(self._lists) > _HELD_LISTS_MAX:
                self._lists.popitem(last=False)
        self._lists.move_to_end(id(ids))
        return found[1]
