"""Shrinks a failing scenario: drops faults, rooms, and fates of single messages and writes, while it still fails alike.

Called by `simulate` and by tests. Then replays the rest and returns it as a list of events.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from sim_run import Outcome, play
from sim_scenarios import Scenario

T = TypeVar("T")
# Runs that shrinking may take; one is some milliseconds to a second.
RUNS_MAX = 1500


def kind(fault: str) -> str:
    """Return the text of a fault without its numbers and names; a smaller run must show the same."""
    text = re.sub(
        r"(engine |room )?[PD]\d/\d/\d(/host)?@h\d(#\d+)?|RoomKey\([^)]*\)", "X", fault.split(";", maxsplit=1)[0]
    )
    text = re.sub(r"ended with \w+ and not released|not ended", "open", text)
    return re.sub(r"[\d,\[\]]+", "N", text)[:60]


class Shrinker:
    """Tries smaller scenarios, a bounded number of them."""

    def __init__(self, failed: Outcome, *, deep: bool, runs_max: int = RUNS_MAX) -> None:
        self.best = failed.scenario
        self.runs = 0
        self._kind = kind(failed.fault)
        self._deep = deep
        self._runs_max = runs_max
        # From here on nothing is random: the fates of messages and writes are a list, of which parts can be dropped.
        self._try(dataclasses.replace(failed.scenario, fates=failed.fates))

    def _try(self, smaller: Scenario) -> bool:
        if self.runs >= self._runs_max:
            return False
        self.runs += 1
        found = play(smaller, deep=self._deep)
        if not found.fault or kind(found.fault) != self._kind:
            return False
        self.best = smaller
        return True

    def _drop(self, items: Callable[[], list[T]], without: Callable[[list[T]], Scenario]) -> None:
        """Drop as many items as possible, large groups first."""
        size = max(1, len(items()) // 2)
        while size:
            at = 0
            while at < len(items()):
                all_items = items()
                if not self._try(without(all_items[:at] + all_items[at + size :])):
                    at += size
            size //= 2

    def shrink(self) -> Scenario:
        """Return the smallest scenario that was found to fail in the same way."""
        before = None
        while before != self.best and self.runs < self._runs_max:
            before = self.best
            self._drop(lambda: list(self.best.rooms), lambda kept: dataclasses.replace(self.best, rooms=tuple(kept)))
            self._drop(lambda: list(self.best.faults), lambda kept: dataclasses.replace(self.best, faults=tuple(kept)))
            if self.best.fates is not None:
                self._drop(lambda: list(self._fates()), lambda kept: dataclasses.replace(self.best, fates=dict(kept)))
            self._drop_replicas()
            for simpler in self._simpler():
                self._try(simpler)
        return self.best

    def _fates(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        yield from (self.best.fates or {}).items()

    def _drop_replicas(self) -> None:
        for at in reversed(range(len(self.best.replicas))):
            used = {each for room in self.best.rooms for each in (room.prefill, room.decode)}
            used |= {fault.who[0] for fault in self.best.faults if fault.what != "cancel"}
            if at in used:
                continue
            moved = {old: old - (old > at) for old in range(len(self.best.replicas))}
            self._try(
                dataclasses.replace(
                    self.best,
                    replicas=tuple(each for number, each in enumerate(self.best.replicas) if number != at),
                    rooms=tuple(
                        dataclasses.replace(room, prefill=moved[room.prefill], decode=moved[room.decode])
                        for room in self.best.rooms
                    ),
                    faults=tuple(
                        fault
                        if fault.what == "cancel"
                        else dataclasses.replace(fault, who=(moved[fault.who[0]], *fault.who[1:]))
                        for fault in self.best.faults
                    ),
                )
            )

    def _simpler(self) -> Iterator[Scenario]:
        best = self.best
        yield dataclasses.replace(best, eager=False, turn_ns=20_000, codec=False)
        yield dataclasses.replace(best, steady=True)
        yield dataclasses.replace(best, clocks_ns=(0,) * len(best.clocks_ns))
        for at, room in enumerate(best.rooms):
            for end in (1, 2, room.end // 2):
                if 0 < end < room.end:
                    chunks = tuple(sorted({min(cut, end) for cut in room.chunks}))
                    smaller = dataclasses.replace(room, end=end, first=min(room.first, end), chunks=chunks)
                    yield dataclasses.replace(
                        self.best, rooms=(*self.best.rooms[:at], smaller, *self.best.rooms[at + 1 :])
                    )
            if len(room.chunks) > 1:
                smaller = dataclasses.replace(self.best.rooms[at], chunks=self.best.rooms[at].chunks[-1:])
                yield dataclasses.replace(self.best, rooms=(*self.best.rooms[:at], smaller, *self.best.rooms[at + 1 :]))


def told(scenario: Scenario, *, deep: bool, lines_max: int = 400) -> str:
    """Return a run of a scenario as a list of events."""
    found = play(scenario, trace=True, deep=deep)
    lines = [f"{now_ns / 1e6:12.3f} ms  {text}" for now_ns, text in found.trace]
    if len(lines) > lines_max:
        lines = [*lines[: lines_max // 2], f"... {len(lines) - lines_max} lines ...", *lines[-lines_max // 2 :]]
    shown = [
        f"mix {scenario.mix!r}, seed {scenario.seed}: {len(scenario.rooms)} rooms, {len(scenario.faults)} faults",
        *(f"  {each}" for each in (*scenario.replicas, *scenario.rooms, *scenario.faults)),
        *(f"  {' '.join(key)}: {fate}" for key, fate in (scenario.fates or {}).items()),
    ]
    return "\n".join([*shown, *lines, found.fault])
