"""Defines the waits of a slab's life, and the limits that make it wait: gates and staging memory.

`life` yields waits and `runners` polls them. A wait never blocks, and only a poll of `passed` makes it pass.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

from longshore_agent.kernels.copier import Ticket
from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.pipeline.slabs import OutboundSlab
from longshore_agent.transports.base import Transport, Write, WriteState
from longshore_wire.errors import RingError
from longshore_wire.ring import Region, Ring
from longshore_wire.slabs import slab_bytes


class Wait(Protocol):
    """A condition that a life waits for."""

    def passed(self) -> bool:
        """Whether the life may resume. Raises DeviceError if a device has failed or hangs."""


class Now:
    """No condition: the life yields to older slabs."""

    def passed(self) -> bool:
        """Return True."""
        return True


class Copied(NamedTuple):
    """The end of a copy. A device ends the copies of one stream in the order of their submission."""

    ticket: Ticket

    def passed(self) -> bool:
        """Whether the copy has ended; see `Ticket.passed`."""
        return self.ticket.passed()


class Compiled:
    """The compilation of a kernel. The life submits its copy again to find out whether it has ended."""

    def passed(self) -> bool:
        """Return True: only the copier knows whether the kernel is compiled."""
        return True


class Written:
    """The end of a write. Each poll drives the transport.

    Attributes:
        state: of the write at the last poll.
    """

    __slots__ = ("_transport", "_write", "state")

    def __init__(self, transport: Transport, write: Write) -> None:
        self.state = WriteState.OPEN
        self._transport = transport
        self._write = write

    def passed(self) -> bool:
        """Whether the write is DONE or FAILED."""
        self.state = self._transport.state(self._write)
        return self.state is not WriteState.OPEN

    def release(self) -> tuple[str, bool]:
        """Release the write after it has passed.

        Returns:
            The error, empty if the write is DONE; and whether the write is settled: none of its bytes can land any
            more.
        """
        settled = self._transport.release(self._write)
        if self.state is WriteState.FAILED:
            return self._write.error or "the write failed and the transport does not say why", settled
        return "", True


class Until(NamedTuple):
    """A point in time, by `time.monotonic_ns`."""

    at_ns: int

    def passed(self) -> bool:
        """Whether the time has come."""
        return time.monotonic_ns() >= self.at_ns


class Gate:
    """Limits how many slabs hold a place at once. The wait of a cancelled slab passes, but the slab takes no place.

    Attributes:
        closed: True: no slab may take a place.
    """

    def __init__(self, count_max: int | None = None) -> None:
        """Begin open and empty.

        Args:
            count_max: number of places; None: no limit.
        """
        self.closed = False
        self._count_max = count_max
        self._count = 0

    @property
    def is_free(self) -> bool:
        """Whether a slab may take a place."""
        return not self.closed and (self._count_max is None or self._count < self._count_max)

    def turn(self, slab: OutboundSlab) -> Turn:
        """Return the wait for a place. It does not take the place: call `enter` when it has passed."""
        return Turn(self, slab)

    def enter(self) -> None:
        """Take a place. Does not check the limit."""
        self._count += 1

    def leave(self) -> None:
        """Give the place back."""
        assert self._count > 0
        self._count -= 1


class Turn(NamedTuple):
    """A free place at a gate, or the slab's cancellation."""

    gate: Gate
    slab: OutboundSlab

    def passed(self) -> bool:
        """Whether the gate has a place or the slab is cancelled."""
        return self.gate.is_free or self.slab.cancelled


class StagingMemory:
    """Allocates a source's staging memory in the order of requests. A slab holds a region until its write has ended.

    Attributes:
        buffer: the memory.
    """

    def __init__(self, buffer: StagingRange, lanes: range) -> None:
        """Begin with everything free.

        Args:
            buffer: registered with the transport.
            lanes: indices of the lanes; status and metrics count an equal part of the buffer as each lane's.
        """
        self.buffer = buffer
        self._lanes = lanes
        self._lane_bytes = buffer.length_bytes // len(lanes)
        self._ring = Ring(buffer.length_bytes)
        self._waiting: deque[Space] = deque()

    def take(self, slab: OutboundSlab) -> Space:
        """Return the wait for a region for a slab and its trailer. Raises RingError if the buffer is too small."""
        space = Space(self, slab, slab_bytes(slab.effect.payload_bytes))
        if space.length_bytes > self._ring.capacity_bytes:
            text = f"a slab takes {space.length_bytes} bytes, and staging memory has {self._ring.capacity_bytes}"
            raise RingError(text)
        self._waiting.append(space)
        return space

    def allocate(self, space: Space) -> Region | None:
        """Return a region; None: an older wait comes first, or too little memory is free."""
        if self._waiting[0] is not space:
            return None
        if not self._ring.region_count:
            # Start over at the same bytes, which a CPU still has in its cache.
            self._ring = Ring(self.buffer.length_bytes)
        return self._ring.allocate(space.length_bytes)

    def end_wait(self, space: Space) -> None:
        """Remove a wait that has passed."""
        self._waiting.remove(space)

    def free(self, region: Region) -> None:
        """Free a region whose write has ended."""
        self._ring.free(region)

    def lane(self, region: Region) -> int:
        """Return the index of the lane in whose part the region begins."""
        return self._lanes[min(region.offset_bytes // self._lane_bytes, len(self._lanes) - 1)]


class Space:
    """Staging memory for a slab, or the slab's cancellation.

    Attributes:
        region: the memory, once the wait has passed; None: the slab was cancelled.
    """

    __slots__ = ("_memory", "_over", "_slab", "length_bytes", "region")

    def __init__(self, memory: StagingMemory, slab: OutboundSlab, length_bytes: int) -> None:
        self.region: Region | None = None
        self.length_bytes = length_bytes
        self._memory = memory
        self._slab = slab
        self._over = False

    def passed(self) -> bool:
        """Take the memory if enough is free. Return whether it was taken or the slab is cancelled."""
        if self._over:
            return True
        if not self._slab.cancelled:
            self.region = self._memory.allocate(self)
        if self.region is not None or self._slab.cancelled:
            self._over = True
            self._memory.end_wait(self)
        return self._over
