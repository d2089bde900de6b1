"""Decode runs out of blocks: vLLM preempts requests whose KV was moved, and computes them again."""

from __future__ import annotations

import pytest
from engines import Nursery, tokens_of
from prompts import Oracle, at_once, random_prompt
from scene import TRANSFER_LIMIT_S, Scene, Side, check_nothing_is_lent, prefill
from tiny_model import TinyModel

# Four prompts fit into decode's blocks, but not together with their generated tokens.
PROMPTS = tuple(random_prompt(200 + number, 300) for number in range(4))
NEW_TOKENS = 120
CROWDED = ("--kv-cache-memory-bytes", str(6 << 20), "--max-model-len", "1024")


@pytest.mark.timeout(600)
def test_what_is_preempted_at_decode_is_computed_there_and_its_tokens_are_right(
    nursery: Nursery, model: TinyModel
) -> None:
    alone = Oracle(nursery, model, PROMPTS, NEW_TOKENS)
    with Scene(nursery, model, [Side("roomy", 2), Side("crowded", 1, extra=CROWDED)]) as scene:
        source, target = scene.engines["roomy"], scene.engines["crowded"]
        # Prefill all of them before the first decode request, so that decode has them concurrently.
        handed = [prefill(source, prompt) for prompt in PROMPTS]
        answers = at_once(lambda prompt, given: tokens_of(target.complete(prompt, NEW_TOKENS, given)), PROMPTS, handed)
        assert target.metrics().total("vllm:num_preemptions_total") > 0
        assert answers == [alone(prompt) for prompt in PROMPTS]
        check_nothing_is_lent(scene, TRANSFER_LIMIT_S)
