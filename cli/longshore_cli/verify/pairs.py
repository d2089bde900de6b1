"""Chooses the pairs of agents, and their order, and judges their speeds. Pure: names and numbers in, values out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

# A pair is slow below this part of the median of the pairs with its way, wire and memory. Repeats on one wire differ less.
SLOW_PART = 0.5
# With two pairs, the median lies between them, and a slow one of a fast wire would be judged by itself.
EXPECTED_PAIRS_MIN = 3
UNKNOWN = "-"

Pair = tuple[str, str]  # the names of a prefill and of a decode agent


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a pair after its rooms.

    Attributes:
        way, wire: UNKNOWN if decode's agent did not tell.
        memory: of the test pages: "gpu" or "host", or of prefill and decode if these differ, as "gpu->host".
        bytes_per_second: the median of the repeats; 0.0: none was right.
        reason, text: why a room failed, or why there was none; empty: all bytes are equal.
        untested: no room of the pair was moved, because one of its agents has no test engine.
    """

    prefill: str
    decode: str
    room_bytes: int = 0
    bytes_per_second: float = 0.0
    way: str = UNKNOWN
    wire: str = UNKNOWN
    memory: str = UNKNOWN
    reason: str = ""
    text: str = ""
    untested: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """A pair beside what was expected. `expected` is 0.0 if too few pairs have its way, wire and memory."""

    pair: Measured
    expected: float
    slow: bool

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.pair.untested:
            return "untested"
        if self.pair.reason:
            return "FAILED"
        return "SLOW" if self.slow else "ok"


def choose(prefill: Sequence[str], decode: Sequence[str], count_max: int) -> list[Pair]:
    """Return pairs of each prefill with each decode agent; if these are too many, some, with each agent about as often.

    Each shift gives every agent of the longer side one of the shorter, so that the first shift reaches all agents.
    """
    longer, shorter = (prefill, decode) if len(prefill) >= len(decode) else (decode, prefill)
    found = []
    for shift in range(len(shorter)):
        for at, one in enumerate(longer):
            other = shorter[(at + shift) % len(shorter)]
            found.append((one, other) if longer is prefill else (other, one))
    # An agent of both roles copies within itself, which tells nothing of a link.
    found.sort(key=lambda pair: pair[0] == pair[1])
    return found[:count_max]


def rounds(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield all pairs in rounds, in which no agent is twice."""
    left = list(pairs)
    while left:
        taken: set[str] = set()
        now: list[Pair] = []
        for pair in left:
            if taken.isdisjoint(pair):
                taken.update(pair)
                now.append(pair)
        yield now
        chosen = set(now)
        left = [pair for pair in left if pair not in chosen]


def judge(pairs: Iterable[Measured]) -> list[Judged]:
    """Compare each pair with the median of those with its way, wire and memory."""
    measured = list(pairs)
    groups: dict[tuple[str, str, str], list[float]] = {}
    for pair in measured:
        if not pair.reason:
            groups.setdefault(_group(pair), []).append(pair.bytes_per_second)
    expected = {key: median(speeds) if len(speeds) >= EXPECTED_PAIRS_MIN else 0.0 for key, speeds in groups.items()}
    judged = []
    for pair in measured:
        usual = 0.0 if pair.reason else expected[_group(pair)]
        judged.append(Judged(pair, usual, not pair.reason and pair.bytes_per_second < SLOW_PART * usual))
    return judged


def is_bad(judged: Sequence[Judged], *, strict: bool) -> bool:
    """Return whether a pair failed or was not tested, or with `strict` was slow."""
    return any(each.pair.reason or (strict and each.slow) for each in judged)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least `part` of the values do not exceed. `values` is not empty."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def _group(pair: Measured) -> tuple[str, str, str]:
    return pair.way, pair.wire, pair.memory
