"""MLA with the real SGLang: whole pages of latents, from prefill TP2 with pages of 16 tokens to decode TP1 with pages of 8."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_model
from sglang_engines import Nursery
from sglang_prompts import LOGPROB_ERROR_MAX, NEW_TOKENS, PROMPTS, TELLING_TOKENS_MIN, Oracle, answer_of
from sglang_scene import AT_ONCE, LATENT_VARIABLE, Scene, Side, at_once, check_nothing_is_lent, write_plugins
from tiny_model import TinyModel

SWITCHED_ON = {LATENT_VARIABLE: "1"}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model.make_latent(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def latent_alone(nursery: Nursery, latent_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    plugins = write_plugins(tmp_path_factory.mktemp("plugins"))
    return Oracle(nursery, latent_model, PROMPTS, environment=SWITCHED_ON, paths=(plugins,))


@pytest.fixture(scope="module")
def scene(nursery: Nursery, latent_model: TinyModel, latent_alone: Oracle) -> Iterator[Scene]:
    decode, by_itself = Side(1, page_tokens=8), {"staging": "Auto"}
    with Scene(nursery, latent_model, Side(2), decode, agent_settings=by_itself, environment=SWITCHED_ON) as running:
        yield running


def test_tokens_and_first_logprobs_of_24_prompts_at_once_equal_those_of_one_engine_alone(
    scene: Scene, latent_alone: Oracle
) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(AT_ONCE)]
    answers = [answer_of(found) for found in at_once(scene, prompts, NEW_TOKENS, return_logprob=True)]
    assert [answer.tokens for answer in answers] == [latent_alone(prompt) for prompt in prompts]
    expected = [latent_alone.first_logprob(prompt) for prompt in prompts]
    errors = [abs(answer.first_logprob - logprob) for answer, logprob in zip(answers, expected, strict=True)]
    assert max(errors) < LOGPROB_ERROR_MAX
    check_nothing_is_lent(scene)


def test_with_the_moved_latents_zeroed_the_tokens_of_every_telling_prompt_differ(
    scene: Scene, latent_alone: Oracle
) -> None:
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    scene.zero.touch()
    try:
        answers = at_once(scene, telling, NEW_TOKENS)
    finally:
        scene.zero.unlink()
    same = [len(p) for p, found in zip(telling, answers, strict=True) if found["output_ids"] == latent_alone(p)]
    assert same == []
