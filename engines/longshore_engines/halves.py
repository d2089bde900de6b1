"""The open halves of rooms of one rank: prompts that are offered chunk by chunk, and claims.

Called by connectors. No call waits for the agent: a thread makes the calls one after the other. One thread takes events: the
engine's, by `take`, or one that `listen` starts. Knows no engine and no tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from longshore_client.arguments import CacheTokens
from longshore_client.client import Client
from longshore_client.errors import AgentLost, ArgumentError, Busy, CallTimeout, ClientClosed
from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.engine_messages import Endpoint, Half, RoomEvent, RoomEventKind
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import TargetMemory
from longshore_wire.names import room_name

# A worker's restart takes seconds. A call that waits for longer delays those behind it.
CALL_LIMIT_S = 30.0
# Pause between two attempts while the agent is away.
AWAY_PAUSE_S = 0.1
# The shortest timeout of a call, even if earlier calls have used up its time.
_CALL_TIMEOUT_MIN_S = 0.1
# How long the thread of `listen` waits for an event. It bounds the time until it looks at calls without an answer.
_EVENT_WAIT_S = 1.0

Key = tuple[Half, str, int]


@dataclass(eq=False, slots=True)
class OpenHalf:
    """One half of a room, from its first call until no process uses its pages. Only `Halves` writes it.

    Attributes:
        ended: no process uses its pages. Before that the engine must not reuse them.
        done: all tokens have moved.
        failure: why it failed or was cancelled; empty if it did not.
        cancelled: it was cancelled, so no further chunk is offered.
        refused: a call has failed for good, so that no other is made.
        accepted: the agent has taken a call, so that an event tells its end.
        is_asked: it waits for prefill's offer, and has no pages.
        was_asked: it was claimed after its ask. An event may still be of the ask.
        is_claiming: the call that claims it has not returned.
        touched_s: time of the engine's last call for it, by `time.monotonic`.
    """

    half: Half
    instance: str
    room: int
    touched_s: float
    ended: bool = False
    done: bool = False
    failure: str = ""
    cancelled: bool = False
    refused: bool = False
    accepted: bool = False
    is_asked: bool = False
    was_asked: bool = False
    is_claiming: bool = False
    bytes_moved: int = 0

    @property
    def key(self) -> Key:
        """By which events name it."""
        return self.half, self.instance, self.room


@dataclass(slots=True)
class _Table:
    """The open halves. `lock` guards the table and every field of its halves.

    Attributes:
        unclear: those of which a call has failed, so that the agent may or may not have them.
        ended: those that have ended since the last `take`.
        offered: those whose rooms prefill has offered since the last `take_offered`.
        is_closed: the connection is closed.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    halves: dict[Key, OpenHalf] = field(default_factory=dict)
    unclear: set[OpenHalf] = field(default_factory=set)
    ended: list[OpenHalf] = field(default_factory=list)
    offered: list[OpenHalf] = field(default_factory=list)
    is_closed: bool = False


