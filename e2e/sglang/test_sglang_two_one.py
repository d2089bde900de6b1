"""Prefill TP2 and decode TP1 with the real SGLang: tokens and first logprobs equal those of one engine alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_engines import Nursery
from sglang_prompts import LOGPROB_ERROR_MAX, NEW_TOKENS, PROMPTS, TELLING_TOKENS_MIN, Oracle, answer_of
from sglang_scene import Scene, Side, at_once, check_nothing_is_lent
from tiny_model import TinyModel

pytestmark = [pytest.mark.shortest, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def scene(nursery: Nursery, model: TinyModel, alone: Oracle) -> Iterator[Scene]:
    with Scene(nursery, model, Side(2), Side(1)) as running:
        yield running


def test_tokens_and_first_logprobs_of_prompts_that_are_moved_at_once_equal_those_of_one_engine_alone(
    scene: Scene, alone: Oracle
) -> None:
    answers = [answer_of(found) for found in at_once(scene, PROMPTS, NEW_TOKENS, return_logprob=True)]
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in PROMPTS]
    errors = [abs(answer.first_logprob - alone.first_logprob(p)) for answer, p in zip(answers, PROMPTS, strict=True)]
    assert max(errors) < LOGPROB_ERROR_MAX
    check_nothing_is_lent(scene)


def test_with_the_moved_kv_zeroed_the_tokens_of_every_telling_prompt_differ(scene: Scene, alone: Oracle) -> None:
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    scene.zero.touch()
    try:
        answers = at_once(scene, telling, NEW_TOKENS)
    finally:
        scene.zero.unlink()
    same = [len(p) for p, answer in zip(telling, answers, strict=True) if answer["output_ids"] == alone(p)]
    assert same == []
