"""Tests faults over NIXL and Mooncake, in the stages that need no open write.

The scenes and rows are those of the loopback, see `test_faults_at_every_stage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from agent_fleet import World
from fault_engine import Actor
from fault_judge import carries, carries_at_once
from fault_scene import SETTINGS, Place
from fault_strike import cancel, kill_agent, kill_engine, kill_worker, play, play_at_once, stop_engine, stop_worker
from fault_table import MOONCAKE, NIXL, NIXL_ALONE, scenes

from longshore_wire.engine_messages import Half

pytestmark = pytest.mark.rest("transports")

TRANSPORTS = (NIXL, NIXL_ALONE, MOONCAKE)
# Engines of this process renew their leases, too, also if it does not run for some seconds on a busy machine.
SHORT_LEASE_S = "6"


def make_places(tmp_path_factory, **settings: str) -> Iterator[dict[str, Place]]:
    """Two agents with two engines for each transport; all start at once."""
    with ExitStack() as stack:
        worlds = {}
        for backend in TRANSPORTS:
            directory = tmp_path_factory.mktemp(backend)
            chosen = {"LONGSHORE_BACKEND": backend}
            if backend == NIXL_ALONE:
                chosen = {"LONGSHORE_BACKEND": NIXL, "LONGSHORE_WIRES": "SharedMemory"}
            world = worlds[backend] = World(directory, **SETTINGS, **settings, **chosen)
            stack.callback(world.close)
        starting = {}
        for backend, world in worlds.items():
            prefill, decode = world.agent("prefill"), world.agent("decode")
            starting[backend] = [
                world.starters.submit(Actor, prefill, "source", Half.SOURCE, 16),
                world.starters.submit(Actor, decode, "target", Half.TARGET, 8),
            ]
        found = {}
        for backend, actors in starting.items():
            source, target = (actor.result() for actor in actors)
            stack.callback(source.close)
            stack.callback(target.close)
            found[backend] = Place(source.engine.agent, target.engine.agent, source, target)
            found[backend].warm_up()
        yield found


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[dict[str, Place]]:
    yield from make_places(tmp_path_factory)


@pytest.fixture(scope="module")
def leased_places(tmp_path_factory) -> Iterator[dict[str, Place]]:
    yield from make_places(tmp_path_factory, LONGSHORE_LEASE_S=SHORT_LEASE_S)


@pytest.fixture
def place(places, judge) -> Place:
    return places[judge.transport]


@carries(*scenes("engine killed"), over=TRANSPORTS)
def test_what_a_killed_engine_had_open_ends_by_name_at_the_other_side(place, judge):
    play(place, judge, kill_engine, dooms=True)


@carries(*scenes("worker killed"), over=TRANSPORTS)
def test_what_a_killed_worker_had_begun_ends_on_both_sides_and_its_engine_is_served_again(place, judge):
    play(place, judge, kill_worker)


@carries(*scenes("agent killed and back"), over=TRANSPORTS)
def test_an_agent_that_was_killed_and_is_back_goes_on_with_what_was_not_begun_and_tells_of_the_rest(place, judge):
    play(place, judge, kill_agent)


@carries(*scenes("cancelled"), over=TRANSPORTS)
def test_a_cancelled_room_ends_on_both_sides_whatever_its_stage(place, judge):
    play(place, judge, cancel)


@carries_at_once(scenes("peer silent")[0], over=TRANSPORTS)
def test_what_was_open_with_a_prefill_worker_that_says_nothing_ends_on_both_sides(places, judges):
    play_at_once(places, judges, stop_worker)


@carries_at_once(scenes("peer silent")[1], over=(NIXL_ALONE, MOONCAKE))
def test_what_was_open_with_a_decode_worker_that_says_nothing_ends_on_both_sides(places, judges):
    play_at_once(places, judges, stop_worker)


@carries_at_once(*scenes("engine stopped"), over=TRANSPORTS)
def test_what_a_stopped_engine_had_open_ends_by_its_lease_on_both_sides(leased_places, judges):
    play_at_once(leased_places, judges, stop_engine, dooms=True)
