"""Real agents that were asked for one wire and are given another: an error that names both, whatever the backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from agent_fleet import Fleet, World, fleet_of
from agent_world import START_LIMIT_S, Agent, Engine, Request, wait_for

from longshore_client import Half, Reason, RoomEventKind

# What a host without other devices gives each backend.
FOUND = {"NIXL": "SharedMemory", "Mooncake": "TCP"}


@dataclass
class Place:
    """An agent that allows RDMA alone, which is not here, and its engine; they write to an engine of a fleet."""

    fleet: Fleet
    asks: Agent
    picky: Engine


@pytest.fixture(scope="module", params=sorted(FOUND))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    fleet = fleet_of(request.param, request, tmp_path_factory)
    settings = {"LONGSHORE_BACKEND": fleet.backend, "LONGSHORE_WIRES": "RDMA"}
    if fleet.backend == "NIXL":
        settings["LONGSHORE_KEYS_DIRECTORY"] = str(fleet.prefill.directory.parent)
    world = World(tmp_path_factory.mktemp("wires"), **settings)
    try:
        asks = world.agent("asks")
        yield Place(fleet, asks, world.engine(asks, "picky", roles=[Half.SOURCE]).result())
    finally:
        world.close()


def test_a_wire_that_was_not_asked_for_fails_the_room_and_both_are_named(place):
    found, pages = FOUND[place.fleet.backend], place.fleet.same
    for _ in range(2):
        each = Request(place.picky, pages, 100)
        each.claim()
        each.offer()
        ends = each.ends()
        assert {(end.kind, end.reason) for end in ends} == {(RoomEventKind.FAILED, Reason.WIRE_NOT_ALLOWED)}, ends
        assert all(found in end.text and "RDMA" in end.text for end in ends), ends
    assert pages.intact()
    assert place.asks.metric("longshore_writes_total") == 0


def test_an_agent_whose_self_test_took_another_wire_is_not_ready_and_names_both(place):
    wait_for(lambda: place.asks.status()["self_test"], START_LIMIT_S)
    code, body = place.asks.ask("/readyz")
    assert code == 503
    assert FOUND[place.fleet.backend].encode() in body and b"RDMA" in body
