"""Families of models beyond K and V of equal layers, each with prefill TP2 and decode TP1, and the other way round."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import tiny_model
from controlplane.waiting import until
from engines import Engine, Nursery, Prompt, tokens_of
from prompts import AT_ONCE, NEW_TOKENS, PROMPTS, TELLING_TOKENS_MIN, Oracle, at_once, random_prompt
from scene import Scene, Side, check_nothing_is_lent, generate, prefill
from tiny_model import TinyModel

from longshore_engines.handover import handover_of

WIDE, SINGLE = "wide", "single"
DIRECTIONS = [pytest.param(WIDE, SINGLE, id="TP2-TP1"), pytest.param(SINGLE, WIDE, id="TP1-TP2")]
# Three times as many as an engine runs at once.
MANY = tuple(random_prompt(500 + number, 20 + 11 * number) for number in range(3 * AT_ONCE))

pytestmark = pytest.mark.timeout(600)


# -- sliding windows: vLLM keeps all tokens of such layers for a connector, in the one group of the others -----------------


@pytest.fixture(scope="module")
def windowed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, Oracle]]:
    model = tiny_model.make_windowed(tmp_path_factory.mktemp("model"), 4)
    alone = Oracle(nursery, model, (*PROMPTS, *MANY))
    with Scene(nursery, model, [Side(WIDE, 2), Side(SINGLE, 1)]) as running:
        yield running, alone


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_tokens_of_a_model_with_windows_equal_those_of_one_engine_alone(
    windowed: tuple[Scene, Oracle], source: str, target: str
) -> None:
    scene, alone = windowed
    engines = scene.engines
    for prompts in (PROMPTS, MANY):
        for engine in engines.values():
            engine.forget_prefixes()
        answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), prompts)
        assert [len(prompt) for prompt, answer in zip(prompts, answers, strict=True) if answer != alone(prompt)] == []
    for engine in engines.values():
        engine.forget_prefixes()
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    scene.zero.touch()
    try:
        answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), telling)
    finally:
        scene.zero.unlink()
    assert [len(prompt) for prompt, answer in zip(telling, answers, strict=True) if answer == alone(prompt)] == []
    check_nothing_is_lent(scene, 60)


# -- speculative decoding: by n-grams, which have no layers, and by a draft model, whose layers are a cache of their own ------

# A model that drafts for itself is always right, if it has its own KV of the prompt.
DRAFTED = 3


def speculative(model: TinyModel, method: str) -> Sequence[str]:
    config: dict[str, object] = {"method": method, "num_speculative_tokens": DRAFTED}
    config |= {"model": str(model.path)} if method == "draft_model" else {"prompt_lookup_max": 3}
    return ("--speculative-config", json.dumps(config))


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def drafting(
    request: pytest.FixtureRequest, nursery: Nursery, model: TinyModel, alone: Oracle
) -> Iterator[tuple[str, Scene]]:
    extra = speculative(model, request.param)
    with Scene(nursery, model, [Side(WIDE, 2, extra=extra), Side(SINGLE, 1, extra=extra)], digest=True) as running:
        yield request.param, running


def accepted_share(engine: Engine, work: Callable[[], object]) -> float:
    """Return the share of drafted tokens that an engine accepts during the work."""
    counts = []
    for call in (lambda: None, work):
        call()
        page = engine.metrics()
        counts.append([page.total(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("accepted", "draft")])
    (accepted, drafted), (accepted_after, drafted_after) = counts
    assert drafted_after > drafted
    return (accepted_after - accepted) / (drafted_after - drafted)


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_tokens_of_engines_that_draft_equal_those_of_one_alone_and_the_drafts_kv_is_moved_too(
    drafting: tuple[str, Scene], alone: Oracle, source: str, target: str
) -> None:
    method, scene = drafting
    engines = scene.engines

    def move(prompts: Sequence[Prompt]) -> None:
        for engine in engines.values():
            engine.forget_prefixes()
        answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), prompts)
        # Whatever a draft proposes, the model decides.
        assert dict(zip(map(len, prompts), answers, strict=True)) == {len(prompt): alone(prompt) for prompt in prompts}

    def compute() -> None:
        (prompt,) = (prompt for prompt in PROMPTS if len(prompt) == 2 * engines[target].options.block_tokens + 1)
        engines[target].complete(prompt, NEW_TOKENS)

    moved = engines[target].metrics().total("vllm:longshore_load_bytes_sum")
    share = accepted_share(engines[target], lambda: move(PROMPTS)) if method == "draft_model" else move(PROMPTS)
    block = engines[target].options.block_tokens
    layers = tiny_model.LAYERS * (2 if method == "draft_model" else 1)
    block_bytes = block * layers * 2 * 4 * tiny_model.HEAD_DIM * tiny_model.ELEMENT_BYTES
    expected = moved + sum(-(-len(prompt) // block) for prompt in PROMPTS) * block_bytes
    until(
        lambda: engines[target].metrics().total("vllm:longshore_load_bytes_sum") == expected, f"{expected} bytes came"
    )
    if method == "draft_model":
        # vLLM's first draft is wrong wherever it computes only the last token of a prompt, also after a hit of its own cache.
        compute()
        assert share == accepted_share(engines[target], compute)
        telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
        scene.zero_draft.touch()
        try:
            assert accepted_share(engines[target], lambda: move(telling)) < share / 2
        finally:
            scene.zero_draft.unlink()
    check_nothing_is_lent(scene, 60)


# -- MLA: engines of unequal TP on CPUs answer one prompt differently, also alone, so that the bytes are compared ------------


@pytest.fixture(scope="module")
def latent(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    model = tiny_model.make_latent(tmp_path_factory.mktemp("model"), has_yarn=False)
    # vLLM has no other blocks for latents on CPUs.
    with Scene(
        nursery, model, [Side(WIDE, 2, block_tokens=16), Side(SINGLE, 1, block_tokens=16)], digest=True
    ) as running:
        yield running


def tokens_kept(scene: Scene, kind: str, room: int, ranks: int) -> list[np.ndarray]:
    """Return the latents of a room's tokens, [layer, token, content], at each rank."""
    files = [scene.keep / f"{kind}-{room}-{rank}.npy" for rank in range(ranks)]
    until(lambda: all(file.exists() for file in files), f"room {room} is {kind} at {ranks} ranks")
    kept = [np.load(file)[:, :, 0] for file in files]
    return [each.reshape(each.shape[0], -1, each.shape[-1]) for each in kept]


