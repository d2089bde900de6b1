"""Keeps an engine's pages in the form that kernels read: a pool's table of planes, and the page ids of each sequence.

Called by `device_copier` and `device_launch`. Page ids come from a peer or an engine, so this module checks them before
a kernel turns one into an address. It does not keep the pages mapped: the caller does, until every stream has passed
the last launch on them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
import torch

from longshore_agent.errors import DeviceError, PoolError, ShapeError
from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_grid import PLANE_FIELDS
from longshore_agent.kernels.view import Pages
from longshore_agent.memory import cuda
from longshore_agent.memory.pools import KVPool
from longshore_wire.errors import LongshoreError

_ID_BYTES = 4


class DevicePages:
    """The pages of one pool in the memory of one device.

    Attributes:
        pool: layout and geometry of the pages, already checked. Its own mapping is not used.
        device: the device of the pages, with its index; "cpu" for Triton's interpreter.
        bits: bitwise or of all addresses and strides, in bytes.
        token_stride_max: the longest token stride of a plane, in bytes.
        heads_adjoin: True: the heads of a token are adjacent in every plane.
    """

    def __init__(self, pool: KVPool, region_addresses: Sequence[int], device: torch.device) -> None:
        """Put the table of planes on the device.

        Args:
            region_addresses: one for each of the pool's regions, of its first byte in the device's address space.
        Raises:
            PoolError: the number of addresses is not the number of regions.
            DeviceError: the device has no memory for the table.
        """
        geometry = pool.geometry
        if len(region_addresses) != len(geometry.region_bytes):
            raise PoolError(
                f"{len(region_addresses)} addresses for {len(geometry.region_bytes)} regions: pass one for each region"
            )
        self.pool = pool
        lines = [
            (region_addresses[plane.region] + plane.offset, plane.page_stride, plane.token_stride, plane.head_stride)
            for plane in geometry.planes
        ]
        try:
            self._planes = torch.tensor(lines, dtype=torch.int64, device=device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"the GPU has no memory left for a pool's table of {len(lines)} planes: leave the agent some of what its "
                "engine takes"
            ) from error
        self.device, self._address = self._planes.device, self._planes.data_ptr()
        # A stride that no index uses does not limit the alignment. The address of a plane is always used.
        counts = (2, pool.page_count, pool.page_tokens, pool.head_count)
        steps = [step for line in lines for step, count in zip(line, counts, strict=True) if count > 1]
        self.bits = functools.reduce(operator.or_, steps, pool.row_bytes)
        self.token_stride_max = max(plane.token_stride for plane in geometry.planes)
        self.heads_adjoin = all(plane.head_stride == pool.row_bytes for plane in geometry.planes)

    def line(self, layer: int) -> int:
        """Return the address of a layer's first plane in the table, [planes, PLANE_FIELDS] int64 on the device.

        A line is the address of the plane, then its strides of pages, tokens and heads.
        """
        return self._address + layer * PLANE_FIELDS * self._planes.element_size()


class HeldPages:
    """The page ids of a sequence, in a device's memory. Keep it until every stream has passed the last launch on it.

    Attributes:
        pool: the pool of the pages.
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
        """Check `pages` ([ids] int32, in the host's memory) and copy them. The caller may change them afterwards.

        Args:
            first_page: number of the first id's page in the sequence.
            stream: the stream of all launches that will read them, where the copy is queued. None: wait for the copy.
            to_write: True: check now for repeated pages; False: `address_of` checks when it is first asked to.
        Raises:
            ShapeError: `pages` is not such an array.
            LongshoreError: PAGE_OUT_OF_RANGE, names the index.
            DeviceError: the device has no memory for them, or refuses the copy.
        """
        if pages.dtype != np.int32 or pages.ndim != 1 or not pages.size:
            raise ShapeError(f"pages is {pages.dtype} {pages.shape}: give int32 ids in one dimension, at least one")
        pool.check_pages(pages)
        self.pool = pool
        self._first_page = first_page
        self._ids = pages.copy()
        if stream is not None and stream.context is not None:
            try:
                self._table = torch.empty(pages.size, dtype=torch.int32, device=device)
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"the GPU has no memory left for {pages.size} page ids: leave the agent some of what its engine takes"
                ) from error
            cuda.copy_to_device(
                stream.context, self._table.data_ptr(), self._ids.ctypes.data, self._ids.nbytes, stream.handle
            )
        else:
            self._table = torch.tensor(pages, dtype=torch.int32, device=device)
            if self._table.is_cuda:
                # Launches on other streams read the ids and would not wait for this copy.
                torch.cuda.current_stream(device).synchronize()
        self._address = self._table.data_ptr()
        self._count = pages.size
        # The check sorts the ids, which takes as long as the copy. A source's pages may repeat.
        self._is_unique = to_write and _are_unique(pool, self._ids)

    def address_of(self, tokens: tuple[int, int], *, unique: bool) -> int:
        """Return the device address of the id (int32) of the first token's page; the other pages' ids follow it.

        Args:
            tokens: [first, end) in the sequence, not empty.
            unique: refuse a list with a repeated page, since two tokens would be written to one place.
        Raises:
            ShapeError: a token lies in no page of the list.
            LongshoreError: TOKENS_OVERLAP.
        """
        size = self.pool.layout.page_size
        first, end = tokens[0] // size - self._first_page, -(-tokens[1] // size) - self._first_page
        if not 0 <= first < end <= self._count:
            held = (self._first_page, self._first_page + self._count)
            raise ShapeError(f"pages are numbers [{held[0]}, {held[1]}) of a sequence: tokens {tokens} lie elsewhere")
        if unique and not self._is_unique:
            self.pool.check_pages(self._ids, unique=True)
            self._is_unique = True
        return self._address + first * _ID_BYTES


def _are_unique(pool: KVPool, ids: Pages) -> bool:
    try:
        pool.check_pages(ids, unique=True)
    except LongshoreError:
        return False
    return True
