"""Decides a client's messages and events: a state machine without socket, thread, lock or clock.

Made by `client.connect`. `connection.Connection` passes messages and time to it, `client.Client` passes calls. It puts
messages into `outbox`, in their order, and room events into `events`; `take_effects` returns all other effects.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from longshore_client.errors import (
    AgentLost,
    ArgumentError,
    Busy,
    CallTimeout,
    ClientClosed,
    ConnectError,
    HelloRefused,
    NotPermitted,
    PoolRefused,
    busy_hint_s,
)
from longshore_client.ledger import Call, HalfKey, Ledger, Outgoing
from longshore_client.steps import Steps
from longshore_wire.engine_messages import (
    TO_AGENT,
    Accepted,
    Ask,
    Endpoint,
    EndpointUpdate,
    EngineSteps,
    Half,
    Hello,
    Offer,
    Receive,
    Refused,
    RegisterPool,
    Renew,
    RoomEvent,
    RoomEventKind,
    ToEngine,
    UnregisterPool,
    Welcome,
)
from longshore_wire.errors import PASSING, CodecError, LongshoreError, Reason
from longshore_wire.layout import TargetMemory
from longshore_wire.names import room_name

# Messages that wait for space in the socket. A claim of a million pages is 123 messages, and each thread has one open
# call.
OUTBOX_MESSAGES_MAX = 4096
# Messages that wait for space in the socket while steps are still sent. Calls have the rest.
STEPS_OUTBOX_MAX = 1024
# Events that no call has taken: three for each of 65,536 halves. Beyond that the caller never polls; drop the oldest.
EVENTS_MAX = 196_608
# Pause between attempts to connect: at once after a worker's restart, then at least four attempts a second.
RECONNECT_WAIT_MIN_S = 0.02
RECONNECT_WAIT_MAX_S = 0.25
# After a connection that lasted this long, the pauses start small again.
RECONNECT_WAIT_RESET_S = 5.0
# Limit for Welcome. The agent may first start a worker: imports, staging memory, transport.
WELCOME_WAIT_MAX_S = 120.0
# Hint of Busy for a full outbox, in which time a slow agent may have read a message.
SLOW_AGENT_WAIT_S = 0.01
# A shorter lease would keep the thread busy with renewals.
RENEW_WAIT_MIN_S = 0.01
# A starting agent gives its socket the mode in two steps, between which its group has no access for some microseconds.
FORBIDDEN_DIALS_MAX = 3


class State(Enum):
    """The state of the connection."""

    DOWN = "down"
    GREETING = "greeting"  # Hello is sent, Welcome is pending
    REPLAYING = "replaying"  # everything that is open is repeated to the new agent
    READY = "ready"
    CLOSED = "closed"


class Pool(NamedTuple):
    """A registered pool. Its descriptors are our duplicates of the caller's."""

    message: RegisterPool
    descriptors: tuple[int, ...]


class Effects(NamedTuple):
    """Work for the connection, besides sending the outbox."""

    settled: Sequence[Call] = ()  # wake their callers
    unused: Sequence[int] = ()  # descriptors to close
    news: bool = False  # wake all callers that wait for an event, an endpoint or a state
    warnings: Sequence[str] = ()  # to log


_NO_EFFECTS = Effects()


