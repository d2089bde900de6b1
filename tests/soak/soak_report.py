"""The results of a soak: the values, and the table for people. Called by `soak`; touches no process."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections import Counter
from pathlib import Path

import msgspec
from soak_growth import Book, Total
from soak_strikes import Striker
from soak_traffic import Traffic

# Targets: a dead engine's memory is free, and an engine whose agent died has a room done again, within these times.
RELEASE_TARGET_S = 2.0
RECOVERY_TARGET_S = 5.0
# Whether other strikes were active during a measurement.
CLEAN, OTHER = "nothing else struck", "more struck meanwhile"
# Texts of one kind in the table.
SHOWN_MAX = 20


class Machine(msgspec.Struct, frozen=True):
    """The machine and the versions of a run."""

    processor: str
    cores: int
    system: str
    python: str
    commit: str


class Rooms(msgspec.Struct, frozen=True):
    """The rooms of one fleet."""

    done: int
    full_hits: int
    done_bytes: int
    failed: dict[str, int]
    unequal: int
    collateral: dict[str, int]
    retried: int
    given_up: int
    calls_repeated: int


class Held(msgspec.Struct, frozen=True):
    """Resources of all processes together at one pause."""

    processes: int
    own_mib: int
    descriptors: int
    threads: int
    dead_sockets: int

    @classmethod
    def of(cls, total: Total) -> Held:
        """Round it."""
        return cls(total.processes, total.own_bytes >> 20, total.descriptors, total.threads, total.dead_sockets)


class Outcome(msgspec.Struct):
    """All results of a run.

    Attributes:
        released: seconds from an engine's death to the end of every mapping and descriptor of its pages; by whether anything
            else was struck meanwhile.
        recovered: from an agent's death to its engine's next room that is done, starting the agent again included.
        replaced: the same from a worker's death.
        lives: how long processes lived under watch, the longest first.
        strange: failures that no strike explains.
    """

    seed: int
    minutes: float
    machine: Machine
    rooms: dict[str, Rooms] = {}
    strikes: dict[str, int] = {}
    strikes_missed: int = 0
    checked_bytes: int = 0
    corrupt: list[str] = []
    stuck: list[str] = []
    growth: list[str] = []
    strange: list[str] = []
    pauses_s: list[float] = []
    load_averages: list[float] = []  # at each pause; of the machine, including other load
    held: list[Held] = []
    lives_s: list[float] = []
    released: dict[str, list[float]] = {}
    recovered: dict[str, list[float]] = {}
    replaced: dict[str, list[float]] = {}

    @property
    def is_good(self) -> bool:
        """Whether rooms were moved, every byte was right, no room was stuck, lost or late, and no process has grown."""
        moved = bool(self.rooms) and all(rooms.done and not rooms.given_up for rooms in self.rooms.values())
        return moved and not (self.corrupt or self.stuck or self.growth or self.strange or self.late)

    @property
    def late(self) -> list[str]:
        """Return the recoveries that exceeded their target without other strikes."""
        return [
            f"{what}: {time_s:g} s, more than {target_s:g} s"
            for what, by_kind, target_s in self.timed
            for time_s in by_kind.get(CLEAN, [])
            if time_s > target_s
        ]

    @property
    def timed(self) -> tuple[tuple[str, dict[str, list[float]], float], ...]:
        """Return (name, times, target) of each measurement."""
        return (
            ("an engine's death to its memory's release", self.released, RELEASE_TARGET_S),
            ("an agent's death to its engine's next room", self.recovered, RECOVERY_TARGET_S),
            ("a worker's death to its engine's next room", self.replaced, RECOVERY_TARGET_S),
        )

    def take(self, traffics: list[Traffic], striker: Striker, book: Book) -> None:
        """Summarise a run."""
        for traffic in traffics:
            counts = traffic.counts
            self.rooms[traffic.fleet.backend.value] = Rooms(
                counts.done,
                counts.full_hits,
                counts.done_bytes,
                dict(counts.failed.most_common()),
                counts.unequal,
                dict(counts.collateral.most_common()),
                counts.retried,
                counts.given_up,
                counts.calls_repeated,
            )
            self.checked_bytes += counts.checked_bytes
            self.corrupt += counts.corrupt
            self.strange += counts.strange
        self.strikes, self.strikes_missed = dict(sorted(striker.done.items())), striker.missed
        self.growth = book.growth()
        self.held = [Held.of(total) for total in book.totals]
        self.lives_s = sorted((round(life.span_s, 1) for life in book.lives.values()), reverse=True)
        for name, times in (
            ("released", striker.released),
            ("recovered", striker.recovered),
            ("replaced", striker.replaced),
        ):
            setattr(self, name, {CLEAN: _rounded(times.clean), OTHER: _rounded(times.other)})


def machine() -> Machine:
    """Return the facts of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return Machine(
        processor,
        len(os.sched_getaffinity(0)),
        f"{platform.system()} {platform.release()}",
        platform.python_version(),
        commit,
    )


