"""Simulated engines: each rank has the real client's core, whose messages and events the simulator carries.

An engine gives pages to rooms, fills them, and frees them as soon as permitted, so that later accesses to them are
detected.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from sim_memory import Pages, Pool, SlotPages, SlotPool
from sim_worker import LOCAL_NS, Worker
from sim_world import MS, SECOND, ViolationError, World

from longshore_client.core import Core, State
from longshore_client.ledger import Call, HalfKey
from longshore_client.memory import pool_geometry
from longshore_wire.effects import PeerId, SessionConfig
from longshore_wire.engine_messages import (
    ENGINE_PROTOCOL_VERSION,
    TO_AGENT,
    Accepted,
    Ask,
    CachePages,
    Cancel,
    Endpoint,
    EndpointUpdate,
    Half,
    Hello,
    Offer,
    Receive,
    Refused,
    RoomEvent,
    RoomEventKind,
    ToEngine,
    Welcome,
)
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import KVLayout, PageOrder, PoolGeometry, TargetMemory
from longshore_wire.peer_messages import RoomKey

if TYPE_CHECKING:
    from sim_agent import Agent

# Host memory is larger, and its pages may hold one token.
PAGES_MAX = {TargetMemory.DEVICE: 512, TargetMemory.HOST: 2048}
REDIAL_NS = 100 * MS
# Tokens of a cache whose pages are small: more than all rooms of a run have, since a room without pages is never offered.
TOKENS_MIN = 4096
# Tokens that a windowed cache keeps.
WINDOW = 6
# An engine aborts a request if its agent is busy for this long.
TRIES_MAX = 60
_serials = itertools.count(1)


@lru_cache(maxsize=256)
def _geometry(layout: KVLayout, page_count: int) -> PoolGeometry:
    return pool_geometry(layout, page_count)


@dataclass(eq=False, slots=True)
class Room:
    """One half of one room at one engine rank, as its engine sees it."""

    client: Client
    key: RoomKey
    end: int
    caches: list[Pages]
    keep_ns: int
    chunks: deque[tuple[int, int, int, bool]]  # still to offer: not before, first, end, last
    claim: Receive | None = None  # to make when prefill has offered the room
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
        """Whether its pages exist, which live as long as their engine."""
        return self.client.alive

    def check_done(self) -> None:
        """Check the pages of a room that was reported as done: they must hold everything."""
        if self.client.half is Half.SOURCE or not self.client.alive:
            return
        for cache, pages in enumerate(self.caches):
            if pages.pages and not pages.holds(self.key.room, self.end):
                text = (
                    f"room {self.key.room} is done at {self.client}, and its pages of cache {cache} hold something else"
                )
                raise ViolationError(text)


class Client:
    """One engine rank's pages in one memory: the real client's core for them, and an engine that uses it.

    A rank with pages in both memories has two, which live, stop and die together, while their workers do not.
    """

    def __init__(self, world: World, agent: Agent, half: Half, make: Callable[[int], SessionConfig]) -> None:
        self.world, self.agent, self.half, self.config = world, agent, half, make
        config = make(0)
        layout = config.layout
        self.layout, self.instance, self.lease_ns = layout, config.instance, config.lease_ns
        self.key = PeerId(config.instance, layout.parallel.dp_rank, layout.rank, config.memory)
        counts = [max(PAGES_MAX[config.memory], TOKENS_MIN // cache.page_size) for cache in layout.caches]
        self.geometries = [_geometry(*each) for each in zip(layout.caches, counts, strict=True)]
        self.pools = [
            (SlotPool if each.order is PageOrder.SLOT else Pool)(each, count, cache)
            for cache, (each, count) in enumerate(zip(layout.caches, counts, strict=True))
        ]
        hello = Hello(
            ENGINE_PROTOCOL_VERSION, config.instance, layout, "cpu", (half,), config.engine, memory=config.memory
        )
        self.core = Core(hello, agent.name, deque())
        self.rooms: dict[RoomKey, Room] = {}
        self.alive, self.paused = True, False
        self.worker: Worker | None = None
        self._wake_ns: int | None = None
        self._kept: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._wake(world.now_ns + LOCAL_NS)

    def __repr__(self) -> str:
        return f"engine {self.key.path}@{self.agent.name}"

    @property
    def served(self) -> bool:
        """Whether it has a worker that knows all of its rooms."""
        return self.core.state is State.READY

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
            self._take(Refused(0, Reason.BUSY, "not now", REDIAL_NS))

    def disconnected(self, worker: Worker) -> None:
        """The connection has ended."""
        if not self.alive or self._later(self.disconnected, worker):
            return
        if self.worker is worker or self.worker is None:
            self.worker = None
            self.core.disconnected(ConnectionError("the worker has ended"), self._now_s)
            self._turn()

    def learn(self, worker: Worker, endpoint: Endpoint) -> None:
        """Take the list of registered ranks from the agent."""
        self.heard(worker, EndpointUpdate(endpoint))

    def welcomed(self, worker: Worker) -> None:
        """A worker serves this engine."""
        if not self.alive:
            self.world.at(LOCAL_NS, worker.deliver, worker.engine_lost)
            return
        if self._later(self.welcomed, worker) or not worker.alive:
            return
        self.worker = worker
        self._take(Welcome(ENGINE_PROTOCOL_VERSION, worker.epoch, "sim", self.lease_ns))

    def heard(self, worker: Worker, message: ToEngine) -> None:
        """Handle a message of the worker."""
        if self.alive and self.worker is worker and not self._later(self.heard, worker, message):
            if isinstance(message, Refused):
                self.world.say(
                    repr(self), f"request {message.request} is refused: {message.reason.name} {message.text}"
                )
            self._take(message)

    @property
    def _now_s(self) -> float:
        return self.world.now_ns / SECOND

    def _take(self, message: ToEngine) -> None:
        self.core.take(message, self._now_s)
        self._turn()

    def _wake(self, at_ns: int) -> None:
        """Schedule a turn at this time at the latest."""
        if self._wake_ns is None or at_ns < self._wake_ns:
            self._wake_ns = at_ns
            self.world.at(at_ns - self.world.now_ns, self._woken, at_ns)

    def _woken(self, at_ns: int) -> None:
        if self._wake_ns != at_ns or not self.alive or self._later(self._woken, at_ns):
            return
        self._wake_ns = None
        self._turn()

    def _turn(self) -> None:
        """Do what the real connection does: connect, do due work, send, and carry the core's effects out."""
        if self.core.should_dial(self._now_s):
            self.core.connected(self._now_s)
            self.core.outbox.clear()  # the Hello
            self.agent.hello(self)
        wait_s = self.core.advance(self._now_s)
        self._send()
        while effects := self.core.take_effects():
            events, calls = list(self.core.events), effects.settled
            self.core.events.clear()
            if not (events or calls):
                break
            for event in events:
                self._report(event)
            for call in calls:
                self._settled(call)
        # Rounded up, so that due work is really due then.
        self._wake(self.world.now_ns + max(math.ceil(wait_s * SECOND), 1))

    def _send(self) -> None:
        for outgoing in self.core.outbox:
            message: Any = TO_AGENT.decode(outgoing.data)
            room = None
            if isinstance(message, Offer | Ask | Receive):
                instance = self.instance if isinstance(message, Offer) else message.endpoint.instance
                room = self.rooms[RoomKey(instance, message.room)]
            worker = self.worker
            assert worker is not None
            self.world.at(LOCAL_NS, worker.deliver, worker.obey_engine, message, room)
        self.core.outbox.clear()

    def _settled(self, call: Call) -> None:
        """A call of this engine has its answer."""
        if call.again or call.key is None or call.answer is None:
            return
        room, answer = self.rooms[RoomKey(*call.key[1:])], call.answer
        if isinstance(answer, Refused) and answer.reason is Reason.BUSY and room.tries < TRIES_MAX:
            # The agent accepts no more rooms now: retry a limited number of times.
            room.tries += 1
            self.world.at(answer.retry_after_ns, self.call, call.key, call.message, room)
            return
        accepted = isinstance(answer, Accepted)
        room.opened = room.opened or accepted
        room.taken_ns, room.taken_by = self.world.now_ns, self.worker
        room.refused = room.refused or not accepted
        if accepted:
            self._next_chunk(room)
        elif self.core.ledger.get(call.key) is None:
            self._give_back(room)

    # -- rooms -----------------------------------------------------------------------------------------------------

    def call(self, key: HalfKey, message: Offer | Ask | Receive, room: Room) -> None:
        """Send a request to the agent, repeatedly until it answers, to its current worker."""
        if not self.alive or self._later(self.call, key, message, room) or room.released:
            return
        message = msgspec.structs.replace(message, request=self.core.next_number())
        try:
            self.core.enter(Call((message,), key=key), f"room {key.room}")
        except LongshoreError as error:
            self.world.say(repr(self), f"room {key.room}: {error}")
            room.refused = True
            return
        self._turn()

    def open(self, number: int, instance: str, first: int, end: int, keep_ns: int) -> Room | None:
        """Give pages to a half of a room; return None if there are too few."""
        serial, caches = next(_serials), []
        for pool, since in zip(self.pools, self._firsts(number, first, end), strict=True):
            size = pool.layout.page_size
            first_page, count = pool.layout.pages_of(since, end)
            pages = pool.take(count, serial)
            if pages is None:
                for each in caches:
                    each.pool.give_back(each.pages)
                return None
            if isinstance(pool, SlotPool):
                caches.append(SlotPages(pool, serial, pages))
                continue
            caches.append(Pages(pool, serial, pages, first_page))
            if self.half is Half.TARGET and pages:
                caches[-1].fill(number, first_page * size, since)
        key = RoomKey(instance, number)
        room = Room(self, key, end, caches, keep_ns, deque())
        self.rooms[key] = room
        return room

    def _firsts(self, number: int, first: int, end: int) -> list[int]:
        """Return from where on each cache is wanted: from `first` on, whole, or not at all. A window begins late."""
        begins = [max(0, end - WINDOW) if pool.layout.name.startswith("window") else 0 for pool in self.pools]
        if self.half is Half.SOURCE:
            return begins
        firsts = [first, *((first, 0, end)[(number + cache) % 3] for cache in range(1, len(self.pools)))]
        for cache, pool in enumerate(self.pools):
            if isinstance(pool, SlotPool) and firsts[cache] < end:
                firsts[cache] = 0
        return list(map(max, begins, firsts))

    def offer(self, room: Room) -> None:
        """Offer the chunks of a room, each at its time and after the one before was accepted."""
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
        key = HalfKey(Half.SOURCE, room.key.instance, room.key.room)
        if room.released:
            room.chunks.clear()
            return
        offered = []
        begins = self._firsts(room.key.room, 0, room.end)
        for cache, pages in enumerate(room.caches):
            # Some caches are offered as a whole, with the last chunk; slots and windows always are.
            waits = bool(cache) and (room.key.room + cache) % 4 == 0
            waits = waits or isinstance(pages, SlotPages) or begins[cache] > 0
            if not waits or last:
                begin = begins[cache] if waits else first
                if begin < end or not isinstance(pages, SlotPages):
                    pages.fill(room.key.room, begin, end)
                offered.append(CachePages(cache, begin, end, 0, b""))
        self.call(key, Offer(0, room.key.room, tuple(offered), last), room)

    def claim(self, room: Room, endpoint: Endpoint, first: int, *, asks: bool) -> None:
        """Claim the tokens of a room, at once or when the answer to an ask has come."""
        key = HalfKey(Half.TARGET, room.key.instance, room.key.room)
        firsts = self._firsts(room.key.room, first, room.end)
        wanted = (
            CachePages(cache, since, room.end, len(each.pages), np.array(each.pages, "<i4").tobytes())
            for cache, (since, each) in enumerate(zip(firsts, room.caches, strict=True))
        )
        claim = Receive(0, room.key.room, endpoint, tuple(wanted))
        if asks:
            room.claim = claim
            self.call(key, Ask(0, room.key.room, endpoint), room)
        else:
            self.call(key, claim, room)

    def cancel(self, room: Room) -> None:
        """Cancel a half, also at a new worker."""
        key = HalfKey(self.half, room.key.instance, room.key.room)
        if not self.alive or self._later(self.cancel, room) or room.released:
            return
        self.world.say(repr(self), f"cancels room {key.room}")
        room.chunks.clear()
        room.cancelled = True
        if not self.core.ledger.cancel(*key):
            # It was not accepted yet, and is not repeated.
            self._give_back(room)
            if self.half is Half.TARGET:
                return
        self.core.enter(Call((Cancel(self.core.next_number(), *key),)), f"cancel of room {key.room}")
        self._turn()

    def _report(self, event: RoomEvent) -> None:
        room = self.rooms[RoomKey(event.instance, event.room)]
        if event.kind is RoomEventKind.OFFERED:
            if room.claim is None or room.cancelled or room.ended is not None:
                raise ViolationError(f"{self} hears that room {event.room} is offered, for which it does not ask")
            claim, room.claim = room.claim, None
            self.call(HalfKey(self.half, event.instance, event.room), claim, room)
        elif event.kind is RoomEventKind.RELEASED:
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
        """Free the pages. Other rooms get them at once, unless the engine still uses the received bytes."""
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
        for each in room.caches:
            each.pool.give_back(each.pages)


@dataclass(eq=False)
class Engine:
    """One life of an engine of one replica: its ranks live and die together, or one by one.

    Attributes:
        clients: of all ranks, first those of the device's memory, then those of host memory, if it has pages there.
    """

    clients: list[Client]

    def of(self, memory: TargetMemory) -> list[Client]:
        """Return the clients of all ranks for one memory."""
        return [client for client in self.clients if client.key.memory is memory]

    def process(self, number: int) -> list[Client]:
        """Return the clients in the process that has client `number`."""
        rank = self.clients[number].key.rank
        return [client for client in self.clients if client.key.rank == rank]

    @property
    def alive(self) -> bool:
        """Whether all ranks live; otherwise it takes no requests."""
        return all(client.alive for client in self.clients)

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint that its connector passes on with a request; None: not complete yet."""
        found = self.clients[0].core.endpoint
        return found if found is not None and found.complete else None

    def rooms(self, number: int) -> list[Room]:
        """Return the halves of a room at all ranks."""
        return [room for client in self.clients for key, room in client.rooms.items() if key.room == number]
