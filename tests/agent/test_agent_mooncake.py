"""Tests real agents over Mooncake: attacks on its ports while rooms move, and configurations that are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from agent_fleet import World
from agent_world import Agent, Engine, Request, wait_for
from transport_peer import mooncake_ports, strike

from longshore_client import Busy, Half, Reason, RoomEventKind


@dataclass
class Place:
    """Two agents, two engines at each."""

    prefill: Agent
    decode: Agent
    source: Engine
    bystander: Engine
    target: Engine
    other: Engine


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    world = World(
        tmp_path_factory.mktemp("mooncake"),
        LONGSHORE_BACKEND="Mooncake",
        LONGSHORE_HEARTBEAT_S="0.2",
        LONGSHORE_PEER_TIMEOUT_S="3",
    )
    try:
        prefill, decode = world.agent("prefill"), world.agent("decode")
        starting = {
            "source": world.engine(prefill, "source", roles=[Half.SOURCE]),
            "bystander": world.engine(prefill, "bystander", roles=[Half.SOURCE]),
            "target": world.engine(decode, "target", page_size=8, roles=[Half.TARGET]),
            "other": world.engine(decode, "other", page_size=8, roles=[Half.TARGET]),
        }
        yield Place(prefill, decode, **{name: engine.result() for name, engine in starting.items()})
    finally:
        world.close()


@pytest.mark.parametrize("half", [Half.SOURCE, Half.TARGET])
def test_junk_on_the_port_of_a_worker_fails_its_rooms_by_name_restarts_it_and_touches_no_other(place, half):
    agent, engine = (place.prefill, place.source) if half is Half.SOURCE else (place.decode, place.target)
    each = Request(place.source, place.target, 300, cuts=(150,))
    each.claim()
    each.offer_chunk(0)
    wait_for(lambda: (place.decode.room(each.room, Half.TARGET) or {"tokens_done": 0})["tokens_done"])
    spared = Request(place.bystander, place.other, 300, cuts=(150,))
    spared.claim()
    spared.offer_chunk(0)
    epoch = engine.client.epoch
    restarts = agent.metric("longshore_worker_restarts_total")

    strike(mooncake_ports(agent.worker(engine.instance)["pid"])["handshake"])

    ends = each.ends()
    assert {end.kind for end in ends} == {RoomEventKind.FAILED}, ends
    assert {end.reason for end in ends} <= {Reason.WORKER_LOST, Reason.PEER_LOST}, ends
    assert all(end.text for end in ends)
    spared.offer_chunk(1)
    spared.arrives()
    wait_for(lambda: engine.client.connected and engine.client.epoch != epoch)
    assert agent.metric("longshore_worker_restarts_total") == restarts + 1
    after = Request(place.source, place.target, 250, prefix=30)
    after.claim()
    after.offer()
    after.arrives()
    assert place.target.intact()
    assert place.other.intact()


@pytest.mark.shows(
    "agent.host_network",
    "agent.network_policy",
    "agent.allow_open_data_path",
    "field.agents.{hostNetwork,allowOpenDataPath}",
)
@pytest.mark.parametrize("backend", ["NIXL", "Mooncake"])
def test_an_agent_whose_data_ports_others_reach_does_not_start_and_says_why_and_the_way_out(tmp_path, backend):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LONGSHORE_")}
    environment |= {
        "LONGSHORE_BACKEND": backend,
        "LONGSHORE_BIND_HOST": "203.0.113.9",
        "LONGSHORE_KEYS_DIRECTORY": str(tmp_path),
        "LONGSHORE_NETWORK_POLICY": "true",
        "LONGSHORE_HOST_NETWORK": "true",
        "LONGSHORE_RUN_DIRECTORY": str(tmp_path / "run"),
    }
    command = [sys.executable, "-m", "longshore_agent.main"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2
    assert "LONGSHORE_BIND_HOST is 203.0.113.9 and LONGSHORE_HOST_NETWORK is True" in ended.stderr
    assert "LONGSHORE_WIRES=SharedMemory" in ended.stderr and "LONGSHORE_ALLOW_OPEN_DATA_PATH=true" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_the_wire_is_reported_as_it_was_found(place):
    each = Request(place.source, place.other, 100)
    each.claim()
    each.offer()
    each.arrives()
    peers = place.decode.worker("other")["peers"]
    assert [peer["wire"] for peer in peers if peer["instance"] == "source"] == ["TCP"], peers


@pytest.mark.rest("storms")
def test_a_worker_whose_transport_keeps_the_connections_of_peers_that_have_ended_is_replaced_before_it_has_no_descriptor_left(
    tmp_path,
):
    settings = {"LONGSHORE_BACKEND": "Mooncake", "LONGSHORE_HEARTBEAT_S": "0.2", "LONGSHORE_PEER_TIMEOUT_S": "3"}
    world = World(tmp_path, **settings)
    # An idle worker has 30 open descriptors, and keeps 4 for each peer that has ended.
    prefill = Agent(tmp_path / "prefill", ["prlimit", "--nofile=60:60"], **settings)
    try:
        decode = world.agent("decode")
        source = world.engine(prefill, "source", roles=[Half.SOURCE]).result()
        target = world.engine(decode, "target", roles=[Half.TARGET]).result()
        first = prefill.worker("source")["pid"]
        for _ in range(10):
            each = Request(source, target, 90)
            try:
                each.offer()
            except Busy:
                break
            each.claim()
            each.arrives()
            os.kill(decode.worker("target")["pid"], signal.SIGKILL)
            wait_for(lambda: not target.client.connected)
            wait_for(lambda: target.client.connected)
        assert "the transport keeps those of peers that have ended" in prefill.log()
        wait_for(lambda: (now := prefill.worker("source")) and now["pid"] not in (None, first))
        wait_for(lambda: source.client.connected)
        after = Request(source, target, 90)
        after.offer()
        after.claim()
        after.arrives()
    finally:
        world.close()
        prefill.stop()
