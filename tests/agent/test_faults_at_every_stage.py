"""Tests every fault in every stage of a room. The loopback holds one room in each stage; then the fault strikes.

`fault_table` has the expected observations of both engines; `fault_strike.play` checks everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_fleet import World
from agent_world import EVENT_LIMIT_S, wait_for
from fault_engine import RELEASED, Actor
from fault_judge import carries
from fault_scene import SETTINGS, Gate, Place, Room
from fault_strike import (
    cancel,
    kill_agent,
    kill_engine,
    kill_worker,
    play,
    stop_engine,
    stop_worker,
)
from fault_table import DECODE, WRITING, scenes, wrong

from longshore_wire.engine_messages import Half

# Agents remember an ended room for two leases. Long enough that a test uses it again in time, also on a slow machine.
LONG_LEASE_S = "60"
# Engines of this process renew their leases, too, also if it does not run for some seconds on a busy machine.
SHORT_LEASE_S = "6"
# A hundredth of the ring of 1 MiB. A room of 64 tokens takes an eighth, so fewer than eight of them fit at once.
STALLED_TOKENS = 5
ROOMS_AT_ONCE = 20


def make_place(directory: Path, lease_s: str) -> Iterator[Place]:
    gate = Gate(directory)
    gate.open()
    world = World(directory, **SETTINGS, LONGSHORE_LEASE_S=lease_s)
    actors: dict[str, Actor] = {}
    try:
        held = gate.rules("target", "whole", "doomed-decode")
        prefill, decode = world.agent("prefill", LONGSHORE_LOOPBACK_FAULTS=held), world.agent("decode")
        wanted = {
            "source": (prefill, Half.SOURCE, 16),
            "target": (decode, Half.TARGET, 8),
            "small": (prefill, Half.SOURCE, 8),
            "whole": (decode, Half.TARGET, 16),
            "plain": (decode, Half.TARGET, 16),
        }
        starting = {
            name: world.starters.submit(Actor, agent, name, half, page_size)
            for name, (agent, half, page_size) in wanted.items()
        }
        actors = {name: actor.result() for name, actor in starting.items()}
        place = Place(prefill, decode, gate=gate, **actors)
        place.warm_up()
        yield place
    finally:
        gate.open()
        for actor in actors.values():
            actor.close()
        world.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    yield from make_place(tmp_path_factory.mktemp("stages"), LONG_LEASE_S)


@pytest.fixture(scope="module")
def leased(tmp_path_factory) -> Iterator[Place]:
    yield from make_place(tmp_path_factory.mktemp("leased"), SHORT_LEASE_S)


@carries(*scenes("engine killed"), further=DECODE)
def test_what_a_killed_engine_had_open_ends_by_name_at_the_other_side(place, judge):
    play(place, judge, kill_engine, dooms=True)


@carries(*scenes("engine stopped"), further=DECODE)
def test_what_a_stopped_engine_had_open_ends_by_its_lease_on_both_sides(leased, judge):
    play(leased, judge, stop_engine, dooms=True)


@carries(*scenes("worker killed"))
def test_what_a_killed_worker_had_begun_ends_on_both_sides_and_its_engine_is_served_again(place, judge):
    play(place, judge, kill_worker)


@carries(*scenes("peer silent"), further=DECODE)
def test_what_was_open_with_a_worker_that_says_nothing_ends_on_both_sides(place, judge):
    play(place, judge, stop_worker)


@carries(*scenes("agent killed and back"))
def test_an_agent_that_was_killed_and_is_back_goes_on_with_what_was_not_begun_and_tells_of_the_rest(place, judge):
    play(place, judge, kill_agent)


@carries(*scenes("cancelled"))
def test_a_cancelled_room_ends_on_both_sides_whatever_its_stage(place, judge):
    play(place, judge, cancel)


@carries(wrong("200 rooms while a stalled one holds 1 % of the ring"))
def test_a_stalled_room_that_holds_a_hundredth_of_the_ring_stops_nobody(place, judge):
    judge.begin(place.prefill, place.decode)
    place.gate.shut()
    place.gate.turn("hold")
    endpoint = place.source.endpoint()
    stalled = Room(WRITING, place.source, place.target, STALLED_TOKENS)
    assert (stalled.offer(), stalled.claim(endpoint)) == ("", "")
    wait_for(lambda: place.gate.held_count("hold") == 1)
    place.gate.turn("")
    ring = place.decode.worker("target")["ring"]
    assert 0.009 < ring["used_bytes"] / ring["capacity_bytes"] < 0.011

    words = set()
    for _ in range(200 // ROOMS_AT_ONCE):
        rooms = [Room("", place.source, place.target) for _ in range(ROOMS_AT_ONCE)]
        for room in rooms:
            assert (room.offer(), room.claim(endpoint)) == ("", "")
        for room in rooms:
            words.add((room.source.end(room.number, EVENT_LIMIT_S), room.target.end(room.number, EVENT_LIMIT_S)))
            assert {actor.release(room.number, EVENT_LIMIT_S) for actor in (room.source, room.target)} == {RELEASED}
    ((prefill, decode),) = words
    judge.sees(prefill, decode)
    judge.counts(200)
    # They have used the whole ring many times, except the memory of the stalled room.
    after = place.decode.worker("target")["ring"]
    assert (after["rounds"] - ring["rounds"] > 10, after["used_bytes"]) == (True, ring["used_bytes"])
    assert place.decode.room(stalled.number, Half.TARGET)["state"] == "open"
    place.gate.open()
    stalled.finish()
    assert place.target.is_intact()
