"""The transition tables of slabs, one place for all of them. `room` files obey them; a missing key is the error.

A slab is one piece of a room between one pair of ranks. Both workers keep a state of their own for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class SourceSlab(Enum):
    """A slab as its source sees it."""

    WAITING = "waiting"  # for tokens, or for a grant
    WRITING = "writing"  # a lane has it
    CONFIRMED = "confirmed"  # the target has acknowledged it before our own completion came
    WRITTEN = "written"  # complete here, the acknowledgement is open
    ACKED = "acked"
    DRAINING = "draining"  # given up while a lane had it
    DROPPED = "dropped"


class SourceEvent(Enum):
    """What happens to a slab at its source."""

    BEGIN = "begin"
    WROTE = "wrote"
    ACK = "ack"
    ABORT = "abort"


SOURCE_SLAB: Mapping[tuple[SourceSlab, SourceEvent], SourceSlab] = {
    (SourceSlab.WAITING, SourceEvent.BEGIN): SourceSlab.WRITING,
    (SourceSlab.WRITING, SourceEvent.WROTE): SourceSlab.WRITTEN,
    (SourceSlab.WRITING, SourceEvent.ACK): SourceSlab.CONFIRMED,
    (SourceSlab.CONFIRMED, SourceEvent.WROTE): SourceSlab.ACKED,
    (SourceSlab.WRITTEN, SourceEvent.ACK): SourceSlab.ACKED,
    (SourceSlab.WAITING, SourceEvent.ABORT): SourceSlab.DROPPED,
    (SourceSlab.WRITING, SourceEvent.ABORT): SourceSlab.DRAINING,
    (SourceSlab.CONFIRMED, SourceEvent.ABORT): SourceSlab.DRAINING,
    (SourceSlab.WRITTEN, SourceEvent.ABORT): SourceSlab.DROPPED,
    (SourceSlab.ACKED, SourceEvent.ABORT): SourceSlab.ACKED,
    (SourceSlab.DRAINING, SourceEvent.WROTE): SourceSlab.DROPPED,
}

# A lane holds the slab's bytes or the engine's pages: neither may be taken away.
SOURCE_BUSY = frozenset({SourceSlab.WRITING, SourceSlab.CONFIRMED, SourceSlab.DRAINING})


class TargetSlab(Enum):
    """A slab as its target sees it."""

    WANTED = "wanted"
    GRANTED = "granted"  # a writer may write our ring
    LANDED = "landed"  # its scatter is queued or runs
    DONE = "done"
    QUARANTINED = "quarantined"  # given up, but a writer may still write
    DRAINING = "draining"  # given up while its scatter runs
    FREED = "freed"


class TargetEvent(Enum):
    """What happens to a slab at its target."""

    GRANT = "grant"
    LAND = "land"
    PLACE = "place"  # written straight into the pages
    SCATTERED = "scattered"
    ABORT = "abort"
    CONFIRM = "confirm"  # its writer will not write any more


TARGET_SLAB: Mapping[tuple[TargetSlab, TargetEvent], TargetSlab] = {
    (TargetSlab.WANTED, TargetEvent.GRANT): TargetSlab.GRANTED,
    (TargetSlab.WANTED, TargetEvent.PLACE): TargetSlab.DONE,
    (TargetSlab.GRANTED, TargetEvent.LAND): TargetSlab.LANDED,
    (TargetSlab.LANDED, TargetEvent.SCATTERED): TargetSlab.DONE,
    (TargetSlab.WANTED, TargetEvent.ABORT): TargetSlab.FREED,
    (TargetSlab.GRANTED, TargetEvent.ABORT): TargetSlab.QUARANTINED,
    (TargetSlab.LANDED, TargetEvent.ABORT): TargetSlab.DRAINING,
    (TargetSlab.DONE, TargetEvent.ABORT): TargetSlab.DONE,
    (TargetSlab.QUARANTINED, TargetEvent.CONFIRM): TargetSlab.FREED,
    (TargetSlab.DRAINING, TargetEvent.SCATTERED): TargetSlab.FREED,
}

S = TypeVar("S")
V = TypeVar("V")


def step(table: Mapping[tuple[S, V], S], state: S, event: V) -> S:
    """Return the state after `event`. A missing key is a mistake of ours: it asserts."""
    following = table.get((state, event))
    assert following is not None, f"{event} cannot happen to a slab that is {state}"
    return following
