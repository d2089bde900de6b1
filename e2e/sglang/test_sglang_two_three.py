"""Prefill TP2 and decode TP3 with the real SGLang: neither size divides the other. SGLang's own backends refuse this pair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_engines import Nursery
from sglang_prompts import NEW_TOKENS, PROMPTS, Oracle
from sglang_scene import Scene, Side, at_once, check_nothing_is_lent
from tiny_model import TinyModel

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def scene(nursery: Nursery, wide_model: TinyModel, wide_alone: Oracle) -> Iterator[Scene]:
    with Scene(nursery, wide_model, Side(2), Side(3)) as running:
        yield running


def test_tokens_of_prompts_that_are_moved_at_once_equal_those_of_one_engine_alone(
    scene: Scene, wide_alone: Oracle
) -> None:
    answers = [found["output_ids"] for found in at_once(scene, PROMPTS, NEW_TOKENS)]
    assert answers == [wide_alone(prompt) for prompt in PROMPTS]
    check_nothing_is_lent(scene)
