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


def started(
    stack: ExitStack, agent: GPUAgent, instance: str, role: str, tp: int, device: int, **changes: Any
) -> list[EngineProcess]:
    ranks = [stack.enter_context(EngineProcess()) for _ in range(tp)]
    for number, rank in enumerate(ranks):
        rank.begin("allocate", device=device, tp=tp, rank=number, **SHAPE | changes)
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


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize(
    ("source_tp", "target_tp", "latent", "page_size"),
    [
        (2, 1, False, 16),
        (1, 2, False, 16),
        (2, 2, False, 16),
        (2, 1, True, 16),
        (1, 2, True, 64),
        (2, 2, True, 1),
    ],
)
def test_pages_on_gpus_are_moved_staged_and_equal(
    source_tp: int,
    target_tp: int,
    latent: bool,
    page_size: int,
    index: bool,
    agents: list[GPUAgent],
    device_count: int,
) -> None:
    with ExitStack() as stack:
        prefill = started(stack, agents[0], "prefill", "SOURCE", source_tp, 0, latent=latent, index=index)
        far_pages = {"latent": latent, "index": index, "page_size": page_size, "page_count": 160 * 16 // page_size}
        decode = started(stack, agents[1], "decode", "TARGET", target_tp, device_count - 1, **far_pages)
        endpoint = prefill[0].ask("endpoint")
        moved = []
        for turn, tokens in enumerate((700, 1, 257)):
            room = next(ROOMS)
            near = [(7 * page + turn) % 160 for page in range(-(-tokens // 16))]
            far = [800 // page_size * turn + page for page in range(-(-tokens // page_size))]
            together(prefill, "fill", seed=room % 97, tokens=tokens, pages=near)
            together(decode, "receive", room=room, endpoint=endpoint, pages=far, tokens=tokens, digest=turn > 0)
            together(prefill, "send", room=room, pages=near, tokens=tokens, chunk=256)
            for kind, text, _ in together(decode, "wait", room=room, half="TARGET", instance="prefill"):
                assert kind == "DONE", text
            for kind, text, _ in together(prefill, "wait", room=room, half="SOURCE", instance="prefill"):
                assert kind == "DONE", text
            moved.append((room % 97, tokens, far))
        assert together(decode, "differences", sequences=moved) == [0] * target_tp
        assert together(decode, "differences", sequences=moved[:1]) != [0] * target_tp
        together([*prefill, *decode], "unregister")


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("digest", [False, True])
def test_states_on_gpus_are_moved_with_the_keys_and_values_of_their_room(
    source_tp: int, target_tp: int, agents: list[GPUAgent], device_count: int, *, digest: bool
) -> None:
    """A hybrid's request: KV in chunks, and the states of GDN and Mamba2 in slots of unequally many layers a page."""
    with ExitStack() as stack:
        prefill = started(stack, agents[0], "prefill", "SOURCE", source_tp, 0, state_layers=3)
        decode = started(stack, agents[1], "decode", "TARGET", target_tp, device_count - 1, state_layers=64)
        endpoint = prefill[0].ask("endpoint")
        moved = []
        for turn, tokens in enumerate((700, 1, 257)):
            room = next(ROOMS)
            pages = [(7 * page + turn) % 160 for page in range(-(-tokens // 16))]
            far = [50 * turn + page for page in range(-(-tokens // 16))]
            together(prefill, "fill", seed=room % 97, tokens=tokens, pages=pages, turn=turn)
            claim = {"pages": far, "tokens": tokens, "digest": digest, "turn": turn}
            together(decode, "receive", room=room, endpoint=endpoint, **claim)
            together(prefill, "send", room=room, pages=pages, tokens=tokens, chunk=256, turn=turn)
            for half, ranks in (("TARGET", decode), ("SOURCE", prefill)):
                for kind, text, _ in together(ranks, "wait", room=room, half=half, instance="prefill"):
                    assert kind == "DONE", text
            moved.append((room % 97, tokens, far))
        assert together(decode, "differences", sequences=moved) == [0] * target_tp
        assert all(together(decode, "differences", sequences=moved[:2]))
        together([*prefill, *decode], "unregister")
