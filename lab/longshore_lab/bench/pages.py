"""Engines' pages with known bytes: fills source pages, wipes target pages, and checks them after a transfer.

Called by `scene`. Uses no tensor library: the bytes of a token are a slice of one random tile, so that every plane,
token and head has different bytes.
"""

from __future__ import annotations

import math
import mmap
import os
import random

from longshore_client.memory import create_region, pool_geometry
from longshore_lab.bench.errors import BenchError
from longshore_lab.devices import CPU
from longshore_wire.engine_messages import DeviceRegion
from longshore_wire.layout import KVLayout, PageOrder

# Not a multiple of any size in a layout, so that neighbours in any direction differ.
_TILE_BYTES = (8 << 20) + 4099


class Content:
    """The bytes of every token of one sequence, the same for all layouts."""

    def __init__(self, row_bytes: int, token_count: int) -> None:
        self._row_bytes = row_bytes
        self._tokens = token_count
        tile = os.urandom(_TILE_BYTES)
        self._tile = tile + tile[:row_bytes]

    def row(self, plane: int, token: int) -> int:
        """Return the offset in `tile` of a token's row of all heads."""
        return (plane * self._tokens + token) * self._row_bytes % _TILE_BYTES

    def slice(self, plane: int, token: int, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of the row of all heads."""
        first = self.row(plane, token)
        return self._tile[first + begin : first + end]


class Pages:
    """One rank's pool in shared memory and the pages in it that hold the sequence, in random order.

    Attributes:
        region_fd: file descriptor of the pool; `close` closes it.
        table: page ids of the sequence.
        device: the device of the pages, in the form that `connect` takes.
    """

    device = CPU

    def __init__(self, layout: KVLayout, token_count: int, seed: int) -> None:
        assert layout.order is PageOrder.NHD, layout.order
        self.layout = layout
        count = math.ceil(token_count / layout.page_size)
        self.geometry = pool_geometry(layout, count)
        self.region_fd, self._memory = create_region(self.geometry.region_bytes[0], "longshore-bench")
        self.table = random.Random(seed).sample(range(count), count)
        head_bytes = layout.model.head_bytes
        self._begin, self._end = layout.heads.start * head_bytes, layout.heads.stop * head_bytes

    @property
    def regions(self) -> list[int] | list[DeviceRegion]:
        """The regions, in the form that `Client.register_pool` takes."""
        return [self.region_fd]

    def fill(self, content: Content, token_count: int) -> None:
        """Write the known bytes of the first tokens."""
        width = self._end - self._begin
        for plane in range(len(self.geometry.planes)):
            for token in range(token_count):
                place = self._place(plane, token)
                self._memory[place : place + width] = content.slice(plane, token, self._begin, self._end)

    def wipe(self, token_count: int) -> None:
        """Zero the pages of the first tokens."""
        blank = bytes(self.geometry.planes[0].page_stride)
        for plane in self.geometry.planes:
            for page in self.pages_of(token_count):
                place = plane.offset + page * plane.page_stride
                self._memory[place : place + len(blank)] = blank

    def check(self, content: Content, token_count: int) -> None:
        """Raise BenchError unless all bytes of the first tokens are right and the rest of their pages is untouched."""
        width = self._end - self._begin
        size = self.layout.page_size
        for plane in range(len(self.geometry.planes)):
            for token in range(math.ceil(token_count / size) * size):
                place = self._place(plane, token)
                found = self._memory[place : place + width]
                wanted = content.slice(plane, token, self._begin, self._end) if token < token_count else bytes(width)
                if found != wanted:
                    raise BenchError(f"token {token} of plane {plane} differs: the bytes that arrived are wrong")

    def pages_of(self, token_count: int) -> list[int]:
        """Return the pages that hold the first tokens."""
        return self.table[: math.ceil(token_count / self.layout.page_size)]

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
        os.close(self.region_fd)

    def _place(self, plane: int, token: int) -> int:
        where = self.geometry.planes[plane]
        page, slot = divmod(token, self.layout.page_size)
        return where.offset + self.table[page] * where.page_stride + slot * where.token_stride


def available_bytes() -> int:
    """Return the available memory of this machine in bytes."""
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