class Core:
    """Pools, open halves, calls and events of one client, through all connections of its life. Not thread-safe.

    Args:
        path: of the agent's socket, for error texts only.
        events: the queue of events, which the cores of one client share.
    """

    def __init__(self, hello: Hello, path: str, events: deque[RoomEvent]) -> None:
        self.state = State.DOWN
        self.layout, self.device = hello.layout, hello.device
        self._place = " for pages in host memory" if hello.memory is TargetMemory.HOST else ""
        self.ledger = Ledger()
        self.steps = Steps()
        self.pools: dict[int, Pool] = {}
        self.events: deque[RoomEvent] = events
        self.dropped_event_count = 0
        self.outbox: deque[Outgoing] = deque()
        self.welcome: Welcome | None = None
        self.endpoint: Endpoint | None = None
        self.last_error = "no agent was tried yet"
        self._path = path
        self._hello = Outgoing(TO_AGENT.encode(hello))
        self._warned = ""  # the last refusal of an engine that was welcome before
        self._warnings: list[str] = []
        self._refusal: LongshoreError | None = None  # of the first Hello, for good: stop trying
        self._turned_away: HelloRefused | None = None  # by the last agent that was reached, for a cause that may pass
        self._forbidden_dial_count = 0  # in a row
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._replay: deque[Call] = deque()
        self._replay_sent = False
        self._dial_at_s = 0.0
        self._dial_wait_s = RECONNECT_WAIT_MIN_S
        self._up_since_s = 0.0
        self._due_s = 0.0  # when GREETING fails, and when REPLAYING repeats a call
        self._renew_every_s = 1.0
        self._renew_at_s = 0.0
        self._settled: list[Call] = []
        self._unused: list[int] = []
        self._news = False

    def take_effects(self) -> Effects:
        """Return the effects since the last call."""
        if not (self._settled or self._unused or self._news):
            return _NO_EFFECTS
        effects = Effects(self._settled, self._unused, self._news, self._warnings)
        self._settled, self._unused, self._news, self._warnings = [], [], False, []
        return effects

    # -- calls -----------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return an unused request number."""
        return next(self._numbers)

    def check_open(self, what: str) -> None:
        """Raise ClientClosed after `close`."""
        if self.state is State.CLOSED:
            raise ClientClosed(f"{what}: the client is closed: connect again")

    def enter(self, call: Call, what: str) -> None:
        """Accept a call, and send it at once if an agent is connected. The core then owns its descriptors.

        Raises:
            ClientClosed, Busy: the call was not accepted.
            ArgumentError, PoolRefused: its pool is already registered, or is not registered.
            RoomError: its half has ended or was cancelled, or it is a claim that is already open.
        """
        self.check_open(what)
        if len(self.outbox) + len(call.outgoing) > OUTBOX_MESSAGES_MAX:
            raise Busy(f"{what}: the agent reads slowly", retry_after_s=SLOW_AGENT_WAIT_S)
        match call.message:
            case RegisterPool(cache=number) if number in self.pools:
                raise ArgumentError(f"cache {number} has a pool that is registered already: unregister it first")
            case UnregisterPool(cache=number) if number not in self.pools:
                text = f"cache {number} has no registered pool: nothing to take back"
                raise PoolRefused(text, reason=Reason.UNKNOWN_POOL)
        if call.key is not None:
            self.ledger.sent(call.key, call)
        self._calls[call.number] = call
        if self.state is State.READY:
            self.outbox += call.outgoing

    def give_up(self, call: Call) -> None:
        """Record that the caller of an unanswered call no longer waits."""
        if self.state is not State.READY and call.outlives_agent:
            # No living agent has received it, and none will.
            self._answer(call, Refused(call.number, Reason.WORKER_LOST, "withdrawn"))
            return
        # Until the agent answers or is gone, it may have received the call.
        call.given_up = True

    def no_answer(self, what: str, timeout_s: float | None) -> LongshoreError:
        """Return the error of a call that got no answer in time."""
        if self.state is State.READY:
            return CallTimeout(
                f"{what}: the agent has not answered within {timeout_s} s and may still accept it: cancel the room "
                "or pool before you use its pages otherwise"
            )
        return AgentLost(
            f"{what}: the agent at {self._path} is away ({self.last_error}); the client keeps trying and repeats "
            "everything that was accepted to the next one: make this call again, or cancel the room"
        )

    def connect_error(self, timeout_s: float) -> LongshoreError:
        """Return the error if no agent has sent Welcome in time."""
        if self._refusal is not None:
            return self._refusal
        if self._turned_away is not None:
            return HelloRefused(f"{self._turned_away}; tried for {timeout_s:g} s", reason=self._turned_away.reason)
        if self.state is State.GREETING:
            return ConnectError(
                f"the agent at {self._path} has not welcomed this engine{self._place} within {timeout_s:g} s and may still "
                "start a worker for it: give a longer timeout_s, or read in the agent's log what takes that long"
            )
        return ConnectError(
            f"no agent welcomed this engine at {self._path}{self._place} within {timeout_s:g} s ({self.last_error}): "
            "check that the agent runs on this node and that the path is its engine socket"
        )

    def find_event(
        self, half: Half, instance: str | None, room: int, kinds: Collection[RoomEventKind]
    ) -> RoomEvent | None:
        """Return the first event of a half that is one of `kinds`. `instance` None matches every instance."""
        for event in self.events:
            same = event.room == room and event.half is half and event.kind in kinds
            if same and instance in (None, event.instance):
                return event
        return None

    def take_steps(self, events: Sequence[RoomEvent], now_ns: int) -> bool:
        """Record that the engine takes events; return whether there are steps to send to the agent."""
        return self.steps.wanted and self._report_steps(self.steps.taken(events, now_ns))

    def _report_steps(self, found: Sequence[EngineSteps | None]) -> bool:
        """Send steps to the agent, unless more urgent messages wait for it."""
        if self.state is not State.READY or len(self.outbox) >= STEPS_OUTBOX_MAX:
            return False
        sent = [Outgoing(TO_AGENT.encode(steps)) for steps in found if steps is not None]
        self.outbox += sent
        return bool(sent)

    def close(self) -> None:
        """End everything: calls get no answer, and all descriptors are to be closed. Idempotent."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        for call in (*self._calls.values(), *self._replay):
            self._settle(call, None)
        self._calls.clear()
        self._replay.clear()
        self.outbox.clear()
        for pool in self.pools.values():
            self._unused.extend(pool.descriptors)
        self.pools.clear()
        self._news = True

    # -- the connection and time -------------------------------------------------------------------------------------

    def should_dial(self, now_s: float) -> bool:
        """Return whether to connect now. Each attempt lengthens the pause before the next one."""
        if self.state is not State.DOWN or now_s < self._dial_at_s:
            return False
        self._dial_at_s = now_s + self._dial_wait_s
        self._dial_wait_s = min(2 * self._dial_wait_s, RECONNECT_WAIT_MAX_S)
        return True

    def connected(self, now_s: float) -> None:
        """Send Hello over a new connection."""
        self.state, self._due_s, self._up_since_s = State.GREETING, now_s + WELCOME_WAIT_MAX_S, now_s
        self.outbox.append(self._hello)

    def disconnected(self, error: Exception, now_s: float) -> None:
        """Handle a connection that is lost, failed or useless. Another one follows after a pause."""
        if self.state is State.CLOSED:
            return
        self.last_error = str(error)
        self._turned_away = error if isinstance(error, HelloRefused) else None
        if isinstance(error, ConnectError) and self.welcome is None:
            self._refusal = error
        if isinstance(error, CodecError) and self.welcome is None:
            self._refusal = CodecError(f"the agent at {self._path} does not speak our protocol: {error}")
        self._forbidden_dial_count = self._forbidden_dial_count + 1 if isinstance(error, PermissionError) else 0
        if self._forbidden_dial_count >= FORBIDDEN_DIALS_MAX and self.welcome is None:
            self._refusal = NotPermitted(f"no engine can connect to the agent from this process: {error}")
        was_up = self.state in (State.REPLAYING, State.READY)
        self.state = State.DOWN
        self._replay.clear()
        self.outbox.clear()
        if was_up:
            self.endpoint = None
            if now_s - self._up_since_s >= RECONNECT_WAIT_RESET_S:
                self._dial_wait_s, self._dial_at_s = RECONNECT_WAIT_MIN_S, now_s
        self._news = True
        if self._refusal is not None:
            self.close()

    def advance(self, now_s: float) -> float:
        """Do all due work; return the time until more is due, in seconds."""
        if self.state is State.GREETING and now_s >= self._due_s:
            self.disconnected(ConnectionError(f"no Welcome within {WELCOME_WAIT_MAX_S:g} s"), now_s)
        match self.state:
            case State.CLOSED:
                return 0.0
            case State.DOWN:
                return max(0.0, self._dial_at_s - now_s)
            case State.GREETING:
                return self._due_s - now_s
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + self._renew_every_s
            # A message in the outbox also shows the agent that we live.
            if not self.outbox:
                self.outbox.append(Outgoing(TO_AGENT.encode(Renew())))
        wait_s = self._renew_at_s - now_s
        if self.state is State.REPLAYING:
            self._replay_next(now_s)
            if self._replay and not self._replay_sent:
                wait_s = min(wait_s, self._due_s - now_s)
        return wait_s

    def take(self, message: ToEngine, now_s: float) -> None:
        """Handle a message of the agent. Afterwards the connection may be useless (state DOWN or CLOSED)."""
        if self.state is State.DOWN or self.state is State.CLOSED:
            return  # from a connection that is already closed
        if self.state is State.GREETING:
            self._take_greeting(message, now_s)
            return
        match message:
            case Accepted() | Refused():
                self._take_answer(message, now_s)
            case RoomEvent():
                self._take_event(message, now_s)
            case EndpointUpdate():
                self.endpoint = message.endpoint
                self._news = True
            case Welcome():
                self.disconnected(CodecError("a second Welcome"), now_s)

    # -- a new agent -----------------------------------------------------------------------------------------------

    def _take_greeting(self, message: ToEngine, now_s: float) -> None:
        match message:
            case Welcome():
                self._take_welcome(message, now_s)
            case Refused():
                self._take_refusal(message, now_s)
            case _:
                self.disconnected(CodecError(f"{type(message).__name__} before Welcome"), now_s)

    def _take_refusal(self, message: Refused, now_s: float) -> None:
        said = message.text or message.reason.name
        error = HelloRefused(f"the agent at {self._path} refused this engine: {said}", reason=message.reason)
        if message.reason is Reason.BUSY:
            self._dial_at_s = max(self._dial_at_s, now_s + busy_hint_s(message))
        if message.reason not in PASSING and self.welcome is None:
            self._refusal = error
        elif message.reason not in PASSING and self._warned != said:
            self._warned = said
            self._warnings.append(f"{error}. The client keeps trying")
            self._news = True
        self.disconnected(error, now_s)

    def _take_welcome(self, message: Welcome, now_s: float) -> None:
        first, self.welcome = self.welcome is None, message
        self._warned = ""
        self.steps.wanted = message.steps
        self.steps.clear()
        for call in list(self._calls.values()):
            if call.given_up:
                self._answer(call, None)
            elif not first and not call.outlives_agent:
                self._answer(call, Accepted(call.number))
        if not first:
            self._settle_ended()
            self._report(self.ledger.agent_replaced())
        self._renew_every_s = max(message.lease_ns / 3e9, RENEW_WAIT_MIN_S)
        self._renew_at_s = now_s + self._renew_every_s
        self._replay = deque((*self._pools_again(), *self._halves_again()))
        self._replay_sent, self._due_s = False, 0.0
        self.state = State.REPLAYING
        self._replay_next(now_s)

    def _settle_ended(self) -> None:
        """Answer open calls whose half has ended, so that they are not repeated to a new worker."""
        for call in list(self._calls.values()):
            if call.key is None:
                continue
            found = self.ledger.get(call.key)
            if call.done:
                self._answer(call, Accepted(call.number))
            elif found is None or found.ended is not None:
                text = f"room {room_name(call.key.room)} had failed when the worker was lost"
                self._answer(call, Refused(call.number, Reason.WORKER_LOST, text))
            elif found.cancelled:
                self._answer(
                    call, Refused(call.number, Reason.CANCELLED, f"room {room_name(call.key.room)} was cancelled")
                )

    def _pools_again(self) -> Iterator[Call]:
        for pool in self.pools.values():
            yield Call((pool.message,), descriptors=pool.descriptors, again=True)

    def _halves_again(self) -> Iterator[Call]:
        for key, messages in self.ledger.replay():
            yield Call(messages, key=key, again=True)

    def _replay_next(self, now_s: float) -> None:
        """Repeat the next open item to a new agent. One at a time keeps the order and overflows no queue."""
        while self._replay and self._replay[0].settled:
            self._replay.popleft()
            self._replay_sent = False
        if self._replay:
            if not self._replay_sent and now_s >= self._due_s:
                self._replay_sent = True
                self.outbox += self._replay[0].outgoing
            return
        self.state = State.READY
        for call in self._calls.values():
            self.outbox += call.outgoing
        self._news = True

    # -- answers and events ----------------------------------------------------------------------------------------

    def _take_answer(self, answer: Accepted | Refused, now_s: float) -> None:
        if self._replay and self._replay[0].number == answer.request:
            if isinstance(answer, Refused) and answer.reason is Reason.BUSY:
                self._replay_sent, self._due_s = False, now_s + busy_hint_s(answer)
                return
            self._settle(self._replay[0], answer)
            self._replay_next(now_s)
            return
        # An answer without a call belongs to one that an event has settled before.
        call = self._calls.get(answer.request)
        if call is not None:
            self._answer(call, answer)

    def _take_event(self, event: RoomEvent, now_s: float) -> None:
        if not self.ledger.take_event(event):
            return
        if self.steps.wanted:
            self.steps.arrived(event, round(now_s * 1e9))
            self._report_steps([self.steps.over(HalfKey(event.half, event.instance, event.room))])
        self._report([event])
        if event.kind is RoomEventKind.DONE:
            # Only an accepted room can be done, so its calls are accepted even if the worker dies before it answers.
            for call in self._calls_of(HalfKey(event.half, event.instance, event.room)):
                call.done = True

    def _answer(self, call: Call, answer: Accepted | Refused | None) -> None:
        """Settle a caller's call. `answer` None: it never gets one."""
        self._calls.pop(call.number, None)
        self._settle(call, answer)

    def _settle(self, call: Call, answer: Accepted | Refused | None) -> None:
        if call.settled:
            return
        call.answer, call.settled, call.outgoing = answer, True, []
        self._settled.append(call)
        accepted = isinstance(answer, Accepted)
        match call.message:
            case Offer() | Ask() | Receive() if call.key is not None and call.again:
                if isinstance(answer, Refused):
                    self._half_lost(call.key, answer)
            case Offer() | Ask() | Receive() if call.key is not None:
                if answer is not None:
                    self.ledger.answered(call.key, call, accepted=accepted)
            case RegisterPool(cache=number) if call.again:
                if isinstance(answer, Refused):
                    self._unused.extend(self.pools.pop(number).descriptors)
                    for found in self.ledger:
                        self._half_lost(found.key, answer)
            case RegisterPool(cache=number) if accepted:
                self.pools[number] = Pool(call.message, call.descriptors)
            case RegisterPool():
                self._unused.extend(call.descriptors)
            case UnregisterPool(cache=number) if accepted:
                self._pool_gone(number)

    def _pool_gone(self, number: int) -> None:
        """Forget a pool that no process uses any more, and end the halves that are still open, since a room has all caches."""
        gone = self.pools.pop(number, None)
        if gone is not None:
            self._unused.extend(gone.descriptors)
        # An agent reports a pool's rooms before it answers. The remaining halves are those that a dead agent did not
        # report.
        for found in self.ledger:
            self._report(self.ledger.end(found.key, Reason.CANCELLED, f"the pool of cache {number} was unregistered"))

    def _half_lost(self, key: HalfKey, refused: Refused) -> None:
        """Fail a half that a new worker refuses; the worker that had accepted it is dead."""
        self._report(self.ledger.end(key, refused.reason, f"refused after the worker was lost: {refused.text}"))
        for call in self._replay:
            if call.key == key:
                self._settle(call, None)
        for call in self._calls_of(key):
            self._answer(call, Refused(call.number, refused.reason, refused.text))

    def _calls_of(self, key: HalfKey) -> list[Call]:
        return [call for call in self._calls.values() if call.key == key]

    def _report(self, events: Sequence[RoomEvent]) -> None:
        """Queue events for `poll` and `wait`."""
        for event in events:
            if len(self.events) >= EVENTS_MAX:
                self.events.popleft()
                self.dropped_event_count += 1
            self.events.append(event)
        self._news = True
