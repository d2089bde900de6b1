"""Records calls to the agent and all that they have opened, so that it can be repeated to a new agent.

`client.Client` makes calls, `core.Core` sends and settles them and holds the ledger. A half of a room is open from its
first offer or its claim until RELEASED. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from longshore_client.errors import BUSY_HINT_S, Busy
from longshore_wire.engine_messages import (
    TO_AGENT,
    Accepted,
    Ask,
    Cancel,
    Half,
    Offer,
    Receive,
    Refused,
    RegisterPool,
    RoomEvent,
    RoomEventKind,
    UnregisterPool,
)
from longshore_wire.errors import Reason, RoomError
from longshore_wire.names import room_name

# Open halves: far more than an agent accepts, so that the agent's own limit applies first.
HALVES_MAX = 65_536


class HalfKey(NamedTuple):
    """One half of one room; `instance` is the prefill instance."""

    half: Half
    instance: str
    room: int


class Resume(NamedTuple):
    """A `send` of several offers of which the agent accepted only the first ones."""

    ranges: tuple[tuple[int, int, int], ...]  # (cache, first token, end token)
    last: bool
    accepted_count: int  # of its messages


Messages = tuple[Offer | Ask | Receive | RegisterPool | UnregisterPool | Cancel, ...]


class Outgoing(NamedTuple):
    """One message for the agent's socket. Its descriptors are sent with it and stay open."""

    data: bytes
    descriptors: tuple[int, ...] = ()


class Call:
    """One call to the agent: its messages, and the answer when it has arrived.

    Attributes:
        number: of its request; unique in the client's life, so the call can be repeated to a new agent.
        message: the first of its messages; the others are further parts of the same request.
        outgoing: its messages as bytes; empty once it is settled.
        key: the half of an offer, an ask or a claim.
        again: True: repeats to a new agent what an earlier one accepted; no caller waits for it.
        given_up: the caller no longer waits.
        done: its half was reported as done before the answer arrived.
        answer: None: not yet, or never.
    """

    def __init__(
        self,
        messages: Messages,
        *,
        key: HalfKey | None = None,
        descriptors: tuple[int, ...] = (),
        again: bool = False,
    ) -> None:
        """Encode the messages. Raises CodecError if one is too long."""
        self.message = messages[0]
        self.messages = messages
        self.number = self.message.request
        self.descriptors = descriptors
        self.outgoing = [Outgoing(TO_AGENT.encode(message)) for message in messages]
        if descriptors:
            self.outgoing[0] = Outgoing(self.outgoing[0].data, descriptors)
        self.key = key
        self.again = again
        self.given_up = False
        self.done = False
        self.settled = False
        self.answer: Accepted | Refused | None = None

    @property
    def outlives_agent(self) -> bool:
        """Whether it must be repeated to a new agent. Otherwise the death of the worker fulfils it."""
        return not isinstance(self.message, UnregisterPool | Cancel)


@dataclass(slots=True)
class OpenHalf:
    """One half, with the messages to repeat to a new agent, in their original order.

    Attributes:
        is_asked: the engine has asked for the room, and not claimed it.
        is_offered: it has been told that prefill has offered the room.
    """

    key: HalfKey
    accepted: list[Messages] = field(default_factory=list)
    unanswered: dict[int, Call] = field(default_factory=dict)  # by number; some callers may no longer wait
    is_asked: bool = False
    is_offered: bool = False
    cancelled: bool = False
    ended: RoomEvent | None = None
    resume: Resume | None = None


