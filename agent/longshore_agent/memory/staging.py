"""Staging memory of one CPU worker: a lane's buffer or a rank's ring. Allocated at the worker's start; never grows.

Called by the worker and the data path. Gives addresses to transports and views to kernels. The ring decides on the use
of the bytes.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import ShapeError
from longshore_agent.memory.ipc import Mapping

# Size of one registration: below the transports' limits, and small enough for useful error messages.
EXTENT_BYTES = 64 << 20


class StagingPieces:
    """The address range of a buffer and its extents for registration, without its memory.

    Attributes:
        address: of the first byte.
        length_bytes: the requested size.
    """

    def __init__(self, address: int, length_bytes: int, extent_bytes: int) -> None:
        self.address = address
        self.length_bytes = length_bytes
        self._extent_bytes = extent_bytes

    def extents(self) -> list[tuple[int, int]]:
        """Return (address, length in bytes) of each extent to register, in order and without gaps; the last may be smaller."""
        return self.pieces(0, self.length_bytes)

    def pieces(self, offset_bytes: int, length_bytes: int) -> list[tuple[int, int]]:
        """Split a range at the ends of extents, for transports that write within one registration: (address, bytes) each."""
        self._check(offset_bytes, length_bytes)
        cuts = []
        end = offset_bytes + length_bytes
        while offset_bytes < end:
            extent_end = (offset_bytes // self._extent_bytes + 1) * self._extent_bytes
            piece = min(end, extent_end) - offset_bytes
            cuts.append((self.address + offset_bytes, piece))
            offset_bytes += piece
        return cuts

    def _check(self, offset_bytes: int, length_bytes: int) -> None:
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= self.length_bytes:
            raise ShapeError(
                f"offset_bytes {offset_bytes} and length_bytes {length_bytes}: the buffer has {self.length_bytes} bytes"
            )


class StagingBuffer(StagingPieces):
    """Private memory whose pages are all touched before the first transfer, so that none faults during one.

    Attributes:
        address: of the first byte, a multiple of the system's page size.
        length_bytes: the requested size.
    """

    def __init__(self, length_bytes: int, *, extent_bytes: int = EXTENT_BYTES, huge_pages: bool = True) -> None:
        """Allocate and touch `length_bytes` (at least 1).

        Raises:
            ShapeError: a length is below 1.
            OSError: out of memory.
        """
        if length_bytes < 1 or extent_bytes < 1:
            raise ShapeError(f"length_bytes is {length_bytes} and extent_bytes is {extent_bytes}: give at least 1")
        self._mapping = Mapping(None, length_bytes)
        super().__init__(self._mapping.address, length_bytes, extent_bytes)
        if huge_pages:
            # They do not speed up copies, but allocation: see benchmarks/gather_scatter_cpu.py.
            self._mapping.advise_huge_pages()
        self._bytes: npt.NDArray[np.uint8] | None = self._mapping.bytes_view()
        # Only a write allocates a page; a read would map the shared zero page.
        self._bytes[:] = 0

    def view(self, offset_bytes: int, length_bytes: int) -> npt.NDArray[np.uint8]:
        """Return [length_bytes] at `offset_bytes`; valid until `close`. Raises ShapeError outside the buffer."""
        self._check(offset_bytes, length_bytes)
        assert self._bytes is not None, "a view of a closed staging buffer"
        return self._bytes[offset_bytes : offset_bytes + length_bytes]

    def bytes_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return a copy of a few bytes, such as a trailer. Raises ShapeError outside the buffer."""
        self._check(offset_bytes, length_bytes)
        assert self._bytes is not None, "a read of a closed staging buffer"
        return ctypes.string_at(self.address + offset_bytes, length_bytes)

    def close(self) -> None:
        """Free the memory. No view and no registration may be in use. Idempotent."""
        self._bytes = None
        self._mapping.unmap()
