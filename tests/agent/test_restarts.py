"""Tests the backoff of crashing workers: it grows with each crash, and a single crash has none."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from agent_fleet import World
from agent_world import Agent, Engine, Request, wait_for

from longshore_agent.status.snapshot import LATELY_S
from longshore_agent.supervisor.restarts import RANKS_MAX, STEADY_S, Restarts
from longshore_wire.effects import PeerId

KEY = PeerId("one", 0, 0)


def waits(restarts: Restarts, count: int, served_s: float = 0.0) -> list[float]:
    """Return the wait after each of `count` crashes, if each start is as early as permitted."""
    found, now_s = [], 100.0
    for _ in range(count):
        restarts.starting(KEY, now_s)
        restarts.died(KEY, served_s, "it ended with -9", now_s)
        found.append(restarts.wait_s(KEY, now_s))
        now_s += found[-1]
        assert restarts.wait_s(KEY, now_s) == 0
    return found


@pytest.mark.shows("agent.restart_backoff_max_s")
def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long_up_to_the_longest_wait() -> None:
    assert waits(Restarts(wait_min_s=0.25, wait_max_s=3.0), 7) == [0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert waits(Restarts(wait_min_s=2.0, wait_max_s=2.0), 50)[-1] == 2.0


def test_a_worker_that_served_for_long_is_no_part_of_a_crash_loop() -> None:
    restarts = Restarts(wait_min_s=1.0, wait_max_s=8.0)
    assert waits(restarts, 3) == [0.0, 1.0, 2.0]
    assert waits(restarts, 3, STEADY_S) == [0.0, 0.0, 0.0]
    assert restarts.count(KEY) == restarts.total == 6


def test_an_engine_that_stayed_away_for_longer_than_any_wait_begins_anew() -> None:
    restarts = Restarts(wait_min_s=1.0, wait_max_s=8.0)
    for _ in range(5):
        restarts.not_started(KEY, "no such GPU", 100.0)
    assert (restarts.wait_s(KEY, 100.0), restarts.total) == (8.0, 0)
    assert "5 times in a row (no such GPU): the next one starts in 3.0 s" in restarts.told(KEY, 105.0)
    restarts.starting(KEY, 108.0 + 8.0)
    restarts.not_started(KEY, "no such GPU", 116.0)
    assert restarts.wait_s(KEY, 116.0) == 0


def test_three_deaths_within_a_minute_are_told_of_until_the_last_is_a_minute_old() -> None:
    restarts = Restarts(wait_min_s=1.0, wait_max_s=30.0)
    for now_s in (100.0, 150.0, 170.0):
        restarts.died(KEY, STEADY_S, "it ended with -11", now_s)
        assert restarts.dying(now_s) == ()
    restarts.died(KEY, STEADY_S, "it ended with -6", 190.0)
    told = ("the worker of one rank 0 has died 3 times within a minute, last because it ended with -6",)
    assert restarts.dying(190.0) == restarts.dying(250.0) == told
    assert restarts.dying(250.1) == restarts.dying(260.0) == ()
    # A crash loop with long waits still counts as one, although three deaths then take longer than a minute.
    for now_s in (300.0, 301.0, 302.0, 340.0, 378.0):
        restarts.died(KEY, 0.0, "it ended with -6", now_s)
    assert restarts.dying(400.0) == told
    restarts.died(PeerId("other", 0, 0), 0.0, "it ended with -9", 400.0)
    assert restarts.dying(400.0) == told


def test_restarts_of_the_last_quarter_of_an_hour_are_counted() -> None:
    restarts = Restarts(wait_min_s=1.0, wait_max_s=30.0)
    restarts.died(KEY, STEADY_S, "it ended with -11", 100.0)
    restarts.replaced(KEY, 200.0)
    counts = [restarts.lately(now_s) for now_s in (200.0, 100.0 + LATELY_S, 101.0 + LATELY_S, 201.0 + LATELY_S)]
    assert (counts, restarts.total) == ([2, 2, 1, 0], 2)


def test_ranks_that_never_come_back_are_forgotten_and_the_sum_is_not() -> None:
    restarts = Restarts(wait_min_s=1.0, wait_max_s=8.0)
    for rank in range(RANKS_MAX + 10):
        restarts.replaced(PeerId("many", 0, rank), 100.0)
    assert (restarts.count(PeerId("many", 0, 9)), restarts.count(PeerId("many", 0, 10))) == (0, 1)
    assert restarts.total == RANKS_MAX + 10


def kill_worker(agent: Agent, instance: str) -> None:
    found = agent.worker(instance)
    assert found is not None
    os.kill(found["pid"], signal.SIGKILL)


def wait_served_again(engine: Engine, epoch: int) -> None:
    wait_for(lambda: engine.client.connected and engine.client.epoch != epoch, what="the next worker")


@pytest.mark.shows("agent.restart_backoff_min_s")
def test_an_engine_whose_worker_dies_again_and_again_waits_as_long_as_its_agent_is_set(tmp_path: Path) -> None:
    world = World(tmp_path, LONGSHORE_RESTART_BACKOFF_MAX_S="3600")
    try:
        starting = {
            name: world.engine(world.agent(name, LONGSHORE_RESTART_BACKOFF_MIN_S=wait_s), name)
            for name, wait_s in (("waits", "3600"), ("goes-on", "0.01"))
        }
        waits, goes_on = (engine.result() for engine in starting.values())
        for engine in (waits, goes_on):
            epoch = engine.client.epoch
            kill_worker(engine.agent, engine.instance)
            wait_served_again(engine, epoch)
        epoch = goes_on.client.epoch
        for engine in (waits, goes_on):
            kill_worker(engine.agent, engine.instance)
        wait_served_again(goes_on, epoch)
        wait_for(lambda: "2 times in a row" in waits.client._core.last_error, what="an engine that has to wait")
        assert (waits.agent.worker("waits"), waits.client.connected) == (None, False)
        request = Request(goes_on, goes_on, 200)
        request.claim()
        request.offer()
        request.arrives()
    finally:
        world.close()


def told_wait_s(engine: Engine, crashes: int) -> float:
    """Return the wait in an agent's refusal of an engine after this many crashes."""
    said = re.compile(rf"{crashes} times in a row .*: the next one starts in ([0-9.]+) s")
    wait_for(lambda: said.search(engine.client._core.last_error), what="an engine that has to wait")
    found = said.search(engine.client._core.last_error)
    assert found is not None
    return float(found[1])


@pytest.mark.shows("agent.restart_backoff_max_s")
def test_an_engine_waits_no_longer_and_no_shorter_than_the_longest_wait_of_its_agent(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        waits_s = {"long": "3600", "short": "2"}
        starting = {
            name: world.engine(
                world.agent(name, LONGSHORE_RESTART_BACKOFF_MIN_S=wait_s, LONGSHORE_RESTART_BACKOFF_MAX_S=wait_s), name
            )
            for name, wait_s in waits_s.items()
        }
        engines = {name: engine.result() for name, engine in starting.items()}
        for name, crashes in (("long", 2), ("short", 3)):
            engine = engines[name]
            for _ in range(crashes - 1):
                epoch = engine.client.epoch
                kill_worker(engine.agent, name)
                wait_served_again(engine, epoch)
            kill_worker(engine.agent, name)
        assert 3000 < told_wait_s(engines["long"], 2) <= 3600
        # It would double with the third crash, but the limit applies.
        assert 0 < told_wait_s(engines["short"], 3) <= 2
    finally:
        world.close()
