"""Tests effects of the client's arguments without other tests: which room or half a call affects, and how long it waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from fake_agent import WAIT_S, FakeAgent, accept_all
from line import agent_and_client
from scene import DONE, ENDPOINT, LAYOUT, client_at, event, told

from longshore_client import CallTimeout, Client, Half, PageOrder, WaitTimeout, connect, create_region, pool_geometry
from longshore_wire.engine_messages import Cancel, Hello, RegisterPool

GEOMETRY = pool_geometry(LAYOUT, 2)
OTHERS = [{"room": 8}, {"half": Half.TARGET}, {"instance": "prefill-1"}]
MINE = {"room": 7, "half": Half.SOURCE, "instance": "prefill-0"}


def _key(named: dict[str, object]) -> tuple[object, ...]:
    return named["half"], named["instance"], named["room"]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "engine.sock")


@pytest.fixture
def region() -> Iterator[int]:
    descriptor, memory = create_region(GEOMETRY.region_bytes[0])
    yield descriptor
    memory.close()
    os.close(descriptor)


@pytest.mark.shows(
    "argument.send.room",
    "argument.cancel.{room,half,instance}",
    "argument.wait.{room,half,instance}",
    "argument.is_open.{room,half,instance}",
)
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_another_room_half_or_instance_is_not_meant(other):
    agent, client = agent_and_client()
    client.send(7, [1], 0, 4, last=True)
    assert client.is_open(**MINE)
    assert not client.is_open(**MINE | other)
    client.cancel(**MINE | other)
    cancelled = [] if {"half", "instance"} & set(other) else [Cancel(0, *_key(MINE | other))]
    assert told(agent, Cancel) == cancelled
    agent.say(event(DONE))
    with pytest.raises(WaitTimeout):
        client.wait(**MINE | other, timeout_s=0)
    assert client.wait(**MINE, timeout_s=0) == event(DONE)
    client.cancel(**MINE)
    assert told(agent, Cancel) == [*cancelled, Cancel(0, *_key(MINE))]


@pytest.mark.shows("argument.wait.kinds")
def test_an_event_of_another_kind_is_not_waited_for():
    agent, client = agent_and_client()
    client.send(7, [1], 0, 4, last=True)
    agent.say(event(DONE))
    with pytest.raises(WaitTimeout):
        client.wait(7, Half.SOURCE, kinds=[kind for kind in type(DONE) if kind is not DONE], timeout_s=0)
    assert client.wait(7, Half.SOURCE, kinds=[DONE], timeout_s=0) == event(DONE)


CALLS: dict[str, Callable[[Client, int], object]] = {
    "send": lambda client, _: client.send(1, [1], 0, 4, last=True, timeout_s=0.01),
    "receive": lambda client, _: client.receive(1, ENDPOINT, [1], 0, 4, timeout_s=0.01),
    "ask": lambda client, _: client.ask(1, ENDPOINT, timeout_s=0.01),
    "cancel": lambda client, _: client.cancel(7, Half.SOURCE, timeout_s=0.01),
    "register_pool": lambda client, region: client.register_pool(1, GEOMETRY, [region], timeout_s=0.01),
    "unregister_pool": lambda client, _: client.unregister_pool(0, timeout_s=0.01),
}


@pytest.mark.shows(
    "argument.send.timeout_s",
    "argument.receive.timeout_s",
    "argument.ask.timeout_s",
    "argument.cancel.timeout_s",
    "argument.register_pool.timeout_s",
    "argument.unregister_pool.timeout_s",
)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_not_answered_waits_as_long_as_it_is_told(path, region, name):
    silent = []

    def answer(message):
        return None if silent else accept_all(message)

    with FakeAgent(path, answer=answer), client_at(path) as client:
        client.register_pool(0, GEOMETRY, [region])
        client.send(7, [1], 0, 4, last=True)
        silent.append(True)
        with pytest.raises(CallTimeout, match=r"within 0\.01 s"):
            CALLS[name](client, region)


@pytest.mark.shows("argument.connect.instance", "argument.connect.device", "argument.connect.roles")
def test_an_engine_says_who_it_is_where_its_pages_are_and_what_it_does(path):
    given = {"instance": "one", "device": "cpu", "roles": [Half.SOURCE]}
    with FakeAgent(path) as agent:
        for change in ({}, {"instance": "two"}, {"device": "GPU-7"}, {"roles": [Half.TARGET, Half.SOURCE]}):
            connect(path, layout=LAYOUT, timeout_s=WAIT_S, **given | change).close()
    said = [(hello.instance, hello.device, hello.roles) for hello in agent.of(Hello)]
    both = (Half.TARGET, Half.SOURCE)
    assert said == [
        ("one", "cpu", (Half.SOURCE,)),
        ("two", "cpu", (Half.SOURCE,)),
        ("one", "GPU-7", (Half.SOURCE,)),
        ("one", "cpu", both),
    ]


@pytest.mark.shows("argument.register_pool.cache", "argument.register_pool.geometry")
def test_a_pool_is_registered_for_its_cache_with_its_geometry(path, region):
    offset = pool_geometry(LAYOUT, 1, offset=64, region_bytes=GEOMETRY.region_bytes[0])
    with FakeAgent(path) as agent, client_at(path) as client:
        client.register_pool(3, GEOMETRY, [region])
        client.register_pool(4, offset, [region])
        assert [(message.cache, message.geometry) for message in agent.of(RegisterPool)] == [(3, GEOMETRY), (4, offset)]


@pytest.mark.shows(
    "argument.pool_geometry.page_count",
    "argument.pool_geometry.offset",
    "argument.pool_geometry.order",
    "argument.pool_geometry.region_bytes",
)
def test_each_argument_of_a_geometry_moves_its_planes():
    plain = pool_geometry(LAYOUT, 2)
    shifted = pool_geometry(LAYOUT, 2, offset=4096)
    assert [plane.offset for plane in shifted.planes] == [plane.offset + 4096 for plane in plain.planes]
    assert shifted.region_bytes == (plain.region_bytes[0] + 4096,)
    assert pool_geometry(LAYOUT, 4).region_bytes == (2 * plain.region_bytes[0],)
    assert pool_geometry(LAYOUT, 2, region_bytes=1 << 20).region_bytes == (1 << 20,)
    head_major = pool_geometry(LAYOUT, 2, order=PageOrder.HND)
    assert head_major.planes[0].head_stride == LAYOUT.page_size * head_major.planes[0].token_stride


@pytest.mark.shows("argument.create_region.length_bytes", "argument.create_region.name")
def test_a_region_has_the_name_and_the_length_that_are_given():
    descriptor, memory = create_region(12_345, "kv-of-rank-3")
    try:
        assert len(memory) == os.fstat(descriptor).st_size == 12_345
        assert "memfd:kv-of-rank-3" in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - it is no path
    finally:
        memory.close()
        os.close(descriptor)
