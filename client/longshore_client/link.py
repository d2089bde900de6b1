"""The client's end of the engine link: one socket to the agent, one thread that keeps it alive.

Used by `client.Client` only. It dials, says hello, tells a new agent what is open, renews the lease and brings
answers to the calls that wait for them. Knows nothing of rooms or pages.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from longshore_client.agent_socket import AgentSocket, ConnectionEndedError
from longshore_client.errors import (
    AgentLost,
    ArgumentError,
    Busy,
    CallTimeout,
    ClientClosed,
    ConnectError,
    HelloRefused,
    busy_hint_s,
    from_refusal,
)
from longshore_client.request import Request
from longshore_wire.engine_codec import TO_AGENT
from longshore_wire.engine_messages import (
    Accepted,
    EndpointUpdate,
    Hello,
    Refused,
    Renew,
    RoomEvent,
    ToEngine,
    Welcome,
)
from longshore_wire.errors import CodecError, LongshoreError, Reason

# Messages that wait for room in the socket: a claim of a million pages is 123, and each thread has one call open.
OUTBOX_MESSAGES_MAX = 4096
# Tries to reach the agent: at once after a worker's restart, at least four times a second while it is away.
RECONNECT_WAIT_MIN_S = 0.02
RECONNECT_WAIT_MAX_S = 0.25
# A connection that lived this long was no failure to connect: the next tries start fast again.
RECONNECT_WAIT_RESET_S = 5.0
# A worker may have to be started before it can answer Hello: imports, staging memory, transport.
WELCOME_WAIT_MAX_S = 120.0
# The kernel had no memory for a message: ask again after this.
STARVED_WAIT_S = 0.01
# A lease of less would keep the thread busy with renewing.
RENEW_WAIT_MIN_S = 0.01
# What may pass: the same Hello can be accepted a moment later.
PASSING = frozenset({Reason.BUSY, Reason.SHUTTING_DOWN, Reason.WORKER_LOST, Reason.INTERNAL})


class LinkOwner(Protocol):
    """Whom a link tells; every method is called under the link's lock and must not block."""

    def agent_connected(self, welcome: Welcome) -> list[Request]:
        """A worker answered Hello. Return what it must be told before any call, in order."""

    def agent_disconnected(self) -> None:
        """The connection is gone; another one follows."""

    def agent_said(self, message: RoomEvent | EndpointUpdate) -> None:
        """The agent said something that nobody asked for."""


class LinkState(Enum):
    """The life of the connection."""

    DOWN = "down"
    GREETING = "greeting"  # Hello is said, Welcome is open
    TELLING = "telling"  # the new agent hears what is open
    READY = "ready"
    CLOSED = "closed"


