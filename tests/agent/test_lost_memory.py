"""Tests an engine that truncates registered memory: its rooms fail with a message that names it, and no worker dies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent_fleet import World, over
from agent_world import EVENT_LIMIT_S, Agent, Engine, Request, holders_of

from longshore_client import Half, RoomError, RoomEvent, RoomEventKind
from longshore_lab.test_engine import memory
from longshore_wire.errors import Reason

WAYS = [
    ("NIXL", "Staged"),
    ("NIXL", "Contiguous"),
    ("Mooncake", "Staged"),
    ("Mooncake", "Slices"),
    ("Loopback", "Slices"),
]
TOKENS = 300

Region = Callable[[int, str], tuple[int, mmap.mmap]]


def unsealed_region(length_bytes: int, name: str) -> tuple[int, mmap.mmap]:
    """Return memory that can be truncated, as an engine without our client may make it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.posix_fallocate(descriptor, 0, length_bytes)
    return descriptor, mmap.mmap(descriptor, length_bytes)


def file_region(length_bytes: int, name: str) -> tuple[int, mmap.mmap]:
    """Return memory in a file of /dev/shm, as torch makes it."""
    path = Path("/dev/shm") / f"longshore-test-{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    os.posix_fallocate(descriptor, 0, length_bytes)
    return descriptor, mmap.mmap(descriptor, length_bytes)


@dataclass
class Pair:
    """Agents whose engines exchange pages by one way, with engines that keep their memory."""

    world: World
    prefill: Agent
    decode: Agent
    source: Engine
    target: Engine

    replaces: bool  # a worker whose write failed: the transport does not report whether its bytes may still land

    def arrives(self) -> None:
        arrives(self.source, self.target)

    def workers(self, *instances: str) -> dict[str, int]:
        found = (worker for agent in (self.prefill, self.decode) for worker in agent.status()["workers"])
        names = {f"{instance}/0/0" for instance in ("source", "target", *instances)}
        return {worker["worker"]: worker["pid"] for worker in found if worker["worker"] in names}


@pytest.fixture(scope="module", params=over(*WAYS), ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    backend, way = request.param
    world = World(tmp_path_factory.mktemp("lost"), LONGSHORE_BACKEND=backend, LONGSHORE_FORCE_WAY=way)
    prefill, decode = world.agent("prefill"), world.agent("decode")
    starting = [world.engine(prefill, "source"), world.engine(decode, "target")]
    source, target = (engine.result() for engine in starting)
    yield Pair(world, prefill, decode, source, target, replaces=request.param == ("Mooncake", "Slices"))
    world.close()


def arrives(source: Engine, target: Engine) -> None:
    room = Request(source, target, TOKENS)
    room.claim()
    room.offer()
    room.arrives()


def engine_with(region: Region, agent: Agent, name: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose pages are in memory of this kind."""
    with monkeypatch.context() as patched:
        patched.setattr(memory, "create_region", region)
        return Engine(agent, name)


def cut_short(engine: Engine) -> None:
    """Truncate all memory of an engine. The test must not touch it from now on."""
    for rank in engine.ranks:
        os.ftruncate(rank.memory.descriptor, 0)


def ends(room: Request) -> dict[Half, RoomEvent]:
    """Wait until both halves of a room are released; return their ends."""
    found = {}
    for half, engine in ((Half.SOURCE, room.source), (Half.TARGET, room.target)):
        found[half] = engine.client.wait(room.room, half, room.source.instance, timeout_s=EVENT_LIMIT_S)
        engine.client.wait(room.room, half, room.source.instance, [RoomEventKind.RELEASED], EVENT_LIMIT_S)
    return found


@pytest.mark.parametrize("side", [Half.SOURCE, Half.TARGET], ids=["source", "target"])
@pytest.mark.parametrize("region", [unsealed_region, file_region])
def test_a_room_on_memory_that_was_cut_short_fails_by_name_and_every_worker_lives(
    request: pytest.FixtureRequest, pair: Pair, monkeypatch: pytest.MonkeyPatch, side: Half, region: Region
) -> None:
    name = f"broken-{side.name.lower()}-{region.__name__}"
    broken = engine_with(region, pair.prefill if side is Half.SOURCE else pair.decode, name, monkeypatch)
    request.addfinalizer(broken.close)
    source, target = (broken, pair.target) if side is Half.SOURCE else (pair.source, broken)
    room = Request(source, target, TOKENS)
    workers = pair.workers(name)
    assert len(workers) == 3
    # Later copies find the memory truncated.
    (room.offer if side is Half.SOURCE else room.claim)()
    cut_short(broken)
    (room.claim if side is Half.SOURCE else room.offer)()
    found = ends(room)
    assert {event.kind for event in found.values()} == {RoomEventKind.FAILED}
    pair.arrives()
    for agent in (pair.prefill, pair.decode):
        assert "ended with" not in agent.log()
    if pair.replaces:
        assert found[side].reason in (Reason.MEMORY_LOST, Reason.TRANSFER_FAILED)
        return
    assert found[side].reason is Reason.MEMORY_LOST, found
    assert "was cut short" in found[side].text
    assert pair.workers(name) == workers
    with pytest.raises(RoomError, match="was cut short") as refused:
        use(broken, side, room.room + 1, pair.source)
    assert refused.value.reason is Reason.MEMORY_LOST
    broken.client.unregister_pool(0)


def use(engine: Engine, side: Half, room: int, source: Engine) -> None:
    """Offer or claim one page of an engine."""
    if side is Half.SOURCE:
        engine.client.send(room, [0], 0, 16, last=True)
    else:
        engine.client.receive(room, source.endpoint(), [0], 0, 16)


def test_workers_of_one_agent_map_no_memory_of_others_that_can_be_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    world = World(tmp_path, LONGSHORE_DIRECT="true")
    request.addfinalizer(world.close)
    agent = world.agent("agent")
    source, target = world.engine(agent, "source").result(), world.engine(agent, "target").result()
    broken = engine_with(unsealed_region, agent, "broken", monkeypatch)
    request.addfinalizer(broken.close)
    arrives(source, target)
    written = agent.metric("longshore_writes_total", way="direct")
    assert written >= 1
    arrives(source, broken)
    assert agent.metric("longshore_writes_total", way="direct") == written
    workers = {worker["worker"]: worker["pid"] for worker in agent.status()["workers"]}
    assert holders_of("broken").keys() == {os.getpid(), workers["broken/0/0"]}
    room = Request(source, broken, TOKENS)
    room.claim()
    cut_short(broken)
    room.offer()
    assert ends(room)[Half.TARGET].reason is Reason.MEMORY_LOST
    # A source whose own memory can be truncated still copies directly into its neighbours' pages.
    cut = engine_with(unsealed_region, agent, "cut", monkeypatch)
    request.addfinalizer(cut.close)
    room = Request(cut, target, TOKENS)
    room.offer()
    cut_short(cut)
    room.claim()
    assert ends(room)[Half.SOURCE].reason is Reason.MEMORY_LOST
    arrives(source, target)
    after = {worker["worker"]: worker["pid"] for worker in agent.status()["workers"]}
    assert after == workers | {"cut/0/0": after["cut/0/0"]}
    assert "ended with" not in agent.log()