def printed(outcome: Outcome) -> str:
    """Return the table."""
    where = outcome.machine
    lines = [
        "",
        f"Soak of {outcome.minutes:g} minutes, seed {outcome.seed}, commit {where.commit}",
        (
            f"{where.cores} cores of {where.processor}, {where.system}, Python {where.python}; "
            f"load average {min(outcome.load_averages, default=0):g} to {max(outcome.load_averages, default=0):g}"
        ),
        "",
    ]
    for name, rooms in outcome.rooms.items():
        lines += [
            (
                f"{name}: {rooms.done:,} rooms done ({rooms.done_bytes / 1e9:.2f} GB, {rooms.full_hits:,} of them full hits), "
                f"{sum(rooms.failed.values()):,} failed, {rooms.retried:,} retried, {rooms.given_up} requests given up, "
                f"{rooms.unequal} done at one engine alone, {sum(rooms.collateral.values())} failed between nodes of "
                f"which neither was struck, {rooms.calls_repeated:,} calls repeated"
            ),
            *(f"    {reason}: {count:,}" for reason, count in rooms.failed.items()),
        ]
    strikes = sum(outcome.strikes.values())
    lines += ["", f"{strikes} strikes ({outcome.strikes_missed} more found nobody):"]
    lines += [f"    {kind}: {count}" for kind, count in outcome.strikes.items()]
    lines += ["", *_times(outcome), "", *_held(outcome)]
    lines += ["", f"compared at pauses: {outcome.checked_bytes / 1e9:.1f} GB of pages that no room had open"]
    for what, texts in (
        ("corrupt", outcome.corrupt),
        ("stuck", outcome.stuck),
        ("growth", outcome.growth),
        ("failures that no strike explains", outcome.strange),
        ("late", outcome.late),
    ):
        lines.append(f"{what}: {len(texts)}")
        lines += [f"    {text}" for text in texts[:SHOWN_MAX]]
    lines += ["", "Nothing was wrong, stuck, late or lost." if outcome.is_good else "NOT GOOD: see above."]
    return "\n".join(lines)


def _times(outcome: Outcome) -> list[str]:
    found = []
    for what, by_kind, target_s in outcome.timed:
        for kind, times_s in by_kind.items():
            if times_s:
                within = sum(time_s <= target_s for time_s in times_s)
                aim = f", {within} of {len(times_s)} within {target_s:g} s"
                found.append(f"{what}, {kind}: {_spread(times_s)}{aim}")
    if outcome.pauses_s:
        found.append(f"all rooms ended after the load did: {_spread(outcome.pauses_s)}")
    return found


def _spread(times_s: list[float]) -> str:
    ordered = sorted(times_s)
    p90_s = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return f"median {statistics.median(ordered):.2f} s, p90 {p90_s:.2f} s, most {ordered[-1]:.2f} s"


def _rounded(times_s: list[float]) -> list[float]:
    return [round(time_s, 3) for time_s in times_s]


def _held(outcome: Outcome) -> list[str]:
    found = [
        f"at the {when}: {held.processes} processes, {held.own_mib} MiB of their own, {held.descriptors} descriptors, "
        f"{held.threads} threads, and {held.dead_sockets} connections to peers that are gone"
        for when, held in zip(("start", "end"), (*outcome.held[:1], *outcome.held[-1:]), strict=False)
    ]
    lives = Counter(f"{int(life_s // 60)} min" for life_s in outcome.lives_s)
    longest = ", ".join(f"{count} for {life}" for life, count in list(lives.items())[:6])
    return [*found, f"processes that were watched for the longest: {longest or 'none'}"]
