"""Way DIRECT of a GPU's worker: copies from our engine's pages into a neighbour's by one kernel, each waited for.

Called by `deliver` in the lanes' threads, each of which has a stream of its own, and by `moving` when a pool is registered. The
tensor library is loaded with the first pool or copy: a worker on a CPU never loads it for this.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longshore_agent.kernels.direct.launch import Side
from longshore_agent.kernels.kept import Kept
from longshore_agent.memory.cuda import Device
from longshore_agent.memory.pools import KVPool

if TYPE_CHECKING:
    from longshore_agent.kernels.direct.device_copier import DeviceTables, DirectCopier

# Page lists of targets that keep their array from slab to slab, and so their copy on the device: more rooms than lanes
# work on in turn.
_LISTS_MAX = 64


class DeviceDirect:
    """What the lanes of one worker share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._tables: DeviceTables | None = None
        # A claim has one list for all its slabs.
        self._lists: Kept[npt.NDArray[np.int32]] = Kept(_LISTS_MAX)

    def ids(self, pages: bytes) -> npt.NDArray[np.int32]:
        """Return packed page ids as an array: the same one for the same bytes object, while it is remembered."""
        with self._lock:
            return self._lists.get(lambda: np.frombuffer(pages, dtype="<i4"), pages)

    def prepare(self, pool: KVPool) -> None:
        """A pool is about to be registered whose pages may go this way: compile its kernels, which no room should wait for."""
        assert pool.device is not None
        self._found(pool.device).prepare(pool)

    def copy(self, source: Side, target: Side, tokens: tuple[int, int]) -> None:
        """Copy tokens [first, end); their bytes are in the target's memory on return. Raises as `DirectCopier.copy`."""
        assert source.pool.device is not None
        copier: DirectCopier | None = getattr(self._local, "copier", None)
        if copier is None:
            copier = self._local.copier = self._make(source.pool.device)
        copier.copy(source, target, tokens)

    def _make(self, device: Device) -> DirectCopier:
        from longshore_agent.kernels.direct.device_copier import DirectCopier

        return DirectCopier(device, self._found(device))

    def _found(self, device: Device) -> DeviceTables:
        from longshore_agent.kernels.direct.device_copier import DeviceTables

        with self._lock:
            self._tables = self._tables or DeviceTables(device)
            return self._tables