class CallThread:
    """A thread that makes the calls given to it, in their order, so that an engine's threads never wait for the agent."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        self._log = log
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._call_all, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Make a call after all earlier ones; return at once."""
        self._calls.put(call)

    def close(self) -> None:
        """Return when all calls are made."""
        self._calls.put(None)
        self._thread.join()

    def _call_all(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001 -- logged with its traceback
                # The thread must survive, because it makes the calls of every other request. Expected errors are
                # handled in the call.
                self._log.exception("a call to the agent or to a peer failed")


class Halves:
    """The open halves of one rank.

    Args:
        client: connected, with its pool registered. Nothing else may call its `poll` and `wait`.
        log: of the engine's connector.
        waits_for_agent: repeat calls while the agent is away. An engine that can compute a prompt itself does not wait.
    """

    def __init__(self, client: Client, log: logging.Logger, *, waits_for_agent: bool = False) -> None:
        self._client = client
        self._repeated = (Busy, AgentLost) if waits_for_agent else (Busy,)
        self._table = _Table()
        self._calls = CallThread("longshore-calls", log)
        self._events: threading.Thread | None = None

    @property
    def open_count(self) -> int:
        """The number of halves that have not ended."""
        with self._table.lock:
            return len(self._table.halves)

    def offer(
        self,
        room: int,
        pages: Sequence[int],
        first_token: int,
        end_token: int,
        *,
        last: bool,
        others: Sequence[CacheTokens] = (),
        binding: Binding = UNBOUND,
        fence: Callable[[], None] | None = None,
        half: OpenHalf | None = None,
    ) -> OpenHalf:
        """Offer the next chunk of a room; return its half.

        Args:
            pages, first_token, end_token, others: as of `Client.send`.
            fence: returns after the device has computed the chunk; called in the thread that makes calls.
            half: that of the first chunk; None: this is the first. If it has ended or was cancelled, there is no call.
        Raises:
            ArgumentError: the first chunk of a room that is open.
        """
        key = (Half.SOURCE, self._client.instance, room)
        found = self._opened(key) if half is None else half
        if found.ended or found.cancelled:
            return found
        found.touched_s = time.monotonic()

        def send(timeout_s: float) -> None:
            where = (room, pages, first_token, end_token)
            self._client.send(
                *where,
                last=last,
                prompt=binding.prompt,
                capability=binding.capability,
                timeout_s=timeout_s,
                others=others,
            )

        self._put(found, send, fence)
        return found

    def ask(self, room: int, endpoint: Endpoint, binding: Binding = UNBOUND) -> OpenHalf:
        """Ask prefill to say when it has offered a room; return our half, which `claim` takes on.

        Nothing is lost if the ask fails, so it is not repeated while the agent is busy: later calls would wait for it.

        Raises:
            ArgumentError: this rank has asked for the room, or claimed it, already.
        """
        found = self._opened((Half.TARGET, endpoint.instance, room))
        found.is_asked = True

        def ask(timeout_s: float) -> None:
            self._client.ask(
                room, endpoint, memory=TargetMemory.DEVICE, capability=binding.capability, timeout_s=timeout_s
            )

        self._put(found, ask, None, insists=False)
        return found

    def claim(
        self,
        room: int,
        endpoint: Endpoint,
        pages: Sequence[int],
        first_token: int,
        end_token: int,
        fence: Callable[[], None] | None = None,
        binding: Binding = UNBOUND,
        others: Sequence[CacheTokens] = (),
    ) -> OpenHalf:
        """Claim tokens [first_token, end_token) of a room into these pages; return its half.

        Args:
            others: as of `Client.receive`.
            fence: as of `offer`.
        Raises:
            ArgumentError: this rank has claimed the room already.
        """
        found = self._opened((Half.TARGET, endpoint.instance, room), takes_asked=True)

        def receive(timeout_s: float) -> None:
            where = (room, endpoint, pages, first_token, end_token)
            self._client.receive(
                *where,
                memory=TargetMemory.DEVICE,
                prompt=binding.prompt,
                capability=binding.capability,
                timeout_s=timeout_s,
                others=others,
            )

        self._put(found, receive, fence, ends_ask=found.was_asked)
        return found

    def cancel(self, half: OpenHalf, text: str) -> None:
        """Cancel a half. Its pages are in use until it has ended. A second call does nothing.

        Calls that were given before are made, so that the peer hears of the room and of its end.
        """
        with self._table.lock:
            if half.ended or half.cancelled:
                return
            half.cancelled = True
            half.failure = half.failure or text
        self._calls.put(lambda: self._cancel(half))

    def take(self, pause_s: float = 0.0) -> list[OpenHalf]:
        """Return the halves that have ended since the last call. Only one thread may call it.

        Args:
            pause_s: how long to wait for an event if no half has ended.
        """
        with self._table.lock:
            unclear = list(self._table.unclear)
            pause_s = 0.0 if self._table.ended else pause_s
        # Before the events are taken, since these tell the end of a half that the client had until now.
        gone = [half for half in unclear if not self._is_open(half)]
        try:
            for event in self._client.poll(0.0 if gone else pause_s):
                self._take(event)
        except ClientClosed:
            self._end_all()
        for half in gone:
            self._end(half)
        with self._table.lock:
            ended, self._table.ended = self._table.ended, []
        return ended

    def take_offered(self) -> list[OpenHalf]:
        """Return the halves that `ask` has opened and whose rooms prefill has offered since the last call."""
        with self._table.lock:
            offered, self._table.offered = self._table.offered, []
        return offered

    def listen(self) -> None:
        """Take events in a thread, until the connection is closed."""
        self._events = threading.Thread(target=self._take_all, name="longshore-events", daemon=True)
        self._events.start()

    def close(self) -> None:
        """Leave the agent, which then releases all rooms and pages."""
        self._client.close()
        self._calls.close()
        if self._events is not None:
            self._events.join()

    def _opened(self, key: Key, *, takes_asked: bool = False) -> OpenHalf:
        with self._table.lock:
            found = self._table.halves.get(key)
            if found is not None and found.is_asked and takes_asked:
                found.is_asked, found.was_asked, found.is_claiming = False, True, True
                found.touched_s = time.monotonic()
                return found
            if found is not None:
                raise ArgumentError(f"room {room_name(key[2])} of {key[1]} is open at this rank already")
            found = self._table.halves[key] = OpenHalf(*key, touched_s=time.monotonic())
        return found

    def _end(self, half: OpenHalf) -> None:
        with self._table.lock:
            if half.ended:
                return
            if not half.done:
                half.failure = half.failure or "it ended without a reason"
            half.ended = True
            del self._table.halves[half.key]
            self._table.unclear.discard(half)
            self._table.ended.append(half)

    def _is_open(self, half: OpenHalf) -> bool:
        return self._client.is_open(half.room, half.half, half.instance)

    # -- the thread that makes calls -------------------------------------------------------------------------------

    def _put(
        self,
        half: OpenHalf,
        call: Callable[[float], None],
        fence: Callable[[], None] | None,
        *,
        insists: bool = True,
        ends_ask: bool = False,
    ) -> None:
        deadline_s = time.monotonic() + CALL_LIMIT_S

        def make() -> None:
            if fence is not None:
                fence()
            try:
                self._insist(half, call, deadline_s, insists=insists)
            except LongshoreError as error:
                with self._table.lock:
                    half.failure = half.failure or str(error)
                    half.refused = half.cancelled = True
                    if not half.ended:
                        self._table.unclear.add(half)
                self._cancel(half)
            if ends_ask:
                self._claimed(half)

        self._calls.put(make)

    def _claimed(self, half: OpenHalf) -> None:
        """After the call that claims an asked half: if its ask had ended before, end the claim too."""
        with self._table.lock:
            half.is_claiming = False
            is_over = half.cancelled
        if is_over:
            self._cancel(half)
            if not self._is_open(half):
                self._end(half)

    def _insist(self, half: OpenHalf, call: Callable[[float], None], deadline_s: float, *, insists: bool) -> None:
        """Make a call of a half, and repeat it while the agent is busy. Raises LongshoreError: it failed for good."""
        # A chunk of a half that has ended would open the room again at a restarted worker.
        while not (half.ended or half.refused):
            try:
                call(max(_CALL_TIMEOUT_MIN_S, deadline_s - time.monotonic()))
            except self._repeated as error:
                pause_s = error.retry_after_s if isinstance(error, Busy) else AWAY_PAUSE_S
                if not insists or time.monotonic() + pause_s > deadline_s:
                    raise
                time.sleep(pause_s)
            else:
                half.accepted = True
                return

    def _cancel(self, half: OpenHalf) -> None:
        # If the client has no place for the call, wait for one, since no other call cancels this half.
        while True:
            try:
                self._client.cancel(half.room, half.half, instance=half.instance, timeout_s=_CALL_TIMEOUT_MIN_S)
            except Busy as error:
                time.sleep(error.retry_after_s)
                continue
            except (AgentLost, CallTimeout, ClientClosed):
                # The client repeats the cancellation to the next agent. A closed client has released everything.
                pass
            break
        if not half.accepted and not self._is_open(half):
            # No call was accepted, so no event follows.
            self._end(half)

    # -- the thread that takes events ------------------------------------------------------------------------------

    def _take_all(self) -> None:
        while not self._table.is_closed:
            self.take(_EVENT_WAIT_S)

    def _take(self, event: RoomEvent) -> None:
        with self._table.lock:
            half = self._table.halves.get((event.half, event.instance, event.room))
            if half is None:
                return
            match event.kind:
                case RoomEventKind.DONE:
                    half.done, half.bytes_moved = True, event.bytes_moved
                case RoomEventKind.OFFERED:
                    self._table.offered.append(half)
                case RoomEventKind.FAILED:
                    half.failure = half.failure or f"{event.reason.name}: {event.text}"
        if event.kind is RoomEventKind.RELEASED and not self._was_the_ask(half):
            self._end(half)

    def _was_the_ask(self, half: OpenHalf) -> bool:
        """Whether a RELEASED event is of the ask for a half that was claimed since. The claim is then made no more, or cancelled."""
        is_open = half.was_asked and self._is_open(half)
        with self._table.lock:
            if not (half.is_claiming or is_open):
                return False
            half.refused = half.cancelled = True
            is_made = not half.is_claiming
        if is_made:
            self._calls.put(lambda: self._cancel(half))
        return True

    def _end_all(self) -> None:
        """When the connection closed, the agent released everything of this rank."""
        with self._table.lock:
            self._table.is_closed = True
            left = list(self._table.halves.values())
            for half in left:
                half.failure = half.failure or "the connection to the agent was closed"
        for half in left:
            self._end(half)
