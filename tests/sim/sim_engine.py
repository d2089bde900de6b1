"""Simulated engines: each rank has a client that keeps the real ledger, and tells a new worker what the real client tells it.

An engine gives pages to rooms, fills them, and takes them back as soon as it may, so that a later access to them is detected.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from sim_memory import Pages, Pool
from sim_worker import LOCAL_NS, Worker
from sim_world import MS, ViolationError, World

from longshore_client.ledger import HalfKey, Ledger
from longshore_client.memory import pool_geometry
from longshore_wire.effects import SessionConfig
from longshore_wire.engine_messages import (
    Accepted,
    Cancel,
    Endpoint,
    Half,
    Offer,
    Receive,
    Refused,
    Renew,
    RoomEvent,
    RoomEventKind,
)
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import KVLayout, PoolGeometry
from longshore_wire.peer_messages import RoomKey

if TYPE_CHECKING:
    from sim_agent import Agent

PAGES_MAX = 512
REDIAL_NS = 100 * MS
# An engine whose agent is busy for seconds gives the request up.
TRIES_MAX = 60
_serials = itertools.count(1)


@lru_cache(maxsize=256)
def _geometry(layout: KVLayout) -> PoolGeometry:
    return pool_geometry(layout, PAGES_MAX)


@dataclass(eq=False, slots=True)
class Room:
    """One half of one room at one engine rank, as its engine sees it."""

    client: Client
    key: RoomKey
    end: int
    pages: Pages
    keep_ns: int
    chunks: deque[tuple[int, int, int, bool]]  # still to offer: not before, first, end, last
    tries: int = 0  # how often the agent was busy
    taken_ns: int = 0  # when a worker has taken the last of it
    taken_by: Worker | None = None
    ended_ns: int = 0
    opened: bool = False  # a worker has taken it
    refused: bool = False
    cancelled: bool = False
    ended: Reason | None = None
    released: bool = False
    ended_by: Worker | None = None  # the life of the worker that said so

    @property
    def lives(self) -> bool:
        """Whether its pages exist: they live as long as their engine."""
        return self.client.alive

    def check_done(self) -> None:
        """Check the pages of a room that was reported as done: they must hold everything."""
        if self.client.half is Half.SOURCE or not self.client.alive or not self.pages.pages:
            return
        if not self.pages.holds(self.key.room, self.end):
            raise ViolationError(f"room {self.key.room} is done at {self.client}, and its pages hold something else")


@dataclass(slots=True)
class Call:
    """A request to the agent that has no answer yet."""

    message: Any
    key: HalfKey
    room: Room
    outlives: bool = True


class Client:
    """One engine rank's end of the engine link."""

    def __init__(self, world: World, agent: Agent, half: Half, make: Callable[[int], SessionConfig]) -> None:
        self.world, self.agent, self.half, self.config = world, agent, half, make
        config = make(0)
        layout = config.layout
        self.layout, self.instance, self.lease_ns = layout, config.instance, config.lease_ns
        self.key = (config.instance, layout.parallel.dp_rank, layout.rank)
        self.geometry = _geometry(layout)
        self.pool = Pool(layout, PAGES_MAX)
        self.ledger = Ledger()
        self.rooms: dict[RoomKey, Room] = {}
        self.endpoint: Endpoint | None = None
        self.alive, self.paused = True, False
        self.worker: Worker | None = None
        self._state = "down"
        self._welcomed = False
        self._number = 0
        self._calls: dict[int, Call] = {}
        self._done_calls: set[int] = set()
        self._telling: deque[tuple[HalfKey, Any]] = deque()
        self._kept: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        world.at(LOCAL_NS, agent.hello, self)

    def __repr__(self) -> str:
        return f"engine {'/'.join(map(str, self.key))}@{self.agent.name}"

    @property
    def served(self) -> bool:
        """Whether it has a worker that knows all of its rooms."""
        return self._state == "ready"

    # -- the link --------------------------------------------------------------------------------------------------

    def _later(self, action: Callable[..., None], *arguments: Any) -> bool:
        """Keep a call until this process is continued; return whether it is stopped."""
        if self.paused:
            self._kept.append((action, arguments))
        return self.paused

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        kept, self._kept = self._kept, []
        for action, arguments in kept:
            action(*arguments)

    def die(self) -> None:
        """The engine's process has ended."""
        self.alive = False
        if self.worker is not None:
            worker = self.worker
            self.world.at(LOCAL_NS, worker.deliver, worker.engine_lost)

    def refused(self) -> None:
        """The agent refuses this engine name now."""
        if self.alive and not self._later(self.refused):
            self.world.at(REDIAL_NS, self.agent.hello, self)

    def disconnected(self, worker: Worker) -> None:
        """The connection has ended."""
        if not self.alive or self._later(self.disconnected, worker):
            return
        if self.worker is worker or self.worker is None:
            self.worker, self.endpoint, self._state = None, None, "down"
            self._telling.clear()
            self.world.at(LOCAL_NS, self.agent.hello, self)

    def learn(self, worker: Worker, endpoint: Endpoint) -> None:
        """Take the list of registered ranks from the agent."""
        if self.alive and self.worker is worker and not self._later(self.learn, worker, endpoint):
            self.endpoint = endpoint

    def welcomed(self, worker: Worker) -> None:
        """A worker serves this engine: tell it first what the last one knew."""
        if not self.alive:
            self.world.at(LOCAL_NS, worker.deliver, worker.engine_lost)
            return
        if self._later(self.welcomed, worker) or not worker.alive:
            return
        self.worker, self._state = worker, "telling"
        self._renew(worker)
        for number, call in list(self._calls.items()):
            if not call.outlives:
                del self._calls[number]
        if self._welcomed:
            self._settle_ended()
            self._report(self.ledger.agent_replaced())
        self._welcomed = True
        self._telling = deque((key, messages[0]) for key, messages in self.ledger.replay())
        self._tell()

    def _settle_ended(self) -> None:
        for number, call in list(self._calls.items()):
            found = self.ledger.get(call.key)
            if number in self._done_calls:
                self._settle(number, accepted=True)
            elif found is None or found.ended is not None or found.cancelled:
                self._settle(number, accepted=False)

    def _settle(self, number: int, *, accepted: bool) -> None:
        call = self._calls.pop(number)
        self._done_calls.discard(number)
        self.ledger.answered(number, accepted=accepted)
        call.room.opened = call.room.opened or accepted
        call.room.taken_ns, call.room.taken_by = self.world.now_ns, self.worker
        call.room.refused = call.room.refused or not accepted
        if accepted:
            self._next_chunk(call.room)
        elif self.ledger.get(call.key) is None:
            self._give_back(call.room)

    def _tell(self) -> None:
        if self._telling:
            key, message = self._telling[0]
            self._transmit(message, self.rooms[RoomKey(key.instance, key.room, key.pool)])
            return
        self._state = "ready"
        for call in self._calls.values():
            self._transmit(call.message, call.room)

    def _tell_again(self, worker: Worker) -> None:
        if self.alive and self.worker is worker and not self._later(self._tell_again, worker) and self._telling:
            self._tell()

    def _transmit(self, message: Any, room: Room | None) -> None:
        worker = self.worker
        assert worker is not None
        self.world.at(LOCAL_NS, worker.deliver, worker.obey_engine, message, room)

    def _renew(self, worker: Worker) -> None:
        if self.alive and self.worker is worker and not self._later(self._renew, worker):
            self._transmit(Renew(), None)
            self.world.at(self.lease_ns // 3, self._renew, worker)

    def heard(self, worker: Worker, message: Any) -> None:
        """Handle a message of the worker."""
        if not self.alive or self.worker is not worker or self._later(self.heard, worker, message):
            return
        if isinstance(message, RoomEvent):
            if self.ledger.take_event(message):
                self._report([message])
                if message.kind is RoomEventKind.DONE:
                    key = HalfKey(message.half, message.instance, message.room, message.pool)
                    self._done_calls.update(number for number, call in self._calls.items() if call.key == key)
            return
        if self._telling and self._telling[0][1].request == message.request:
            self._told(message)
            return
        call = self._calls.get(message.request)
        if call is None:
            return
        if isinstance(message, Refused) and message.reason is Reason.BUSY and isinstance(call.message, Offer | Receive):
            self._busy(message, call)
        else:
            if isinstance(message, Refused):
                self.world.say(repr(self), f"room {call.key.room} is refused: {message.reason.name} {message.text}")
            self._settle(message.request, accepted=isinstance(message, Accepted))

    def _busy(self, answer: Refused, call: Call) -> None:
        """The agent takes no more rooms now: ask again, a limited number of times."""
        call.room.tries += 1
        if call.room.tries > TRIES_MAX:
            self._settle(answer.request, accepted=False)
            return
        del self._calls[answer.request]
        self.ledger.answered(answer.request, accepted=False)
        self.world.at(answer.retry_after_ns, self.call, call.key, call.message, call.room)

    def _told(self, answer: Accepted | Refused) -> None:
        """A new worker has answered a message about the last one's rooms."""
        worker = self.worker
        assert worker is not None
        if isinstance(answer, Refused) and answer.reason is Reason.BUSY:
            self.world.at(answer.retry_after_ns, self._tell_again, worker)
            return
        key, _ = self._telling.popleft()
        if isinstance(answer, Refused):
            self.world.say(repr(self), f"room {key.room} is refused after a loss: {answer.reason.name} {answer.text}")
            self._report(self.ledger.end(key, answer.reason, answer.text))
            self._telling = deque(each for each in self._telling if each[0] != key)
            for number, call in list(self._calls.items()):
                if call.key == key:
                    self._settle(number, accepted=False)
        self._tell()

    # -- rooms -----------------------------------------------------------------------------------------------------

    def call(self, key: HalfKey, message: Offer | Receive, room: Room) -> None:
        """Send a request to the agent, again until it answers, to whichever worker it has by then."""
        if not self.alive or self._later(self.call, key, message, room) or room.released:
            return
        self._number += 1
        message = type(message)(self._number, *[getattr(message, name) for name in message.__struct_fields__[1:]])
        try:
            self.ledger.sent(key, self._number, (message,))
        except LongshoreError as error:
            self.world.say(repr(self), f"room {key.room}: {error}")
            room.refused = True
            return
        self._calls[self._number] = Call(message, key, room)
        if self._state == "ready":
            self._transmit(message, room)

    def open(self, number: int, instance: str, first: int, end: int, keep_ns: int) -> Room | None:
        """Give pages to a half of a room; None: there are too few."""
        serial, size = next(_serials), self.layout.page_size
        first_page = first // size
        count = -(-end // size) - first_page if first < end or self.half is Half.SOURCE else 0
        pages = self.pool.take(max(count, 0), serial)
        if pages is None:
            return None
        key = RoomKey(instance, number, 0)
        room = Room(self, key, end, Pages(self.pool, serial, pages, first_page), keep_ns, deque())
        if self.half is Half.TARGET and pages:
            room.pages.fill(number, first_page * size, first)
        self.rooms[key] = room
        return room

    def offer(self, room: Room) -> None:
        """Offer the chunks of a room, each when its time has come and the one before was accepted."""
        self._next_chunk(room)

    def _next_chunk(self, room: Room) -> None:
        if not room.chunks:
            return
        wait_ns = room.chunks[0][0] - self.world.now_ns
        if wait_ns > 0:
            self.world.at(wait_ns, self._next_chunk, room)
            return
        if not self.alive or self._later(self._next_chunk, room) or not room.chunks:
            return
        _, first, end, last = room.chunks.popleft()
        key = HalfKey(Half.SOURCE, room.key.instance, room.key.room, 0)
        if room.released:
            room.chunks.clear()
            return
        room.pages.fill(room.key.room, first, end)
        self.call(key, Offer(0, room.key.room, 0, first, end, last, b""), room)

    def claim(self, room: Room, endpoint: Endpoint, first: int) -> None:
        """Ask for the tokens of a room."""
        key = HalfKey(Half.TARGET, room.key.instance, room.key.room, 0)
        pages = np.array(room.pages.pages, "<i4").tobytes()
        count = len(room.pages.pages)
        self.call(key, Receive(0, room.key.room, 0, endpoint, first, room.end, 0, count, pages), room)

    def cancel(self, room: Room) -> None:
        """Cancel a half; a new worker hears of it, too."""
        key = HalfKey(self.half, room.key.instance, room.key.room, 0)
        if not self.alive or self._later(self.cancel, room) or room.released:
            return
        self.world.say(repr(self), f"cancels room {key.room}")
        room.chunks.clear()
        room.cancelled = True
        if self.ledger.get(key) is None:
            # It was not taken yet, and will not be asked for again.
            self._give_back(room)
            if self.half is Half.TARGET:
                return
        else:
            self.ledger.cancelled(key)
        self._number += 1
        message = Cancel(self._number, *key)
        self._calls[self._number] = Call(message, key, room, outlives=False)
        if self._state == "ready":
            self._transmit(message, room)

    def _report(self, events: list[RoomEvent]) -> None:
        for event in events:
            room = self.rooms[RoomKey(event.instance, event.room, event.pool)]
            if event.kind is RoomEventKind.RELEASED:
                if room.ended is None:
                    raise ViolationError(f"{self}: room {event.room} is released before it has ended")
                self._give_back(room)
            elif room.ended is not None:
                raise ViolationError(f"{self} hears twice how room {event.room} ended")
            else:
                room.ended, room.ended_ns = event.reason, self.world.now_ns
                room.chunks.clear()
                if event.kind is RoomEventKind.DONE:
                    room.check_done()
                    self.world.counts[f"{self.half.name.lower()} done"] += 1

    def _give_back(self, room: Room) -> None:
        """Take the pages back: other rooms get them at once, unless the engine still uses the received bytes."""
        if room.released:
            return
        room.released = True
        if room.ended is Reason.NONE and self.half is Half.TARGET:
            self.world.at(room.keep_ns, self._free, room)
        else:
            self._free(room)

    def _free(self, room: Room) -> None:
        if not self.alive:
            return
        if room.ended is Reason.NONE:
            room.check_done()
        self.pool.give_back(room.pages.pages)


@dataclass(eq=False)
class Engine:
    """One life of an engine of one replica: its ranks live and die together, or one by one."""

    clients: list[Client]

    @property
    def alive(self) -> bool:
        """Whether all ranks live; otherwise it takes no requests."""
        return all(client.alive for client in self.clients)

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint that its connector passes on with a request; None: not complete yet."""
        found = self.clients[0].endpoint
        return found if found is not None and found.complete else None

    def rooms(self, number: int) -> list[Room]:
        """Return the halves of a room at all ranks."""
        return [room for client in self.clients for key, room in client.rooms.items() if key.room == number]
