"""The simulator's program: plays mixes of faults from seeds, prints the failures, and shrinks a failing run.

make sim                                each mix with some seeds
make sim SEEDS=200 MIX='tiny rings'     one mix, more seeds
make sim MINUTES=30                     all mixes, seed after seed, until the time is over
make sim SEED='tiny rings:17'           one run again, shrunk and printed as a list of events
make sim PLANT=K                        with a planted bug, from the first seed on, until it is found
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import count, islice

from planted_bugs import PLANTS, planted
from sim_mixes import MIXES
from sim_run import Outcome, play
from sim_scenarios import scenario
from sim_shrink import Shrinker, told

SEEDS = 16
# One of this many runs also checks that rooms are forgotten, since waiting for that takes as long as a run.
DEEP_EVERY = 8
TOLD_MAX = 3
# Maximum of rooms to search for a planted bug.
ROOMS_MAX = 20_000


@dataclass
class Tally:
    """The sum of the runs of one mix."""

    runs: int = 0
    rooms: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    processor_s: float = 0.0
    failed: list[tuple[int, str]] = field(default_factory=list)


def is_deep(seed: int) -> bool:
    """Whether a run of this seed also waits until rooms are forgotten."""
    return seed % DEEP_EVERY == DEEP_EVERY - 1


def search(plant: str, rooms_max: int) -> tuple[Outcome | None, int]:
    """Play the mixes of a planted bug from the first seed on; return the run that finds it, and the rooms that it took."""
    rooms = 0
    with planted(plant) as bug:
        for seed in count():
            for mix in bug.mixes:
                found = play(scenario(mix, seed), deep=is_deep(seed))
                rooms += found.rooms
                if found.fault:
                    return found, rooms
                if rooms >= rooms_max:
                    return None, rooms
    raise AssertionError


def run_one(mix: str, seed: int) -> tuple[str, int, int, Counter[str], str, float]:
    """Play one run in a process of the pool."""
    begun_s = time.process_time()
    found = play(scenario(mix, seed), deep=is_deep(seed))
    return mix, seed, found.rooms, found.counts, found.fault, time.process_time() - begun_s


def run_many(work: Iterable[tuple[str, int]], jobs: int, until_s: float) -> dict[str, Tally]:
    """Play runs until there are no more, or the time is over."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    waiting: set[Future[tuple[str, int, int, Counter[str], str, float]]] = set()
    todo = iter(work)
    with ProcessPoolExecutor(jobs) as pool:
        while True:
            for mix, seed in islice(todo, 4 * jobs - len(waiting)) if time.monotonic() < until_s else ():
                waiting.add(pool.submit(run_one, mix, seed))
            if not waiting:
                return tallies
            done = next(as_completed(waiting))
            waiting.discard(done)
            _note(tallies, *done.result())


def _note(
    tallies: dict[str, Tally], mix: str, seed: int, rooms: int, counts: Counter[str], fault: str, spent_s: float
) -> None:
    tally = tallies[mix]
    tally.runs, tally.rooms, tally.processor_s = tally.runs + 1, tally.rooms + rooms, tally.processor_s + spent_s
    tally.counts += counts
    if fault:
        tally.failed.append((seed, fault))
        print(f"FAILED  SEED='{mix}:{seed}'  {fault[:200]}", flush=True)


def show(tallies: dict[str, Tally]) -> None:
    """Print the results of all runs."""
    print(
        f"{'mix':34} {'runs':>6} {'rooms':>8} {'halves done':>12} {'slabs':>9} {'messages':>10} {'rooms/s':>8} failed"
    )
    total = Tally()
    for mix, tally in sorted(tallies.items(), key=lambda item: list(MIXES).index(item[0])):
        _line(mix, tally)
        total.runs, total.rooms = total.runs + tally.runs, total.rooms + tally.rooms
        total.counts, total.processor_s = total.counts + tally.counts, total.processor_s + tally.processor_s
        total.failed += tally.failed
    _line(f"{len(tallies)} mixes", total)


def _line(name: str, tally: Tally) -> None:
    counts, rate = tally.counts, tally.rooms / max(tally.processor_s, 1e-9)
    done = counts["source done"] + counts["target done"]
    slabs = sum(number for key, number in counts.items() if key.startswith("slabs "))
    print(
        f"{name:34} {tally.runs:6} {tally.rooms:8} {done:12} {slabs:9} {counts['messages']:10} {rate:8.0f} {len(tally.failed)}"
    )


def replay(mix: str, seed: int) -> bool:
    """Play one run again, shrink it if it fails, and print it; return whether it held."""
    found: Outcome = play(scenario(mix, seed), deep=is_deep(seed))
    if not found.fault:
        print(f"SEED='{mix}:{seed}' holds: {found.rooms} rooms, {found.counts['messages']} messages")
        return True
    _tell(found)
    return False


def _tell(found: Outcome) -> None:
    mix, seed = found.scenario.mix, found.scenario.seed
    print(f"SEED='{mix}:{seed}' fails: {found.fault}\n{found.where}")
    shrinker = Shrinker(found, deep=is_deep(seed))
    small = shrinker.shrink()
    print(f"made small in {shrinker.runs} runs:\n{told(small, deep=is_deep(seed))}")


def seek(name: str) -> bool:
    """Search for planted bugs, one or `all`; return whether they were found."""
    lost = []
    for plant in PLANTS if name == "all" else [name]:
        found, rooms = search(plant, ROOMS_MAX)
        where = (
            "NOT FOUND" if found is None else f"SEED='{found.scenario.mix}:{found.scenario.seed}'  {found.fault[:90]}"
        )
        print(f"{plant:18} {PLANTS[plant].about:68} {rooms:6} rooms  {where}", flush=True)
        if found is None:
            lost.append(plant)
        elif name != "all":
            with planted(plant):
                _tell(found)
    return not lost


def main() -> int:
    """Run as the environment's variables say, which `make sim` passes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", help="MIX:NUMBER, to play one run again")
    parser.add_argument("--plant", choices=[*PLANTS, "all"], help="a planted bug to search for")
    parser.add_argument("--mix", help="this mix only")
    parser.add_argument("--seeds", type=int, help=f"of each mix (default {SEEDS}, or as many as the minutes allow)")
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    given = parser.parse_args()
    if given.seed:
        mix, _, number = given.seed.rpartition(":")
        return 0 if replay(mix, int(number)) else 1
    if given.plant:
        return 0 if seek(given.plant) else 1
    mixes = [given.mix] if given.mix else list(MIXES)
    for mix in mixes:
        if mix not in MIXES:
            parser.error(f"there is no mix {mix!r}: {', '.join(MIXES)}")
    seeds: Iterator[int] = count(given.first)
    if given.minutes is None or given.seeds is not None:
        seeds = iter(range(given.first, given.first + (given.seeds or SEEDS)))
    until_s = time.monotonic() + 60 * given.minutes if given.minutes is not None else float("inf")
    begun_s = time.monotonic()
    tallies = run_many(((mix, seed) for seed in seeds for mix in mixes), given.jobs, until_s)
    show(tallies)
    print(f"{time.monotonic() - begun_s:.0f} s with {given.jobs} processes")
    failed = [(mix, seed) for mix, tally in tallies.items() for seed, _ in sorted(tally.failed)]
    for mix, seed in failed[:TOLD_MAX]:
        replay(mix, seed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
