"""Defines the interface of all copies: a copier takes a copy between two sides and returns a ticket for it.

Called by the pipeline; `cpu_copy` and `device_copier` implement it. Gather, scatter and direct copy differ only in
their sides: an engine's pages (`View`) or staging memory (`Slab`). A submitted copy has not ended until its ticket has
passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from longshore_agent.kernels.view import Pages, View
from longshore_agent.memory.pools import KVPool
from longshore_agent.memory.staging import StagingPieces
from longshore_wire.trailer import SealedTrailer


class Slab(NamedTuple):
    """A packed side in staging memory: [planes, rows, heads, row bytes] as the other side chooses, without gaps.

    Attributes:
        memory: the staging buffer.
        offset_bytes: of the first row in `memory`, a multiple of 64.
        payload_bytes: of all rows; the trailer begins at the next multiple of 64.
    """

    memory: StagingPieces
    offset_bytes: int
    payload_bytes: int


class Copy(NamedTuple):
    """Tokens [first, end) of a sequence, from one side to the other. At most one side is packed.

    Attributes:
        source, target: of one model, with equally many layers and heads.
        tokens: (first, end); see `cpu_copy.copy_rows`.
        trailer: to be written behind a packed target, after its payload.
        accepts: checks the 64 bytes behind a packed source, as they were before its payload was read.
    """

    source: View | Slab
    target: View | Slab
    tokens: tuple[int, int]
    trailer: SealedTrailer | None = None
    accepts: Callable[[bytes], bool] | None = None


class Ticket(Protocol):
    """One submitted copy. Its memory stays held until `end`."""

    def passed(self) -> bool:
        """Whether the copy has ended. Raises DeviceError if the device has failed or hangs."""

    def end(self) -> bool:
        """Release the memory. Call it once, after the copy has passed.

        Returns:
            False: `accepts` has refused the trailer. A GPU has copied the payload nevertheless, a CPU has not.
        """


class Copier(Protocol):
    """Copies between an engine's pages and staging memory, or between the pages of two ranks."""

    def prepare(self, pool: KVPool, *, direct: bool) -> None:
        """Prepare a pool before its registration, so that its slabs need not wait. Takes seconds on a GPU.

        Args:
            direct: its pages may also be copied to those of other ranks.
        """

    def admit(self, pool: KVPool, pages: Pages, first_page: int, *, to_write: bool, direct: bool) -> None:
        """Prepare the pages of a room, so that its slabs need not wait.

        Args:
            pages: [n] int32, the same array object as in the room's views.
            first_page: number of the first of them in the sequence.
            to_write: True: copies write these pages; False: copies read them.
            direct: for copies from pages to pages.
        Raises:
            LongshoreError: they are not pages of that pool.
        """

    def wait(self, limit_s: float) -> None:
        """Wait until no copy runs. Raises DeviceError if one still runs after `limit_s`."""

    def submit(self, copy: Copy) -> Ticket | None:
        """Begin a copy.

        Returns:
            None: nothing has begun, since another thread compiles the kernel. Submit the copy again later.
        Raises:
            PoolError: an engine has unregistered its pages.
            MemoryLostError: an engine has truncated its memory.
            ShapeError, LongshoreError: the sides do not fit each other; names the argument. Nothing has begun.
            DeviceError: the device refuses it.
        """
