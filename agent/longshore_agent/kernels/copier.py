"""The one seam for copies: a copier takes a copy between two sides and returns a ticket for it.

Called by the pipeline. `cpu_copy` and `device_copier` implement it. Gather, scatter and direct copy differ in their sides
alone: an engine's pages (`View`) or staging memory (`Slab`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from longshore_agent.kernels.view import Pages, View
from longshore_agent.memory.pools import KVPool
from longshore_agent.memory.staging import StagingPieces
from longshore_wire.trailer import SealedTrailer


class Slab(NamedTuple):
    """A packed side in staging memory: [planes, rows, heads, row bytes] of the other side's choice, without gaps.

    Attributes:
        memory: the staging buffer.
        offset_bytes: of the first row in `memory`, a multiple of 64.
        payload_bytes: of all rows; the trailer stands at the next multiple of 64.
    """

    memory: StagingPieces
    offset_bytes: int
    payload_bytes: int


class Copy(NamedTuple):
    """Tokens [first, end) of a sequence, from one side to the other. At most one side is packed.

    Attributes:
        source, target: as many layers and heads on both, of one model.
        tokens: (first, end); see `cpu_copy.copy_rows`.
        trailer: written behind a packed target, after its payload.
        accepts: judges the 64 bytes behind a packed source, as they were before its payload was read.
    """

    source: View | Slab
    target: View | Slab
    tokens: tuple[int, int]
    trailer: SealedTrailer | None = None
    accepts: Callable[[bytes], bool] | None = None


class Ticket(Protocol):
    """One copy that was submitted. Its memory stays held until `end`."""

    def passed(self) -> bool:
        """Whether the copy is over. Raises DeviceError if the device has failed or hangs."""

    def end(self) -> bool:
        """Let the memory go, once, after the copy has passed.

        Returns:
            False: `accepts` has refused the trailer. A GPU has copied the payload nevertheless, a CPU has not.
        """


class Copier(Protocol):
    """Copies between an engine's pages and staging memory, or between the pages of two ranks."""

    def prepare(self, pool: KVPool, *, direct: bool) -> None:
        """Do once what no slab of a pool should wait for: it is about to be registered. Takes seconds on a GPU.

        Args:
            direct: its pages may also be copied to those of other ranks.
        """

    def admit(self, pool: KVPool, pages: Pages, first_page: int, *, to_write: bool, direct: bool) -> None:
        """The pages of a room are known: do what none of its slabs should wait for.

        Args:
            pages: [n] int32, the very array that the room's views will have.
            first_page: which page of the sequence the first one is.
            to_write: copies write to them, else read from them.
            direct: from pages to pages.
        Raises:
            LongshoreError: they are not pages of that pool.
        """

    def wait(self, limit_s: float) -> None:
        """Wait until no copy runs any more. Raises DeviceError if some still do after `limit_s`."""

    def submit(self, copy: Copy) -> Ticket | None:
        """Begin a copy.

        Returns:
            None: nothing has begun, since a kernel is being compiled beside this thread. Submit it again later.
        Raises:
            PoolError: an engine has unregistered its pages.
            MemoryLostError: an engine has cut its memory short.
            ShapeError, LongshoreError: the sides do not fit each other; names the argument. Nothing has begun.
            DeviceError: the device refuses it.
        """
