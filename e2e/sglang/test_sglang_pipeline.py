"""Pipeline stages with the real SGLang: two at prefill, then two at decode, and another tensor parallel size on the other side.

SGLang's own backends refuse a prefill engine whose stages are fewer than decode's. Failures are in `test_sglang_failures`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_engines import Nursery
from sglang_prompts import LOGPROB_ERROR_MAX, NEW_TOKENS, PROMPTS, TELLING_TOKENS_MIN, Oracle, answer_of
from sglang_scene import AT_ONCE, Scene, Side, at_once, check_nothing_is_lent
from tiny_model import TinyModel

PAIRS = {
    "prefill-pp2-decode-tp2": (Side(1, pp=2), Side(2, page_tokens=8)),
    "prefill-tp2-decode-pp2": (Side(2), Side(1, page_tokens=8, pp=2)),
}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=PAIRS)
def scene(request: pytest.FixtureRequest, nursery: Nursery, model: TinyModel, alone: Oracle) -> Iterator[Scene]:
    with Scene(nursery, model, *PAIRS[request.param]) as running:
        yield running


def test_tokens_and_first_logprobs_of_24_prompts_at_once_equal_those_of_one_engine_alone(
    scene: Scene, alone: Oracle
) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(AT_ONCE)]
    answers = [answer_of(found) for found in at_once(scene, prompts, NEW_TOKENS, return_logprob=True)]
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in prompts]
    errors = [abs(answer.first_logprob - alone.first_logprob(p)) for answer, p in zip(answers, prompts, strict=True)]
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
