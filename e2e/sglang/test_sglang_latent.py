"""MLA with the real SGLang: whole pages of latents, from prefill TP2 with pages of 16 tokens to decode TP1 with pages of 8."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_model
from families import TOKENS_EQUAL
from sglang_engines import Nursery
from sglang_prompts import LOGPROB_ERROR_MAX, MANY_PROMPTS, PROMPTS, Oracle
from sglang_scene import (
    LATENT_VARIABLE,
    Scene,
    Side,
    answers_at_once,
    check_nothing_is_lent,
    unchanged_by_zeroing,
    write_plugins,
)
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


@pytest.mark.family("DeepSeek V2 (MLA)", "latents", TOKENS_EQUAL, "TP2 → TP1")
def test_tokens_and_first_logprobs_of_24_prompts_at_once_equal_those_of_one_engine_alone(
    scene: Scene, latent_alone: Oracle
) -> None:
    answers = answers_at_once(scene, MANY_PROMPTS)
    assert [answer.tokens for answer in answers] == [latent_alone(prompt) for prompt in MANY_PROMPTS]
    assert latent_alone.first_logprob_error(MANY_PROMPTS, answers) < LOGPROB_ERROR_MAX
    check_nothing_is_lent(scene)


def test_with_the_moved_latents_zeroed_the_tokens_of_every_telling_prompt_differ(
    scene: Scene, latent_alone: Oracle
) -> None:
    assert unchanged_by_zeroing(scene, latent_alone) == []
