"""Tests engines with pages on GPUs and real agents between them: pages are moved staged and compared byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from gpu_world import EngineProcess, GPUAgent

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 8, "kv_heads": 8, "page_size": 16, "page_count": 160}
ROOMS = itertools.count(2**63 + 1)


@pytest.fixture(scope="module")
def device_count() -> int:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("nixl")
    return int(torch.cuda.device_count())


@pytest.fixture
def agents(device_count: int) -> Iterator[list[GPUAgent]]:
    # Several slabs a room, and a ring that wraps.
    small = {
        "LONGSHORE_RING_BYTES": "24Mi",
        "LONGSHORE_RING_EXTENT_BYTES": "8Mi",
        "LONGSHORE_LANE_BYTES": "2Mi",
        "LONGSHORE_SLAB_BYTES_MIN": "64Ki",
    }
    with ExitStack() as stack:
        yield [stack.enter_context(GPUAgent(**small)) for _ in range(2)]


def started(stack: ExitStack, agent: GPUAgent, instance: str, role: str, tp: int, device: int) -> list[EngineProcess]:
    ranks = [stack.enter_context(EngineProcess()) for _ in range(tp)]
    for number, rank in enumerate(ranks):
        rank.begin("allocate", device=device, tp=tp, rank=number, **SHAPE)
    for rank in ranks:
        rank.result()
    for rank in ranks:
        rank.begin("register", socket=agent.socket, instance=instance, role=role)
    for rank in ranks:
        rank.result()
    return ranks


def together(ranks: list[EngineProcess], command: str, **arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.begin(command, **arguments)
    return [rank.result() for rank in ranks]


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (1, 2), (2, 2)])
def test_pages_on_gpus_are_moved_staged_and_equal(
    source_tp: int, target_tp: int, agents: list[GPUAgent], device_count: int
) -> None:
    with ExitStack() as stack:
        prefill = started(stack, agents[0], "prefill", "SOURCE", source_tp, 0)
        decode = started(stack, agents[1], "decode", "TARGET", target_tp, device_count - 1)
        endpoint = prefill[0].ask("endpoint")
        moved = []
        for index, tokens in enumerate((700, 1, 257)):
            room, count = next(ROOMS), -(-tokens // 16)
            near, far = (
                [(7 * page + index) % 160 for page in range(count)],
                [50 * index + page for page in range(count)],
            )
            together(prefill, "fill", seed=room % 97, tokens=tokens, pages=near)
            together(decode, "receive", room=room, endpoint=endpoint, pages=far, tokens=tokens)
            together(prefill, "send", room=room, pages=near, tokens=tokens, chunk=256)
            for kind, text, _ in together(decode, "wait", room=room, half="TARGET", instance="prefill"):
                assert kind == "DONE", text
            for kind, text, _ in together(prefill, "wait", room=room, half="SOURCE", instance="prefill"):
                assert kind == "DONE", text
            moved.append((room % 97, tokens, far))
        assert together(decode, "differences", sequences=moved) == [0] * target_tp
        assert together(decode, "differences", sequences=moved[:1]) != [0] * target_tp
        together([*prefill, *decode], "unregister")
