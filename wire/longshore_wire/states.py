"""The transition tables of slabs, pairs and rooms. `room` applies them; a missing key is a bug.

A room is the transfer of one request. A pair is the part of one of its caches between one source rank and one target rank. A
slab is one piece of a pair. Each of the two workers keeps its own state of all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class _Step(Enum):
    """A state or an event. Its identity is its hash, since Enum's own is a Python function, and each step looks two up."""

    __hash__ = object.__hash__


class SourceSlab(_Step):
    """A slab as its source sees it."""

    WAITING = "waiting"  # for tokens, or for a grant
    WRITING = "writing"  # a lane has it
    CONFIRMED = "confirmed"  # the target has acknowledged it before our own completion
    WRITTEN = "written"  # complete here; not acknowledged yet
    ACKED = "acked"
    DRAINING = "draining"  # aborted while a lane had it
    DROPPED = "dropped"


class SourceEvent(_Step):
    """Events of a slab at its source."""

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

# A lane uses the slab's bytes or the engine's pages, so neither may be freed.
SOURCE_BUSY = frozenset({SourceSlab.WRITING, SourceSlab.CONFIRMED, SourceSlab.DRAINING})


class TargetSlab(_Step):
    """A slab as its target sees it."""

    WANTED = "wanted"
    GRANTED = "granted"  # a writer may write our ring
    LANDED = "landed"  # its scatter, or the digest of its pages, is queued or running
    DONE = "done"
    QUARANTINED = "quarantined"  # aborted, but a writer may still write
    DRAINING = "draining"  # aborted while its scatter runs
    FREED = "freed"


class TargetEvent(_Step):
    """Events of a slab at its target."""

    GRANT = "grant"
    LAND = "land"
    PLACE = "place"  # written directly into the pages
    SCATTERED = "scattered"
    ABORT = "abort"
    CONFIRM = "confirm"  # its writer will not write any more


TARGET_SLAB: Mapping[tuple[TargetSlab, TargetEvent], TargetSlab] = {
    (TargetSlab.WANTED, TargetEvent.GRANT): TargetSlab.GRANTED,
    (TargetSlab.WANTED, TargetEvent.PLACE): TargetSlab.DONE,
    # Written in place, with digests to compare.
    (TargetSlab.WANTED, TargetEvent.LAND): TargetSlab.LANDED,
    (TargetSlab.GRANTED, TargetEvent.LAND): TargetSlab.LANDED,
    (TargetSlab.LANDED, TargetEvent.SCATTERED): TargetSlab.DONE,
    (TargetSlab.WANTED, TargetEvent.ABORT): TargetSlab.FREED,
    (TargetSlab.GRANTED, TargetEvent.ABORT): TargetSlab.QUARANTINED,
    (TargetSlab.LANDED, TargetEvent.ABORT): TargetSlab.DRAINING,
    (TargetSlab.DONE, TargetEvent.ABORT): TargetSlab.DONE,
    (TargetSlab.QUARANTINED, TargetEvent.CONFIRM): TargetSlab.FREED,
    (TargetSlab.DRAINING, TargetEvent.SCATTERED): TargetSlab.FREED,
}


class SourcePairState(_Step):
    """A pair as its source sees it."""

    OPEN = "open"
    TELLING = "telling"  # aborted here; the target has not answered yet
    TOLD = "told"  # aborted here; the target has answered
    DRAINING = "draining"  # aborted by the target; a lane may still hold a slab
    CLOSED = "closed"  # the target has our confirmation that no write is open, or is gone


class SourcePairEvent(_Step):
    """Events of a pair at its source."""

    GIVE_UP = "give up"  # this side fails the room
    ANSWER = "answer"  # the target has acknowledged the abort
    ABORT = "abort"  # the target fails the room
    QUIET = "quiet"  # no lane holds a slab
    LOSE = "lose"  # the target is gone


SOURCE_PAIR: Mapping[tuple[SourcePairState, SourcePairEvent], SourcePairState] = {
    (SourcePairState.OPEN, SourcePairEvent.GIVE_UP): SourcePairState.TELLING,
    (SourcePairState.OPEN, SourcePairEvent.ABORT): SourcePairState.DRAINING,
    (SourcePairState.TELLING, SourcePairEvent.ANSWER): SourcePairState.TOLD,
    (SourcePairState.TELLING, SourcePairEvent.ABORT): SourcePairState.DRAINING,
    (SourcePairState.TOLD, SourcePairEvent.ABORT): SourcePairState.DRAINING,
    (SourcePairState.DRAINING, SourcePairEvent.ABORT): SourcePairState.DRAINING,
    (SourcePairState.DRAINING, SourcePairEvent.QUIET): SourcePairState.CLOSED,
    # The target repeats its abort until it receives our confirmation, which may get lost.
    (SourcePairState.CLOSED, SourcePairEvent.ABORT): SourcePairState.DRAINING,
    **{(state, SourcePairEvent.LOSE): SourcePairState.CLOSED for state in SourcePairState},
}


