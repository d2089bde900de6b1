"""Pipeline stages with the real SGLang: two at prefill, then two at decode, and another tensor parallel size on the other side.

SGLang's own backends refuse a prefill engine whose stages are fewer than decode's. Failures are in `test_sglang_failures`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from families import TOKENS_EQUAL
from sglang_engines import Nursery
from sglang_prompts import LOGPROB_ERROR_MAX, MANY_PROMPTS, PROMPTS, Oracle
from sglang_scene import (
    DENSE,
    WINDOWED,
    Family,
    Scene,
    Side,
    answers_at_once,
    check_nothing_is_lent,
    unchanged_by_zeroing,
)
from tiny_model import TinyModel

PAIRS = {
    "prefill-pp2-decode-tp2": (Side(1, pp=2), Side(2, page_tokens=8)),
    "prefill-tp2-decode-pp2": (Side(2), Side(1, page_tokens=8, pp=2)),
}
ROWS = (
    pytest.mark.family("Qwen3 (K and V per head)", "each rank's heads and layers", TOKENS_EQUAL),
    pytest.mark.family(
        "Laguna (sliding windows), pipeline parallel", "K and V, of windowed layers the end of the prompt", TOKENS_EQUAL
    ),
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(
    scope="module",
    params=[pytest.param(DENSE, marks=ROWS[0], id="dense"), pytest.param(WINDOWED, marks=ROWS[1], id="windows")],
)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return family.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(nursery: Nursery, family: Family, model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return family.alone(nursery, model, tmp_path_factory.mktemp("plugins"), PROMPTS)


@pytest.fixture(scope="module", params=PAIRS)
def scene(request: pytest.FixtureRequest, nursery: Nursery, model: TinyModel, alone: Oracle) -> Iterator[Scene]:
    with Scene(nursery, model, *PAIRS[request.param]) as running:
        yield running


def test_tokens_and_first_logprobs_of_24_prompts_at_once_equal_those_of_one_engine_alone(
    scene: Scene, alone: Oracle
) -> None:
    answers = answers_at_once(scene, MANY_PROMPTS)
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in MANY_PROMPTS]
    assert alone.first_logprob_error(MANY_PROMPTS, answers) < LOGPROB_ERROR_MAX
    check_nothing_is_lent(scene)


def test_with_the_moved_kv_zeroed_the_tokens_of_every_telling_prompt_differ(
    scene: Scene, alone: Oracle, family: Family
) -> None:
    assert unchanged_by_zeroing(scene, alone) == []
    if family.has_state:
        assert unchanged_by_zeroing(scene, alone, "state") == []
