"""Tests blocks of 32 tokens at prefill and of 64 at decode. On a CPU a block is opaque, so the pair is refused."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from engines import Nursery, tokens_of
from prompts import NEW_TOKENS, PROMPTS, Oracle
from scene import Scene, Side, prefill
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
