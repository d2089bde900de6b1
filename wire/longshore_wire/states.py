"""The transition tables of slabs, pairs and rooms. `room` obeys them; a missing key is an error of ours.

A room is one request's transfer. A pair is one room between one source rank and one target rank. A slab is one piece of a
pair. Both workers keep a state of their own for each of the three.
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


class SourcePairState(Enum):
    """A pair as its source sees it."""

    OPEN = "open"
    TELLING = "telling"  # given up here; the target has not answered yet
    TOLD = "told"  # given up here; the target knows
    DRAINING = "draining"  # given up by the target; a lane may still hold a slab
    CLOSED = "closed"  # the target has our word that no write is open, or is gone


class SourcePairEvent(Enum):
    """What happens to a pair at its source."""

    GIVE_UP = "give up"  # this side fails the room
    ANSWER = "answer"  # the target has heard of it
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
    # The target repeats its abort until it has our word, which may get lost.
    (SourcePairState.CLOSED, SourcePairEvent.ABORT): SourcePairState.DRAINING,
    **{(state, SourcePairEvent.LOSE): SourcePairState.CLOSED for state in SourcePairState},
}


class TargetPairState(Enum):
    """A pair as its target sees it."""

    WAITING = "waiting"  # not claimed yet: the source or the wire to it is not known
    CLAIMED = "claimed"  # the source has not answered the claim yet
    OPEN = "open"  # the source has said how it cuts
    COMPLETE = "complete"  # every slab is in the pages
    ABORTING = "aborting"  # given up; its writer may still write memory of ours
    CLOSED = "closed"  # given up; its writer will not write any more


class TargetPairEvent(Enum):
    """What happens to a pair at its target."""

    CLAIM = "claim"
    CUT = "cut"  # the source answers the claim
    FINISH = "finish"  # the last slab is in the pages
    ABORT = "abort"  # the room has failed, and the writer has memory of ours
    CLOSE = "close"  # the room has failed or does not need this source, and the writer has no memory of ours
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


class SourceRoomState(Enum):
    """A room as its prefill rank sees it."""

    CLAIMED = "claimed"  # by a target; our engine has not offered it
    OFFERED = "offered"  # our engine waits for its end
    FAILED = "failed"  # the engine was told; a lane still reads its pages
    RELEASED = "released"  # the pages are the engine's again; a target has still to hear of it
    ENDED = "ended"


class SourceRoomEvent(Enum):
    """What happens to a room at its prefill rank."""

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


class TargetRoomState(Enum):
    """A room as its decode rank sees it."""

    OPEN = "open"  # our engine waits for its end
    DONE = "done"  # the engine was told; a source that sends nothing has not answered yet
    FAILED = "failed"  # the engine was told; a writer may still write its pages
    RELEASED = "released"  # the pages are the engine's again; a writer may still write ring memory
    ENDED = "ended"


class TargetRoomEvent(Enum):
    """What happens to a room at its decode rank."""

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
    """Return the state after `event`. A missing key is a mistake of ours: it asserts."""
    following = table.get((state, event))
    assert following is not None, f"{event} cannot happen in {state}"
    return following
