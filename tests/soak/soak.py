"""Runs the soak: deployments over NIXL and Mooncake move rooms while processes are killed, stopped and restarted.

`make soak MINUTES=60`, or `python tests/soak/soak.py --minutes 60`. It compares every byte, inside and outside of the
rooms. It runs in cycles: strikes under load, then a pause in which every room must end, every agent must be empty, and
every process is measured. It exits with 1 if a byte was wrong, a room was stuck or lost without a strike, a process has
grown, or a recovery without other strikes took longer than its target.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import select
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from soak_growth import Book
from soak_messages import Check, Leave
from soak_nodes import LEASE_S, ROOM_TIMEOUT_S, Fleet, now_s
from soak_report import Outcome, machine, printed
from soak_strikes import Striker, schedule
from soak_traffic import Timers, Traffic

from longshore_cli.local_agents import LocalAgentError
from longshore_spec.agent_config import Backend

BACKENDS = (Backend.NIXL, Backend.MOONCAKE)
CYCLE_S = 60.0
# Minimum of cycles, for short runs.
CYCLES_MIN = 3
WARM_UP_S = 2 * LEASE_S
# For eight agents and their engines on two shared cores.
START_LIMIT_S = 300.0
# In a pause every room has ended on both sides within this after the last process is back: twice `room_timeout_s`, the
# longest of the limits that end a room.
END_LIMIT_S = 2 * ROOM_TIMEOUT_S
# After it, stuck rooms are aborted; if that does not help, their engines are killed, so that the soak continues.
GIVE_UP_LIMIT_S = 20.0


class Soak:
    """One run. `run` returns its outcome."""

    def __init__(
        self,
        seed: int,
        minutes: float,
        directory: Path,
        say: Callable[[str], None],
        backends: Sequence[Backend] = BACKENDS,
    ) -> None:
        self.duration_s, self.directory = minutes * 60, directory
        self.outcome = Outcome(seed, minutes, machine())
        self.fleets = [Fleet(backend, directory / backend.value.lower()) for backend in backends]
        self.timers = Timers()
        numbers = itertools.count(random.Random(f"rooms of {seed}").randrange(1 << 62))
        self.traffics = [
            Traffic(fleet, random.Random(f"{fleet.backend.value} of {seed}"), self.timers, numbers, self._log)
            for fleet in self.fleets
        ]
        self.striker = Striker(self.fleets, self.traffics, self.timers, self._log)
        self.book = Book()
        self._say, self._started_s, self._flowed_s = say, now_s(), 0.0
        self._known_left: set[str] = set()
        self._strikes = deque(schedule(seed, self.duration_s, len(self.fleets)))

    def run(self) -> Outcome:
        """Start everything, soak, end everything."""
        cycle_s = min(CYCLE_S, self.duration_s / CYCLES_MIN)
        with self.world():
            self.flow(min(WARM_UP_S, cycle_s), strikes=False)
            self.pause()
            while self._flowed_s < self.duration_s:
                self.flow(min(cycle_s, self.duration_s - self._flowed_s), strikes=True)
                self.pause()
            self.leave()
        self.outcome.take(self.traffics, self.striker, self.book)
        return self.outcome

    @contextmanager
    def world(self) -> Iterator[None]:
        """Start all agents and engines; end them at the end, and leave nothing of them."""
        with ExitStack() as stack:
            for fleet in self.fleets:
                fleet.directory.mkdir()
                stack.enter_context(fleet)
            stack.callback(self.striker.resume)
            self.start()
            yield

    def start(self) -> None:
        """Wait for the agents, then for the engines."""
        for fleet in self.fleets:
            for node in fleet.nodes.values():
                node.agent.wait_ready(START_LIMIT_S)
                self.striker.start_engine(node)
        assert self._until(self._are_all_there, START_LIMIT_S), "the engines do not start: see their logs"
        self._progress("all agents and engines are there")

    def flow(self, duration_s: float, *, strikes: bool) -> None:
        """Keep the load for a while."""
        end_s = now_s() + duration_s
        for traffic in self.traffics:
            traffic.is_flowing = True
        while now_s() < end_s:
            at_s = self._flowed_s + duration_s - (end_s - now_s())
            while strikes and self._strikes and self._strikes[0].at_s <= at_s:
                self.striker.strike(self._strikes.popleft())
            self.turn()
        self._flowed_s += duration_s if strikes else 0.0

    def pause(self) -> None:
        """Let every room end, compare all pages, and measure all processes."""
        # The load continues until stopped and missing processes are back, since their rooms must end, too.
        assert self._until(lambda: self.striker.is_quiet and self._are_all_there(), START_LIMIT_S), "not all come back"
        for traffic in self.traffics:
            traffic.is_flowing = False
        since_s = now_s()
        if not self._until(lambda: not self._open_rooms(), END_LIMIT_S):
            self._free_stuck()
        if not self._until(lambda: not self._leftovers(), END_LIMIT_S):
            for name, page in self._leftovers().items():
                self._known_left.add(name)
                self.outcome.stuck.append(f"after {END_LIMIT_S:g} s an agent still has {name}")
                self._log(f"STILL THERE: {name}: {page}")
        took_s = now_s() - since_s
        self.outcome.pauses_s.append(round(took_s, 2))
        self.outcome.load_averages.append(round(os.getloadavg()[0], 1))
        self.check()
        self.book.note(self.fleets)
        self._progress(f"all ended within {took_s:.1f} s")

    def check(self) -> None:
        """Let every engine compare all of its pages."""
        for traffic in self.traffics:
            traffic.checks_open = 0
            for node in traffic.fleet.nodes.values():
                traffic.checks_open += node.engine.tell(Check())
        if not self._until(lambda: not any(traffic.checks_open for traffic in self.traffics), END_LIMIT_S):
            self.outcome.stuck.append("an engine does not answer")

    def leave(self) -> None:
        """End the engines in an orderly way; their agents must hold nothing then."""
        for fleet in self.fleets:
            for node in fleet.nodes.values():
                node.engine.tell(Leave())
                node.engine.over()

    def turn(self) -> None:
        """Do due work and read the engines' reports; wait a moment if there is nothing to do."""
        wait_s = self.timers.run()
        poller = select.poll()
        talking = {}
        for traffic in self.traffics:
            traffic.flow()
            for node in traffic.fleet.nodes.values():
                if node.engine.pid:
                    talking[node.engine.fileno()] = (traffic, node)
                    poller.register(node.engine, select.POLLIN)
        for descriptor, _ in poller.poll(min(wait_s, 0.02 if self.striker.is_measuring else 0.1) * 1e3):
            traffic, node = talking[descriptor]
            reports, ended = node.engine.read()
            for report in reports:
                traffic.hear(node, report)
            if ended:
                self.striker.engine_ended(node)
        self.striker.look()

    def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        end_s = now_s() + limit_s
        while not condition():
            if now_s() > end_s:
                return False
            self.turn()
        return True

    def _leftovers(self) -> dict[str, str]:
        """Return the agents' leftovers of ended rooms, by name, without those that an earlier pause reported."""
        nodes = [node for fleet in self.fleets for node in fleet.nodes.values()]
        found = {name: page for node in nodes for name, page in node.leftovers().items()}
        return {name: page for name, page in found.items() if name not in self._known_left}

    def _are_all_there(self) -> bool:
        return all(node.is_there for fleet in self.fleets for node in fleet.nodes.values())

    def _open_rooms(self) -> int:
        return sum(len(traffic.rooms) for traffic in self.traffics)

    def _free_stuck(self) -> None:
        """Record the rooms that have not ended, with their agents' status, and continue the soak without them."""
        for traffic in self.traffics:
            for room in traffic.rooms.values():
                self.outcome.stuck.append(f"after {END_LIMIT_S:g} s: {room.described()}")
                pages = {}
                for side in room.sides:
                    try:
                        pages[side.node.name] = side.node.agent.room(room.number)
                    except LocalAgentError as error:
                        pages[side.node.name] = {"error": str(error)}
                self._log(f"STUCK {room.described()}: {msgspec.json.encode(pages).decode()}")
                traffic.give_up(room)
        if self._until(lambda: not self._open_rooms(), GIVE_UP_LIMIT_S):
            return
        for traffic in self.traffics:
            for room in list(traffic.rooms.values()):
                self.outcome.stuck.append(f"and {GIVE_UP_LIMIT_S:g} s after it was given up: {room.described()}")
                for side in room.sides:
                    if side.node.engine.pid and not side.end:
                        side.node.engine.kill()
                        traffic.lost(side.node)
                        self.striker.start_engine(side.node)
        self._until(self._are_all_there, START_LIMIT_S)

    def _progress(self, words: str) -> None:
        counts = [traffic.counts for traffic in self.traffics]
        by_fleet = ", ".join(f"{traffic.fleet.backend.value} {traffic.counts.done:,}" for traffic in self.traffics)
        total = self.book.totals[-1] if self.book.totals else None
        held = f"; {total.own_bytes >> 20} MiB, {total.descriptors} descriptors" if total else ""
        self._say(
            f"[{now_s() - self._started_s:5.0f} s] {words}; {sum(self.striker.done.values())} strikes; "
            f"rooms done: {by_fleet}; failed {sum(count.failed.total() for count in counts):,}; "
            f"corrupt {sum(len(count.corrupt) for count in counts)}; stuck {len(self.outcome.stuck)}{held}"
        )

    def _log(self, words: str) -> None:
        with (self.directory / "strikes.log").open("a", encoding="utf-8") as log:
            log.write(f"[{now_s() - self._started_s:7.1f} s] {words}\n")


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main() -> int:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load, without the pauses between cycles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--directory",
        type=Path,
        help="of logs, which are kept; a new one. Default: a temporary one, kept if something was wrong",
    )
    parser.add_argument("--json", type=Path, help="where the outcome is written")
    given = parser.parse_args()
    # Unwind at SIGTERM too: stopped processes must be continued.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    directory = given.directory or Path(tempfile.mkdtemp(prefix="soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    outcome = Soak(given.seed, given.minutes, directory, _say).run()
    _say(printed(outcome))
    if outcome.is_good and given.directory is None:
        shutil.rmtree(directory)
    else:
        _say(f"logs: {directory}")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n")
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
