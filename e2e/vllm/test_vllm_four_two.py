"""Prefill TP4 and decode TP2, also with fewer KV heads than prefill ranks, which vLLM's NixlConnector refuses; replicas; stages."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import tiny_model
from engines import DEVICES, Nursery
from families import TOKENS_EQUAL
from prompts import EVERY_PROMPT, NEW_TOKENS, PROMPTS, TELLING_TOKENS_MIN, Oracle, at_once
from scene import TRANSFER_LIMIT_S, Scene, Side, check_nothing_is_lent, generate
from tiny_model import TinyModel

FOUR, TWO = "four", "two"

FOUR_GPUS = pytest.mark.skipif(0 < len(DEVICES) < 4, reason="needs four GPUs")


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


@FOUR_GPUS
@pytest.mark.timeout(600)
def test_tokens_equal_those_of_one_engine_alone(nursery: Nursery, model: TinyModel, alone: Oracle) -> None:
    with Scene(nursery, model, [Side(FOUR, 4), Side(TWO, 2)]) as scene:
        check_tokens(scene, alone)


@FOUR_GPUS
@pytest.mark.timeout(600)
def test_tokens_equal_when_prefill_ranks_hold_copies_of_heads(
    nursery: Nursery, narrow_model: TinyModel, narrow_alone: Oracle
) -> None:
    with Scene(nursery, narrow_model, [Side(FOUR, 4), Side(TWO, 2)]) as scene:
        check_tokens(scene, narrow_alone)


# -- ranks beside those of tensor parallelism: replicas, each an instance of its own, and stages, each with half of the layers ---

SEVERAL = 2
KINDS = [
    pytest.param(
        "data",
        marks=pytest.mark.family(
            "Qwen3 (K and V per head), data parallel",
            "each rank's heads, of one of several instances",
            TOKENS_EQUAL,
            "TP2 → DP2",
            "DP2 → TP2",
        ),
        id="dp2",
    ),
    pytest.param(
        "pipeline",
        marks=pytest.mark.family(
            "Qwen3 (K and V per head), pipeline parallel",
            "each rank's heads and layers",
            TOKENS_EQUAL,
            "TP2 → PP2",
            "PP2 → TP2",
        ),
        id="pp2",
    ),
    pytest.param(
        "pipeline of windows",
        marks=pytest.mark.family(
            "gpt-oss (sliding windows, sinks, experts), pipeline parallel",
            "K and V by layers, of windowed ones the end of the prompt",
            TOKENS_EQUAL,
            "TP2 → PP2",
            "PP2 → TP2",
        ),
        id="pp2-windows",
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def several(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, Oracle]]:
    kind, _, what = request.param.partition(" of ")
    if what:
        model = tiny_model.make_sinks(tmp_path_factory.mktemp("model"), 4)
        alone = Oracle(nursery, model)
    else:
        model, alone = request.getfixturevalue("model"), request.getfixturevalue("alone")
    cores = sorted(os.sched_getaffinity(0))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(SEVERAL))}
    # vLLM for CPUs makes the tensors between stages only where it captures graphs.
    environment |= {"E2E_VLLM_STAGES": "1"} if kind == "pipeline" else {}
    if DEVICES:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(DEVICES[-SEVERAL:])}
    extra = (f"--{kind}-parallel-size", str(SEVERAL))
    with Scene(nursery, model, [Side("wide", 2), Side("several", 1, extra=extra, environment=environment)]) as running:
        yield running, alone


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_source", [False, True], ids=["to", "from"])
def test_tokens_equal_with_replicas_or_stages_at_one_side(several: tuple[Scene, Oracle], *, is_source: bool) -> None:
    scene, alone = several
    engines = scene.engines
    source, target = (engines[name] for name in (("several", "wide") if is_source else ("wide", "several")))
    telling = [prompt for prompt in EVERY_PROMPT if len(prompt) >= TELLING_TOKENS_MIN]
    for is_zeroed in (False, True):
        for engine in engines.values():
            engine.forget_prefixes()
        if is_zeroed:
            scene.zero.touch()
        answers = at_once(lambda prompt: generate(source, target, prompt, NEW_TOKENS), telling)
        equal = [len(prompt) for prompt, answer in zip(telling, answers, strict=True) if answer == alone(prompt)]
        assert equal == ([] if is_zeroed else [len(prompt) for prompt in telling])
    scene.zero.unlink()
    workers = [worker for worker in scene.agents["several"].status()["workers"] if worker["engines"]]
    assert len(workers) == SEVERAL
    check_nothing_is_lent(scene, TRANSFER_LIMIT_S)
