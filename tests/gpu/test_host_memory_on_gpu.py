"""Tests pages of prefill on a GPU that go into decode's host memory: directly, and staged between two agents."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_world import HOST_PAGES, EngineProcess, GPUAgent, agent_status

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 8, "kv_heads": 8}
PREFILL_PAGE_SIZE, TOKENS_MAX = 64, 4096
ROOMS = itertools.count(2**63 + 1)
# Lengths around the edges of prefill's pages; decode's have one token.
LENGTHS = (1, 63, 64, 65, 700)
SETTINGS = {"LONGSHORE_RING_BYTES": "24Mi", "LONGSHORE_LANE_BYTES": "2Mi", "LONGSHORE_SLAB_BYTES_MIN": "64Ki"}
LET_GO_S = 10.0


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("nixl")
    return found


class Place:
    """A prefill rank on a GPU, and a decode rank with pages of one token in host memory."""

    def __init__(self, stack: ExitStack, torch: Any, agents: list[GPUAgent], *, on_gpu: bool) -> None:
        self.prefill_agent, self.decode_agent = agents[0], agents[-1]
        self.prefill, self.decode = (stack.enter_context(EngineProcess()) for _ in range(2))
        shape = SHAPE | {"tp": 1, "rank": 0}
        self.prefill.begin("allocate", device=0, page_size=PREFILL_PAGE_SIZE, page_count=TOKENS_MAX // 64, **shape)
        self.decode.ask("allocate_host", page_size=1, page_count=TOKENS_MAX, **shape)
        uuid = self.prefill.end()["device"]
        device = uuid if on_gpu else "cpu"
        self.prefill.begin("register", socket=self.prefill_agent.socket, instance="prefill", role="SOURCE")
        self.decode.ask("register_host", socket=self.decode_agent.socket, instance="decode", device=device)
        self.prefill.end()
        self.endpoint = self.prefill.ask("endpoint")
        self.moved: list[tuple[int, int, list[int]]] = []

    def move(self, tokens: int, *, digest: bool = False) -> None:
        """Move one room into pages that no other has, in descending order."""
        room, seed = next(ROOMS), len(self.moved) + 1
        first = sum(len(pages) for _, _, pages in self.moved)
        far = list(range(first + tokens - 1, first - 1, -1))
        near = [(7 * page + seed) % 64 for page in range(-(-tokens // PREFILL_PAGE_SIZE))]
        self.prefill.ask("fill", seed=seed, tokens=tokens, pages=near)
        self.decode.ask("receive", room=room, endpoint=self.endpoint, pages=far, tokens=tokens, digest=digest)
        self.prefill.ask("send", room=room, pages=near, tokens=tokens, chunk=256)
        for engine, half in ((self.decode, "TARGET"), (self.prefill, "SOURCE")):
            kind, text, _ = engine.ask("wait", room=room, half=half, instance="prefill")
            assert kind == "DONE", text
        self.moved.append((seed, tokens, far))

    def is_right(self) -> bool:
        return bool(self.decode.ask("differences", sequences=self.moved) == 0)

    def worker(self, name: str) -> int:
        """Return the PID of a worker."""
        workers = agent_status(self.prefill_agent)["workers"] + agent_status(self.decode_agent)["workers"]
        return int(next(worker["pid"] for worker in workers if worker["worker"] == name))


@contextmanager
def place_of(torch: Any, agent_count: int, *, on_gpu: bool, **settings: str) -> Iterator[Place]:
    with ExitStack() as stack:
        agents = [stack.enter_context(GPUAgent(**SETTINGS, **settings)) for _ in range(agent_count)]
        yield Place(stack, torch, agents, on_gpu=on_gpu)


def ways(agent: GPUAgent) -> dict[str, float]:
    http = json.loads((agent.directory / "agent.json").read_bytes())["http"]
    with urllib.request.urlopen(http + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("longshore_writes_total{"):
            way = line.partition('way="')[2].partition('"')[0]
            found[way] = found.get(way, 0) + float(line.rsplit(" ", 1)[1])
    return {way: count for way, count in found.items() if count}


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("backend", "on_gpu"),
    [("NIXL", True), ("NIXL", False), pytest.param("Mooncake", False, marks=pytest.mark.slow)],
)
def test_one_kernel_writes_decodes_host_memory_to_the_token_and_lets_it_go_with_its_pool_or_engine(
    backend: str, on_gpu: bool, torch: Any
) -> None:
    with place_of(torch, 1, on_gpu=on_gpu, LONGSHORE_BACKEND=backend) as place:
        for tokens in LENGTHS:
            place.move(tokens)
            assert place.is_right(), tokens
        place.move(333, digest=True)
        assert place.is_right()
        assert ways(place.prefill_agent).keys() == {"direct"}
        source = place.worker("prefill/0/0")
        # A process that computes on a GPU, or has memory there, maps the driver's unified memory.
        assert "nvidia-uvm" in maps_of(source)
        assert "nvidia-uvm" not in maps_of(place.worker("decode/0/0/host" if on_gpu else "decode/0/0"))
        assert maps_of(source).count(HOST_PAGES) == 1
        if on_gpu:
            place.decode.ask("unregister")
            assert HOST_PAGES not in maps_of(source)
            assert place.is_right()
        else:
            place.decode.kill()
            end_s = time.monotonic() + LET_GO_S
            while HOST_PAGES in maps_of(source):
                assert time.monotonic() < end_s, "the pages of a dead engine stay mapped"
            # The worker and its GPU serve the next engine.
            assert place.prefill.ask("endpoint") == place.endpoint


def test_agents_that_share_no_memory_stage_pages_of_a_gpu_into_host_memory(torch: Any) -> None:
    with place_of(torch, 2, on_gpu=False) as place:
        for tokens in LENGTHS:
            place.move(tokens)
            assert place.is_right(), tokens
        place.move(333, digest=True)
        assert ways(place.prefill_agent).keys() == {"staged"}


@pytest.mark.slow
def test_mooncake_between_two_agents_refuses_memory_of_another_kind_by_name(torch: Any) -> None:
    with (
        place_of(torch, 2, on_gpu=False, LONGSHORE_BACKEND="Mooncake") as place,
        pytest.raises(AssertionError, match=r"two of a kind; use NIXL, or have one agent serve both engines"),
    ):
        place.move(64)
