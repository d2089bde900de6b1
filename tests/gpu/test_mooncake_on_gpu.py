"""Tests Mooncake between GPUs of one host: bytes, the wire, and the end of mappings; then pages moved by real agents.

All tests except those with agents also run without a GPU, over a fake CUDA: see mooncake_place.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import os
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from gpu_world import EngineProcess, GPUAgent, agent_status, wire_between
from mooncake_place import WHEEL, Place, build_stand_in

pytestmark = pytest.mark.gpu

PACKAGE = "mooncake-transfer-engine-cuda13"
MIB = 1 << 20
LENGTH = 32 * MIB
LIMIT_S = 30.0
ROOMS = itertools.count(2**63 + 7001)


class World(NamedTuple):
    """The environment for places; `device_count` is 0 over the fake CUDA."""

    environment: dict[str, str]
    device_count: int


class Pair(NamedTuple):
    """Two places with one region each; the near one writes."""

    near: Place
    far: Place
    peer: str
    target: int


def gpu_count() -> int:
    torch = pytest.importorskip("torch")
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    if count := gpu_count():
        try:
            importlib.metadata.version(PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(
                f"needs {PACKAGE} in place of the other Mooncake wheels: pip install 'longshore-kv[mooncake-cuda13]'"
            )
        return World({}, count)
    if not os.environ.get(WHEEL):
        pytest.skip(f"needs a CUDA device; or, for all but speed and agents, {WHEEL}=a folder with the unpacked wheel")
    return World(build_stand_in(tmp_path_factory.mktemp("stand-in")), 0)


@pytest.fixture
def pair(world: World) -> Iterator[Pair]:
    with (
        Place("near", 0, world.environment) as near,
        Place("far", max(world.device_count - 1, 0), world.environment) as far,
    ):
        near.ask("allocate", length=LENGTH, seed=1)
        target = far.ask("allocate", length=LENGTH, seed=2)
        yield Pair(near, far, near.ask("connect", metadata=far.ask("metadata")), target)


def content(seed: int, length: int = LENGTH) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def digest(expected: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(expected.tobytes()).hexdigest()


def write(pair: Pair, *pieces: tuple[int, int, int]) -> list[Any]:
    """Write pieces of (offset here, offset there, bytes) and wait for the end."""
    placed = [(near, pair.target + far, length) for near, far, length in pieces]
    return list(pair.near.ask("finish", write=pair.near.ask("begin", peer=pair.peer, pieces=placed)))


def wait_until(true: Any) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s
        select.select([], [], [], 0.01)


def test_bytes_arrive_where_they_belong_and_nowhere_else(pair: Pair) -> None:
    pieces = [(0, 5, 1), (3, 4097, 4096), (MIB, 7 * MIB + 13, 16 * MIB), (LENGTH - 9, LENGTH - 9, 9)]
    expected, source = content(2), content(1)
    for near, far, length in pieces:
        assert write(pair, (near, far, length)) == ["done", "", True]
        expected[far : far + length] = source[near : near + length]
        assert pair.far.ask("digest", region=0) == digest(expected)
    assert pair.near.ask("digest", region=0) == digest(source)


def test_many_pieces_and_many_writes_at_once_all_arrive(pair: Pair) -> None:
    source, size = content(1), 8192
    count = LENGTH // size // 2
    numbers = []
    for half in range(2):
        order = np.random.default_rng(half).permutation(count)
        pieces = [(int(each) * size * 2, pair.target + int(each) * size * 2 + half * size, size) for each in order]
        numbers.append(pair.near.ask("begin", peer=pair.peer, pieces=pieces))
    assert [pair.near.ask("finish", write=number) for number in numbers] == [["done", "", True]] * 2
    halves = source.reshape(count, 2, size)[:, :1]
    assert pair.far.ask("digest", region=0) == digest(np.concatenate([halves, halves], axis=1))


def test_the_wire_is_told_and_is_no_network(pair: Pair, world: World) -> None:
    found = pair.near.ask("probe", peer=pair.peer, target=pair.target, length=MIB)
    # The fake CUDA copies at the host's speed, which may be too slow for NVLink or CUDA IPC.
    if world.device_count:
        assert found == wire_between(0, world.device_count - 1)
    else:
        assert found in {"CudaIPC", "Unknown"}
    assert write(pair, (0, 0, MIB)) == ["done", "", True]


def test_memory_that_was_registered_later_is_reached_after_it_was_told(pair: Pair) -> None:
    assert write(pair, (0, 0, 4096)) == ["done", "", True]
    second = pair.far.ask("allocate", length=4 * MIB, seed=3)
    assert pair.near.ask("connect", metadata=pair.far.ask("metadata")) == pair.peer
    assert write(pair._replace(target=second), (0, MIB, MIB)) == ["done", "", True]
    expected = content(3, 4 * MIB)
    expected[MIB : 2 * MIB] = content(1)[:MIB]
    assert pair.far.ask("digest", region=1) == digest(expected)
    wait_until(lambda: pair.near.ask("engines") == 2)


def test_deregistration_takes_no_access_away(pair: Pair) -> None:
    assert write(pair, (0, 0, 4096)) == ["done", "", True]
    pair.far.ask("deregister", region=0)
    assert write(pair, (0, 8192, 4096)) == ["done", "", True]
    expected = content(2)
    expected[:4096] = expected[8192 : 8192 + 4096] = content(1)[:4096]
    assert pair.far.ask("digest", region=0) == digest(expected)


def test_a_disconnect_drops_the_engine_that_wrote(pair: Pair, world: World) -> None:
    assert write(pair, (0, 0, 4096)) == ["done", "", True]
    assert pair.near.ask("engines") == 2
    # The engine's end waits for its listener, and every thread waits for the engine's end.
    assert pair.near.ask("listener_sleeps_us")[0] <= 100_000
    if not world.device_count:
        assert pair.near.ask("stand_in", what="mapped") == 1
    pair.near.ask("disconnect", peer=pair.peer)
    wait_until(lambda: pair.near.ask("engines") == 1)
    if not world.device_count:
        assert pair.near.ask("stand_in", what="mapped") == 0
    peer = pair.near.ask("connect", metadata=pair.far.ask("metadata"))
    assert write(pair._replace(peer=peer), (0, 8192, 4096)) == ["done", "", True]


def test_memory_of_a_killed_peer_is_free_again_after_its_disconnect(world: World) -> None:
    if not world.device_count:
        pytest.skip("needs a CUDA device: what a driver does with a dead process's memory")
    import torch

    length, far_device = 2 << 30, world.device_count - 1
    before = torch.cuda.mem_get_info(far_device)[0]
    with Place("near", 0, {}) as near, Place("far", far_device, {}) as far:
        near.ask("allocate", length=MIB, seed=1)
        target = far.ask("allocate", length=length, seed=2)
        peer = near.ask("connect", metadata=far.ask("metadata"))
        number = near.ask("begin", peer=peer, pieces=[(0, target, MIB)])
        assert near.ask("finish", write=number) == ["done", "", True]
        assert torch.cuda.mem_get_info(far_device)[0] < before - length // 2
        far.kill()
        near.ask("disconnect", peer=peer)
        wait_until(lambda: torch.cuda.mem_get_info(far_device)[0] > before - length // 2)


def test_a_killed_peer_ends_no_process_and_leaves_no_write_open(pair: Pair) -> None:
    assert write(pair, (0, 0, 4096)) == ["done", "", True]
    pair.far.kill()
    # The memory is mapped here, so the bytes land although its owner has ended. Only heartbeats detect the end.
    assert write(pair, (0, 8192, 4096))[0] in {"done", "failed"}
    pair.near.ask("disconnect", peer=pair.peer)
    wait_until(lambda: pair.near.ask("engines") == 1)


def test_a_peer_that_died_before_the_first_write_is_not_reached(pair: Pair) -> None:
    pair.far.kill()
    state, error, settled = write(pair, (0, 0, 4096))
    assert (state, settled) == ("failed", True)
    assert "cannot be reached" in error


class TestHeld:
    """Copies that do not end, which only the fake CUDA supports."""

    @pytest.fixture(autouse=True)
    def only_on_the_stand_in(self, world: World) -> None:
        if world.device_count:
            pytest.skip("a GPU's copies cannot be held")

    def test_nothing_is_unmapped_under_a_copy_that_runs(self, pair: Pair) -> None:
        assert write(pair, (0, 0, 4096)) == ["done", "", True]
        pair.near.ask("hold", on=True)
        number = pair.near.ask("begin", peer=pair.peer, pieces=[(0, pair.target + MIB, MIB)])
        assert pair.near.ask("look", write=number)[0] == "open"
        pair.near.ask("disconnect", peer=pair.peer)
        state, error, settled = pair.near.ask("look", write=number)
        assert (state, settled) == ("failed", False)
        assert "disconnected" in error
        assert pair.near.ask("stand_in", what="mapped") == 1
        pair.near.ask("hold", on=False)
        wait_until(lambda: pair.near.ask("stand_in", what="mapped") == 0)
        expected = content(2)
        expected[:4096], expected[MIB : 2 * MIB] = content(1)[:4096], content(1)[:MIB]
        assert pair.far.ask("digest", region=0) == digest(expected)

    def test_a_probe_that_does_not_end_leaves_nothing_that_is_asked_after(self, pair: Pair) -> None:
        pair.near.ask("hold", on=True)
        assert pair.near.ask("probe", peer=pair.peer, target=pair.target, length=MIB) == "Unknown"
        pair.near.ask("hold", on=False)
        assert write(pair, (0, MIB, MIB)) == ["done", "", True]
        pair.near.ask("disconnect", peer=pair.peer)
        wait_until(lambda: pair.near.ask("engines") == 1)
        assert pair.near.ask("stand_in", what="dead_asked") == 0


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (1, 2)])
def test_pages_on_gpus_are_moved_by_agents_over_mooncake_and_equal(
    source_tp: int, target_tp: int, world: World
) -> None:
    count = world.device_count
    if not count:
        pytest.skip("needs a CUDA device: the kernels of gather and scatter")
    shape = {"layers": 8, "kv_heads": 8, "page_size": 16, "page_count": 160}
    settings = {
        "LONGSHORE_BACKEND": "Mooncake",
        "LONGSHORE_WIRES": "CudaIPC",
        "LONGSHORE_RING_BYTES": "24Mi",
        "LONGSHORE_LANE_BYTES": "2Mi",
        "LONGSHORE_SLAB_BYTES_MIN": "64Ki",
    }
    with ExitStack() as stack:
        near, far = (stack.enter_context(GPUAgent(**settings)) for _ in range(2))
        engines: dict[str, list[EngineProcess]] = {}
        for agent, role, tp, device in ((near, "SOURCE", source_tp, 0), (far, "TARGET", target_tp, count - 1)):
            engines[role] = [stack.enter_context(EngineProcess()) for _ in range(tp)]
            for rank, engine in enumerate(engines[role]):
                engine.ask("allocate", device=device, tp=tp, rank=rank, **shape)
            together(engines[role], "register", socket=agent.socket, instance=role.lower(), role=role)
        endpoint = engines["SOURCE"][0].ask("endpoint")
        moved = []
        for index, tokens in enumerate((700, 1, 257)):
            room, pages = next(ROOMS), -(-tokens // 16)
            sources = [(7 * page + index) % 160 for page in range(pages)]
            targets = [50 * index + page for page in range(pages)]
            together(engines["SOURCE"], "fill", seed=room % 97, tokens=tokens, pages=sources)
            together(engines["TARGET"], "receive", room=room, endpoint=endpoint, pages=targets, tokens=tokens)
            together(engines["SOURCE"], "send", room=room, pages=sources, tokens=tokens, chunk=256)
            for role in ("TARGET", "SOURCE"):
                for kind, text, _ in together(engines[role], "wait", room=room, half=role, instance="source"):
                    assert kind == "DONE", text
            moved.append((room % 97, tokens, targets))
        assert together(engines["TARGET"], "differences", sequences=moved) == [0] * target_tp
        assert together(engines["TARGET"], "differences", sequences=moved[:1]) != [0] * target_tp
        wires = {peer["wire"] for worker in agent_status(near)["workers"] for peer in worker["peers"]}
        # CudaIPC in the list also allows NVLink, which is one kind of it.
        assert wires == {wire_between(0, count - 1)}
        together([*engines["SOURCE"], *engines["TARGET"]], "unregister")


def together(engines: list[EngineProcess], command: str, **arguments: Any) -> list[Any]:
    for engine in engines:
        engine.begin(command, **arguments)
    return [engine.result() for engine in engines]