class AgentLink:
    """Keeps one connection to an agent alive until `close`. `changed` is the lock of the link and of its owner."""

    def __init__(self, path: str, hello: Hello, owner: LinkOwner) -> None:
        self.changed = threading.Condition()
        self.state = LinkState.DOWN
        self.path = path
        self.last_error = "no agent was tried yet"
        self._hello = TO_AGENT.encode(hello)
        self._owner = owner
        self._process_id = os.getpid()
        self._socket: AgentSocket | None = None
        self._refusal: LongshoreError | None = None  # of the first Hello: there is no use in going on
        self._turned_away: HelloRefused | None = None  # by the last agent that was reached, for something that may pass
        self._welcomed = False
        self._closing = False
        self._number = 0
        self._calls: dict[int, Request] = {}
        self._telling: deque[Request] = deque()
        self._telling_sent = False
        self._dial_at_s = 0.0
        self._dial_wait_s = RECONNECT_WAIT_MIN_S
        self._up_since_s = 0.0
        self._due_s = 0.0  # of the state: GREETING gives up, TELLING says it again
        self._renew_every_s = 1.0
        self._renew_at_s = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A daemon: an engine that ends without `close` must not be kept alive by us.
        self._thread = threading.Thread(target=self._run, name="longshore-link", daemon=True)

    # -- callers' threads ------------------------------------------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        """Connect; return once an agent has said Welcome.

        Raises:
            HelloRefused, CodecError, ConnectError: it never did; the link is closed.
        """
        self._thread.start()
        with self.changed:
            self.changed.wait_for(lambda: self.state in (LinkState.READY, LinkState.CLOSED), timeout_s)
            if self.state is LinkState.READY:
                return
            refusal, turned_away = self._refusal, self._turned_away
        self.close()
        if refusal is not None:
            raise refusal
        if turned_away is not None:
            raise HelloRefused(f"{turned_away}; tried for {timeout_s:g} s", reason=turned_away.reason)
        raise ConnectError(
            f"no agent welcomed this engine at {self.path} within {timeout_s:g} s ({self.last_error}): "
            "check that the agent runs on this node and that the path is its engine socket"
        )

    def next_number(self) -> int:
        """Return a request number that was never used."""
        with self.changed:
            self._number += 1
            return self._number

    def enter(self, request: Request, what: str) -> None:
        """Take a request; it is sent at once if an agent is there. Called under the lock.

        Raises:
            ClientClosed, ArgumentError, Busy: it was not taken.
        """
        self.check_open(what)
        if self._socket is not None and self._socket.outbox_count + len(request.data) > OUTBOX_MESSAGES_MAX:
            raise Busy(f"{what}: the agent reads slowly", retry_after_s=STARVED_WAIT_S)
        self._calls[request.number] = request
        if self.state is LinkState.READY:
            self._transmit(request)

    def wait(
        self,
        request: Request,
        what: str,
        timeout_s: float | None,
        refusal_kind: type[LongshoreError],
        *,
        on_give_up: Callable[[], None] | None = None,
    ) -> None:
        """Wait until an agent, whichever it is by then, has accepted a request that was entered.

        Args:
            on_give_up: called under the lock if the agent may still accept what nobody waits for.
        Raises:
            Busy, refusal_kind: the agent refused it.
            AgentLost, CallTimeout: no answer within `timeout_s` (None: wait for ever).
            ClientClosed: the client was closed.
        """
        if not request.settled.wait(timeout_s):
            with self.changed:
                if not request.settled.is_set():
                    self._give_up(request, on_give_up)
                    raise self._no_answer(what, timeout_s)
        if request.answer is None:
            raise ClientClosed(f"{what}: the client was closed")
        if isinstance(request.answer, Refused):
            raise from_refusal(request.answer, what, refusal_kind)

    def _give_up(self, request: Request, on_give_up: Callable[[], None] | None) -> None:
        if self.state is not LinkState.READY and request.outlives_agent:
            # No agent that lives has heard of it, and none will.
            self.settle(request, Refused(request.number, Reason.WORKER_LOST, "withdrawn"))
            return
        request.given_up = True
        if on_give_up is not None:
            on_give_up()

    def check_open(self, what: str) -> None:
        """Raise ClientClosed, or ArgumentError in a forked child: threads do not survive a fork."""
        if self._closing or self.state is LinkState.CLOSED:
            raise ClientClosed(f"{what}: the client is closed: connect again")
        if os.getpid() != self._process_id:
            raise ArgumentError(f"{what}: this client belongs to process {self._process_id}: connect in this one")

    def calls(self) -> list[Request]:
        """Return the requests without an answer, in order. Called under the lock."""
        return list(self._calls.values())

    def close(self) -> bool:
        """End the thread and the connection; calls and waits in other threads end with ClientClosed. Idempotent.

        Returns False in a forked child, where nothing is ours to close.
        """
        if os.getpid() != self._process_id:
            return False  # a forked child has no thread of ours, and the connection is its parent's
        with self.changed:
            self._closing = True
            if self.state is not LinkState.CLOSED:
                os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        return True

    def _no_answer(self, what: str, timeout_s: float | None) -> LongshoreError:
        if self.state is LinkState.READY:
            return CallTimeout(
                f"{what}: the agent has not answered within {timeout_s} s and may still accept it: cancel the room "
                "or pool before you use its pages otherwise"
            )
        return AgentLost(
            f"{what}: the agent at {self.path} is away ({self.last_error}); the client goes on trying and tells a new "
            "one everything that was accepted: make this call again, or cancel the room"
        )

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            # Also after a mistake of ours: whoever waits must learn that nobody will answer.
            with self.changed:
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None
                self.state = LinkState.CLOSED
                for request in (*self._calls.values(), *self._telling):
                    request.settle(None)
                self._calls.clear()
                self._telling.clear()
                os.close(self._wake)
                self.changed.notify_all()

    def _turn(self) -> None:
        with self.changed:
            try:
                wait_s = self._advance(time.monotonic())
            except (OSError, CodecError) as error:
                self._drop(error)
                return
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            connected = self._socket
            if connected is not None:
                writing = connected.outbox_count > 0 and not connected.starved
                poller.register(connected.fileno(), select.POLLIN | (select.POLLOUT if writing else 0))
        ready = poller.poll(max(wait_s, 0.0) * 1e3)
        with self.changed:
            if any(descriptor == self._wake for descriptor, _ in ready):
                os.eventfd_read(self._wake)
            if connected is not None and (ready or connected.outbox_count):
                try:
                    connected.flush()
                    for message in connected.receive():
                        self._take(message)
                except (OSError, CodecError) as error:
                    self._drop(error)

    def _advance(self, now_s: float) -> float:
        """Do what is due; return how long nothing else is, in seconds."""
        if self._socket is None:
            if now_s < self._dial_at_s:
                return self._dial_at_s - now_s
            self._dial_at_s = now_s + self._dial_wait_s
            self._dial_wait_s = min(2 * self._dial_wait_s, RECONNECT_WAIT_MAX_S)
            self._socket = AgentSocket.dial(self.path)
            self.state, self._due_s, self._up_since_s = LinkState.GREETING, now_s + WELCOME_WAIT_MAX_S, now_s
            self._socket.send(self._hello)
        if self.state is LinkState.GREETING:
            if now_s >= self._due_s:
                raise ConnectionEndedError(f"no Welcome within {WELCOME_WAIT_MAX_S:g} s")
            return self._due_s - now_s
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + self._renew_every_s
            # Whatever waits in the outbox tells the agent as well that we live.
            if not self._socket.outbox_count:
                self._socket.send(TO_AGENT.encode(Renew()))
        wait_s = self._renew_at_s - now_s
        if self.state is LinkState.TELLING:
            self._tell(now_s)
            if self._telling and not self._telling_sent:
                wait_s = min(wait_s, self._due_s - now_s)
        return min(wait_s, STARVED_WAIT_S) if self._socket.starved else wait_s

    def _tell(self, now_s: float) -> None:
        """Tell a new agent the next of what is open, one at a time, so that order holds and no queue overflows."""
        while self._telling and self._telling[0].settled.is_set():
            self._telling.popleft()
            self._telling_sent = False
        if self._telling:
            if not self._telling_sent and now_s >= self._due_s:
                self._telling_sent = True
                self._transmit(self._telling[0])
            return
        self.state = LinkState.READY
        for request in self.calls():
            self._transmit(request)
        self.changed.notify_all()

    def _transmit(self, request: Request) -> None:
        assert self._socket is not None
        try:
            for index, data in enumerate(request.data):
                self._socket.send(data, request.descriptors if index == 0 else ())
        except OSError as error:
            # The thread sees the broken connection too, and then sends what has no answer to the next agent.
            self.last_error = str(error)
        if self._socket.outbox_count:
            os.eventfd_write(self._wake, 1)

    def _take(self, message: ToEngine) -> None:
        if self.state is LinkState.GREETING:
            self._take_greeting(message)
        elif isinstance(message, Accepted | Refused):
            self._take_answer(message)
        elif isinstance(message, Welcome):
            raise CodecError("a second Welcome")
        else:
            self._owner.agent_said(message)

    def _take_greeting(self, message: ToEngine) -> None:
        if isinstance(message, Refused):
            said = message.text or message.reason.name
            error = HelloRefused(f"the agent at {self.path} refused this engine: {said}", reason=message.reason)
            if message.reason is Reason.BUSY:
                self._dial_at_s = max(self._dial_at_s, time.monotonic() + busy_hint_s(message))
            if message.reason not in PASSING and not self._welcomed:
                self._refusal = error
            raise ConnectionEndedError(str(error)) from error
        if not isinstance(message, Welcome):
            raise CodecError(f"{type(message).__name__} before Welcome")
        lost = [request for request in self.calls() if request.given_up]
        if self._welcomed:
            lost += [request for request in self.calls() if not request.outlives_agent]
        for request in lost:
            self._calls.pop(request.number, None)
            request.settle(None if request.given_up else Accepted(request.number))
        self._renew_every_s = max(message.lease_ns / 3e9, RENEW_WAIT_MIN_S)
        self._renew_at_s = time.monotonic() + self._renew_every_s
        self._telling = deque(self._owner.agent_connected(message))
        self._telling_sent, self._due_s = False, 0.0
        self._welcomed = True
        self.state = LinkState.TELLING
        self._tell(time.monotonic())

    def _take_answer(self, answer: Accepted | Refused) -> None:
        if self._telling and self._telling[0].number == answer.request:
            if isinstance(answer, Refused) and answer.reason is Reason.BUSY:
                self._telling_sent, self._due_s = False, time.monotonic() + busy_hint_s(answer)
                return
            self._telling[0].settle(answer)
            self._tell(time.monotonic())
            return
        # An answer to nobody is one to a call that an event has settled before.
        request = self._calls.pop(answer.request, None)
        if request is not None:
            request.settle(answer)

    def settle(self, request: Request, answer: Accepted | Refused) -> None:
        """Answer a call in the agent's place: an event has told what the answer must be. Called under the lock."""
        self._calls.pop(request.number, None)
        request.settle(answer)

    def _drop(self, error: OSError | CodecError) -> None:
        """Let the connection go; the next turn dials again when it is time."""
        now_s = time.monotonic()
        self.last_error = str(error)
        self._turned_away = error.__cause__ if isinstance(error.__cause__, HelloRefused) else None
        if isinstance(error, CodecError) and not self._welcomed:
            self._refusal = CodecError(f"the agent at {self.path} does not speak our protocol: {error}")
        was_up = self.state in (LinkState.TELLING, LinkState.READY)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.state = LinkState.DOWN
        self._telling.clear()
        if was_up and now_s - self._up_since_s >= RECONNECT_WAIT_RESET_S:
            self._dial_wait_s, self._dial_at_s = RECONNECT_WAIT_MIN_S, now_s
        if was_up:
            self._owner.agent_disconnected()
        if self._refusal is not None:
            self._closing = True
        self.changed.notify_all()
