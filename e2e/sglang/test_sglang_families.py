"""Families of models beyond K and V of equal layers with the real SGLang, each between engines of unequal TP and pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from families import TOKENS_EQUAL
from sglang_engines import Nursery
from sglang_prompts import MANY_PROMPTS, PROMPTS, Oracle
from sglang_scene import (
    DENSE,
    GATED,
    LATENT,
    WINDOWED,
    Family,
    Scene,
    Side,
    answers_at_once,
    check_nothing_is_lent,
    unchanged_by_zeroing,
)

pytestmark = pytest.mark.timeout(900)


class Pair(NamedTuple):
    """A kind of model, and the two sides."""

    family: Family
    prefill: Side
    decode: Side


# SGLang's radix cache of states needs a GPU.
WIDE, SINGLE = Side(2), Side(1, page_tokens=8)
# With overlap scheduling, for which SGLang would record a GPU's event.
OVERLAPPING = Side(1, page_tokens=8, plain=("--disable-radix-cache",))
OVERLAPPED = GATED._replace(switches=GATED.switches | {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"})
REPLICAS = Side(2, extra=("--attn-dp-size", "2"))
PAIRS = {
    "latents TP2-TP1": Pair(LATENT, WIDE, SINGLE),
    "states TP2-TP1": Pair(GATED, WIDE, SINGLE),
    "states TP1-TP2": Pair(OVERLAPPED, OVERLAPPING, Side(2, plain=OVERLAPPING.plain)),
    # Two replicas of attention, each of one rank.
    "states TP2-DP2": Pair(GATED, WIDE, REPLICAS),
    "windows TP2-TP1": Pair(WINDOWED, WIDE, SINGLE),
    "windows TP1-TP2": Pair(WINDOWED, SINGLE, WIDE),
    "dense TP2-DP2": Pair(DENSE, WIDE, REPLICAS),
    "dense DP2-TP1": Pair(DENSE, REPLICAS, SINGLE),
}


def _param(name: str) -> object:
    kind, _, pair = name.partition(" ")
    sizes = pair.replace("-", " → ")
    marks = {
        "latents": pytest.mark.family("DeepSeek V2 (MLA)", "latents", TOKENS_EQUAL, sizes),
        "dense": pytest.mark.family(
            "Qwen3 with data parallel attention", "K and V between the ranks of a replica", TOKENS_EQUAL, sizes
        ),
        "windows": pytest.mark.family(
            "Laguna (sliding windows)", "K and V, of windowed layers the end of the prompt", TOKENS_EQUAL, sizes
        ),
        "states": pytest.mark.family(
            "Qwen3.5 (gated delta nets and attention)",
            "K and V; conv states by q, k and v; recurrent states",
            TOKENS_EQUAL,
            sizes,
        ),
    }
    return pytest.param(name, marks=marks[kind], id=name)


@pytest.fixture(scope="module", params=list(map(_param, PAIRS)))
def family(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, Oracle, Family]]:
    """Engines of a family, the answers of one engine alone, and the family."""
    made, prefill, decode = PAIRS[request.param]
    model = made.make(tmp_path_factory.mktemp("model"))
    alone = made.alone(nursery, model, tmp_path_factory.mktemp("plugins"), PROMPTS)
    by_itself = {"staging": "Auto", "digest": "true"}
    with Scene(nursery, model, prefill, decode, agent_settings=by_itself, environment=made.switches) as running:
        yield running, alone, made


def test_tokens_and_first_logprobs_of_24_prompts_at_once_equal_those_of_one_engine_alone(
    family: tuple[Scene, Oracle, Family],
) -> None:
    scene, alone, made = family
    answers = answers_at_once(scene, MANY_PROMPTS)
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in MANY_PROMPTS]
    assert alone.first_logprob_error(MANY_PROMPTS, answers) < made.logprob_error_max
    check_nothing_is_lent(scene)


def test_with_what_moved_zeroed_the_tokens_of_every_telling_prompt_differ(family: tuple[Scene, Oracle, Family]) -> None:
    scene, alone, made = family
    assert unchanged_by_zeroing(scene, alone) == []
    if made.has_state:
        assert unchanged_by_zeroing(scene, alone, "state") == []
