"""Carries out the scheduler's orders in a rank, through the client, and reports the requests that have ended.

Called by an engine's connector in each rank's process, by the model's thread. That thread never waits for the agent:
another thread makes the calls, and events are read from memory. Knows no engine and no tensors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from longshore_client.client import Client
from longshore_client.errors import Busy, ClientClosed
from longshore_engines.calls import CALL_TIMEOUT_MIN_S, CallThread, cancel
from longshore_engines.handover import Claim, Fail, Offer, Order, ReportSent, TakeBack, Withdraw
from longshore_wire.engine_messages import Half, RoomEvent, RoomEventKind
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import TargetMemory

_log = logging.getLogger("vllm.longshore")

# A worker's restart takes seconds. A call that waits for longer delays those behind it.
CALL_TIMEOUT_S = 30.0
# Longest wait for one event while pages are taken back, and interval of the warnings that this takes long.
TAKE_BACK_LOOK_S = 0.05
TAKE_BACK_WARNING_S = 10.0

_RoomKey = tuple[Half, str, int]


class Transfer(NamedTuple):
    """One half of a room that has ended, for statistics. `failure` is empty if it succeeded."""

    half: Half
    duration_s: float
    bytes_moved: int
    failure: str


@dataclass(slots=True)
class Ended:
    """The requests that have ended since the last `poll`. Their pages belong to the engine again."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # those of `received` whose pages lack the claimed tokens
    transfers: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """A half of a room, from its order until no process uses its pages.

    Attributes:
        order: the claim, or the last offer so far.
        since_s: time of that order.
        refused: a call was refused for good, or the room has ended, so no other call is made.
        reported: of a prefill half: the engine keeps its pages until it hears that the half has ended.
    """

    order: Offer | Claim
    since_s: float
    done: bool = False
    refused: bool = False
    reported: bool = False
    withdrawn: bool = False
    unwanted: bool = False  # withdrawn because the engine no longer needs it: no failure
    unclear: bool = False  # a call has failed, so the agent may or may not have it
    failure: str = ""
    bytes_moved: int = 0

    @property
    def half(self) -> Half:
        return Half.SOURCE if isinstance(self.order, Offer) else Half.TARGET


class _Answer(NamedTuple):
    """From the calling thread to the model's: the call for this room has failed."""

    key: _RoomKey
    text: str


