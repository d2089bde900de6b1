"""The connector beside one that keeps KV on disk or in a host's memory, in vLLM's MultiConnector, in either order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from controlplane.waiting import until
from engines import BLOCK_TOKENS, CHUNK_TOKENS, DEVICES, Nursery, Prompt
from prompts import NEW_TOKENS, PROMPTS, Oracle
from scene import TRANSFER_LIMIT_S, Scene, Side, check_nothing_is_lent, generate
from tiny_model import TinyModel

OURS, DISK, HOST = "LongshoreConnector", "ExampleConnector", "OffloadingConnector"
# vLLM's ExampleConnector keeps the first chunk of a prompt alone, and fails when it loads a longer one.
WHOLE = [prompt for prompt in PROMPTS if BLOCK_TOKENS < len(prompt) <= CHUNK_TOKENS]


def move_twice(scene: Scene, alone: Oracle, again: Sequence[Prompt], is_kept: Callable[[], object]) -> None:
    """Move all prompts; when they are kept, move some again that no engine has in its own cache any more."""
    source, target = scene.engines.values()
    for prompts in (PROMPTS, again):
        for engine in (source, target):
            engine.forget_prefixes()
        for prompt in prompts:
            assert generate(source, target, prompt, NEW_TOKENS) == alone(prompt)
        until(is_kept, "the other connector keeps KV")
    # vLLM's API servers looked the connector up when they got the first statistics.
    assert target.metrics().total("vllm:longshore_load_bytes_sum") > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("connectors", [(OURS, DISK), (DISK, OURS)], ids=["ours first", "ours last"])
def test_kv_moves_and_is_kept_on_disk_whichever_connector_is_first(
    nursery: Nursery, model: TinyModel, alone: Oracle, connectors: tuple[str, str]
) -> None:
    sides = [Side("first", 1, connectors=connectors), Side("second", 1, connectors=connectors)]
    with Scene(nursery, model, sides) as scene:
        # Both have these prompts on disk: vLLM loads them from there, or asks prefill, as the first connector can.
        move_twice(scene, alone, WHOLE, lambda: list(scene.disk("second").rglob("*.safetensors")))
        check_nothing_is_lent(scene, TRANSFER_LIMIT_S)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not DEVICES, reason="vLLM offloads the memory of GPUs alone")
@pytest.mark.parametrize("connectors", [(OURS, HOST), (HOST, OURS)], ids=["ours first", "ours last"])
def test_kv_moves_and_is_kept_in_the_hosts_memory_whichever_connector_is_first(
    nursery: Nursery, model: TinyModel, alone: Oracle, connectors: tuple[str, str]
) -> None:
    sides = [Side("near", 1, connectors=connectors), Side("far", 1, connectors=connectors)]
    with Scene(nursery, model, sides) as scene:
        metrics = scene.engines["far"].metrics
        move_twice(scene, alone, PROMPTS, lambda: metrics().total("vllm:kv_offload_store_bytes_total") > 0)
        # Where ours is last, vLLM asks the host first.
        assert connectors[0] == OURS or metrics().total("vllm:kv_offload_load_bytes_total") > 0
        check_nothing_is_lent(scene, TRANSFER_LIMIT_S)
