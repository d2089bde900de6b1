"""Page ids of one sequence in a device's memory: checked and copied there once, then read by every launch on them.

Called by whoever begins a room on a GPU, and by the device launchers. The ids are a peer's or an engine's: they are
checked here, before a kernel can turn one into an address.
"""

from __future__ import annotations

import numpy as np
import torch

from longshore_agent.errors import DeviceError, ShapeError
from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.view import Pages
from longshore_agent.memory import cuda
from longshore_agent.memory.pools import KVPool
from longshore_wire.errors import LongshoreError


class HeldPages:
    """Pages of a sequence, in its order; keep it until every stream has passed the last launch on it.

    Attributes:
        pool: whose pages they are.
        first_page: which page of the sequence the first id is.
        table: [ids] int32 on the device.
    """

    def __init__(
        self,
        pool: KVPool,
        pages: Pages,
        device: torch.device,
        first_page: int = 0,
        stream: CopyStream | None = None,
        *,
        to_write: bool = False,
    ) -> None:
        """Check `pages` ([ids] int32, in the host's memory) and copy them; they may be changed after.

        Args:
            stream: of all launches that will read them: the copy is queued there. None: waits for the copy.
            to_write: see now whether a page stands there twice, which `index_of` would look for first otherwise.
        Raises:
            ShapeError: `pages` is no such list.
            LongshoreError: PAGE_OUT_OF_RANGE, names the index.
            DeviceError: the device has no memory for them, or refuses the copy.
        """
        if pages.dtype != np.int32 or pages.ndim != 1 or not pages.size:
            raise ShapeError(f"pages is {pages.dtype} {pages.shape}: give int32 ids in one dimension, at least one")
        pool.check_pages(pages)
        self.pool = pool
        self.first_page = first_page
        self._ids = pages.copy()
        if stream is not None and stream.context is not None:
            try:
                self.table = torch.empty(pages.size, dtype=torch.int32, device=device)
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"the GPU has no memory left for {pages.size} page ids: leave the agent some of what its engine takes"
                ) from error
            cuda.copy_to_device(
                stream.context, self.table.data_ptr(), self._ids.ctypes.data, self._ids.nbytes, stream.handle
            )
        else:
            self.table = torch.tensor(pages, dtype=torch.int32, device=device)
            if self.table.is_cuda:
                # Launches on other streams read it: none of them waits for this copy by itself.
                torch.cuda.current_stream(device).synchronize()
        self.address = self.table.data_ptr()
        self._count = pages.size
        # Sorting them takes as long as copying them, and a source's may repeat.
        self._is_unique = to_write and _are_unique(pool, self._ids)

    def index_of(self, tokens: tuple[int, int], *, unique: bool) -> int:
        """Return which id is that of the first token's page.

        Args:
            tokens: global [first, end), not empty.
            unique: refuse a list with a page that stands in it twice: a scatter would write two tokens to one place.
        Raises:
            ShapeError: a token lies in no page of the list.
            LongshoreError: TOKENS_OVERLAP.
        """
        size = self.pool.layout.page_size
        first, end = tokens[0] // size - self.first_page, -(-tokens[1] // size) - self.first_page
        if not 0 <= first < end <= self._count:
            held = (self.first_page, self.first_page + self._count)
            raise ShapeError(f"pages are numbers [{held[0]}, {held[1]}) of a sequence: tokens {tokens} lie elsewhere")
        if unique and not self._is_unique:
            self.pool.check_pages(self._ids, unique=True)
            self._is_unique = True
        return first


def _are_unique(pool: KVPool, ids: Pages) -> bool:
    try:
        pool.check_pages(ids, unique=True)
    except LongshoreError:
        return False
    return True
