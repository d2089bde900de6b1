"""Records all that an engine has open at its agent, so that it can be repeated to a new agent. Pure: no I/O, no clock.

Held by `core.Core`. A half of a room is open from its first offer or its claim until RELEASED.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from longshore_client.errors import BUSY_HINT_S, Busy
from longshore_wire.engine_messages import Half, Offer, Receive, RoomEvent, RoomEventKind
from longshore_wire.errors import Reason, RoomError

# Open halves: far more than an agent accepts, so that the agent's own limit applies first.
HALVES_MAX = 65_536


class HalfKey(NamedTuple):
    """One half of one room of one pool; `instance` is the prefill instance."""

    half: Half
    instance: str
    room: int
    pool: int


class Resume(NamedTuple):
    """A `send` of several offers of which the agent accepted only the first ones."""

    first_token: int
    end_token: int
    last: bool
    accepted_end_token: int


Messages = tuple[Offer, ...] | tuple[Receive, ...]


@dataclass(slots=True)
class OpenHalf:
    """One half, with the messages to repeat to a new agent, in their original order."""

    key: HalfKey
    accepted: list[Messages] = field(default_factory=list)
    waiting: dict[int, Messages] = field(default_factory=dict)  # by request; sent and unanswered
    unknown: dict[int, Messages] = field(default_factory=dict)  # by request; unanswered, the caller no longer waits
    cancelled: bool = False
    ended: RoomEvent | None = None
    resume: Resume | None = None


class Ledger:
    """The open halves of one client, in the order in which they were opened."""

    def __init__(self) -> None:
        self._halves: dict[HalfKey, OpenHalf] = {}
        self._requests: dict[int, HalfKey] = {}
        self.stale_event_count = 0

    def __len__(self) -> int:
        return len(self._halves)

    def __iter__(self) -> Iterator[OpenHalf]:
        return iter(list(self._halves.values()))

    def get(self, key: HalfKey) -> OpenHalf | None:
        """Return the open half, or None."""
        return self._halves.get(key)

    def find(self, half: Half, instance: str | None, room: int, pool: int) -> list[HalfKey]:
        """Return the keys of matching open halves. `instance` None matches every instance."""
        if instance is not None:
            key = HalfKey(half, instance, room, pool)
            return [key] if key in self._halves else []
        return [key for key in self._halves if (key.half, key.room, key.pool) == (half, room, pool)]

    def sent(self, key: HalfKey, request: int, messages: Messages) -> None:
        """Record the messages of `request` before they are sent.

        Raises:
            RoomError: the half has ended or was cancelled, or it is a claim that is already open.
            Busy: too many halves are open.
        """
        found = self._halves.get(key)
        if found is None:
            if len(self._halves) >= HALVES_MAX:
                raise Busy(f"{HALVES_MAX} halves of rooms are open: let some end first", retry_after_s=BUSY_HINT_S)
            found = self._halves[key] = OpenHalf(key)
        else:
            _check_open(found)
        found.waiting[request] = messages
        self._requests[request] = key

    def answered(self, request: int, *, accepted: bool) -> None:
        """Record the agent's answer. A refused request is dropped, and its half too if that has no other request."""
        key = self._requests.pop(request, None)
        found = self._halves.get(key) if key is not None else None
        if found is None:
            return
        messages = found.waiting.pop(request, None) or found.unknown.pop(request, None)
        if accepted:
            # An ended half is never repeated, so its pages need not be kept.
            if messages is not None and found.ended is None:
                found.accepted.append(messages)
        elif not (found.accepted or found.waiting or found.unknown or found.ended):
            del self._halves[found.key]

    def gave_up(self, request: int) -> None:
        """Record that the caller no longer waits. Until the agent answers or is gone, it may have the request."""
        key = self._requests.get(request)
        found = self._halves.get(key) if key is not None else None
        if found is not None and request in found.waiting:
            found.unknown[request] = found.waiting.pop(request)

    def stopped(self, key: HalfKey, resume: Resume) -> None:
        """Record the accepted part of a `send` that the agent did not accept whole, if its half is open."""
        found = self._halves.get(key)
        if found is not None and resume.accepted_end_token > resume.first_token:
            found.resume = resume

    def resumed(self, key: HalfKey, first_token: int, end_token: int, *, last: bool) -> int | None:
        """Return the token up to which an equal earlier `send` was accepted. Drops the record, equal or not."""
        found = self._halves.get(key)
        if found is None or found.resume is None:
            return None
        resume, found.resume = found.resume, None
        return resume.accepted_end_token if resume[:3] == (first_token, end_token, last) else None

    def cancelled(self, key: HalfKey) -> None:
        """Record that the engine cancelled a half."""
        self._halves[key].cancelled = True

    def take_event(self, event: RoomEvent) -> bool:
        """Record the agent's event; return whether to report it to the engine: only once, and only for an open half."""
        found = self._halves.get(HalfKey(event.half, event.instance, event.room, event.pool))
        if found is None or (found.ended is not None and event.kind is not RoomEventKind.RELEASED):
            self.stale_event_count += 1
            return False
        if event.kind is RoomEventKind.RELEASED:
            self._forget(found)
        else:
            found.ended = event
            found.accepted.clear()
        return True

    def end(self, key: HalfKey, reason: Reason, text: str) -> list[RoomEvent]:
        """Close a half that no agent knows any more; return the events to report to the engine, in order."""
        found = self._halves.get(key)
        if found is None:
            return []
        self._forget(found)
        released = RoomEvent(*key, RoomEventKind.RELEASED)
        if found.ended is not None:
            return [released]
        return [RoomEvent(*key, RoomEventKind.FAILED, reason, text), released]

    def agent_replaced(self) -> list[RoomEvent]:
        """Close the halves not to repeat to a new worker, after the old one has died. Returns the engine's events."""
        events: list[RoomEvent] = []
        for found in self:
            for request in found.unknown:
                self._requests.pop(request, None)
            found.unknown.clear()
            if found.ended is not None or found.cancelled:
                events += self.end(found.key, Reason.CANCELLED, "the engine cancelled it before the worker was lost")
            elif not (found.accepted or found.waiting):
                events += self.end(found.key, Reason.WORKER_LOST, "the worker was lost before it had answered")
        return events

    def replay(self) -> list[tuple[HalfKey, Messages]]:
        """Return the messages for a new agent, in order: all accepted ones of each open half."""
        return [(found.key, messages) for found in self if found.ended is None for messages in found.accepted]

    def _forget(self, found: OpenHalf) -> None:
        del self._halves[found.key]
        for request in (*found.waiting, *found.unknown):
            self._requests.pop(request, None)


def _check_open(found: OpenHalf) -> None:
    key = found.key
    if found.ended is not None and found.ended.kind is RoomEventKind.FAILED:
        raise RoomError(f"room {key.room} has failed: {found.ended.text}", reason=found.ended.reason)
    if found.ended is not None:
        raise RoomError(f"room {key.room} is done: use a new id for a new request", reason=Reason.ROOM_REUSED)
    if found.cancelled:
        raise RoomError(f"room {key.room} was cancelled: use a new id for a new request", reason=Reason.CANCELLED)
    if key.half is Half.TARGET:
        raise RoomError(f"room {key.room} is claimed already: use one claim a room", reason=Reason.ROOM_REUSED)
