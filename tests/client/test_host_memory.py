"""Tests a client whose rank has pages in host memory beside those of its device: two connections behind one client."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
from fake_agent import WAIT_S, FakeAgent, accept_all
from line import HELLO, Line
from scene import DONE, ENDPOINT, LAYOUT, RELEASED, event, wait_until

from longshore_client import (
    ArgumentError,
    Half,
    KVLayout,
    LayoutError,
    Reason,
    RoomError,
    TargetMemory,
    connect,
    pool_geometry,
)
from longshore_client.core import State
from longshore_wire.engine_messages import (
    ENGINE_PROTOCOL_VERSION,
    Ask,
    Cancel,
    Hello,
    Receive,
    Refused,
    RegisterPool,
    UnregisterPool,
    Welcome,
)

HOST_LAYOUT = KVLayout(LAYOUT.model, LAYOUT.parallel, page_size=1)
HOST_HELLO = msgspec.structs.replace(HELLO, layout=HOST_LAYOUT, roles=(Half.TARGET,), memory=TargetMemory.HOST)


@pytest.fixture
def lines():
    """Both connections of one client, and the client."""
    device = Line()
    host = Line(hello=HOST_HELLO, beside=device)
    return device, host, host.client


@pytest.mark.shows(
    "argument.connect.host_layout",
    "argument.receive.memory",
    "argument.register_pool.memory",
    "argument.unregister_pool.memory",
)
def test_pools_and_claims_go_to_the_worker_of_their_memory(lines):
    device, host, client = lines
    reading, writing = os.pipe()
    for memory in TargetMemory:
        client.register_pool(0, pool_geometry(LAYOUT, 2), [reading], memory=memory)
    client.receive(1, ENDPOINT, [1, 2], 4, 12, memory=TargetMemory.DEVICE)
    client.receive(2, ENDPOINT, list(range(8)), 4, 12, memory=TargetMemory.HOST)
    os.close(reading)
    os.close(writing)
    assert [[claim.room for claim in line.of(Receive)] for line in (device, host)] == [[1], [2]]
    assert [len(line.of(RegisterPool)) for line in (device, host)] == [1, 1]
    assert client.open_count == 2
    client.unregister_pool(0, TargetMemory.HOST)
    assert [len(line.of(UnregisterPool)) for line in (device, host)] == [0, 1]


@pytest.mark.shows("argument.ask.memory")
def test_an_ask_goes_to_the_worker_of_the_memory_that_is_claimed(lines):
    device, host, client = lines
    client.ask(1, ENDPOINT, memory=TargetMemory.HOST)
    assert [[ask.room for ask in line.of(Ask)] for line in (device, host)] == [[], [1]]
    with pytest.raises(RoomError, match="into another memory"):
        client.receive(1, ENDPOINT, [1, 2], 4, 12, memory=TargetMemory.DEVICE)
    client.receive(1, ENDPOINT, list(range(8)), 4, 12, memory=TargetMemory.HOST)
    assert [[claim.room for claim in line.of(Receive)] for line in (device, host)] == [[], [1]]


@pytest.mark.shows("argument.receive.memory")
@pytest.mark.parametrize("target", TargetMemory)
def test_a_claim_that_names_no_memory_gets_the_deployments(target):
    device = Line(greet=lambda hello: Welcome(ENGINE_PROTOCOL_VERSION, 1, "demo", 60_000_000_000, target))
    host = Line(hello=HOST_HELLO, beside=device)
    host.client.receive(1, ENDPOINT, [1, 2] if target is TargetMemory.DEVICE else list(range(8)), 4, 12)
    expected = [1, 0] if target is TargetMemory.DEVICE else [0, 1]
    assert [len(line.of(Receive)) for line in (device, host)] == expected


def test_a_deployment_with_host_memory_needs_a_host_layout_or_a_memory_by_name():
    on_gpu = msgspec.structs.replace(HELLO, device="GPU-1")
    welcome = Welcome(ENGINE_PROTOCOL_VERSION, 1, "demo", 60_000_000_000, TargetMemory.HOST)
    device = Line(hello=on_gpu, greet=lambda hello: welcome)
    with pytest.raises(ArgumentError, match=r"decode\.target is Host: give connect the host_layout"):
        device.client.receive(1, ENDPOINT, [1, 2], 4, 12)
    device.client.receive(1, ENDPOINT, [1, 2], 4, 12, memory=TargetMemory.DEVICE)
    assert len(device.of(Receive)) == 1
    # All pages of an engine on a CPU are in host memory.
    on_cpu = Line(greet=lambda hello: welcome)
    on_cpu.client.receive(1, ENDPOINT, [1, 2], 4, 12)
    assert len(on_cpu.of(Receive)) == 1


def test_pages_are_counted_by_the_page_size_of_their_memory(lines):
    _, host, client = lines
    with pytest.raises(ArgumentError, match="pages of 1 tokens that hold them are 8"):
        client.receive(1, ENDPOINT, [1, 2], 4, 12, memory=TargetMemory.HOST)
    assert host.of(Receive) == []


def test_events_of_both_memories_arrive_at_one_client(lines):
    device, host, client = lines
    client.receive(1, ENDPOINT, [1, 2], 4, 12, memory=TargetMemory.DEVICE)
    client.receive(2, ENDPOINT, list(range(8)), 4, 12, memory=TargetMemory.HOST)
    host.say(event(DONE, room=2, half=Half.TARGET), event(RELEASED, room=2, half=Half.TARGET))
    device.say(event(DONE, room=1, half=Half.TARGET))
    assert client.wait(1, Half.TARGET, timeout_s=0).kind is DONE
    assert [(found.room, found.kind) for found in client.poll()] == [(2, DONE), (2, RELEASED)]
    assert client.is_open(1, Half.TARGET, ENDPOINT.instance)
    assert not client.is_open(2, Half.TARGET, ENDPOINT.instance)


def test_a_room_is_claimed_into_one_memory_and_cancelled_there(lines):
    device, host, client = lines
    client.receive(1, ENDPOINT, list(range(8)), 4, 12, memory=TargetMemory.HOST)
    with pytest.raises(RoomError, match="claimed already, into another memory"):
        client.receive(1, ENDPOINT, [1, 2], 4, 12, memory=TargetMemory.DEVICE)
    client.cancel(1, Half.TARGET)
    assert [len(line.of(Cancel)) for line in (device, host)] == [0, 1]


def test_a_client_is_connected_while_both_workers_serve_it_and_repeats_only_the_lost_ones_claims(lines):
    device, host, client = lines
    client.receive(1, ENDPOINT, [1, 2], 4, 12, memory=TargetMemory.DEVICE)
    client.receive(2, ENDPOINT, list(range(8)), 4, 12, memory=TargetMemory.HOST)
    host.lose()
    assert not client.connected
    host.agent(epoch=2)
    assert client.connected
    assert [[claim.room for claim in line.of(Receive)] for line in (device, host)] == [[1], [2]]


def test_connect_opens_one_connection_for_each_memory_and_close_ends_both(tmp_path):
    path = str(tmp_path / "agent.sock")
    with FakeAgent(path, answer=accept_all) as agent:
        client = connect(path, instance="decode-0", layout=LAYOUT, host_layout=HOST_LAYOUT, timeout_s=30)
        hellos = agent.of(Hello)
        client.close()
    assert [hello.memory for hello in hellos] == [TargetMemory.DEVICE, TargetMemory.HOST]
    assert [hello.layout.page_size for hello in hellos] == [LAYOUT.page_size, 1]
    assert (hellos[1].device, hellos[1].roles) == ("cpu", (Half.TARGET,))
    assert hellos[0].engine == hellos[1].engine


def test_a_thread_that_reads_one_connection_takes_news_of_the_other(tmp_path):
    """The host's agent is away when the wait begins, so that only the device's connection is read by the waiting thread."""
    path, back = str(tmp_path / "agent.sock"), threading.Event()

    def greet(hello):
        if hello.memory is TargetMemory.HOST and agent.of(Hello)[2:] and not back.is_set():
            return Refused(0, Reason.BUSY, "later", 1)
        return Welcome(ENGINE_PROTOCOL_VERSION, 1, "demo", 10**13)

    with FakeAgent(path, greet=greet) as agent:
        client = connect(path, instance="decode-0", layout=LAYOUT, host_layout=HOST_LAYOUT, timeout_s=WAIT_S)
        client.receive(2, ENDPOINT, list(range(8)), 4, 12, memory=TargetMemory.HOST)
        device, host = (client._links[memory] for memory in (TargetMemory.DEVICE, TargetMemory.HOST))
        agent.hang_up(1)
        wait_until(client, lambda: host.core.state is not State.READY)
        found = []
        waiting = threading.Thread(target=lambda: found.append(client.wait(2, Half.TARGET, timeout_s=10 * WAIT_S)))
        waiting.start()
        wait_until(client, lambda: device._is_lent)
        back.set()
        wait_until(client, lambda: client.connected)
        with agent.changed:
            agent.links[-1].send(event(DONE, 2, Half.TARGET, instance=ENDPOINT.instance))
        waiting.join(WAIT_S)
        is_told = not waiting.is_alive()
        client.close()
    assert is_told
    assert [each.room for each in found] == [2]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"roles": (Half.SOURCE,)}, ArgumentError, "roles has no TARGET"),
        ({"host_layout": "one"}, ArgumentError, "host_layout is 'one': give a KVLayout"),
        ({"host_layout": msgspec.structs.replace(HOST_LAYOUT, page_size=0)}, LayoutError, "page_size"),
        (
            {
                "host_layout": msgspec.structs.replace(
                    HOST_LAYOUT, model=msgspec.structs.replace(LAYOUT.model, layers=64)
                )
            },
            ArgumentError,
            "only page size and order may differ",
        ),
    ],
)
def test_a_host_layout_that_cannot_be_is_refused_by_name(tmp_path, changes, error, message):
    arguments = {"instance": "decode-0", "layout": LAYOUT, "host_layout": HOST_LAYOUT, "timeout_s": 0.1, **changes}
    with pytest.raises(error, match=message):
        connect(str(tmp_path / "agent.sock"), **arguments)
