"""Limits on what one engine may use of an agent: silent connections, workers, pools."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_fleet import World
from agent_world import MODEL, START_LIMIT_S, Agent, Engine, EngineProcess, wait_for

from longshore_agent.supervisor.callers import HELLO_LIMIT_S, WAITING_MAX
from longshore_client import HelloRefused, KVLayout, Parallel, PoolRefused, connect, create_region, pool_geometry
from longshore_wire.errors import Reason

LAYOUT = KVLayout(MODEL, Parallel(), 16)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.close()


def silent(agent: Agent) -> socket.socket:
    """A connection that never says Hello."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(START_LIMIT_S)
    wait_for(lambda: connection.connect_ex(agent.socket) == 0, START_LIMIT_S, "room in the agent's backlog")
    return connection


def test_engines_come_in_past_more_silent_connections_than_may_wait_and_those_are_closed(world):
    agent = world.agent("agent")
    assert agent.http
    waiting = [silent(agent) for _ in range(WAITING_MAX + 10)]
    engine = Engine(agent, "engine")
    assert agent.worker("engine")["state"] == "ready"
    said = [connection.recv(1 << 16) for connection in waiting]
    # The oldest ones, unless a busy machine took so long that their time had passed.
    assert any(b"connections have not said Hello" in text for text in said)
    assert f"no Hello within {HELLO_LIMIT_S:g} s".encode() in said[-1]
    assert [connection.recv(1) for connection in waiting] == [b""] * len(waiting)
    for connection in waiting:
        connection.close()
    engine.close()


def refused(call: Callable[[], object]) -> HelloRefused:
    with pytest.raises(HelloRefused) as caught:
        call()
    assert caught.value.reason is Reason.UNSUPPORTED
    return caught.value


@pytest.mark.shows("agent.process_workers_max")
def test_a_process_gets_as_many_workers_as_are_allowed_and_another_one_in_the_place_of_one_that_ended(world):
    agent = world.agent("agent", LONGSHORE_PROCESS_WORKERS_MAX="2")
    engines = [Engine(agent, name) for name in ("a", "b")]
    error = refused(lambda: Engine(agent, "c"))
    assert f"this process (PID {os.getpid()}) has 2 workers, of 2 that LONGSHORE_PROCESS_WORKERS_MAX allows" in str(
        error
    )
    beside = world.process(agent, "beside")
    assert beside.endpoint().instance == "beside"
    engines[0].close()
    engines.append(Engine(agent, "c"))
    names = {worker["worker"] for worker in agent.status()["workers"]}
    assert {"b/0/0", "c/0/0", "beside/0/0"} <= names
    for engine in engines[1:]:
        engine.close()


def test_processes_that_the_agent_cannot_see_are_told_apart(tmp_path):
    # As in its own pod: the agent sees no PID of an engine.
    pod = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    agent = Agent(tmp_path / "agent", pod, LONGSHORE_PROCESS_WORKERS_MAX="1")
    beside = EngineProcess(agent, "beside")
    try:
        engine = Engine(agent, "engine")
        assert beside.endpoint().instance == "beside"
        assert {worker["engines"][0]["pid"] for worker in agent.status()["workers"]} == {0}
        assert "this process has 1 workers, of 1 that" in str(refused(lambda: Engine(agent, "another")))
        engine.close()
    finally:
        beside.close()
        # The namespace ends with it.
        agent.process.kill()
        agent.stop()


@pytest.mark.shows("agent.user_workers_max")
def test_the_engines_of_a_user_get_as_many_workers_as_are_allowed(world):
    agent = world.agent("agent", LONGSHORE_USER_WORKERS_MAX="2")
    processes = [world.process(agent, name) for name in ("a", "b")]
    for process in processes:
        assert process.endpoint().instance == process.instance
    error = refused(lambda: Engine(agent, "c"))
    assert f"user {os.getuid()} has 2 workers, of 2 that LONGSHORE_USER_WORKERS_MAX allows" in str(error)


@pytest.mark.shows("argument.register_pool.cache", "argument.unregister_pool.cache")
def test_a_cache_has_one_pool_and_a_layout_of_one_cache_has_no_second_one(world):
    agent = world.agent("agent")
    assert agent.http
    client = connect(agent.socket, instance="engine", layout=LAYOUT, timeout_s=START_LIMIT_S)
    geometry = pool_geometry(LAYOUT, 1)
    descriptor, memory = create_region(geometry.region_bytes[0])
    client.register_pool(0, geometry, [descriptor])
    with pytest.raises(
        PoolRefused, match="cache is 1: give the index of a cache in this engine's layout, from 0 to 0"
    ) as caught:
        client.register_pool(1, geometry, [descriptor])
    assert caught.value.reason is Reason.UNSUPPORTED
    client.unregister_pool(0)
    client.register_pool(0, geometry, [descriptor])
    client.close()
    memory.close()
    os.close(descriptor)
