"""Tests that the soak detects wrong bytes, stuck rooms and growing processes, and that its seed sets its strikes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import soak
from process_ledger import Holdings
from soak import Soak
from soak_growth import LIFE_MIN_S, OWN_BYTES_MAX, Life, Sample
from soak_nodes import Victim
from soak_report import CLEAN, OTHER, Machine, Outcome, Rooms, printed
from soak_strikes import SPARED, STOPS, Kind, Striker, schedule
from soak_traffic import Timers

from longshore_spec.agent_config import Backend

HOUR_S = 3600.0
MACHINE = Machine("a processor", 2, "Linux", "3.11", "abc")
MOVED = Rooms(1, 0, 100, {}, 0, {}, 0, 0, 0)


def test_one_seed_gives_one_schedule_and_another_seed_another() -> None:
    assert schedule(7, HOUR_S, 2) == schedule(7, HOUR_S, 2) != schedule(8, HOUR_S, 2)


def test_an_hour_strikes_in_every_way_at_every_node_and_ends_no_process_that_is_spared() -> None:
    strikes = schedule(1, HOUR_S, 2)
    assert {strike.kind for strike in strikes} == set(Kind)
    assert len({(strike.fleet, strike.node) for strike in strikes}) == 8
    for strike in strikes:
        spared = SPARED[int(4 * strike.at_s / HOUR_S)]
        assert strike.kind in STOPS or not {strike.node, strike.opposite} & set(spared)


class Restarted:
    """An agent whose end is detected at the second poll."""

    def __init__(self) -> None:
        self.pid, self.looks, self.starts = 7, 0, 0

    @property
    def running(self) -> bool:
        self.looks += 1
        return self.starts > 0 or self.looks < 3

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        self.looks = 3

    def start(self) -> None:
        self.pid, self.starts = self.pid + 1, self.starts + 1


def test_an_agent_that_is_struck_twice_while_it_ends_is_started_once() -> None:
    timers, agent = Timers(), Restarted()
    node = SimpleNamespace(
        name="prefill-a", title="", agent=agent, engine=SimpleNamespace(is_ready=False), struck_s=0.0
    )
    traffic = SimpleNamespace(fleet=SimpleNamespace(nodes={"prefill-a": node}), done_at_s={})
    striker = Striker([], [traffic], timers, lambda _: None)  # type: ignore[list-item]
    for kind in (Kind.RESTART_AGENT, Kind.KILL_AGENT):
        assert striker._end_agent(node, kind, 0.0)  # type: ignore[arg-type]
    end_s = time.monotonic() + 120.0
    while not striker.is_quiet and time.monotonic() < end_s:
        timers.run()
    assert striker.is_quiet
    assert agent.starts == 1


@pytest.mark.parametrize(
    ("fault", "title"),
    [
        ("corrupt", "corrupt"),
        ("stuck", "stuck"),
        ("growth", "growth"),
        ("strange", "failures that no strike explains"),
    ],
)
def test_a_run_with_one_fault_is_not_good_and_its_table_names_the_fault(fault: str, title: str) -> None:
    outcome = Outcome(1, 1.0, MACHINE, {"NIXL": MOVED})
    assert outcome.is_good
    setattr(outcome, fault, ["seven"])
    assert not outcome.is_good
    assert f"{title}: 1\n    seven\n" in printed(outcome)


@pytest.mark.parametrize(("timed", "time_s"), [("released", 2.1), ("recovered", 5.1), ("replaced", 5.1)])
def test_a_run_in_which_something_took_too_long_is_not_good_unless_more_was_struck_meanwhile(
    timed: str, time_s: float
) -> None:
    outcome = Outcome(1, 1.0, MACHINE, {"NIXL": MOVED})
    setattr(outcome, timed, {CLEAN: [time_s - 0.2], OTHER: [time_s]})
    assert outcome.is_good
    setattr(outcome, timed, {CLEAN: [time_s], OTHER: []})
    assert not outcome.is_good
    assert "late: 1\n    " in printed(outcome)


def test_a_run_that_gave_a_request_up_is_not_good() -> None:
    assert not Outcome(1, 1.0, MACHINE, {"NIXL": msgspec.structs.replace(MOVED, given_up=1)}).is_good


def test_a_run_that_has_moved_nothing_over_a_transport_is_not_good() -> None:
    assert not Outcome(1, 1.0, MACHINE).is_good
    assert not Outcome(1, 1.0, MACHINE, {"NIXL": MOVED, "Mooncake": Rooms(0, 0, 0, {}, 0, {}, 0, 0, 0)}).is_good


def sample(at_s: float, own_bytes: int = 0, sockets: int = 0, pages: int = 0, threads: int = 1) -> Sample:
    return Sample(at_s, Holdings({"socket": sockets}, pages, own_bytes), threads, 0)


@pytest.mark.parametrize(
    ("last", "word"),
    [
        (sample(LIFE_MIN_S, own_bytes=OWN_BYTES_MAX + 1), "own memory"),
        (sample(LIFE_MIN_S, sockets=100), "descriptors"),
        (sample(LIFE_MIN_S, pages=1), "mapped regions"),
        (sample(LIFE_MIN_S, threads=10), "threads"),
    ],
)
def test_a_process_that_holds_more_at_the_end_of_a_long_life_has_grown(last: Sample, word: str) -> None:
    assert word in Life("a worker", 1, [sample(0.0), last]).growth()
    assert Life("a worker", 1, [last, sample(2 * LIFE_MIN_S)]).growth() == ""


def flip_a_byte(pid: int) -> None:
    """Write into a free page of a process from outside; no room is open."""
    path = next(path for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd:pages-" in str(path.readlink()))
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, 0)
        os.pwrite(descriptor, bytes([byte ^ 1]), 0)
    finally:
        os.close(descriptor)


@pytest.mark.rest("soak")
@pytest.mark.slow
def test_a_soak_of_real_agents_tells_a_foreign_write_and_a_room_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Soak(1, 1.0, tmp_path / "soak", print, [Backend.LOOPBACK])
    running.directory.mkdir()
    with running.world():
        (traffic,), outcome = running.traffics, running.outcome
        running.flow(3.0, strikes=False)
        running.pause()
        assert (traffic.counts.done > 0, traffic.counts.corrupt, outcome.stuck) == (True, [], [])
        node = traffic.fleet.nodes["decode-b"]
        flip_a_byte(node.engine.pid)
        running.check()
        assert len(traffic.counts.corrupt) == 1
        # The ranks' memory is opened in any order.
        found = r"Loopback decode-b rank [01]: a page of no open room has other bytes: 1 bytes"
        assert re.match(found, traffic.counts.corrupt[0])
        monkeypatch.setattr(soak, "END_LIMIT_S", 1.0)
        worker = Victim(node.workers()[0])
        running.flow(1.0, strikes=False)
        assert worker.send(signal.SIGSTOP)

        def go_on_when_told() -> None:
            if outcome.stuck:
                worker.send(signal.SIGCONT)
            else:
                running.timers.after(0.1, go_on_when_told)

        running.timers.after(0.1, go_on_when_told)
        running.flow(1.0, strikes=False)
        running.pause()
        rooms = Counter(line.partition(": room ")[0] for line in outcome.stuck)
        assert rooms["after 1 s"] > 0
        running.leave()
        worker.close()
