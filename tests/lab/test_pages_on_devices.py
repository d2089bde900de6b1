"""Engines' pages on a simulated GPU: the same bytes, and no queued work when a call returns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import pytest
import torch
from pretend_devices import PretendMemory

from longshore_cli.lifetime import parts_watched
from longshore_cli.local_agents import LocalAgent
from longshore_lab.bench import BenchError
from longshore_lab.bench.pages import SequencePages, open_pages
from longshore_lab.bench.scene import Stage
from longshore_lab.engine import cache, device_memory
from longshore_lab.engine.cache import POISON_PATTERN, PagePool
from longshore_lab.engine.config import ModelConfig, RankOptions
from longshore_lab.engine.connector import Connector, ConnectorOptions, Registration
from longshore_lab.engine.device_memory import DeviceMemory
from longshore_lab.engine.errors import EngineError
from longshore_lab.engine.rank import EngineRank
from longshore_lab.test_engine import ranks
from longshore_wire.engine_messages import DeviceRegion, Half
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, PoolGeometry

SMALL = ModelConfig(layers=2, hidden=48, query_heads=12, kv_heads=6, head_dim=8, mlp=48, vocabulary=64)
SHAPE = ModelShape.kv(layers=2, kv_heads=4, head_dim=8, element_bytes=2)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "DeviceMemory", PretendMemory)
    monkeypatch.setattr(device_memory, "DeviceMemory", PretendMemory)


def memory_of(pool: PagePool) -> PretendMemory:
    memory = pool.memory
    assert isinstance(memory, PretendMemory)
    return memory


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
def test_an_engine_whose_pages_are_on_a_gpu_gives_the_same_tokens_and_bytes(order: PageOrder, pretended: None) -> None:
    draw = random.Random(3)
    prompt = [draw.randrange(SMALL.vocabulary) for _ in range(37)]
    found = []
    for devices in ((), ("cuda:7",)):
        engine = EngineRank(RankOptions(model=SMALL, order=order, page_count=8, devices=devices))
        pages = engine.allocator.allocate(3)
        first = engine.prefill(prompt, pages, 0, 20)
        second = engine.prefill(prompt, pages, 20, 37)
        dumped = engine.pool.dump_tokens(pages, 0, 37).view(torch.int32).tolist()
        found.append((first, second, engine.pool.digest_tokens(pages, 0, 37), dumped, engine.pool.geometry))
        assert (engine.pool.memory.device_name != "cpu") == bool(devices)
        engine.close()
    assert found[0] == found[1]


def test_what_writes_pages_on_a_gpu_returns_when_they_are_written(pretended: None) -> None:
    pool = PagePool(KVLayout(SMALL.shape, Parallel(1, 0), 4), 5, device="cuda:0")
    memory = memory_of(pool)
    assert memory.device_name == "GPU-of-cuda:0"
    assert memory.settled
    assert set(memory.tensor.view(torch.int32)[:100].tolist()) == {POISON_PATTERN}
    rows = torch.ones(6, 6, 8)
    for change in (
        lambda: pool.write(1, [3, 0], 2, rows, 2 * rows),
        lambda: pool.zero([3, 0], 3, 5),
        lambda: pool.poison([3]),
    ):
        before = memory.tensor.clone()
        change()
        assert not torch.equal(before, memory.tensor)
        assert memory.settled


@pytest.fixture
def pages(pretended: None) -> Iterator[SequencePages]:
    made = open_pages(KVLayout(SHAPE, Parallel(tp=2, tp_rank=1), 4), 21, 5, "cuda:1")
    yield made
    made.close()


def test_pages_of_a_benchmark_are_filled_wiped_and_compared_where_they_lie(pages: SequencePages) -> None:
    memory = pages.memory
    assert isinstance(memory, PretendMemory)
    assert memory.device_name == "GPU-of-cuda:1"
    pages.fill(21)
    assert memory.settled
    pages.check(21)
    plane = pages.geometry.planes[-1]
    memory.tensor[plane.offset + pages.table[2] * plane.page_stride] ^= 1
    with pytest.raises(BenchError, match="token 8 of plane 3"):
        pages.check(21)
    pages.wipe(21)
    assert not memory.tensor[: plane.offset + 6 * plane.page_stride].any()
    with pytest.raises(BenchError, match="token 0 of plane 0"):
        pages.check(21)


def test_memory_that_torch_cannot_give_is_a_typed_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> object:
        raise RuntimeError(f"{device}: no kernel image")

    monkeypatch.setattr(torch.cuda, "device", refuse)
    with pytest.raises(EngineError, match=r"640 bytes on cuda:3: cuda:3: no kernel image: use a torch built for this"):
        DeviceMemory(640, "cuda:3")


class HeardClient:
    """Return an engine's registration as an agent would get it: its device and regions."""

    heard: ClassVar[list[tuple[str, object]]] = []

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def register_pool(self, pool: int, geometry: PoolGeometry, regions: list[object], *, timeout_s: float) -> None:
        self.heard.append((self._device, *regions))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    def connect(path: str, *, device: str, **known: object) -> HeardClient:
        return HeardClient(device)

    monkeypatch.setattr(ranks, "connect", connect)
    monkeypatch.setattr(HeardClient, "heard", [])
    return HeardClient.heard


def test_an_agent_hears_which_gpu_an_engines_pages_are_on_and_gets_their_handle(
    pretended: None, heard: list[tuple[str, object]]
) -> None:
    agents = {"one": Registration("prefill", "/agent.sock")}
    told = msgspec.msgpack.encode(ConnectorOptions(Half.SOURCE, agents))
    for devices in (("cuda:5", "cuda:6"), ()):
        engine = EngineRank(RankOptions(model=SMALL, page_count=4, devices=devices))
        Connector(engine, told).close()
        engine.close()
    memory_name, region = heard[0]
    assert memory_name == "GPU-of-cuda:5"
    assert isinstance(region, DeviceRegion)
    assert heard[1][0] == "cpu"
    assert isinstance(heard[1][1], int)


def test_ranks_of_a_benchmark_are_dealt_to_their_devices_and_tell_their_agent(
    pretended: None, heard: list[tuple[str, object]]
) -> None:
    with parts_watched() as watch, ExitStack() as stack:
        stage = Stage(stack, {}, Path("/nowhere"), watch)
        pages = stage.pages(SHAPE, 4, 4, 8, 0, ("cuda:2", "cuda:3"))
        agent = LocalAgent({}, Path("/nowhere"))
        stage.engine("decode", agent, pages, Half.TARGET)
        stage.engine("host", agent, stage.pages(SHAPE, 1, 4, 8, 0), Half.TARGET)
    devices = [f"GPU-of-cuda:{index}" for index in (2, 3, 2, 3)]
    assert [mine.memory.device_name for mine in pages] == devices
    assert sorted(name for name, _ in heard) == sorted([*devices, "cpu"])
    assert all(isinstance(region, DeviceRegion) == (name != "cpu") for name, region in heard)
