"""The soak's load: rooms of random sizes between all pairs of a fleet, the reports of their engines, and the counts.

Called by `soak`. It acts as the router: it passes claims to prefill's engines, retries failed requests, and cancels rooms
that one engine has open and the other can never open. It injects no fault.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from soak_messages import (
    MODEL,
    Cancel,
    Checked,
    Claim,
    Corrupt,
    Ended,
    FromEngine,
    Offer,
    Opened,
    Reachable,
    Ready,
    Repeated,
)
from soak_nodes import ROOM_TOKENS_MAX, Fleet, Node, now_s

from longshore_wire.engine_messages import Endpoint
from longshore_wire.errors import Reason

# Between two engines: rooms that are opened in a second, and that are open at once. An engine has two peers.
PAIR_RATE_PER_S = 3.0
PAIR_ROOMS = 4
# Tries of a failing request, including the first one.
TRIES_MAX = 4
PREFIX_SHARE, FULL_HIT_SHARE, CANCELLED_SHARE = 0.3, 0.04, 0.08
CUTS_MAX = 3
PAUSE_MAX_S = 0.05
CANCEL_DELAY_MAX_S = 0.2
# A half without its other half is cancelled after this time: decode is dead, or was refused.
ORPHAN_LIMIT_S = 2.0
# A room that fails this long after the last strike at one of its processes did not fail because of the strike.
AFTERMATH_S = 20.0
# K and V of one token in all layers and heads.
TOKEN_BYTES = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim * MODEL.element_bytes


class Timers:
    """Calls that are due later, on the thread that calls `run`."""

    def __init__(self) -> None:
        self._gc_policy: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call something after a while."""
        heapq.heappush(self._gc_policy, (now_s() + delay_s, next(self._number), call))

    def run(self) -> float:
        """Make the calls that are due; return the seconds until the next one, at most 1."""
        while self._gc_policy and self._gc_policy[0][0] <= now_s():
            heapq.heappop(self._gc_policy)[2]()
        return min(1.0, max(0.0, self._gc_policy[0][0] - now_s())) if self._gc_policy else 1.0


@dataclass
class Side:
    """One half of a room, as the router knows it. `end` is its end; empty while it is open."""

    node: Node
    asked: bool = False
    opened: bool = False
    end: str = ""
    text: str = ""


@dataclass
class Room:
    """One room, from the router's first message to the end of both halves."""

    number: int
    source: Side
    target: Side
    total: int
    prefix: int
    cuts: tuple[int, ...]
    pause_s: float
    order: str  # the engine that is asked first
    tries: int
    endpoint: Endpoint  # of prefill when the request came, as a router passes it on
    since_s: float = field(default_factory=now_s)
    cancelled: bool = False
    orphaned: bool = False

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both halves."""
        return self.source, self.target

    def other(self, side: Side) -> Side:
        """The other half."""
        return self.target if side is self.source else self.source

    def described(self) -> str:
        """Return the room's description for messages."""
        halves = " | ".join(
            f"{side.node.title}: {side.end or ('open' if side.opened else 'asked' if side.asked else 'not asked')}"
            for side in self.sides
        )
        return f"room {self.number} of {self.total} tokens, {now_s() - self.since_s:.1f} s old: {halves}"


@dataclass
class Counts:
    """The counts so far.

    Attributes:
        failed: rooms that were not done, by the reason that decode saw, or prefill where decode saw none.
        unequal: rooms that were done at one engine, and failed at the other, which lives.
        given_up: requests whose every try has failed.
        collateral: rooms that failed between two nodes of which neither was struck, though a third was, by reason.
        strange: rooms that failed though no process was struck, as texts.
    """

    done: int = 0
    done_bytes: int = 0
    full_hits: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unequal: int = 0
    retried: int = 0
    given_up: int = 0
    calls_repeated: int = 0
    checked_bytes: int = 0
    corrupt: list[str] = field(default_factory=list)
    collateral: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)


