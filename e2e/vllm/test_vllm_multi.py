"""The connector beside one that keeps KV on disk or in a host's memory, in vLLM's MultiConnector, in either order."""

from __future__ import annotations

import pytest
from controlplane.waiting import until
from engines import BLOCK_TOKENS, CHUNK_TOKENS, DEVICES, Nursery
from prompts import NEW_TOKENS, PROMPTS, Oracle
from scene import TRANSFER_LIMIT_S, Scene, Side, check_nothing_is_lent, generate
from tiny_model import TinyModel

OURS, DISK, HOST = "LongshoreConnector", "ExampleConnector", "OffloadingConnector"
# vLLM's ExampleConnector keeps the first chunk of a prompt alone, and fails when it loads a longer one.
WHOLE = [prompt for prompt in PROMPTS if BLOCK_TOKENS < len(prompt) <= CHUNK_TOKENS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("connectors", [(OURS, DISK), (DISK, OURS)], ids=["ours first", "ours last"])
def test_kv_moves_and_is_kept_on_disk_whichever_connector_is_first(
    nursery: Nursery, model: TinyModel, alone: Oracle, connectors: tuple[str, str]
) -> None:
    sides = [Side("first", 1, connectors=connectors), Side("second", 1, connectors=connectors)]
    with Scene(nursery, model, sides) as scene:
        source, target = scene.engines.values()
        for prompt in PROMPTS:
            assert generate(source, target, prompt, NEW_TOKENS) == alone(prompt)
        # Both have these prompts on disk: vLLM loads them from there, or asks prefill, as the first connector can.
        for engine in (source, target):
            engine.forget_prefixes()
        for prompt in WHOLE:
            assert generate(source, target, prompt, NEW_TOKENS) == alone(prompt)
        # vLLM's API servers looked the connector up when they got the first statistics.
        assert target.metrics().total("vllm:longshore_load_bytes_sum") > 0
        assert list(scene.disk("second").rglob("*.safetensors"))
        check_nothing_is_lent(scene, TRANSFER_LIMIT_S)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not DEVICES, reason="vLLM offloads the memory of GPUs alone")
@pytest.mark.parametrize("connectors", [(OURS, HOST), (HOST, OURS)], ids=["ours first", "ours last"])
def test_kv_moves_and_is_kept_in_the_hosts_memory_whichever_connector_is_first(
    nursery: Nursery, model: TinyModel, alone: Oracle, connectors: tuple[str, str]
) -> None:
    sides = [Side("near", 1, connectors=connectors), Side("far", 1, connectors=connectors)]
    with Scene(nursery, model, sides) as scene:
        source, target = scene.engines.values()
        for prompt in PROMPTS:
            assert generate(source, target, prompt, NEW_TOKENS) == alone(prompt)
        until(lambda: target.metrics().total("vllm:kv_offload_store_bytes_total") > 0, "the host has blocks")
        for engine in (source, target):
            engine.forget_prefixes()
        for prompt in PROMPTS:
            assert generate(source, target, prompt, NEW_TOKENS) == alone(prompt)
        assert target.metrics().total("vllm:longshore_load_bytes_sum") > 0
        # Where ours is last, vLLM asks the host first.
        assert connectors[0] == OURS or target.metrics().total("vllm:kv_offload_load_bytes_total") > 0
        check_nothing_is_lent(scene, TRANSFER_LIMIT_S)