class Ledger:
    """The open halves of one client, in the order in which they were opened."""

    def __init__(self) -> None:
        self._halves: dict[HalfKey, OpenHalf] = {}
        self.stale_event_count = 0

    def __len__(self) -> int:
        return len(self._halves)

    def __iter__(self) -> Iterator[OpenHalf]:
        return iter(list(self._halves.values()))

    def get(self, key: HalfKey) -> OpenHalf | None:
        """Return the open half, or None."""
        return self._halves.get(key)

    def cancel(self, half: Half, instance: str | None, room: int) -> list[HalfKey]:
        """Mark open halves as cancelled and return their keys. `instance` None matches every instance."""
        if instance is not None:
            keys = [key for key in (HalfKey(half, instance, room),) if key in self._halves]
        else:
            keys = [key for key in self._halves if (key.half, key.room) == (half, room)]
        for key in keys:
            self._halves[key].cancelled = True
        return keys

    def sent(self, key: HalfKey, call: Call) -> None:
        """Record a call on a half before its messages are sent.

        Raises:
            RoomError: the half has ended or was cancelled, or it is an ask or a claim of a room that is claimed already.
            Busy: too many halves are open.
        """
        found = self._halves.get(key)
        if found is None:
            if len(self._halves) >= HALVES_MAX:
                raise Busy(f"{HALVES_MAX} halves of rooms are open: let some end first", retry_after_s=BUSY_HINT_S)
            found = self._halves[key] = OpenHalf(key)
        else:
            _check_open(found, call)
        found.is_asked = isinstance(call.message, Ask)
        found.unanswered[call.number] = call

    def answered(self, key: HalfKey, call: Call, *, accepted: bool) -> None:
        """Record the agent's answer. A refused call is dropped, and its half too if that has no other call."""
        found = self._halves.get(key)
        if found is None or found.unanswered.pop(call.number, None) is None:
            return  # the half of this call was closed before
        if accepted:
            # An ended half is never repeated, so its pages need not be kept.
            if found.ended is None:
                if isinstance(call.message, Receive):
                    # A claim replaces the ask for its room.
                    found.accepted.clear()
                found.accepted.append(call.messages)
        elif found.accepted and isinstance(call.message, Receive):
            found.is_asked = True
        elif not (found.accepted or found.unanswered or found.ended):
            del self._halves[key]

    def stopped(self, key: HalfKey, resume: Resume) -> None:
        """Record the accepted part of a `send` that the agent did not accept whole, if its half is open."""
        found = self._halves.get(key)
        if found is not None and resume.accepted_count:
            found.resume = resume

    def resumed(self, key: HalfKey, ranges: tuple[tuple[int, int, int], ...], *, last: bool) -> int:
        """Return how many messages of an equal earlier `send` were accepted. Drops the record, equal or not."""
        found = self._halves.get(key)
        if found is None or found.resume is None:
            return 0
        resume, found.resume = found.resume, None
        return resume.accepted_count if resume[:2] == (ranges, last) else 0

    def take_event(self, event: RoomEvent) -> bool:
        """Record the agent's event; return whether to report it to the engine: only once, and only for an open half."""
        found = self._halves.get(HalfKey(event.half, event.instance, event.room))
        is_late = found is not None and found.ended is not None and event.kind is not RoomEventKind.RELEASED
        is_over = found is not None and (found.is_offered or found.cancelled or not found.is_asked)
        if found is None or is_late or (is_over and event.kind is RoomEventKind.OFFERED):
            self.stale_event_count += 1
            return False
        if event.kind is RoomEventKind.OFFERED:
            found.is_offered = True
        elif event.kind is RoomEventKind.RELEASED:
            del self._halves[found.key]
        else:
            found.ended = event
            found.accepted.clear()
        return True

    def end(self, key: HalfKey, reason: Reason, text: str) -> list[RoomEvent]:
        """Close a half that no agent knows any more; return the events to report to the engine, in order."""
        found = self._halves.pop(key, None)
        if found is None:
            return []
        released = RoomEvent(*key, RoomEventKind.RELEASED)
        if found.ended is not None:
            return [released]
        return [RoomEvent(*key, RoomEventKind.FAILED, reason, text), released]

    def agent_replaced(self) -> list[RoomEvent]:
        """Close the halves not to repeat to a new worker, after the old one has died. Returns the engine's events."""
        events: list[RoomEvent] = []
        for found in self:
            # Only the old worker may have received a call that its caller has given up.
            found.unanswered = {call.number: call for call in found.unanswered.values() if not call.given_up}
            if found.ended is not None or found.cancelled:
                events += self.end(found.key, Reason.CANCELLED, "the engine cancelled it before the worker was lost")
            elif not (found.accepted or found.unanswered):
                events += self.end(found.key, Reason.WORKER_LOST, "the worker was lost before it had answered")
        return events

    def replay(self) -> list[tuple[HalfKey, Messages]]:
        """Return the messages for a new agent, in order: all accepted ones of each open half."""
        return [(found.key, messages) for found in self if found.ended is None for messages in found.accepted]


def _check_open(found: OpenHalf, call: Call) -> None:
    key = found.key
    if found.ended is not None and found.ended.kind is RoomEventKind.FAILED:
        raise RoomError(f"room {room_name(key.room)} has failed: {found.ended.text}", reason=found.ended.reason)
    if found.ended is not None:
        raise RoomError(
            f"room {room_name(key.room)} is done: use a new id for a new request", reason=Reason.ROOM_REUSED
        )
    if found.cancelled:
        raise RoomError(
            f"room {room_name(key.room)} was cancelled: use a new id for a new request", reason=Reason.CANCELLED
        )
    if key.half is Half.TARGET and not (found.is_asked and isinstance(call.message, Receive)):
        raise RoomError(
            f"room {room_name(key.room)} is claimed already: use one claim a room", reason=Reason.ROOM_REUSED
        )
