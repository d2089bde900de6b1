"""What a client has open, and what it does with it when the agent speaks, dies or is replaced.

Made by `client.Client`; told by `link.AgentLink`. Everything here is read and changed under the link's lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from longshore_client.ledger import HalfKey, Ledger
from longshore_client.link import AgentLink
from longshore_client.request import Request
from longshore_wire.engine_messages import (
    Accepted,
    Endpoint,
    EndpointUpdate,
    Hello,
    Refused,
    RegisterPool,
    RoomEvent,
    RoomEventKind,
    Welcome,
)
from longshore_wire.errors import Reason

# Events that nobody has taken: three a half of 65,536 halves would be a caller who never polls. The oldest go first.
EVENTS_MAX = 196_608


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool as it was registered; the descriptors are ours, duplicated from the caller's."""

    message: RegisterPool
    descriptors: tuple[int, ...]


class OpenState:
    """Pools, open halves, events that wait to be taken, and the agent's newest word. Owns the link."""

    def __init__(self, path: str, hello: Hello) -> None:
        self.ledger = Ledger()
        self.pools: dict[int, Pool] = {}
        self.keys: dict[int, HalfKey] = {}  # of the requests in flight that speak of a half
        self.done_calls: set[int] = set()  # of those, the ones whose half was reported done
        self.events: deque[RoomEvent] = deque()
        self.dropped_event_count = 0
        self.welcome: Welcome | None = None
        self.endpoint: Endpoint | None = None
        self._told_again: dict[HalfKey, list[Request]] = {}  # by the last `agent_connected`
        self.link = AgentLink(path, hello, self)

    def call_answered(self, number: int, answer: Accepted | Refused | None) -> None:
        """Note the answer to a call that speaks of a half; None: there never is one."""
        self.keys.pop(number, None)
        self.done_calls.discard(number)
        if answer is not None:
            self.ledger.answered(number, accepted=isinstance(answer, Accepted))

    def pool_gone(self, number: int) -> None:
        """Forget a pool that nobody touches any more, and end what is still open on it."""
        gone = self.pools.pop(number, None)
        if gone is not None:
            close_all(gone.descriptors)
        # The agent has reported these rooms before it answered; what is left, a dead one could not report.
        for found in self.ledger:
            if found.key.pool == number:
                self.report(self.ledger.end(found.key, Reason.CANCELLED, f"pool {number} was unregistered"))

    def agent_connected(self, welcome: Welcome) -> list[Request]:
        """Return all that a new worker has to know: pools first, then open offers and claims. Called by the link."""
        first, self.welcome = self.welcome is None, welcome
        if not first:
            self._settle_ended()
            self.report(self.ledger.agent_replaced())
        return [*self._pools_again(), *self._halves_again()]

    def agent_disconnected(self) -> None:
        """Forget what only the old worker could say. Called by the link."""
        self.endpoint = None

    def agent_said(self, message: RoomEvent | EndpointUpdate) -> None:
        """Take an event or a newer endpoint. Called by the link."""
        if isinstance(message, EndpointUpdate):
            self.endpoint = message.endpoint
            self.link.changed.notify_all()
        elif self.ledger.take_event(message):
            self.report([message])
            if message.kind is RoomEventKind.DONE:
                # Only a room that was taken whole can be done: its answer is known if the worker dies before giving it.
                key = HalfKey(message.half, message.instance, message.room, message.pool)
                self.done_calls.update(request.number for request in self._calls_of(key))

    def _settle_ended(self) -> None:
        """Answer calls in flight whose half is over: a new worker must not hear of it."""
        for request in self.link.calls():
            key = self.keys.get(request.number)
            if key is None:
                continue
            if request.number in self.done_calls:
                self.link.settle(request, Accepted(request.number))
                continue
            found = self.ledger.get(key)
            if found is None or found.ended is not None or found.cancelled:
                reason, text = Reason.CANCELLED, f"room {key.room} was cancelled"
                if found is None or found.ended is not None:
                    reason, text = Reason.WORKER_LOST, f"room {key.room} had failed when the worker was lost"
                self.link.settle(request, Refused(request.number, reason, text))

    def _pools_again(self) -> Iterator[Request]:
        for number, pool in self.pools.items():

            def on_answer(answer: Accepted | Refused | None, number: int = number) -> None:
                if isinstance(answer, Refused):
                    close_all(self.pools.pop(number).descriptors)
                    for found in self.ledger:
                        if found.key.pool == number:
                            self._give_up(found.key, answer)

            yield Request(pool.message.request, (pool.message,), descriptors=pool.descriptors, on_answer=on_answer)

    def _halves_again(self) -> Iterator[Request]:
        self._told_again = {}
        for key, messages in self.ledger.replay():

            def on_answer(answer: Accepted | Refused | None, key: HalfKey = key) -> None:
                if isinstance(answer, Refused):
                    self._give_up(key, answer)

            request = Request(messages[0].request, messages, on_answer=on_answer)
            self._told_again.setdefault(key, []).append(request)
            yield request

    def _give_up(self, key: HalfKey, refused: Refused) -> None:
        """A new worker refuses what the old one had: the half has failed, and the worker that held it is dead."""
        self.report(self.ledger.end(key, refused.reason, f"refused after the worker was lost: {refused.text}"))
        for request in self._told_again.get(key, []):
            request.settle(None)
        for request in self._calls_of(key):
            self.link.settle(request, Refused(request.number, refused.reason, refused.text))

    def report(self, events: Sequence[RoomEvent]) -> None:
        """Keep events until they are taken, and wake who waits."""
        for event in events:
            if len(self.events) >= EVENTS_MAX:
                self.events.popleft()
                self.dropped_event_count += 1
            self.events.append(event)
        self.link.changed.notify_all()

    def _calls_of(self, key: HalfKey) -> list[Request]:
        return [request for request in self.link.calls() if self.keys.get(request.number) == key]


def close_all(descriptors: Collection[int]) -> None:
    """Close descriptors of ours."""
    for descriptor in descriptors:
        os.close(descriptor)
