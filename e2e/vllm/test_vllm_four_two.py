"""Prefill TP4 and decode TP2, also with fewer KV heads than prefill ranks, which vLLM's NixlConnector refuses; data parallel ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from engines import DEVICES, Nursery
from families import TOKENS_EQUAL
from prompts import EVERY_PROMPT, NEW_TOKENS, PROMPTS, TELLING_TOKENS_MIN, Oracle, at_once
from scene import TRANSFER_LIMIT_S, Scene, Side, check_nothing_is_lent, generate
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


# Each rank answers requests by itself, and is an instance of its own.
PARALLEL = 2


@pytest.mark.family(
    "Qwen3 (K and V per head), data parallel", "each rank's heads, of one of several instances", TOKENS_EQUAL
)
@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param("wide", "several", id="TP2-DP2"), pytest.param("several", "wide", id="DP2-TP2")],
)
def test_tokens_equal_with_data_parallel_ranks_at_one_side(
    several: Scene, alone: Oracle, source: str, target: str
) -> None:
    engines = several.engines
    for engine in engines.values():
        engine.forget_prefixes()
    for is_zeroed in (False, True):
        if is_zeroed:
            several.zero.touch()
        telling = [prompt for prompt in EVERY_PROMPT if len(prompt) >= TELLING_TOKENS_MIN]
        answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), telling)
        equal = [len(prompt) for prompt, answer in zip(telling, answers, strict=True) if answer == alone(prompt)]
        assert equal == ([] if is_zeroed else [len(prompt) for prompt in telling])
        for engine in engines.values():
            engine.forget_prefixes()
    several.zero.unlink()
    # Every rank has taken part.
    instances = {
        worker["worker"].partition("/")[0]
        for worker in several.agents["several"].status()["workers"]
        if worker["engines"]
    }
    assert len(instances) == PARALLEL
    check_nothing_is_lent(several, TRANSFER_LIMIT_S)


@pytest.fixture(scope="module")
def several(nursery: Nursery, model: TinyModel) -> Iterator[Scene]:
    cores = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(cores[rank % len(cores)]) for rank in range(PARALLEL))
    side = Side(
        "several",
        1,
        extra=("--data-parallel-size", str(PARALLEL)),
        environment={"VLLM_CPU_OMP_THREADS_BIND": bind},
    )
    with Scene(nursery, model, [Side("wide", 2), side]) as running:
        yield running
