"""Compares the observations of fault tests with the rows of `fault_table`, and records which rows have tests.

A test of rows is marked with `carries` and gets a `judge`, or with `carries_at_once` and gets `judges`. It fails unless it
compares every field of every row, so every row is tested.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from agent_world import Agent
from fault_scene import Place, Room
from fault_table import CLAIMED, DEAD, DECODE, DONE, LEFT_OPEN, LOOPBACK, OVER, PREFILL, Scene, Wrong

# (name of the scene or fault, transport) -> name of its test. Filled by the import of the tests.
CARRIED: dict[tuple[str, str], list[str]] = {}

Test = Callable[..., None]


def carries(*rows: Scene | Wrong, over: Sequence[str] = (LOOPBACK,), further: str = "") -> Callable[[Test], Test]:
    """Run a test once for each of `rows` and each transport, with a `judge` of it.

    Args:
        further: `make test` leaves out the rows of this side.
    """

    def mark(test: Test) -> Test:
        judges = [(row, transport) for transport in over for row in rows]
        names = [row.name if len(over) == 1 else f"{row.name}-{transport}" for row, transport in judges]
        for row, transport in judges:
            CARRIED.setdefault((row.name, transport), []).append(test.__name__)
        rest = pytest.mark.rest("storms")
        values = [
            pytest.param(each, marks=rest if further and each[0].name.endswith(further) else ()) for each in judges
        ]
        return pytest.mark.parametrize("judge", values, indirect=True, ids=names)(test)

    return mark


def carries_at_once(*scenes: Scene, over: Sequence[str]) -> Callable[[Test], Test]:
    """Run a test once for each of `scenes`, with `judges` of it by transport: one for each of `over`."""

    def mark(test: Test) -> Test:
        for scene in scenes:
            for transport in over:
                CARRIED.setdefault((scene.name, transport), []).append(test.__name__)
        values, names = [(scene, over) for scene in scenes], [scene.name for scene in scenes]
        return pytest.mark.parametrize("judges", values, indirect=True, ids=names)(test)

    return mark


@dataclass
class Counts:
    """Ends and refusals that an agent's workers have counted, by worker, with each worker's epoch."""

    ends: dict[str, Counter[str]] = field(default_factory=dict)
    epochs: dict[str, str] = field(default_factory=dict)
    restarts: float = 0.0
    agent_pid: int = 0

    @classmethod
    def of(cls, agent: Agent, half: str) -> Counts:
        """Read them from the agent's pages."""
        workers = agent.status()["workers"]
        found = cls(epochs={worker["worker"]: worker["epoch"] for worker in workers}, agent_pid=agent.process.pid)
        for name, labels, value in _series(agent.ask("/metrics")[1].decode()):
            ends = found.ends.setdefault(labels.get("worker", ""), Counter())
            if name == "longshore_worker_restarts_total":
                found.restarts += value
            elif name == "longshore_refused_messages_total":
                # The engine's next worker may already know that a room has failed when the engine repeats it.
                ends[labels["reason"].upper()] += round(value)
            elif name == "longshore_rooms_total" and labels["half"] == half:
                ends[DONE if labels["outcome"] == "done" else labels["reason"].upper()] += round(value)
        return found

    def since(self, before: Counts) -> Counter[str]:
        """Return the counts since `before`. A new worker counts from 0."""
        total: Counter[str] = Counter()
        for name, ends in self.ends.items():
            total.update(ends)
            if before.epochs.get(name) == self.epochs.get(name):
                total.subtract(before.ends.get(name, Counter()))
        return total


class SceneJudge:
    """The judge of one scene over one transport."""

    def __init__(self, scene: Scene, transport: str) -> None:
        self.scene, self.transport = scene, transport
        self._left = {("seen", row.stage) for row in scene.rows_over(transport)} | {("counted", ""), ("start", "")}
        self._before: dict[str, Counts] = {}

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(row.stage for row in self.scene.rows_over(self.transport))

    def begin(self, place: Place) -> None:
        """Record the counts before the fault."""
        self._before = _counts(place)
        self._left.discard(("start", ""))

    def sees(self, rooms: list[Room]) -> None:
        """Compare both engines' observations of each room, and their times."""
        found = [(room.stage, room.seen[PREFILL], room.seen[DECODE]) for room in rooms]
        rows = {row.stage: row for row in self.scene.rows_over(self.transport)}
        expected = [(stage, rows[stage].prefill, rows[stage].decode) for stage, _, _ in found]
        assert found == expected
        late = [(room.stage, room.after_s) for room in rooms if room.after_s > self.scene.limit_s]
        assert not late, f"not within {self.scene.limit_s} s"
        self._left -= {("seen", room.stage) for room in rooms}

    def counts(self, place: Place, rooms: list[Room]) -> None:
        """Compare the agents' counts with the engines' observations."""
        after = _counts(place)
        for side, counts in after.items():
            before, told = self._before[side], counts.since(self._before[side])
            wanted = Counter(self._counted(side, room, counts, before) for room in rooms)
            for reason, count in wanted.items():
                # A room that was claimed and never offered also ends at prefill's worker, which reports it to no engine.
                unheard = sum(room.stage == CLAIMED and reason != DONE for room in rooms)
                assert not reason or count <= told[reason] <= count + unheard, (side, reason, count, told)
        now, before = after[self.scene.side], self._before[self.scene.side]
        restarts_before = before.restarts if now.agent_pid == before.agent_pid else 0
        assert now.restarts - restarts_before == self.scene.restarts
        self._left.discard(("counted", ""))

    def _counted(self, side: str, room: Room, now: Counts, before: Counts) -> str:
        """Return the reason under which one side must count a room's end, or DONE; "" if it must not count it."""
        word = room.seen[side]
        actor = room.source if side == PREFILL else room.target
        worker = f"{actor.instance}/0/0"
        if word in (DEAD, LEFT_OPEN) or worker not in now.epochs:
            return ""
        # A room that was done before its worker died was counted by that worker.
        return "" if room.stage == OVER and now.epochs[worker] != before.epochs.get(worker) else word.split()[-1]

    def left(self) -> set[Any]:
        """Return the fields that were not compared."""
        return self._left


def _series(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in page.splitlines():
        found = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
        if found:
            yield found[1], dict(re.findall(r'(\w+)="([^"]*)"', found[2])), float(found[3])


def _counts(place: Place) -> dict[str, Counts]:
    return {PREFILL: Counts.of(place.prefill, "source"), DECODE: Counts.of(place.decode, "target")}


class WrongJudge:
    """The judge of one invalid request."""

    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong
        self._left = {PREFILL, DECODE, "counted"}
        self._before = 0.0

    def begin(self, prefill: Agent, decode: Agent) -> None:
        """Record the counts before the request."""
        self._agent = prefill if self.wrong.at == PREFILL else decode
        self._before = self._count()

    def sees(self, prefill: str, decode: str) -> None:
        """Compare both sides' observations."""
        assert (prefill, decode) == (self.wrong.prefill, self.wrong.decode)
        self._left -= {PREFILL, DECODE}

    def counts(self, times: int = 1) -> None:
        """Compare the counts."""
        if self.wrong.counted:
            assert self._count() == self._before + times
        self._left.discard("counted")

    def _count(self) -> float:
        labels: Mapping[str, str] = self.wrong.labels
        return self._agent.metric(self.wrong.counted, **labels) if self.wrong.counted else 0.0

    def left(self) -> set[Any]:
        """Return the fields that were not compared."""
        return self._left
