"""Tests blocks of 32 tokens on one side and of 64 on the other. Opaque blocks are refused; blocks of tokens fit."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from engines import Nursery, tokens_of
from prompts import NEW_TOKENS, PROMPTS, Oracle, at_once
from scene import Scene, Side, check_nothing_is_lent, generate, prefill
from tiny_model import TinyModel

SMALL, LARGE, LENIENT = "small", "large", "lenient"
PROMPT = PROMPTS[-2]


@pytest.fixture(scope="module")
def scene(nursery: Nursery, model: TinyModel, alone: Oracle) -> Iterator[Scene]:
    sides = [Side(SMALL, 2), Side(LARGE, 1, block_tokens=64), Side(LENIENT, 1, policy="recompute", block_tokens=64)]
    with Scene(nursery, model, sides) as running:
        yield running


@pytest.mark.timeout(600)
def test_the_load_is_refused_by_the_name_of_the_field_and_the_request_ends_as_the_policy_says(
    scene: Scene, alone: Oracle
) -> None:
    with pytest.raises(httpx.HTTPStatusError):
        scene.engines[LARGE].complete(PROMPT, NEW_TOKENS, prefill(scene.engines[SMALL], PROMPT))
    assert "page_size" in scene.engines[LARGE].log()
    handed = prefill(scene.engines[SMALL], PROMPT)
    assert tokens_of(scene.engines[LENIENT].complete(PROMPT, NEW_TOKENS, handed)) == alone(PROMPT)
    assert tokens_of(scene.engines[LARGE].complete(PROMPT, NEW_TOKENS)) == alone(PROMPT)


@pytest.fixture(scope="module")
def by_tokens(nursery: Nursery, model: TinyModel, alone: Oracle) -> Iterator[Scene]:
    sides = [Side(SMALL, 2, pages="tokens"), Side(LARGE, 1, block_tokens=64, pages="tokens")]
    with Scene(nursery, model, sides, digest=True) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("source", "target"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_blocks_of_tokens_are_moved_between_engines_with_other_block_sizes(
    by_tokens: Scene, alone: Oracle, source: str, target: str
) -> None:
    near, far = by_tokens.engines[source], by_tokens.engines[target]
    found = at_once(lambda prompt: generate(near, far, prompt, NEW_TOKENS), PROMPTS)
    assert found == [alone(prompt) for prompt in PROMPTS]
    moved = far.metrics().total("vllm:external_prefix_cache_hits_total")
    assert moved > 0
    # vLLM transposes K on CPUs, and the digests of both sides are equal nevertheless.
    compared = by_tokens.agents[target].metrics()
    assert compared.total("longshore_digests_total", result="equal") > 0
    assert compared.total("longshore_digests_total", result="different") == 0
    check_nothing_is_lent(by_tokens, 60)
