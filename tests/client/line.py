"""Joins a client with a fake agent without socket, thread or clock, and runs them step by step.

`Line` replaces `connection.Connection`, so its `client` is a real Client. Calls are settled at once or never.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fake_agent import accept_all
from scene import LAYOUT

from longshore_client import Half, pool_geometry
from longshore_client.client import Client
from longshore_client.connection import Waits
from longshore_client.core import RECONNECT_WAIT_MAX_S, Core
from longshore_client.ledger import Call, HalfKey
from longshore_wire.engine_messages import (
    ENGINE_PROTOCOL_VERSION,
    TO_AGENT,
    CachePages,
    Hello,
    Offer,
    RegisterPool,
    ToAgent,
    ToEngine,
    Welcome,
)
from longshore_wire.layout import TargetMemory

PATH = "/run/engine.sock"
HELLO = Hello(ENGINE_PROTOCOL_VERSION, "prefill-0", LAYOUT, "cpu", (Half.SOURCE, Half.TARGET))
LEASE_NS = 60_000_000_000
STEP_MIN_S = 0.001


class Line:
    """An agent that answers by script (see `agent`), a client's core, and a clock that only `pass_s` moves."""

    def __init__(self, *, reached: bool = True, hello: Hello = HELLO, beside: Line | None = None, **agent) -> None:
        """Make a client's only connection, or one `beside` the device's, whose client then has both."""
        events, self.changed = (deque(), Waits()) if beside is None else (beside.core.events, beside.changed)
        self.core = Core(hello, PATH, events)
        links = {} if beside is None else {TargetMemory.DEVICE: beside}
        self.client = Client(HELLO, {**links, hello.memory: self})
        self.now_s = 100.0
        self.dials_s, self.given_back, self.descriptors, self.heard = [], [], {}, []
        self.steps = 0
        self.reads = True  # False: messages to the agent stay in the outbox
        self._there = False
        if reached:
            self.agent(**agent)

    # -- the agent -------------------------------------------------------------------------------------------------

    def agent(
        self,
        *,
        epoch: int = 1,
        lease_ns: int = LEASE_NS,
        answer: Callable[[ToAgent], ToEngine | None] = accept_all,
        greet: Callable[[Hello], ToEngine | Exception] | None = None,
    ) -> None:
        """Start this agent, which runs until `lose`; return when the client is connected."""
        self._answer = answer
        self._greet = greet or (lambda hello: Welcome(ENGINE_PROTOCOL_VERSION, epoch, "demo", lease_ns))
        self.heard, self._there = [], True
        self.pass_s(RECONNECT_WAIT_MAX_S)

    def lose(self) -> None:
        """End the agent. Its path has no listener then."""
        self._there = False
        self.core.disconnected(ConnectionResetError("the agent closed the connection"), self.now_s)
        self.carry_out()

    def say(self, *messages: ToEngine) -> None:
        """Send an unsolicited message of the agent."""
        for message in messages:
            self.core.take(message, self.now_s)
        self.carry_out()

    def of(self, *kinds: type) -> list[ToAgent]:
        """Return the messages of these kinds that this agent has received, in order."""
        return [message for message in self.heard if isinstance(message, kinds)]

    # -- time --------------------------------------------------------------------------------------------------------

    def pass_s(self, duration_s: float) -> None:
        """Let time pass. The client wakes at its due times; `steps` counts the wake-ups."""
        end_s = self.now_s + duration_s
        self.carry_out()
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + max(self._wait_s, STEP_MIN_S))
            self.steps += 1
            self.carry_out()

    # -- calls that need not be answered -----------------------------------------------------------------------------

    def begin(self, *messages: ToAgent, descriptors: tuple[int, ...] = ()) -> Call:
        """Make a call without waiting for its answer."""
        first = messages[0]
        key = HalfKey(Half.SOURCE, "prefill-0", first.room) if isinstance(first, Offer) else None
        call = Call(messages, key=key, descriptors=descriptors)
        self.core.enter(call, "a call")
        self.carry_out()
        return call

    def offer(self, room: int, first_token: int = 0, end_token: int = 4, *, last: bool = True) -> Call:
        return self.begin(
            Offer(
                self.core.next_number(),
                room,
                (CachePages(0, first_token, end_token, len(bytes(4)) // 4, bytes(4)),),
                last,
            )
        )

    def register(self, cache: int, *descriptors: int) -> Call:
        message = RegisterPool(self.core.next_number(), cache, pool_geometry(LAYOUT, 2))
        return self.begin(message, descriptors=descriptors)

    # -- as a Connection ---------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        if self.core.should_dial(self.now_s):
            self.dials_s.append(self.now_s)
            if self._there:
                self.core.connected(self.now_s)
            else:
                self.core.disconnected(ConnectionRefusedError("connection refused"), self.now_s)
        self._wait_s = self.core.advance(self.now_s)
        while self.core.outbox and self.reads:
            data, descriptors = self.core.outbox.popleft()
            self._hear(TO_AGENT.decode(data), descriptors)
            self._wait_s = self.core.advance(self.now_s)
        self.given_back += self.core.take_effects().unused

    def expect(self, call: Call) -> None:
        pass

    def wait(self, call: Call, timeout_s: float | None) -> bool:
        return call.settled

    def check_process(self, what: str) -> None:
        pass

    def close(self) -> None:
        self.core.close()
        self.carry_out()

    def _hear(self, message: ToAgent, descriptors: tuple[int, ...]) -> None:
        self.heard.append(message)
        if descriptors:
            self.descriptors[message.request] = descriptors
        reply = self._greet(message) if isinstance(message, Hello) else self._answer(message)
        if isinstance(reply, Exception):
            self.core.disconnected(reply, self.now_s)
        elif reply is not None:
            self.core.take(reply, self.now_s)


def agent_and_client(**agent) -> tuple[Line, Client]:
    """Return an agent, as the arguments of `Line` make it, and the client that has reached it."""
    line = Line(**agent)
    return line, line.client