class Traffic:
    """The rooms of one fleet."""

    def __init__(
        self,
        fleet: Fleet,
        chance: random.Random,
        timers: Timers,
        numbers: itertools.count[int],
        log: Callable[[str], None],
    ) -> None:
        self.fleet = fleet
        self.counts = Counts()
        self.rooms: dict[int, Room] = {}
        self.is_flowing = False
        self.done_at_s: dict[str, float] = {}  # the newest DONE, by node
        self.checks_open = 0
        self._chance, self._timers, self._numbers, self._log = chance, timers, numbers, log
        self._due: defaultdict[tuple[str, str], float] = defaultdict(float)  # by the names of a pair
        self._again: list[int] = []  # tries that requests which failed have had

    # -- the router ------------------------------------------------------------------------------------------------

    def flow(self) -> None:
        """Open the rooms that are due, between live engines."""
        for source, target in itertools.product(self.fleet.sources, self.fleet.targets):
            pair, now = (source.name, target.name), now_s()
            if not self.is_flowing or now < self._due[pair]:
                continue
            open_count = sum(room.source.node is source and room.target.node is target for room in self.rooms.values())
            if open_count < PAIR_ROOMS and source.engine.endpoint and target.engine.is_ready:
                self._due[pair] = now + 1 / PAIR_RATE_PER_S
                self._begin(source, target)

    def _begin(self, source: Node, target: Node) -> None:
        chance, endpoint = self._chance, source.engine.endpoint
        assert endpoint is not None
        total = round(ROOM_TOKENS_MAX ** chance.random())
        prefix = chance.randrange(total + 1) if chance.random() < PREFIX_SHARE else 0
        if chance.random() < FULL_HIT_SHARE:
            prefix = total
        cuts = sorted({chance.randrange(1, total) for _ in range(chance.randint(0, CUTS_MAX))}) if total > 1 else []
        room = Room(
            next(self._numbers),
            Side(source),
            Side(target),
            total,
            prefix,
            tuple(cuts),
            chance.random() * PAUSE_MAX_S,
            chance.choice(("source", "target", "both")),
            self._again.pop() if self._again else 0,
            endpoint,
        )
        self.counts.retried += room.tries > 0
        self.rooms[room.number] = room
        if room.order != "target":
            self._ask(room, room.source)
        if room.order != "source":
            self._ask(room, room.target)
        if chance.random() < CANCELLED_SHARE:
            side = chance.choice(room.sides)
            self._timers.after(chance.random() * CANCEL_DELAY_MAX_S, lambda: self._cancel(room, side))

    def _ask(self, room: Room, side: Side) -> None:
        if side.asked or side.end:
            return
        side.asked = True
        if side is room.source:
            side.node.engine.tell(Offer(room.number, room.total, room.cuts, room.pause_s))
        else:
            side.node.engine.tell(Claim(room.number, room.endpoint, room.prefix, room.total))

    def _cancel(self, room: Room, side: Side) -> None:
        if side.asked and not side.end and room.number in self.rooms:
            room.cancelled = True
            side.node.engine.tell(Cancel(room.number))

    def give_up(self, room: Room) -> None:
        """Ask both engines to end a room."""
        for side in room.sides:
            if side.asked and not side.end:
                side.node.engine.tell(Cancel(room.number))

    # -- what engines say ------------------------------------------------------------------------------------------

    def hear(self, node: Node, report: FromEngine) -> None:
        """Take one report of an engine."""
        match report:
            case Ready():
                node.engine.is_ready = True
            case Reachable():
                node.engine.endpoint = report.endpoint
            case Corrupt():
                self.counts.corrupt.append(f"{self.fleet.backend.value} {report.text}")
            case Checked():
                self.counts.checked_bytes += report.byte_count
                self.checks_open -= 1
            case Repeated():
                self.counts.calls_repeated += 1
            case Opened() | Ended():
                room = self.rooms.get(report.room)
                side = self._side(room, node)
                if room is None or side is None:
                    self.counts.strange.append(f"{node.title}: {report} of no room that is open")
                elif isinstance(report, Opened):
                    side.opened = True
                    self._ask(room, room.other(side))
                else:
                    self._ended(room, side, report)

    def lost(self, node: Node) -> None:
        """Handle the end of an engine's process, which ends all of its rooms."""
        for room in list(self.rooms.values()):
            side = self._side(room, node)
            if side is not None and not side.end:
                side.end = "dead"
                self._look_at(room)

    def _side(self, room: Room | None, node: Node) -> Side | None:
        sides = room.sides if room is not None else ()
        return next((side for side in sides if side.node is node), None)

    def _ended(self, room: Room, side: Side, report: Ended) -> None:
        if report.reason is Reason.NONE:
            side.end = "DONE"
            self.done_at_s[side.node.name] = now_s()
        else:
            side.end, side.text = ("refused " if report.refused else "FAILED ") + report.reason.name, report.text
        self._look_at(room)

    def _look_at(self, room: Room) -> None:
        for side in room.sides:
            other = room.other(side)
            if side.end and not other.asked and not other.end:
                other.end = "not asked"
            elif (
                side.end not in ("", "DONE")
                and not other.end
                and not (side.opened and other.opened)
                and not room.orphaned
            ):
                # Only its engine can know that the other half will never open.
                room.orphaned = True
                self._timers.after(ORPHAN_LIMIT_S * self._chance.random(), lambda: self._orphan(room))
        if all(side.end for side in room.sides):
            self._over(room)

    def _orphan(self, room: Room) -> None:
        if room.number in self.rooms:
            self.give_up(room)

    def _over(self, room: Room) -> None:
        del self.rooms[room.number]
        counts, (source, target) = self.counts, (side.end for side in room.sides)
        self._judge(room)
        if target == "DONE":
            counts.done += 1
            counts.full_hits += room.prefix == room.total
            counts.done_bytes += (room.total - room.prefix) * TOKEN_BYTES
            return
        if "dead" in (source, target):
            reason = "decode engine dead" if target == "dead" else "prefill engine dead"
        else:
            reason = (target if target.startswith(("FAILED", "refused")) else source).partition(" ")[2]
        counts.failed[reason] += 1
        if room.cancelled and reason == Reason.CANCELLED.name:
            return
        if room.tries + 1 < TRIES_MAX:
            self._again.append(room.tries + 1)
        else:
            counts.given_up += 1

    def _judge(self, room: Room) -> None:
        """Count how a room ended, and note an end that no strike explains."""
        ends = {side.end for side in room.sides}
        self.counts.unequal += "DONE" in ends and not ends <= {"DONE", "dead"}
        if ends == {"DONE"} or room.cancelled:
            return
        text = f"{room.described()}; {room.target.text or room.source.text}"
        self._log(f"{self.fleet.backend.value} {text}")
        if room.since_s < max(side.node.struck_s for side in room.sides) + AFTERMATH_S:
            return
        if room.since_s > max(node.struck_s for node in self.fleet.nodes.values()) + AFTERMATH_S:
            self.counts.strange.append(f"nobody was struck: {text}")
        else:
            self.counts.collateral[(room.target.end or room.source.end).partition(" ")[2]] += 1