class TargetPairState(_Step):
    """A pair as its target sees it."""

    WAITING = "waiting"  # not claimed yet: the source or its wire is unknown
    CLAIMED = "claimed"  # the source has not answered the claim yet
    OPEN = "open"  # the source has sent its Demand
    COMPLETE = "complete"  # every slab is in the pages
    ABORTING = "aborting"  # aborted; its writer may still write our memory
    CLOSED = "closed"  # aborted; its writer will not write any more


class TargetPairEvent(_Step):
    """Events of a pair at its target."""

    CLAIM = "claim"
    CUT = "cut"  # the source answers the claim
    FINISH = "finish"  # the last slab is in the pages
    ABORT = "abort"  # the room has failed, and the writer has memory here
    CLOSE = "close"  # the room has failed or does not need this source, and the writer has no memory here
    CONFIRM = "confirm"  # the writer will not write any more


TARGET_PAIR: Mapping[tuple[TargetPairState, TargetPairEvent], TargetPairState] = {
    (TargetPairState.WAITING, TargetPairEvent.CLAIM): TargetPairState.CLAIMED,
    (TargetPairState.CLAIMED, TargetPairEvent.CLAIM): TargetPairState.CLAIMED,
    (TargetPairState.CLAIMED, TargetPairEvent.CUT): TargetPairState.OPEN,
    (TargetPairState.OPEN, TargetPairEvent.FINISH): TargetPairState.COMPLETE,
    (TargetPairState.CLAIMED, TargetPairEvent.ABORT): TargetPairState.ABORTING,
    (TargetPairState.OPEN, TargetPairEvent.ABORT): TargetPairState.ABORTING,
    (TargetPairState.WAITING, TargetPairEvent.CLOSE): TargetPairState.CLOSED,
    (TargetPairState.CLAIMED, TargetPairEvent.CLOSE): TargetPairState.CLOSED,
    (TargetPairState.OPEN, TargetPairEvent.CLOSE): TargetPairState.CLOSED,
    (TargetPairState.COMPLETE, TargetPairEvent.CLOSE): TargetPairState.COMPLETE,
    (TargetPairState.ABORTING, TargetPairEvent.CONFIRM): TargetPairState.CLOSED,
}


class SourceRoomState(_Step):
    """A room as its prefill rank sees it."""

    CLAIMED = "claimed"  # claimed by a target; our engine has not offered it
    OFFERED = "offered"  # our engine waits for its end
    FAILED = "failed"  # the engine is notified; a lane still reads its pages
    RELEASED = "released"  # the pages are released; a target has not answered yet
    ENDED = "ended"


class SourceRoomEvent(_Step):
    """Events of a room at its prefill rank."""

    OFFER = "offer"
    FAIL = "fail"
    RELEASE = "release"
    END = "end"


SOURCE_ROOM: Mapping[tuple[SourceRoomState, SourceRoomEvent], SourceRoomState] = {
    (SourceRoomState.CLAIMED, SourceRoomEvent.OFFER): SourceRoomState.OFFERED,
    (SourceRoomState.OFFERED, SourceRoomEvent.OFFER): SourceRoomState.OFFERED,
    (SourceRoomState.OFFERED, SourceRoomEvent.END): SourceRoomState.ENDED,
    (SourceRoomState.CLAIMED, SourceRoomEvent.FAIL): SourceRoomState.FAILED,
    (SourceRoomState.OFFERED, SourceRoomEvent.FAIL): SourceRoomState.FAILED,
    (SourceRoomState.FAILED, SourceRoomEvent.RELEASE): SourceRoomState.RELEASED,
    (SourceRoomState.RELEASED, SourceRoomEvent.END): SourceRoomState.ENDED,
}


class TargetRoomState(_Step):
    """A room as its decode rank sees it."""

    OPEN = "open"  # our engine waits for its end
    DONE = "done"  # the engine is notified; a source that sends nothing has not answered yet
    FAILED = "failed"  # the engine is notified; a writer may still write its pages
    RELEASED = "released"  # the pages are released; a writer may still write ring memory
    ENDED = "ended"


class TargetRoomEvent(_Step):
    """Events of a room at its decode rank."""

    FINISH = "finish"
    FAIL = "fail"
    RELEASE = "release"
    END = "end"


TARGET_ROOM: Mapping[tuple[TargetRoomState, TargetRoomEvent], TargetRoomState] = {
    (TargetRoomState.OPEN, TargetRoomEvent.FINISH): TargetRoomState.DONE,
    (TargetRoomState.OPEN, TargetRoomEvent.FAIL): TargetRoomState.FAILED,
    (TargetRoomState.FAILED, TargetRoomEvent.RELEASE): TargetRoomState.RELEASED,
    (TargetRoomState.DONE, TargetRoomEvent.END): TargetRoomState.ENDED,
    (TargetRoomState.RELEASED, TargetRoomEvent.END): TargetRoomState.ENDED,
}

S = TypeVar("S")
V = TypeVar("V")


def step(table: Mapping[tuple[S, V], S], state: S, event: V) -> S:
    """Return the state after `event`. Asserts that the table has the transition."""
    following = table.get((state, event))
    assert following is not None, f"{event} cannot happen in {state}"
    return following