class RankRooms:
    """The open rooms of one rank. Only the model's thread may call its public methods.

    Args:
        client: connected, with its pool registered.
        limit_s: a room that is not done after this time is cancelled. Its pages return when no process uses them.
    """

    def __init__(self, client: Client, limit_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._open: dict[_RoomKey, _Open] = {}
        self._by_request: dict[str, _RoomKey] = {}
        self._ended = Ended()
        self._answers: deque[_Answer] = deque()
        self._calls = CallThread("longshore-calls")

    @property
    def open_count(self) -> int:
        """The number of halves of rooms that have not ended."""
        return len(self._open)

    def carry_out(self, orders: Sequence[Order], fence: Callable[[], None] | None = None) -> None:
        """Begin the scheduler's orders; return at once.

        Args:
            fence: returns after the device has done all earlier work; called in the thread that makes calls.
        """
        for order in orders:
            match order:
                case Offer() | Claim():
                    self._begin(order, fence)
                case Withdraw():
                    self._give_up(order.request_id)
                case ReportSent():
                    found = self._open.get(self._source_key(order.room))
                    if found is not None and found.order.request_id == order.request_id:
                        found.reported = True
                    else:
                        self._ended.sent.add(order.request_id)
                case Fail():
                    _log.error("request %s: %s", order.request_id, order.text)
                    self._ended.received.add(order.request_id)
                    self._ended.failed.add(order.request_id)
                    self._ended.transfers.append(Transfer(Half.TARGET, 0.0, 0, order.text))

    def take_back(self, orders: Sequence[Order]) -> None:
        """Cancel the rooms of all `TakeBack` orders, and wait until no process uses their pages.

        If the agent is away, this waits for the next one. A room that could still be done would be read from pages that
        the engine has given to another request.
        """
        wanted = [order.request_id for order in orders if isinstance(order, TakeBack)]
        keys = [key for request_id in wanted if (key := self._give_up(request_id)) is not None]
        begin_s = warned_s = time.monotonic()
        while any(key in self._open for key in keys):
            self._hear(TAKE_BACK_LOOK_S)
            now_s = time.monotonic()
            if now_s - warned_s >= TAKE_BACK_WARNING_S:
                warned_s = now_s
                _log.warning("a preempted prompt waits for the agent for %.0f s to release its pages", now_s - begin_s)

    def poll(self, pause_s: float = 0.0) -> Ended:
        """Return the requests that have ended since the last call.

        Args:
            pause_s: how long to wait for an end if rooms are open; 0: do not wait.
        """
        self._hear(pause_s)
        ended, self._ended = self._ended, Ended()
        return ended

    def close(self) -> None:
        """Leave the agent, which then releases all rooms and pages."""
        self._client.close()
        self._calls.close()

    # -- the model's thread ----------------------------------------------------------------------------------------

    def _hear(self, pause_s: float) -> None:
        """Take the answers of calls, and the events of rooms."""
        now_s = self._clock_s()
        while self._answers:
            answer = self._answers.popleft()
            found = self._open.get(answer.key)
            if found is not None:
                found.failure = found.failure or answer.text
                found.unclear = True
        try:
            for event in self._client.poll(pause_s if self._open else 0.0):
                self._take(event, now_s)
        except ClientClosed:
            # When the connection closed, the agent released everything of this rank.
            for key, found in list(self._open.items()):
                found.failure = found.failure or "the connection to the agent was closed"
                self._end(key, found, now_s)
        self._look_at_slow(now_s)

    def _begin(self, order: Offer | Claim, fence: Callable[[], None] | None) -> None:
        if isinstance(order, Offer):
            key = self._source_key(order.room)
        else:
            key = (Half.TARGET, order.endpoint.instance, order.room)
        found, now_s = self._open.get(key), self._clock_s()
        if found is not None and found.order.request_id != order.request_id:
            # A router has used one room for two prompts. The second request cannot have it.
            self._fail_twin(order)
            return
        if isinstance(order, Offer) and order.first_token:
            if found is None or found.withdrawn:
                # It has ended, such as by decode's cancellation, while the engine computes the rest.
                return
            del self._open[key]
            found.order, found.since_s = order, now_s
        elif found is None:
            found = _Open(order, now_s)
        else:
            self._fail_twin(order)
            return
        self._open[key] = found
        if order.pages:
            self._by_request[order.request_id] = key
        deadline_s = time.monotonic() + CALL_TIMEOUT_S

        def call() -> None:
            if fence is not None:
                fence()
            self._insist(key, found, order, deadline_s)

        self._calls.put(call)

    def _fail_twin(self, order: Offer | Claim) -> None:
        if not order.pages:
            return
        _log.error(
            "request %s: room %d is open at this rank already: a router must use each room for one prompt",
            order.request_id,
            order.room,
        )
        if isinstance(order, Claim):
            self._ended.received.add(order.request_id)
            self._ended.failed.add(order.request_id)

    def _source_key(self, room: int) -> _RoomKey:
        return Half.SOURCE, self._client.instance, room

    def _give_up(self, request_id: str) -> _RoomKey | None:
        """Cancel the open room of a request, which the engine no longer needs; return the room's key."""
        key = self._by_request.get(request_id)
        if key is not None:
            self._open[key].unwanted = True
            self._withdraw(key)
        return key

    def _withdraw(self, key: _RoomKey) -> None:
        found = self._open[key]
        if not found.withdrawn:
            found.withdrawn = True
            self._calls.put(lambda: cancel(self._client, *key))

    def _take(self, event: RoomEvent, now_s: float) -> None:
        key = (event.half, event.instance, event.room)
        found = self._open.get(key)
        if found is None:
            return
        match event.kind:
            case RoomEventKind.DONE:
                found.done, found.bytes_moved = True, event.bytes_moved
            case RoomEventKind.FAILED:
                found.failure = found.failure or f"{event.reason.name}: {event.text}"
            case RoomEventKind.RELEASED:
                self._end(key, found, now_s)

    def _look_at_slow(self, now_s: float) -> None:
        for key, found in list(self._open.items()):
            if found.unclear and not self._client.is_open(key[2], key[0], key[1]):
                self._end(key, found, now_s)
        for key, found in self._open.items():
            # Rooms are in the order of opening, so the first one with time left ends the search.
            if now_s - found.since_s < self._limit_s:
                break
            if not (found.done or found.withdrawn):
                found.failure = found.failure or f"it was not done within {self._limit_s:g} s"
                self._withdraw(key)

    def _end(self, key: _RoomKey, found: _Open, now_s: float) -> None:
        del self._open[key]
        # A chunk that is still queued would open the room again at a restarted worker.
        found.refused = True
        order, failure = found.order, "" if found.done else found.failure or "it ended without a reason"
        # An empty claim only tells prefill not to wait. vLLM requests one even for rooms that were claimed.
        unwanted = found.unwanted or not order.pages
        if order.pages and not (failure and unwanted):
            self._ended.transfers.append(Transfer(found.half, now_s - found.since_s, found.bytes_moved, failure))
        if failure:
            _log.log(
                logging.DEBUG if unwanted else logging.WARNING,
                "request %s, room %d of %s: %s",
                order.request_id,
                order.room,
                key[1],
                failure,
            )
        if order.pages:
            self._by_request.pop(order.request_id, None)
        if found.reported:
            self._ended.sent.add(order.request_id)
        if isinstance(order, Claim) and order.pages:
            self._ended.received.add(order.request_id)
            if failure:
                self._ended.failed.add(order.request_id)

    # -- the thread that makes calls -------------------------------------------------------------------------------

    def _insist(self, key: _RoomKey, found: _Open, order: Offer | Claim, deadline_s: float) -> None:
        """Make a call of a room, and repeat it while the agent is busy or away. Report a final failure."""
        while not found.refused:
            left_s = max(CALL_TIMEOUT_MIN_S, deadline_s - time.monotonic())
            try:
                self._tell(order, left_s)
            except Busy as error:
                if time.monotonic() + error.retry_after_s <= deadline_s:
                    time.sleep(error.retry_after_s)
                    continue
                self._call_failed(key, found, str(error))
            except LongshoreError as error:
                self._call_failed(key, found, str(error))
            return

    def _tell(self, order: Offer | Claim, timeout_s: float) -> None:
        if isinstance(order, Offer):
            chunk = (order.room, order.pages, order.first_token, order.end_token)
            self._client.send(*chunk, last=order.last, timeout_s=timeout_s)
        else:
            where = (order.room, order.endpoint, order.pages, order.first_token, order.end_token)
            self._client.receive(*where, memory=TargetMemory.DEVICE, timeout_s=timeout_s)

    def _call_failed(self, key: _RoomKey, found: _Open, text: str) -> None:
        found.refused = True
        # If a part of the call was accepted, events of its end follow; otherwise the room is not open at the client.
        cancel(self._client, *key)
        self._answers.append(_Answer(key, text))
