"""Tests real agents and an engine whose ranks have pages in host memory beside those of their device.

Here the device is the CPU, too, so each memory's pages are seen whole. The workers of the two memories share the engine's
name, its rooms' numbers and its pools' numbers. `tests/gpu/test_host_memory_on_gpu.py` has prefill on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from agent_fleet import World, over
from agent_world import (
    EVENT_LIMIT_S,
    MODEL,
    START_LIMIT_S,
    Agent,
    Engine,
    holders_of,
    memory_name,
    poisoned,
    room_ids,
    wait_for,
    wait_for_none,
)

from longshore_client import (
    Client,
    Half,
    HelloRefused,
    KVLayout,
    ModelShape,
    Parallel,
    Reason,
    RoomError,
    RoomEventKind,
    TargetMemory,
    connect,
)
from longshore_lab.test_engine.pages import content

LATENT = ModelShape.latent(3, 72, 2)
DEVICE_PAGE_SIZE, TOKENS_MAX = 16, 1024
# (total, prefix): around the edges of pages of 16 tokens (decode's device) and of 64 (prefill), and one token.
REQUESTS = ((1, 0), (15, 0), (16, 0), (17, 16), (33, 15), (63, 0), (64, 64), (65, 63), (211, 37), (397, 128))


class HostRank:
    """A decode rank with a pool 0 in each memory, of which that in host memory has pages of one token."""

    def __init__(self, agent: Agent, instance: str, model: ModelShape, place: Parallel) -> None:
        sizes = {TargetMemory.DEVICE: DEVICE_PAGE_SIZE, TargetMemory.HOST: 1}
        layouts = {memory: KVLayout(model, place, size) for memory, size in sizes.items()}
        self.pools = {
            memory: poisoned(layout, TOKENS_MAX // layout.page_size, memory_name(f"{instance}-{memory.name}"))
            for memory, layout in layouts.items()
        }
        self.client: Client = connect(
            agent.socket,
            instance=instance,
            layout=layouts[TargetMemory.DEVICE],
            host_layout=layouts[TargetMemory.HOST],
            roles=(Half.TARGET,),
            timeout_s=START_LIMIT_S,
        )
        for memory, pool in self.pools.items():
            self.client.register_pool(0, pool.geometry, pool.memory.regions, memory=memory)

    def claim(self, source: Engine, room: int, memory: TargetMemory, data: Any, total: int, prefix: int) -> None:
        """Claim a room into the last pages of a pool, in descending order, and expect its bytes."""
        pool = self.pools[memory]
        size, count = pool.layout.page_size, pool.geometry.page_count
        pages = [count - 1 - page for page in range(-(-total // size) - prefix // size)] if total > prefix else []
        self.client.receive(room, source.endpoint(), pages, prefix, total, memory=memory)
        if pages:
            pool.put(pool.expected, pages, data, prefix, total)

    def intact(self) -> bool:
        return all(pool.intact() for pool in self.pools.values())

    def close(self) -> None:
        self.client.close()
        for pool in self.pools.values():
            pool.close()


@dataclass
class Place:
    """A prefill instance, and a decode instance with both memories, at one agent each."""

    prefill: Agent
    decode: Agent
    source: Engine
    ranks: list[HostRank]

    def offer(self, total: int) -> tuple[int, Any]:
        """Offer a new room; return its number and content."""
        room = next(room_ids)
        pages = self.source.take_pages(0, total)
        data = content(room, total, self.source.ranks[0].layout)
        for rank in self.source.ranks:
            rank.put(rank.planes, pages, data, 0, total)
            rank.client.send(room, pages, 0, total, last=True)
        self.source.free += pages
        return room, data

    def arrives(self, room: int) -> None:
        """Wait until a room is DONE and released at every rank."""
        for half, ranks in ((Half.SOURCE, self.source.ranks), (Half.TARGET, self.ranks)):
            for rank in ranks:
                end = rank.client.wait(room, half, timeout_s=EVENT_LIMIT_S)
                assert end.kind is RoomEventKind.DONE, end
                rank.client.wait(room, half, None, [RoomEventKind.RELEASED], EVENT_LIMIT_S)

    def moves(self, memory: TargetMemory, total: int, prefix: int = 0) -> None:
        room, data = self.offer(total)
        for rank in self.ranks:
            rank.claim(self.source, room, memory, data, total, prefix)
        self.arrives(room)

    def leftovers(self) -> list[str]:
        return self.prefill.leftovers() + self.decode.leftovers()


Make = Callable[..., Place]


@contextlib.contextmanager
def making(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Yield a function that starts a place, of a backend, a model, TP sizes and settings."""
    worlds: list[World] = []

    def build(
        backend: str,
        model: ModelShape = MODEL,
        tp: tuple[int, int] = (1, 1),
        *,
        together: bool = False,
        **settings: str,
    ) -> Place:
        worlds.append(World(tmp_path_factory.mktemp("host"), LONGSHORE_BACKEND=backend, **settings))
        world = worlds[-1]
        prefill = world.agent("prefill")
        decode = prefill if together else world.agent("decode")
        source = world.engine(prefill, "source", tp[0], model=model, page_size=64, roles=[Half.SOURCE])
        assert decode.http
        places = [Parallel(tp[1], rank) for rank in range(tp[1])]
        ranks = [world._keep(HostRank(decode, "target", model, place)) for place in places]  # type: ignore[type-var]
        return Place(prefill, decode, source.result(), ranks)

    yield build
    for world in worlds:
        world.close()


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    with making(tmp_path_factory) as build:
        yield build


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Yield a place of two agents that no test breaks."""
    with making(tmp_path_factory) as build:
        yield build("NIXL")


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Yield a place of one agent."""
    with making(tmp_path_factory) as build:
        yield build("NIXL", together=True, LONGSHORE_DIRECT="true")