@pytest.mark.parametrize(
    ("source", "target"), [pytest.param(WIDE, SINGLE, id="TP2-TP1", marks=pytest.mark.shortest), DIRECTIONS[1]]
)
def test_latents_reach_each_rank_of_decode_byte_for_byte(latent: Scene, source: str, target: str) -> None:
    engines = latent.engines
    for engine in engines.values():
        engine.forget_prefixes()
    latent.keep.mkdir()
    prompts = (*PROMPTS, *MANY)
    rooms: dict[int, int] = {}

    def move(prompt: Prompt) -> list[int]:
        handed = prefill(engines[source], prompt)
        rooms[handover_of(handed).room] = len(prompt)
        return tokens_of(engines[target].complete(prompt, NEW_TOKENS, handed))

    try:
        at_once(move, prompts)
        assert sorted(rooms.values()) == sorted(map(len, prompts))
        for room, length in rooms.items():
            (offered, *others) = tokens_kept(latent, "offered", room, engines[source].options.tp)
            received = tokens_kept(latent, "received", room, engines[target].options.tp)
            # Decode computes the last token of a prompt itself, and has room for it.
            assert offered[:, :length].any(axis=2).all()
            for other in (*others, *received):
                assert np.array_equal(other[:, :length], offered[:, :length])
    finally:
        shutil.rmtree(latent.keep)
    check_nothing_is_lent(latent, 60)


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_with_the_moved_latents_zeroed_answers_change(latent: Scene, source: str, target: str) -> None:
    engines = latent.engines
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    answers = []
    for is_zeroed in (False, True):
        for engine in engines.values():
            engine.forget_prefixes()
        if is_zeroed:
            latent.zero.touch()
        # One after the other, since answers also depend on what is computed in the same step.
        answers.append([generate(engines[source], engines[target], prompt, NEW_TOKENS) for prompt in telling])
    latent.zero.unlink()
    same = [len(prompt) for prompt, one, other in zip(telling, *answers, strict=True) if one == other]
    assert same == []
