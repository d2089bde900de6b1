"""Tests wrong types and ranges of every argument of the client's public calls: refused by name, and nothing is sent."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from fake_agent import FakeAgent
from hypothesis import given, settings
from hypothesis import strategies as st
from line import Line, agent_and_client
from scene import ENDPOINT, LAYOUT, client_at, left_open, open_descriptors, told

from longshore_client import (
    ArgumentError,
    CacheTokens,
    Client,
    Half,
    KVLayout,
    LayoutError,
    LongshoreError,
    ModelShape,
    PageOrder,
    Parallel,
    PlaneGeometry,
    PoolGeometry,
    RoomEventKind,
    TargetMemory,
    connect,
    create_region,
    new_instance,
    pool_geometry,
    torch_region,
)
from longshore_client.cuda import device_name, device_region
from longshore_wire.engine_messages import TOKENS_MAX, CachePages, DeviceRegion, Endpoint, Offer, RankAddress, Receive
from longshore_wire.layout import CACHES_MAX

GEOMETRY = pool_geometry(LAYOUT, 2)


class Odd:
    """A value of an unexpected type."""


WORDS = st.text(max_size=5) | st.just("\ud800")
SCALARS = st.none() | st.booleans() | st.floats() | st.binary(max_size=9) | WORDS | st.builds(Odd)
LISTS = st.lists(st.integers() | SCALARS, max_size=3) | st.dictionaries(WORDS, st.integers(), max_size=2)
ENUMS = st.sampled_from([Half.SOURCE, RoomEventKind.DONE, TargetMemory.DEVICE, PageOrder.NHD])
ANYTHING = SCALARS | st.integers() | LISTS | ENUMS | st.just(LAYOUT) | st.just(ENDPOINT) | st.just(GEOMETRY)
NO_NUMBER = SCALARS | LISTS | st.just(ENDPOINT)


def outside(low: int, high: int) -> st.SearchStrategy[Any]:
    """Return values that are no number or not in [low, high]."""
    return NO_NUMBER | st.integers(max_value=low - 1) | st.integers(min_value=high + 1) | st.just(2**70)


def other_than(*kinds: type) -> st.SearchStrategy[Any]:
    return ANYTHING.filter(lambda value: not isinstance(value, kinds))


NO_TEXT = other_than(str) | st.sampled_from(["", "a\0b", "\ud800"])
# An infinite wait, and waits longer than a lock permits.
NO_TIME = other_than(int, float, type(None)) | st.booleans() | st.sampled_from([-1, -0.5, math.nan, math.inf, 2**70])
NO_TIME_NOR_NONE = NO_TIME | st.none()
NO_COUNT = outside(1, 2**31 - 1)
NO_ROOM, NO_CACHE, NO_TOKEN = outside(0, 2**64 - 1), outside(0, CACHES_MAX - 1), outside(0, TOKENS_MAX)


def broken(good: msgspec.Struct, *fields: str) -> st.SearchStrategy[Any]:
    """Return values of another type, and of this type with a field of another type."""
    kept = tuple({type(getattr(good, field)) for field in fields})
    wrong = NO_NUMBER.filter(lambda value: not isinstance(value, (*kept, dict, list, type(None))))
    changed = st.builds(
        lambda field, value: msgspec.structs.replace(good, **{field: value}), st.sampled_from(fields), wrong
    )
    return other_than(type(good)) | changed


NO_LAYOUT = broken(LAYOUT, "model", "parallel", "page_size")
NO_ENDPOINT = broken(ENDPOINT, "instance", "layout", "ranks", "agent")
NO_GEOMETRY = broken(GEOMETRY, "page_count", "region_bytes", "planes")
NO_PAGES = (
    st.none()
    | st.integers()
    | st.floats()
    | WORDS
    | st.builds(Odd)
    | st.sampled_from([b"abc", [1.5], ["1"], [None], [2**31], [-1, 1], b"\0\0\0\x80\0\0\0\0"])
)


@dataclass(frozen=True)
class Call:
    """One public call: valid arguments, and invalid values for each of them."""

    call: Callable[..., object]
    good: dict[str, Any]
    wrong: dict[str, st.SearchStrategy[Any]]


NO_OTHERS = other_than(list, tuple) | st.sampled_from([[1], [CacheTokens(1, [1], 0, 4)], (CacheTokens(0, [1], 0, 4),)])
ROOM_CALL = {"others": NO_OTHERS, "room": NO_ROOM, "first_token": NO_TOKEN, "end_token": NO_TOKEN, "pages": NO_PAGES}
TOKENS = {"room": 1, "pages": [3, 4], "first_token": 0, "end_token": 8, "others": (), "timeout_s": 5.0}
SECRETS = {"prompt": b"p" * 16, "capability": b"c" * 16}
NO_SECRETS = dict.fromkeys(SECRETS, other_than(bytes) | st.binary(min_size=17, max_size=20))
CALLS = {
    "send": Call(
        Client.send,
        {**TOKENS, **SECRETS, "last": False},
        {**ROOM_CALL, **NO_SECRETS, "last": other_than(bool), "timeout_s": NO_TIME_NOR_NONE},
    ),
    "receive": Call(
        Client.receive,
        {**TOKENS, **SECRETS, "endpoint": ENDPOINT, "memory": TargetMemory.DEVICE, "digest": False},
        {
            **ROOM_CALL,
            **NO_SECRETS,
            "endpoint": NO_ENDPOINT,
            "memory": other_than(TargetMemory).filter(lambda value: value is not None) | st.just(TargetMemory.HOST),
            "digest": other_than(bool),
            "timeout_s": NO_TIME_NOR_NONE,
        },
    ),
    "ask": Call(
        Client.ask,
        {
            "room": 1,
            "endpoint": ENDPOINT,
            "memory": TargetMemory.DEVICE,
            "capability": SECRETS["capability"],
            "timeout_s": 5.0,
        },
        {
            "room": NO_ROOM,
            "endpoint": NO_ENDPOINT,
            "memory": other_than(TargetMemory).filter(lambda value: value is not None) | st.just(TargetMemory.HOST),
            "capability": NO_SECRETS["capability"],
            "timeout_s": NO_TIME_NOR_NONE,
        },
    ),
    "register_pool": Call(
        Client.register_pool,
        {"cache": 5, "geometry": GEOMETRY, "regions": [0], "memory": TargetMemory.DEVICE, "timeout_s": 5.0},
        {
            "cache": NO_CACHE,
            "geometry": NO_GEOMETRY,
            "regions": other_than(list, dict)
            | st.sampled_from(
                [
                    [],
                    [0, 0],
                    [-1],
                    [2**40],
                    [1.5],
                    [None],
                    [True],
                    ["0"],
                    [DeviceRegion("x", 0)],
                    [99_999],
                    b"\x00",
                    {0},
                ]
            ),
            "memory": other_than(TargetMemory) | st.just(TargetMemory.HOST),
            "timeout_s": NO_TIME_NOR_NONE,
        },
    ),
    "unregister_pool": Call(
        Client.unregister_pool,
        {"cache": 9, "memory": TargetMemory.DEVICE, "timeout_s": 5.0},
        {"cache": NO_CACHE, "memory": other_than(TargetMemory) | st.just(TargetMemory.HOST), "timeout_s": NO_TIME},
    ),
    "cancel": Call(
        Client.cancel,
        {"room": 1, "half": Half.SOURCE, "instance": "p", "timeout_s": 5.0},
        {
            "room": NO_ROOM,
            "half": other_than(Half),
            "instance": NO_TEXT.filter(lambda value: value is not None),
            "timeout_s": NO_TIME_NOR_NONE,
        },
    ),
    "wait": Call(
        Client.wait,
        {"room": 1, "half": Half.SOURCE, "instance": "p", "kinds": {RoomEventKind.DONE}, "timeout_s": 0},
        {
            "room": NO_ROOM,
            "half": other_than(Half),
            "instance": NO_TEXT.filter(lambda value: value is not None),
            "kinds": other_than(set) | st.sampled_from([set(), [1], (Half.SOURCE,)]),
            "timeout_s": NO_TIME,
        },
    ),
    "is_open": Call(
        Client.is_open,
        {"room": 1, "half": Half.SOURCE, "instance": "p"},
        {"room": NO_ROOM, "half": other_than(Half), "instance": NO_TEXT},
    ),
    "poll": Call(Client.poll, {"timeout_s": 0}, {"timeout_s": NO_TIME_NOR_NONE}),
    "endpoint": Call(Client.endpoint, {"timeout_s": 0}, {"timeout_s": NO_TIME_NOR_NONE}),
}
FREE_CALLS = {
    "new_instance": Call(new_instance, {}, {}),
    "connect": Call(
        connect,
        {
            "path": "/nowhere",
            "instance": "p",
            "layout": LAYOUT,
            "device": "cpu",
            "roles": [Half.SOURCE],
            "host_layout": None,
            "timeout_s": 0,
        },
        {
            "path": NO_TEXT.filter(lambda value: value is not None),
            "instance": NO_TEXT,
            "layout": NO_LAYOUT,
            "device": NO_TEXT,
            "roles": other_than(list, dict) | st.sampled_from([[], (), "source", [0], [Half.SOURCE, Half.SOURCE]]),
            "host_layout": NO_LAYOUT.filter(lambda value: value is not None),
            "timeout_s": NO_TIME_NOR_NONE,
        },
    ),
    "pool_geometry": Call(
        pool_geometry,
        {"layout": LAYOUT, "page_count": 2, "offset": 0, "order": None, "region_bytes": None},
        {
            "layout": NO_LAYOUT,
            "page_count": NO_COUNT,
            "offset": outside(0, 2**63 - 1),
            "order": other_than(PageOrder, type(None)),
            "region_bytes": outside(1, 2**63 - 1).filter(lambda value: value is not None),
        },
    ),
    "create_region": Call(
        create_region,
        {"length_bytes": 4096, "name": "pages"},
        {"length_bytes": outside(1, 2**63 - 1) | st.just(2**62), "name": NO_TEXT | st.just("n" * 300)},
    ),
    "torch_region": Call(torch_region, {"tensor": None}, {"tensor": ANYTHING}),
    "device_region": Call(device_region, {"tensor": None}, {"tensor": ANYTHING}),
    "device_name": Call(device_name, {"tensor": None}, {"tensor": ANYTHING}),
}


@pytest.fixture(scope="module")
def place() -> tuple[Line, Client]:
    return agent_and_client()


def arguments_of(call: Call, name: str, data: st.DataObject) -> dict[str, Any]:
    return {**call.good, name: data.draw(call.wrong[name], label=name)}


@pytest.mark.parametrize(("name", "argument"), [(name, key) for name, call in CALLS.items() for key in call.wrong])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_sent(place, name, argument, data) -> None:
    agent, client = place
    before = len(agent.heard)
    with pytest.raises(ArgumentError) as caught:
        CALLS[name].call(client, **arguments_of(CALLS[name], argument, data))
    assert argument.removesuffix("s") in str(caught.value)
    assert len(str(caught.value)) < 400
    assert (len(agent.heard), client.open_count, client.connected) == (before, 0, True)


@pytest.mark.parametrize(("name", "argument"), [(name, key) for name, call in FREE_CALLS.items() for key in call.wrong])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_wrong_argument_of_a_function_is_refused_by_name_and_nothing_is_left_open(name, argument, data) -> None:
    before = open_descriptors()
    with pytest.raises(ArgumentError) as caught:
        FREE_CALLS[name].call(**arguments_of(FREE_CALLS[name], argument, data))
    assert argument in str(caught.value)
    assert not left_open(before)


def test_every_argument_of_every_public_call_is_among_those_that_are_tried() -> None:
    import inspect

    import longshore_client

    public = {name: call for name, call in vars(Client).items() if callable(call) and not name.startswith("_")}
    assert set(public) - set(CALLS) == {"close"}
    functions = {name for name in longshore_client.__all__ if inspect.isfunction(getattr(longshore_client, name))}
    assert functions <= set(FREE_CALLS)
    for name, call in (CALLS | FREE_CALLS).items():
        parameters = set(inspect.signature(call.call).parameters) - {"self"}
        assert parameters == set(call.good) == set(call.wrong), name


@pytest.mark.parametrize("name", CALLS)
def test_the_arguments_that_each_is_changed_from_are_accepted(tmp_path, name) -> None:
    path = str(tmp_path / "engine.sock")
    descriptor, memory = create_region(GEOMETRY.region_bytes[0])
    good = {**CALLS[name].good, **({"regions": [descriptor]} if name == "register_pool" else {})}
    with FakeAgent(path) as agent, client_at(path) as client, ExitStack() as stack:
        stack.callback(memory.close)
        stack.callback(os.close, descriptor)
        # There is nothing to cancel, to wait for, or to query.
        with suppress(LongshoreError) if name in {"unregister_pool", "wait", "endpoint"} else ExitStack():
            CALLS[name].call(client, **good)
        assert agent.gone_count == 0


class Index:
    """A foreign integer type, such as numpy's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_numbers_of_other_integer_types_arrive_as_what_they_are() -> None:
    agent, client = agent_and_client()
    client.send(Index(7), [Index(3)], Index(4), Index(8), last=True)
    assert told(agent, Offer) == [Offer(0, 7, (CachePages(0, 4, 8, len(b"\3\0\0\0") // 4, b"\3\0\0\0"),), True)]


def test_a_sequence_that_is_too_long_to_be_claimed_is_not_offered() -> None:
    agent, client = agent_and_client()
    with pytest.raises(ArgumentError, match=f"end_token is {TOKENS_MAX + 1}: give 0 to {TOKENS_MAX}"):
        client.send(1, [1], TOKENS_MAX, TOKENS_MAX + 1, last=True)
    client.send(1, [1], TOKENS_MAX - 1, TOKENS_MAX, last=True)
    assert len(agent.of(Offer)) == client.open_count == 1


def test_a_wrong_field_within_an_argument_is_named_with_its_path() -> None:
    layout = KVLayout(ModelShape.kv(2, "four", 8, 2), Parallel(), 4)
    with pytest.raises(ArgumentError, match=r"layout\.model\.planes\[0\]\.heads is 'four': Expected `int`, got `str`"):
        connect("/nowhere", instance="p", layout=layout)
    with pytest.raises(LayoutError, match=r"parallel\.tp is 3"):
        connect("/nowhere", instance="p", layout=KVLayout(ModelShape.kv(2, 4, 8, 2), Parallel(tp=3), 4))
    ranks = (ENDPOINT.ranks[0], RankAddress(1, 7000, 6))
    agent, client = agent_and_client()
    with pytest.raises(ArgumentError, match=r"endpoint\.ranks\[1\]\.address is 7000: Expected `str`"):
        client.receive(1, Endpoint("p", LAYOUT, ranks), [1], 0, 4)
    geometry = PoolGeometry(2, (64,), (PlaneGeometry(0, 0, 32, None, 8),))
    with pytest.raises(ArgumentError, match=r"geometry\.planes\[0\]\.token_stride is None"):
        client.register_pool(0, geometry, [0])
    assert agent.of(Receive) == []


def test_a_number_in_place_of_a_name_of_ours_is_taken_as_an_agent_will_read_it(tmp_path) -> None:
    path = str(tmp_path / "engine.sock")
    with FakeAgent(path), connect(path, instance="p", layout=msgspec.structs.replace(LAYOUT, order=1)) as client:
        assert client.layout.order is PageOrder.HND
