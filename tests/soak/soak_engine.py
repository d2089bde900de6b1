"""One engine of the soak: all ranks of an instance in a process that may be killed or stopped at any moment.

Started by `soak_nodes`, controlled by lines of JSON (`soak_messages`). It reuses pages as soon as they are released. It compares
them when a room is done, when a page is taken again, and all of them on `Check`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from agent_world import AgentSocket, Engine
from soak_messages import (
    MODEL,
    Cancel,
    Check,
    Checked,
    Claim,
    Corrupt,
    Ended,
    EngineSpec,
    FromEngine,
    Leave,
    Offer,
    Opened,
    Reachable,
    Ready,
    Repeated,
    ToEngine,
)

from longshore_client import Half, RoomEvent, RoomEventKind, WaitTimeout
from longshore_client.errors import AgentLost, Busy, CallTimeout, ClientClosed
from longshore_lab.test_engine.pages import content
from longshore_lab.test_engine.ranks import Rank
from longshore_wire.engine_messages import Endpoint
from longshore_wire.errors import LongshoreError, Reason

# Calls that may wait for an agent at one time: one call for each open room, and as many cancels.
CALLERS = 32
# Time limit of one call to an agent that is away or busy, and of its retries before its room is aborted.
CALL_LIMIT_S = 5.0
INSIST_LIMIT_S = 60.0
LOOK_S = 0.2
# Number of places that a message on wrong bytes names.
PLACES_MAX = 8


@dataclass
class Room:
    """One half of a room at this engine."""

    instance: str  # of prefill
    prefix: int
    total: int
    pages: list[int] = field(default_factory=list)
    data: np.ndarray = field(default_factory=lambda: np.empty(0))
    calling: bool = True
    cancelled: bool = False
    accepted: set[int] = field(default_factory=set)  # ranks
    released: set[int] = field(default_factory=set)
    ends: dict[int, tuple[Reason, str]] = field(default_factory=dict)
    refused: tuple[Reason, str] | None = None


class Player:
    """Carries out orders, each call in a thread; every rank has a thread that waits for the events of its rooms."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.engine = Engine(
            AgentSocket(spec.socket),
            spec.instance,
            spec.tp,
            model=MODEL,
            page_size=spec.page_size,
            page_count=spec.page_count,
            order=spec.order,
            roles=[spec.half],
        )
        self._lock = threading.RLock()
        self._rooms: dict[int, Room] = {}
        self._pause = threading.Event()
        self._callers = ThreadPoolExecutor(CALLERS)
        # Start all threads at once. Otherwise their number would grow with the open rooms.
        barrier = threading.Barrier(CALLERS)
        list(self._callers.map(lambda _: barrier.wait(), range(CALLERS)))
        self._said: Endpoint | None = None
        self._damage_count = 0

    def play(self) -> None:
        """Serve until stdin ends or `Leave` comes."""
        for number, rank in enumerate(self.engine.ranks):
            threading.Thread(target=self._listen, args=(number, rank), daemon=True).start()
        self._say(Ready())
        orders = msgspec.json.Decoder(ToEngine)
        for line in sys.stdin.buffer:
            order = orders.decode(line)
            if isinstance(order, Leave):
                break
            if isinstance(order, Offer | Claim):
                # Open it here, so that a later Cancel finds the room.
                instance = order.endpoint.instance if isinstance(order, Claim) else self.spec.instance
                self._rooms[order.room] = Room(instance, order.prefix if isinstance(order, Claim) else 0, order.total)
            elif isinstance(order, Cancel) and (room := self._rooms.get(order.room)) is not None:
                room.cancelled = True
            self._callers.submit(self._obey, order)
        self._pause.set()
        self.engine.close()

    def _obey(self, order: ToEngine) -> None:
        try:
            match order:
                case Offer():
                    self._offer(order)
                case Claim():
                    self._claim(order)
                case Cancel():
                    self._cancel(order.room)
                case Check():
                    self._check()
        except BaseException as error:
            # Otherwise our own error in a thread would look like a stuck room.
            self._say(Corrupt(f"{self.spec.instance}: the soak's engine failed: {error!r}"))
            raise

    # -- calls -----------------------------------------------------------------------------------------------------

    def _offer(self, order: Offer) -> None:
        size = self.spec.page_size
        room = self._open(order.room)
        with self._lock:
            for rank in self.engine.ranks:
                for where in (rank.planes, rank.expected):
                    rank.put(where, room.pages, room.data, 0, order.total)
        edges = [0, *order.cuts, order.total]
        for first, end in itertools.pairwise(edges):
            if first and (self._pause.wait(order.pause_s) or room.released or room.ends):
                break
            pages = room.pages[first // size : -(-end // size)]

            def send(rank: Rank, first: int = first, end: int = end, pages: list[int] = pages) -> None:
                rank.client.send(order.room, pages, first, end, last=end == order.total, timeout_s=CALL_LIMIT_S)

            if not all(self._call(order.room, room, number, send) for number in range(self.spec.tp)):
                break
            if not first:
                self._say(Opened(order.room))
        self._calls_over(order.room, room)

    def _claim(self, order: Claim) -> None:
        room = self._open(order.room)

        def receive(rank: Rank) -> None:
            rank.client.receive(
                order.room, order.endpoint, room.pages, order.prefix, order.total, timeout_s=CALL_LIMIT_S
            )

        if all(self._call(order.room, room, number, receive) for number in range(self.spec.tp)):
            self._say(Opened(order.room))
        self._calls_over(order.room, room)

    def _open(self, number: int) -> Room:
        room = self._rooms[number]
        room.data = content(number, room.total, self.engine.ranks[0].layout)
        with self._lock:
            room.pages = self.engine.take_pages(room.prefix, room.total)
            for rank in self.engine.ranks:
                self._compare(rank, room.pages, f"a free page was written before room {number} took it")
        return room

    def _call(self, number: int, room: Room, rank: int, call: Callable[[Rank], None]) -> bool:
        """Repeat a call to one rank's agent until it is answered; return whether it was accepted."""
        end_s = time.monotonic() + INSIST_LIMIT_S
        while time.monotonic() < end_s:
            if room.cancelled or self._pause.is_set():
                return False
            try:
                call(self.engine.ranks[rank])
            except Busy as error:
                self._say(Repeated(error.reason))
                self._pause.wait(error.retry_after_s)
            except AgentLost as error:
                self._say(Repeated(error.reason))
            except LongshoreError as error:
                room.refused = room.refused or (error.reason, str(error))
                return False
            else:
                room.accepted.add(rank)
                return True
        room.refused = room.refused or (Reason.BUSY, f"the agent took no call of room {number}")
        return False

    def _calls_over(self, number: int, room: Room) -> None:
        room.calling = False
        if room.refused or room.cancelled:
            self._cancel(number)
        self._look_at(number)

    def _cancel(self, number: int) -> None:
        room = self._rooms.get(number)
        if room is None:
            return
        room.cancelled = True
        for rank in self.engine.ranks:
            # The client stores the cancel and sends it to the next agent.
            with contextlib.suppress(AgentLost, CallTimeout, ClientClosed):
                rank.client.cancel(number, self.spec.half, instance=room.instance, timeout_s=CALL_LIMIT_S)
        self._look_at(number)

    # -- events ----------------------------------------------------------------------------------------------------

    def _listen(self, number: int, rank: Rank) -> None:
        with contextlib.suppress(ClientClosed):
            while True:
                for event in rank.client.poll(LOOK_S):
                    self._take(number, rank, event)
                self._look_at_unclear()
                if number == 0 and self.spec.half is Half.SOURCE:
                    with contextlib.suppress(WaitTimeout):
                        found = rank.client.endpoint(0)
                        if found != self._said:
                            self._said = found
                            self._say(Reachable(found))

    def _take(self, number: int, rank: Rank, event: RoomEvent) -> None:
        with self._lock:
            room = self._rooms.get(event.room)
            if room is None:
                return
            if event.kind is RoomEventKind.RELEASED:
                room.released.add(number)
            else:
                room.ends[number] = (event.reason, event.text)
                if event.kind is RoomEventKind.DONE and self.spec.half is Half.TARGET:
                    rank.put(rank.expected, room.pages, room.data, room.prefix, room.total)
                    self._compare(rank, room.pages, f"room {event.room} is DONE with other bytes")
        self._look_at(event.room)

    def _look_at_unclear(self) -> None:
        """Check a half whose call got no answer: if it opened nothing, no event will come."""
        for number, room in list(self._rooms.copy().items()):
            if not room.calling and len(room.accepted) < self.spec.tp:
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        """Free the pages and report a half's end, once it is released on every rank."""
        with self._lock:
            room = self._rooms.get(number)
            if room is None or room.calling:
                return
            for rank, sibling in enumerate(self.engine.ranks):
                if rank in room.released:
                    continue
                if rank in room.accepted or sibling.client.is_open(number, self.spec.half, room.instance):
                    return
            del self._rooms[number]
            ends = list(room.ends.values())
            failed = next((end for end in ends if end[0] is not Reason.NONE), room.refused)
            if failed is None and len(ends) < self.spec.tp:
                failed = (Reason.CANCELLED, "cancelled before every rank was asked")
            if failed is not None and self.spec.half is Half.TARGET:
                # Their bytes are unspecified, and no process may change them now.
                for sibling in self.engine.ranks:
                    sibling.expected[:, :, room.pages] = sibling.planes[:, :, room.pages]
            # At the front, so that the next room takes them at once.
            self.engine.free = room.pages + self.engine.free
            reason, text = failed or (Reason.NONE, "")
            self._say(Ended(number, reason, text, refused=not room.ends))

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        with self._lock:
            taken = {page for room in self._rooms.values() for page in room.pages}
            if self.spec.half is Half.SOURCE:
                taken = set()
            pages = sorted(set(range(self.engine.ranks[0].geometry.page_count)) - taken)
            for rank in self.engine.ranks:
                self._compare(rank, pages, "a page of no open room has other bytes")
            self._say(Checked(sum(rank.planes[:, :, pages].nbytes for rank in self.engine.ranks)))

    def _compare(self, rank: Rank, pages: list[int], what: str) -> None:
        """Compare pages with their expected content; report a wrong one once, keep it in a file, and then correct it."""
        got, expected = rank.planes[:, :, pages], rank.expected[:, :, pages]
        if np.array_equal(got, expected):
            return
        wrong = np.argwhere(got != expected)
        number = rank.layout.parallel.tp_rank
        self._damage_count += 1
        path = Path(self.spec.damage_directory) / f"{self.spec.instance}-{number}-{time.time_ns()}.npz"
        np.savez_compressed(path, got=got, expected=expected, pages=np.asarray(pages))
        places = [(pages[place[2]], *(int(index) for index in place)) for place in wrong[:PLACES_MAX]]
        self._say(
            Corrupt(
                f"{self.spec.instance} rank {number}: {what}: {len(wrong)} bytes of {len(np.unique(wrong[:, 2]))} "
                f"pages, first (page, kind, layer, index, slot, head, byte): {places}; kept in {path.name}"
            )
        )
        rank.expected[:, :, pages] = got

    def _say(self, message: FromEngine) -> None:
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
            sys.stdout.buffer.flush()


def main() -> None:
    """Run the engine that the argument describes."""
    # If no process reads, the soak has ended, and there is nothing left to do.
    with contextlib.suppress(BrokenPipeError):
        Player(msgspec.json.decode(sys.argv[1], type=EngineSpec)).play()


if __name__ == "__main__":
    main()
