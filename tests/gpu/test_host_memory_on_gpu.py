"""Tests pages of prefill on a GPU that go into decode's host memory, directly and staged, and digests of such rooms."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gpu_world import HOST_PAGES, EngineProcess, GPUAgent, agent_page, agent_status, writes_by_way

from longshore_cli.metrics_page import MetricsPage

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 4, "kv_heads": 8}
PREFILL_TP, PREFILL_PAGE_SIZE, TOKENS_MAX = 2, 64, 4096
ROOMS = itertools.count(2**63 + 1)
# Lengths around the edges of prefill's pages; decode's have one token.
LENGTHS = (1, 63, 64, 65, 700)
# Whole pages, so that a wrong page that is written changes nothing beyond the room.
DAMAGED_TOKENS = 256
# By what a way of copying has: `host` is direct, the others staged.
PAGES_DAMAGES = (
    "a bit in prefill's pages",
    "a wrong page that is read",
    "a bit in decode's pages",
    "a wrong page that is written",
)
RING_DAMAGES = ("a bit in the lane", "a bit in the ring", "swapped heads", "a stale slab")
DAMAGES = {"host": PAGES_DAMAGES, "device": PAGES_DAMAGES + RING_DAMAGES, "apart": ("a bit in the lane",)}
SETTINGS = {"LONGSHORE_RING_BYTES": "24Mi", "LONGSHORE_LANE_BYTES": "2Mi", "LONGSHORE_SLAB_BYTES_MIN": "64Ki"}
LET_GO_S = 10.0


@dataclass
class Decode:
    """A decode rank of TP1: its process, its pages' size, and the rooms that its pool holds."""

    engine: EngineProcess
    page_size: int
    moved: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def pages(self, first_token: int, tokens: int) -> list[int]:
        """Return the pages of a room from a place on, in descending order."""
        first, count = first_token // self.page_size, -(-tokens // self.page_size)
        return list(range(first + count - 1, first - 1, -1))

    def is_right(self) -> bool:
        return bool(self.engine.ask("differences", sequences=self.moved) == 0)


