"""The things that the life of a slab waits for, and the limits that it keeps to.

Yielded by `life`, asked by `runners`. Each wait says whether it has passed; none blocks.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

from longshore_agent.kernels.copier import Ticket
from longshore_agent.memory.staging import StagingPieces
from longshore_agent.pipeline.slabs import OutboundSlab
from longshore_agent.transports.base import Transport, Write, WriteState
from longshore_wire.errors import RingError
from longshore_wire.ring import Region, Ring
from longshore_wire.slabs import region_bytes


class Wait(Protocol):
    """One thing that a life waits for."""

    def passed(self) -> bool:
        """Whether the life may go on. Raises DeviceError if a device has failed or hangs."""


class Now:
    """Nothing: the life lets older slabs go first."""

    def passed(self) -> bool:
        """Return True."""
        return True


class Copied(NamedTuple):
    """The end of a copy. A device ends the copies of one stream in the order in which they began."""

    ticket: Ticket

    def passed(self) -> bool:
        """Whether the copy is over; see `Ticket.passed`."""
        return self.ticket.passed()


class Compiled:
    """A kernel that is being compiled: the copy is submitted again."""

    def passed(self) -> bool:
        """Return True: only the copier knows."""
        return True


class Written:
    """The end of a write. Asking drives the transport.

    Attributes:
        state: as it was when it was asked last.
    """

    __slots__ = ("_transport", "_write", "state")

    def __init__(self, transport: Transport, write: Write) -> None:
        self.state = WriteState.OPEN
        self._transport = transport
        self._write = write

    def passed(self) -> bool:
        """Whether the write is done or has failed."""
        self.state = self._transport.state(self._write)
        return self.state is not WriteState.OPEN

    def release(self) -> tuple[str, bool]:
        """Give the write back after it has passed.

        Returns:
            Why it failed, or an empty text; and whether none of its bytes can land any more.
        """
        settled = self._transport.release(self._write)
        if self.state is WriteState.FAILED:
            return self._write.error or "the write failed and the transport does not say why", settled
        return "", True


class Until(NamedTuple):
    """A time, of `time.monotonic_ns`."""

    at_ns: int

    def passed(self) -> bool:
        """Whether the time has come."""
        return time.monotonic_ns() >= self.at_ns


class Gate:
    """Lets a number of slabs through at a time. A cancelled slab passes, and then leaves without entering.

    Attributes:
        closed: nobody may enter.
    """

    def __init__(self, count_max: int | None = None) -> None:
        """Begin open and empty. None: no limit."""
        self.closed = False
        self._count_max = count_max
        self._count = 0

    @property
    def is_free(self) -> bool:
        """Whether one more may enter."""
        return not self.closed and (self._count_max is None or self._count < self._count_max)

    def turn(self, slab: OutboundSlab) -> Turn:
        """Return the wait for a place."""
        return Turn(self, slab)

    def enter(self) -> None:
        """Take a place."""
        self._count += 1

    def leave(self) -> None:
        """Give the place back."""
        assert self._count > 0
        self._count -= 1


class Turn(NamedTuple):
    """A place at a gate, or the end of the slab's room."""

    gate: Gate
    slab: OutboundSlab

    def passed(self) -> bool:
        """Whether there is a place, or nobody waits for the slab any more."""
        return self.gate.is_free or self.slab.cancelled


class StagingMemory:
    """Staging memory of a source. A slab takes as much as it needs, from its copy to the end of its write, in turn.

    Attributes:
        buffer: where it lies.
    """

    def __init__(self, buffer: StagingPieces, lanes: range) -> None:
        """Begin with everything free.

        Args:
            lanes: those that share the buffer in equal parts, for status and metrics.
        """
        self.buffer = buffer
        self._lanes = lanes
        self._lane_bytes = buffer.length_bytes // len(lanes)
        self._ring = Ring(buffer.length_bytes)
        self._waiting: deque[Space] = deque()

    def take(self, slab: OutboundSlab) -> Space:
        """Return the wait for the memory of a slab and its trailer. Raises RingError if there never will be enough."""
        space = Space(self, slab, region_bytes(slab.effect.payload_bytes))
        if space.length_bytes > self._ring.capacity_bytes:
            text = f"a slab takes {space.length_bytes} bytes, and staging memory has {self._ring.capacity_bytes}"
            raise RingError(text)
        self._waiting.append(space)
        return space

    def allocate(self, space: Space) -> Region | None:
        """Return memory for the oldest wait, if there is enough."""
        if self._waiting[0] is not space:
            return None
        if not self._ring.region_count:
            # The same bytes again: a processor has them in its cache.
            self._ring = Ring(self.buffer.length_bytes)
        return self._ring.allocate(space.length_bytes)

    def end_wait(self, space: Space) -> None:
        """A wait is over."""
        self._waiting.remove(space)

    def free(self, region: Region) -> None:
        """Give memory back."""
        self._ring.free(region)

    def lane(self, region: Region) -> int:
        """Return in which lane's part the region begins."""
        return self._lanes[min(region.offset_bytes // self._lane_bytes, len(self._lanes) - 1)]


class Space:
    """Memory for a slab, or the end of the slab's room.

    Attributes:
        region: None: nobody waits for the slab any more.
    """

    __slots__ = ("_memory", "_over", "_slab", "length_bytes", "region")

    def __init__(self, memory: StagingMemory, slab: OutboundSlab, length_bytes: int) -> None:
        self.region: Region | None = None
        self.length_bytes = length_bytes
        self._memory = memory
        self._slab = slab
        self._over = False

    def passed(self) -> bool:
        """Take the memory if there is enough. Return whether it was taken, or nobody waits for the slab any more."""
        if self._over:
            return True
        if not self._slab.cancelled:
            self.region = self._memory.allocate(self)
        if self.region is not None or self._slab.cancelled:
            self._over = True
            self._memory.end_wait(self)
        return self._over
