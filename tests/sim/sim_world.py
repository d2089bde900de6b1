"""The simulated world under the protocol cores: one clock, hosts, a network, and the fate of each message and write.

Used by `sim_worker`, `sim_agent` and `sim_engine`; `sim_run` makes a run. Time moves only to the next event. Nothing here knows
rooms.
"""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

# No run of some hundred rooms has more events, unless something spins.
EVENTS_MAX = 4_000_000


class ViolationError(AssertionError):
    """The world has detected a violated rule."""


@dataclass(frozen=True, slots=True)
class Odds:
    """The odds of network and transport faults while faults last: probabilities per message or write; times in ns."""

    loss: float = 0.0
    repeat: float = 0.0
    late: float = 0.0  # a message, or its copy, takes up to `late_ns`
    delay_ns: int = 500 * US
    late_ns: int = 3 * SECOND
    write_ns: int = 5 * MS
    slow_write: float = 0.0  # a write lands after up to `slow_write_ns`
    slow_write_ns: int = 3 * SECOND
    failed_write: float = 0.0  # nothing of it lands any more
    unsettled_write: float = 0.0  # it is said to have failed, and lands later
    endless_write: float = 0.0  # it ends with its process
    damage: float = 0.0  # a write, or a scatter, brings other bytes than it was given


class Write(NamedTuple):
    """The fate of one write: after how long it begins, lands and ends; None: never."""

    begin_ns: int
    land_ns: int | None
    end_ns: int | None
    fails: bool = False
    settled: bool = True
    damage: int = 0  # not 0: what is wrong, see `sim_memory.damaged`


# For runs without random delays.
STEADY_MESSAGE = (100 * US,)
STEADY_WRITE = Write(100 * US, 1 * MS, 2 * MS)

_ALL = (1 << 64) - 1


def _mixed(number: int) -> int:
    """Return 64 pseudo-random bits, the same for the same number (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _ALL
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _ALL
    return number ^ (number >> 31)


class Draws:
    """Random numbers for one message or write, which depend only on its link and its position there."""

    __slots__ = ("_state",)

    def __init__(self, state: int) -> None:
        self._state = state

    def below(self, limit: float) -> float:
        """Return the next number in [0, limit)."""
        self._state = _mixed(self._state)
        return self._state / (1 << 64) * limit


class Chance:
    """The fate of the n-th message or write from one worker to another.

    Drawn from a seed, and noted if unusual. With `fixed`, it is the listed fate, or the usual one. So a run with all of its
    unusual fates listed is the same run.
    """

    def __init__(
        self, seed: str, odds: Odds, fixed: dict[tuple[str, ...], Any] | None = None, *, steady: bool = False
    ) -> None:
        self.odds = odds
        self.calm = False  # faults are over
        self.drawn: dict[tuple[str, ...], Any] = {}
        self._fixed = fixed
        self._steady = steady
        self._seed = seed
        self._links: dict[tuple[str, str], int] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def _draws(self, link: tuple[str, str]) -> tuple[tuple[str, ...], Draws]:
        number = self._counts[link] = self._counts[link] + 1
        base = self._links.get(link)
        if base is None:
            base = self._links[link] = _mixed(zlib.crc32(f"{self._seed} {link}".encode()))
        return (*link, str(number)), Draws(base + number)

    def message(self, sender: str, receiver: str) -> tuple[int, ...]:
        """Return after how long each copy of the next message arrives; none: it is lost."""
        key, draws = self._draws((sender, receiver))
        odds, r = self.odds, draws.below(1)
        usual = STEADY_MESSAGE if self._steady else (50 * US + int(draws.below(odds.delay_ns)),)
        if self._fixed is not None:
            return self._fixed.get(key, usual)  # type: ignore[no-any-return]
        if self.calm or r >= odds.loss + odds.repeat + odds.late:
            return usual
        if r < odds.loss:
            fate: tuple[int, ...] = ()
        elif r < odds.loss + odds.repeat:
            late = (int(draws.below(odds.late_ns)),) if draws.below(1) < 0.3 else ()
            fate = (*usual, int(draws.below(odds.delay_ns)), *late)
        else:
            fate = (int(draws.below(odds.late_ns)),)
        self.drawn[key] = fate
        return fate

    def write(self, sender: str, receiver: str) -> Write:
        """Return the fate of the next write."""
        key, draws = self._draws((sender, receiver + " write"))
        odds, r = self.odds, draws.below(1)
        begin_ns, length_ns = int(draws.below(200 * US)), int(draws.below(odds.write_ns)) + 10 * US
        usual = STEADY_WRITE if self._steady else Write(begin_ns, length_ns, length_ns + begin_ns)
        if self._fixed is not None:
            return self._fixed.get(key, usual)  # type: ignore[no-any-return]
        edges = [odds.slow_write, odds.failed_write, odds.unsettled_write, odds.endless_write, odds.damage]
        if self.calm or r >= sum(edges):
            return usual
        slow_ns = int(draws.below(odds.slow_write_ns))
        if r < edges[0]:
            fate = Write(begin_ns, slow_ns, slow_ns + length_ns)
        elif r < sum(edges[:2]):
            fate = Write(begin_ns, None, length_ns, fails=True)
        elif r < sum(edges[:3]):
            fate = Write(begin_ns, slow_ns, int(draws.below(length_ns)), fails=True, settled=False)
        elif r >= sum(edges[:4]):
            fate = usual._replace(damage=1 + int(draws.below(1 << 16)))
        else:
            fate = Write(begin_ns, slow_ns if draws.below(1) < 0.5 else None, None)
        self.drawn[key] = fate
        return fate


@dataclass
class Host:
    """A machine. Its clock is its own."""

    name: str
    offset_ns: int = 0
    cut: bool = False  # no message enters or leaves, without an error

    def reaches(self, other: Host) -> bool:
        """Whether messages to another host arrive there."""
        return self is other or not (self.cut or other.cut)


@dataclass
class World:
    """See the module.

    Attributes:
        trace: events in words, for people; None: not kept.
        listeners: the process that listens at each address.
        lives: the newest process of each worker's name.
    """

    chance: Chance
    trace: list[tuple[int, str]] | None = None
    now_ns: int = 0
    listeners: dict[str, Any] = field(default_factory=dict)
    lives: dict[Any, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _sequence: int = 0

    def at(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Run `action` after `delay_ns`."""
        self._sequence += 1
        heapq.heappush(self._events, (self.now_ns + delay_ns, self._sequence, action, arguments))

    def run(self, until_ns: int) -> None:
        """Run all events before `until_ns`."""
        events = self._events
        while events and events[0][0] <= until_ns:
            self.now_ns, _, action, arguments = heapq.heappop(events)
            action(*arguments)
            if self._sequence > EVENTS_MAX:
                raise ViolationError("it spins: more events than in any run")
        self.now_ns = max(self.now_ns, until_ns)

    def say(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append((self.now_ns, f"{who}: {what}"))