@dataclass
class Place:
    """A prefill instance on a GPU at the agent `near`, and decode ranks in every kind of place.

    Attributes:
        host: at `near`, an engine on the GPU with pages in host memory, too.
        alone: at `near`, an engine with host memory only.
        apart: at `far`, an engine with host memory only.
        device: at `far`, an engine with pages on the last GPU.
        plant: the file that names the damage of copies on the GPU.
    """

    near: GPUAgent
    far: GPUAgent
    prefill: list[EngineProcess]
    host: Decode
    alone: Decode
    apart: Decode
    device: Decode
    endpoint: str
    plant: Path

    def fill(self, seed: int, tokens: int) -> None:
        pages = list(range(-(-tokens // PREFILL_PAGE_SIZE)))
        for prefill in self.prefill:
            prefill.ask("fill", seed=seed, tokens=tokens, pages=pages)

    def move(self, decode: Decode, tokens: int, first_token: int, *, digest: bool = False) -> tuple[str, str]:
        """Move a room of prefill's first pages; return its end at decode, and the text."""
        room, far = next(ROOMS), decode.pages(first_token, tokens)
        near = list(range(-(-tokens // PREFILL_PAGE_SIZE)))
        decode.engine.ask("receive", room=room, endpoint=self.endpoint, pages=far, tokens=tokens, digest=digest)
        for prefill in self.prefill:
            prefill.ask("send", room=room, pages=near, tokens=tokens, chunk=256)
        kind, text, _ = decode.engine.ask("wait", room=room, half="TARGET", instance="prefill")
        for prefill in self.prefill:
            prefill.ask("wait", room=room, half="SOURCE", instance="prefill")
        return kind, text

    def maps(self, worker: str) -> str:
        """Return the mappings of a worker at `near`."""
        workers = agent_status(self.near)["workers"]
        pid = next(each["pid"] for each in workers if each["worker"] == worker)
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def together(engines: list[EngineProcess], command: str, arguments: list[dict[str, Any]]) -> list[Any]:
    for engine, given in zip(engines, arguments, strict=True):
        engine.begin(command, **given)
    return [engine.result() for engine in engines]


def mismatches(agent: GPUAgent) -> float:
    """Return how many slabs of an agent had unequal digests so far."""
    return MetricsPage(agent_page(agent, "/metrics")).total("longshore_digests_total", result="different")


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("nixl")
    return found


@pytest.fixture(scope="module")
def place(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    plant = tmp_path_factory.mktemp("plant") / "damage"
    with ExitStack() as stack:
        near, far = (stack.enter_context(GPUAgent(**SETTINGS, PLANT_FILE=str(plant))) for _ in range(2))
        engines = [stack.enter_context(EngineProcess()) for _ in range(PREFILL_TP + 4)]
        on_gpu, in_host = engines[: PREFILL_TP + 1], engines[PREFILL_TP + 1 :]
        pool = {"page_size": PREFILL_PAGE_SIZE, "page_count": TOKENS_MAX // PREFILL_PAGE_SIZE, **SHAPE}
        given = [{"device": 0, "tp": PREFILL_TP, "rank": rank} | pool for rank in range(PREFILL_TP)]
        given += [{"device": torch.cuda.device_count() - 1, "tp": 1, "rank": 0} | pool]
        uuid = together(on_gpu, "allocate", given)[0]["device"]
        tokens = {"page_size": 1, "page_count": TOKENS_MAX, "tp": 1, "rank": 0, **SHAPE}
        together(in_host, "allocate_host", [tokens] * 3)
        named = [{"socket": near.socket, "instance": "prefill", "role": "SOURCE"}] * PREFILL_TP
        named += [{"socket": far.socket, "instance": "device", "role": "TARGET"}]
        together(on_gpu, "register", named)
        agents = ((near, "host", uuid), (near, "alone", "cpu"), (far, "apart", "cpu"))
        hosts = [{"socket": agent.socket, "instance": name, "device": device} for agent, name, device in agents]
        together(in_host, "register_host", hosts)
        ranks = [Decode(engine, 1) for engine in in_host]
        device = Decode(on_gpu[-1], PREFILL_PAGE_SIZE)
        prefill = on_gpu[:PREFILL_TP]
        yield Place(near, far, prefill, *ranks, device, prefill[0].ask("endpoint"), plant)


@pytest.mark.parametrize(("name", "way"), [("host", "direct"), ("alone", "direct"), ("apart", "staged")])
def test_pages_of_a_gpu_arrive_in_host_memory_to_the_token(name: str, way: str, place: Place) -> None:
    decode: Decode = getattr(place, name)
    before, first = writes_by_way(place.near), 0
    for seed, tokens in enumerate((*LENGTHS, 333), 1):
        place.fill(seed, tokens)
        assert place.move(decode, tokens, first, digest=seed > len(LENGTHS)) == ("DONE", "")
        decode.moved.append((seed, tokens, decode.pages(first, tokens)))
        assert decode.is_right(), tokens
        first += tokens
    after = writes_by_way(place.near)
    assert {way for way, count in after.items() if count > before.get(way, 0)} == {way}


def test_the_worker_of_host_memory_uses_no_gpu_and_prefill_maps_each_pool_once(place: Place) -> None:
    # A process that computes on a GPU, or has memory there, maps the driver's unified memory.
    assert ["nvidia-uvm" in place.maps(name) for name in ("prefill/0/0", "host/0/0/host", "alone/0/0")] == [
        True,
        False,
        False,
    ]
    assert place.maps("prefill/0/0").count(HOST_PAGES) == 2


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name, damages in DAMAGES.items() for damage in damages]
)
def test_damage_on_a_gpu_fails_its_room_and_names_layer_head_rank_and_slab(
    name: str, damage: str, place: Place
) -> None:
    decode: Decode = getattr(place, name)
    compares = place.near if name == "host" else place.far
    first = 2048
    place.fill(90, DAMAGED_TOKENS)
    before = mismatches(compares)
    place.plant.write_text(damage, encoding="utf-8")
    try:
        kind, text = place.move(decode, DAMAGED_TOKENS, first, digest=True)
    finally:
        place.plant.unlink()
    assert (kind, mismatches(compares) > before) == ("FAILED", True), text
    assert re.match(
        r"layer 0, K, head [04]: tokens 0 to \d+ in decode rank 0's pages are not those of prefill rank [01] \(", text
    )
    place.fill(90, DAMAGED_TOKENS)
    assert place.move(decode, DAMAGED_TOKENS, first, digest=True) == ("DONE", "")
    whole = [(90, DAMAGED_TOKENS, decode.pages(first, DAMAGED_TOKENS))]
    assert decode.engine.ask("differences", sequences=decode.moved + whole) == 0


def test_host_memory_is_let_go_when_its_pool_is_unregistered_and_when_its_engine_is_killed(place: Place) -> None:
    assert place.maps("prefill/0/1").count(HOST_PAGES) == 2
    place.host.engine.ask("unregister")
    assert place.maps("prefill/0/1").count(HOST_PAGES) == 1
    place.alone.engine.kill()
    end_s = time.monotonic() + LET_GO_S
    while HOST_PAGES in place.maps("prefill/0/0") + place.maps("prefill/0/1"):
        assert time.monotonic() < end_s, "the pages of a dead engine stay mapped"
    # The workers and their GPU serve the next engine.
    place.fill(91, 64)
    assert place.move(place.apart, 64, 3000) == ("DONE", "")


@pytest.mark.slow
def test_mooncake_writes_host_memory_directly_and_refuses_it_between_two_agents_by_name(torch: Any) -> None:
    with ExitStack() as stack:
        near, far = (stack.enter_context(GPUAgent(**SETTINGS, LONGSHORE_BACKEND="Mooncake")) for _ in range(2))
        prefill, alone, apart = (stack.enter_context(EngineProcess()) for _ in range(3))
        prefill.ask("allocate", device=0, tp=1, rank=0, page_size=64, page_count=64, **SHAPE)
        together([alone, apart], "allocate_host", [{"page_size": 1, "page_count": 64, "tp": 1, "rank": 0, **SHAPE}] * 2)
        prefill.ask("register", socket=near.socket, instance="prefill", role="SOURCE")
        hosts = [{"socket": agent.socket, "device": "cpu"} for agent in (near, far)]
        together([alone, apart], "register_host", [{"instance": f"d-{i}", **host} for i, host in enumerate(hosts)])
        ranks = [Decode(alone, 1), Decode(apart, 1)]
        place = Place(near, far, [prefill], *ranks, *ranks, prefill.ask("endpoint"), Path("no damage"))
        place.fill(1, 64)
        assert place.move(ranks[0], 64, 0) == ("DONE", "")
        assert alone.ask("differences", sequences=[(1, 64, ranks[0].pages(0, 64))]) == 0
        kind, text = place.move(ranks[1], 64, 0)
        assert kind == "FAILED"
        assert "two of a kind; use NIXL, or have one agent serve both engines" in text
