"""Prefill TP4 and decode TP2, also with fewer KV heads than prefill ranks, which vLLM's NixlConnector refuses."""

from __future__ import annotations

import pytest
from engines import DEVICES, Nursery
from prompts import NEW_TOKENS, PROMPTS, TELLING_TOKENS_MIN, Oracle, at_once
from scene import Scene, Side, generate
from tiny_model import TinyModel

FOUR, TWO = "four", "two"

pytestmark = pytest.mark.skipif(0 < len(DEVICES) < 4, reason="needs four GPUs")


def check_tokens(scene: Scene, alone: Oracle) -> None:
    """With the transferred KV all tokens are right. With zeroed KV the tokens of every sensitive prompt are wrong."""
    source, target = scene.engines[FOUR], scene.engines[TWO]

    def answers(prompts) -> dict[int, list[int]]:
        for engine in (source, target):
            engine.forget_prefixes()
        found = at_once(lambda prompt: generate(source, target, prompt, NEW_TOKENS), prompts)
        return dict(zip(map(len, prompts), found, strict=True))

    assert answers(PROMPTS) == {len(prompt): alone(prompt) for prompt in PROMPTS}
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    scene.zero.touch()
    zeroed = answers(telling)
    assert [len(prompt) for prompt in telling if zeroed[len(prompt)] == alone(prompt)] == []


@pytest.mark.timeout(600)
def test_tokens_equal_those_of_one_engine_alone(nursery: Nursery, model: TinyModel, alone: Oracle) -> None:
    with Scene(nursery, model, [Side(FOUR, 4), Side(TWO, 2)]) as scene:
        check_tokens(scene, alone)


@pytest.mark.timeout(600)
def test_tokens_equal_when_prefill_ranks_hold_copies_of_heads(
    nursery: Nursery, narrow_model: TinyModel, narrow_alone: Oracle
) -> None:
    with Scene(nursery, narrow_model, [Side(FOUR, 4), Side(TWO, 2)]) as scene:
        check_tokens(scene, narrow_alone)