@pytest.mark.shows(
    "argument.connect.host_layout",
    "argument.receive.memory",
    "argument.register_pool.memory",
    "argument.unregister_pool.memory",
)
@pytest.mark.parametrize(
    "options",
    over(("NIXL", MODEL, (2, 1)), ("NIXL", LATENT, (1, 2)), ("Mooncake", MODEL, (1, 2)), ("Loopback", LATENT, (2, 1))),
)
def test_rooms_into_both_memories_at_once_arrive_to_the_token(
    make: Make, options: tuple[str, ModelShape, tuple[int, int]]
) -> None:
    place = make(*options)
    for total, prefix in REQUESTS:
        rooms = [(memory, *place.offer(total)) for memory in TargetMemory]
        for memory, room, data in rooms:
            for rank in place.ranks:
                rank.claim(place.source, room, memory, data, total, prefix)
        for _, room, _ in rooms:
            place.arrives(room)
        assert all(rank.intact() for rank in place.ranks), (total, prefix)
    wait_for_none(place.leftovers)


@pytest.mark.parametrize("lost", over(TargetMemory.HOST, TargetMemory.DEVICE))
def test_a_lost_worker_of_one_memory_is_replaced_and_the_other_memory_goes_on(make: Make, lost: TargetMemory) -> None:
    place = make("NIXL", LONGSHORE_HEARTBEAT_S="0.2", LONGSHORE_PEER_TIMEOUT_S="6")
    (rank,) = place.ranks
    room = next(room_ids)
    size = rank.pools[lost].layout.page_size
    rank.client.receive(room, place.source.endpoint(), list(range(192 // size)), 0, 192, memory=lost)
    suffix = "/host" if lost is TargetMemory.HOST else ""

    def found() -> dict[str, Any]:
        return {worker["worker"]: worker for worker in place.decode.status()["workers"] if worker["state"] == "ready"}

    before = found()
    assert set(before) == {"target/0/0", "target/0/0/host"}
    wait_for(lambda: place.prefill.room(room, Half.SOURCE), what="prefill to have heard of the claim")
    os.kill(before[f"target/0/0{suffix}"]["pid"], signal.SIGKILL)
    place.moves(TargetMemory(1 - lost), 130)
    # Otherwise the claim would be repeated to the next worker.
    assert rank.client.wait(room, Half.TARGET, timeout_s=EVENT_LIMIT_S).reason is Reason.PEER_LOST
    wait_for(lambda: rank.client.connected and len(found()) == 2)
    after = found()
    assert {name for name in after if after[name]["epoch"] != before[name]["epoch"]} == {f"target/0/0{suffix}"}
    place.moves(lost, 210)
    assert rank.intact()
    wait_for_none(place.leftovers)


def test_the_status_names_each_memory(place: Place) -> None:
    place.moves(TargetMemory.HOST, 100)
    place.moves(TargetMemory.DEVICE, 100)
    status = place.decode.status()
    assert {(each["instance"], each["memory"]) for each in status["instances"]} == {
        ("target", "device"),
        ("target", "host"),
    }
    assert {each["engines"][0]["memory"] for each in status["workers"]} == {"device", "host"}
    peers = place.prefill.status()["workers"][0]["peers"]
    assert {(peer["instance"], peer["memory"], peer["state"]) for peer in peers} == {
        ("target", "device", "attached"),
        ("target", "host", "attached"),
    }


def test_engines_of_one_agent_copy_directly_into_host_memory_and_the_plan_says_so(near: Place) -> None:
    place = near
    place.moves(TargetMemory.HOST, 203)
    assert place.ranks[0].intact()
    assert place.prefill.metric("longshore_writes_total", way="direct") > 0
    assert place.prefill.metric("longshore_writes_total", way="staged") == 0
    for memory, page_size in (("host", 1), ("device", DEVICE_PAGE_SIZE)):
        found = place.prefill.get(f"/v1/plan?source=source&target=target&target_memory={memory}")
        assert (found["way"], found["pairs"][0]["why"]) == ("Direct", "near")
        assert (found["source_page_size"], found["target_page_size"]) == (64, page_size)


def test_host_memory_is_let_go_when_its_pool_is_unregistered_and_when_its_engine_leaves(near: Place) -> None:
    place = near
    (rank,) = place.ranks
    for memory in TargetMemory:
        place.moves(memory, 100)
    agents = {worker["pid"] for worker in place.decode.status()["workers"]}
    host, device = (f"target-{memory}" for memory in ("HOST", "DEVICE"))
    assert len(agents & holders_of(host).keys()) == len(agents & holders_of(device).keys()) == 2
    rank.client.unregister_pool(0, TargetMemory.HOST)
    assert not agents & holders_of(host).keys()
    assert len(agents & holders_of(device).keys()) == 2
    rank.client.close()
    wait_for_none(lambda: [str(pid) for pid in agents & holders_of(device).keys()])
    # The worker of the prefill rank goes on.
    assert [worker["worker"] for worker in wait_for(lambda: workers_of(place, 1))] == ["source/0/0"]


def workers_of(place: Place, count: int) -> list[dict[str, Any]] | None:
    found: list[dict[str, Any]] = place.decode.status()["workers"]
    return found if len(found) == count else None


def test_a_room_that_is_claimed_into_host_memory_is_refused_to_the_device(place: Place) -> None:
    (rank,) = place.ranks
    room, data = place.offer(100)
    rank.claim(place.source, room, TargetMemory.HOST, data, 100, 0)
    place.arrives(room)
    with pytest.raises(RoomError) as caught:
        rank.claim(place.source, room, TargetMemory.HOST, data, 100, 0)
    assert caught.value.reason is Reason.ROOM_REUSED
    # The worker of the other memory does not know the room. Prefill refuses it.
    pages = list(range(7))
    rank.client.receive(room, place.source.endpoint(), pages, 0, 100, memory=TargetMemory.DEVICE)
    end = rank.client.wait(room, Half.TARGET, timeout_s=EVENT_LIMIT_S)
    assert end.kind is RoomEventKind.FAILED
    assert np.array_equal(rank.pools[TargetMemory.DEVICE].planes, rank.pools[TargetMemory.DEVICE].expected)


@pytest.mark.shows("agent.decode_target", "field.decode.target")
def test_a_deployment_with_host_memory_is_the_default_of_claims(make: Make) -> None:
    place = make("Loopback", LONGSHORE_DECODE_TARGET="Host")
    (rank,) = place.ranks
    room, data = place.offer(77)
    pool = rank.pools[TargetMemory.HOST]
    pages = list(range(100, 177))
    rank.client.receive(room, place.source.endpoint(), pages, 0, 77)
    pool.put(pool.expected, pages, data, 0, 77)
    place.arrives(room)
    assert rank.intact()


def test_an_engine_rank_registers_each_memory_once(place: Place) -> None:
    layout = place.ranks[0].pools[TargetMemory.DEVICE].layout
    with pytest.raises(HelloRefused, match="target rank 0 is registered"):
        connect(place.decode.socket, instance="target", layout=layout, roles=(Half.TARGET,), timeout_s=5.0)
