"""Tests real agents whose transport uses a wire that is not allowed: the error names both wires, with every backend.

Engines of one agent copy directly, without a wire, so the list does not apply to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from agent_fleet import Fleet, World
from agent_world import START_LIMIT_S, Agent, Engine, Request, wait_for

from longshore_client import Half, Reason, RoomEventKind

# The wire that each backend uses on a host without other devices, and another wire.
FOUND = {"NIXL": "SharedMemory", "Mooncake": "TCP"}
ASKED = {"NIXL": "TCP", "Mooncake": "RDMA"}


@dataclass
class Place:
    """An agent that allows only an unused wire, with two engines; one of them also writes to an engine of a fleet."""

    fleet: Fleet
    asks: Agent
    picky: Engine
    near: Engine

    @property
    def found(self) -> str:
        return FOUND[self.fleet.backend]

    @property
    def asked(self) -> str:
        return ASKED[self.fleet.backend]


@pytest.fixture(scope="module", params=sorted(FOUND))
def place(
    request: pytest.FixtureRequest, fleet_of: Callable[[str], Fleet], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    fleet = fleet_of(request.param)
    settings = {"LONGSHORE_BACKEND": fleet.backend, "LONGSHORE_WIRES": ASKED[fleet.backend], "LONGSHORE_DIRECT": "true"}
    if fleet.backend == "NIXL":
        settings["LONGSHORE_KEYS_DIRECTORY"] = str(fleet.prefill.directory.parent)
    world = World(tmp_path_factory.mktemp("wires"), **settings)
    try:
        asks = world.agent("asks")
        starting = [
            world.engine(asks, "picky", roles=[Half.SOURCE]),
            world.engine(asks, "picky-near", roles=[Half.TARGET]),
        ]
        yield Place(fleet, asks, *(engine.result() for engine in starting))
    finally:
        world.close()


def peer_of(place: Place, instance: str, other: str) -> dict[str, Any]:
    """Return the entry of one rank as a peer of another in the agent's status."""
    worker = place.asks.worker(instance)
    assert worker is not None
    (found,) = [peer for peer in worker["peers"] if peer["instance"] == other]
    return found


def moved(source: Engine, target: Engine) -> Request:
    each = Request(source, target, 100)
    # In this order no half of the room can fail before its engine has opened it.
    each.offer()
    each.claim()
    return each


@pytest.mark.shows("agent.wires", "field.transfer.wires")
def test_a_wire_that_was_not_asked_for_fails_the_room_and_peers_wires_and_way_out_are_named(place):
    pages = place.fleet.same
    for _ in range(2):
        ends = moved(place.picky, pages).ends()
        assert {(end.kind, end.reason) for end in ends} == {(RoomEventKind.FAILED, Reason.WIRE_NOT_ALLOWED)}, ends
        for end in ends:
            assert f"prefill picky rank 0 reaches decode same rank 0 over {place.found}" in end.text
            assert f"transfer.wires (LONGSHORE_WIRES) allows only {place.asked}" in end.text
            assert f"add {place.found} to the list" in end.text
    assert pages.intact()
    assert place.asks.metric("longshore_writes_total", way="staged") == 0
    peer = peer_of(place, "picky", "same")
    assert (peer["wire"], peer["error"]) == (place.found, ends[0].text)
    assert "direct" not in peer["ways"]
    assert ends[0].text in place.asks.log()


def test_a_decode_agent_takes_no_byte_over_a_wire_that_it_does_not_allow_though_its_peer_allows_any(place):
    ends = moved(place.fleet.one, place.near).ends()
    assert {(end.kind, end.reason) for end in ends} == {(RoomEventKind.FAILED, Reason.WIRE_NOT_ALLOWED)}, ends
    for end in ends:
        assert f"prefill one rank 0 reaches decode picky-near rank 0 over {place.found}" in end.text
    assert place.near.intact()
    assert peer_of(place, "picky-near", "one")["error"] == ends[0].text
    assert place.asks.metric("longshore_findings", worker="picky-near/0/0", code="PeerWireNotAllowed") == 1


def test_engines_of_one_agent_copy_directly_whatever_wires_are_allowed(place):
    moved(place.picky, place.near).arrives()
    # The probe's answer must change nothing, neither on arrival nor later.
    wait_for(lambda: peer_of(place, "picky", "picky-near")["wire"] == place.found)
    moved(place.picky, place.near).arrives()
    assert place.near.intact()
    assert place.asks.metric("longshore_writes_total", way="direct") > 0
    assert place.asks.metric("longshore_written_bytes_total", way="direct", wire="None") > 0
    for one, other in (("picky", "picky-near"), ("picky-near", "picky")):
        peer = peer_of(place, one, other)
        assert (peer["state"], peer["ways"], peer["error"]) == ("attached", ["direct"], "")


def test_a_self_test_inside_one_host_is_judged_only_where_it_tells_of_other_hosts(place):
    wait_for(lambda: place.asks.status()["self_test"], START_LIMIT_S)
    code, body = place.asks.ask("/readyz")
    (check,) = [check for check in json.loads(body)["checks"] if check["name"] == "SelfTest"]
    assert place.found in check["message"]
    assert place.asked in check["message"]
    # A transport that uses TCP inside a host uses nothing faster between hosts; one that uses shared memory may.
    tells = place.found == "TCP"
    assert (code, check["reason"]) == ((503, "WireNotAllowed") if tells else (200, "SelfTestPassed"))
    assert check["message"] in place.asks.log()


def test_an_agent_that_opens_no_port_and_one_that_needs_it_to_say_so_to_both_engines(
    fleet_of: Callable[[str], Fleet], tmp_path_factory: pytest.TempPathFactory
) -> None:
    fleet = fleet_of("NIXL")
    keys = str(fleet.prefill.directory.parent)
    settings = {"LONGSHORE_BACKEND": "NIXL", "LONGSHORE_WIRES": "SharedMemory", "LONGSHORE_KEYS_DIRECTORY": keys}
    world = World(tmp_path_factory.mktemp("alone"), **settings)
    try:
        alone = world.engine(world.agent("alone"), "alone", roles=[Half.SOURCE]).result()
        for _ in range(2):
            ends = moved(alone, fleet.same).ends()
            assert {(end.kind, end.reason) for end in ends} == {(RoomEventKind.FAILED, Reason.WIRE_NOT_ALLOWED)}, ends
            for end in ends:
                assert "may use wires inside its host alone" in end.text
                assert "give both agents the same transfer.wires (LONGSHORE_WIRES)" in end.text
        assert fleet.same.intact()
    finally:
        world.close()
