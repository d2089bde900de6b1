"""Prefill TP2 and decode TP1, and the other way round, with the real vLLM: tokens equal those of one engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
import tiny_model
from controlplane.waiting import until
from engines import Nursery, tokens_of
from families import TOKENS_EQUAL
from prompts import (
    NEW_TOKENS,
    PROMPTS,
    SHARED_TOKENS,
    SHARES_A_PREFIX,
    TELLING_TOKENS_MIN,
    Oracle,
    at_once,
    random_prompt,
)
from scene import TRANSFER_LIMIT_S, Scene, Side, check_nothing_is_lent, generate, prefill
from tiny_model import TinyModel

from longshore_engines.handover import handover_of, packed_handover, parameters_for_decode
from longshore_wire.bindings import Binding

WIDE, SINGLE = "wide", "single"
DIRECTIONS = [
    pytest.param(WIDE, SINGLE, id="TP2-TP1", marks=pytest.mark.shortest),
    pytest.param(SINGLE, WIDE, id="TP1-TP2"),
]


@pytest.fixture(scope="module")
def scene(nursery: Nursery, model: TinyModel, alone: Oracle) -> Iterator[Scene]:
    with Scene(nursery, model, [Side(WIDE, 2), Side(SINGLE, 1)]) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(scene: Scene) -> None:
    """Empty the prefix caches, so that each test computes its own KV."""
    for engine in scene.engines.values():
        engine.forget_prefixes()


def rooms_done(scene: Scene, side: str) -> float:
    """Return the number of DONE claims of ranks at the agent of a side."""
    return scene.agents[side].metrics().total("longshore_rooms_total", half="target", outcome="done")


def loaded_bytes(scene: Scene, side: str) -> float:
    """Return the bytes of KV that an engine received into its blocks, by its own count."""
    return scene.engines[side].metrics().total("vllm:longshore_load_bytes_sum")


def external_tokens(scene: Scene, side: str) -> float:
    """Return the number of tokens that an engine received instead of computing them."""
    return scene.engines[side].metrics().total("vllm:external_prefix_cache_hits_total")


@pytest.mark.family("Qwen3 (K and V per head)", "each rank's heads", TOKENS_EQUAL)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_tokens_of_prompts_that_are_moved_at_once_equal_those_of_one_engine_alone(
    scene: Scene, alone: Oracle, source: str, target: str
) -> None:
    engines = scene.engines
    done, taken = rooms_done(scene, target), external_tokens(scene, target)
    answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), PROMPTS)
    assert dict(zip(map(len, PROMPTS), answers, strict=True)) == {len(prompt): alone(prompt) for prompt in PROMPTS}
    assert external_tokens(scene, target) - taken == sum(map(len, PROMPTS))
    expected = done + len(PROMPTS) * engines[target].options.tp
    until(lambda: rooms_done(scene, target) == expected, f"{expected} rooms are done at the agent")


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_with_the_moved_kv_zeroed_the_tokens_of_every_telling_prompt_differ(
    scene: Scene, alone: Oracle, source: str, target: str
) -> None:
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    taken = external_tokens(scene, target)
    scene.zero.touch()
    try:
        answers = at_once(
            lambda prompt: generate(scene.engines[source], scene.engines[target], prompt, NEW_TOKENS), telling
        )
    finally:
        scene.zero.unlink()
    # Zeroing does not affect tokens that decode had in its own prefix cache.
    assert external_tokens(scene, target) - taken == sum(map(len, telling))
    same = [len(prompt) for prompt, answer in zip(telling, answers, strict=True) if answer == alone(prompt)]
    assert same == []


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_of_a_prompt_whose_beginning_decode_has_only_the_rest_is_moved(
    scene: Scene, alone: Oracle, source: str, target: str
) -> None:
    first, second = PROMPTS[-2], SHARES_A_PREFIX
    block = scene.engines[target].options.block_tokens
    assert first[:SHARED_TOKENS] == second[:SHARED_TOKENS]
    assert generate(scene.engines[source], scene.engines[target], first, NEW_TOKENS) == alone(first)
    taken, moved = external_tokens(scene, target), loaded_bytes(scene, target)
    handed = prefill(scene.engines[source], second)
    assert tokens_of(scene.engines[target].complete(second, NEW_TOKENS, handed)) == alone(second)
    here = SHARED_TOKENS // block * block
    assert external_tokens(scene, target) - taken == len(second) - here
    whole_blocks = -(-len(second) // block) - here // block
    expected = moved + whole_blocks * block * bytes_of_a_token(scene)
    until(lambda: loaded_bytes(scene, target) == expected, f"{expected} bytes came")


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_a_handover_that_is_forged_or_of_another_prompt_costs_its_sender_the_request_and_nobody_else_anything(
    scene: Scene, alone: Oracle, source: str, target: str
) -> None:
    first, decode = PROMPTS[-2], scene.engines[target]
    second = random_prompt(101, len(first))
    expected = tokens_of(decode.complete(second, NEW_TOKENS))
    decode.forget_prefixes()
    handed = prefill(scene.engines[source], first)
    found = handover_of(handed)
    ranks = tuple(msgspec.structs.replace(each, address="slow.attacker.example:443") for each in found.endpoint.ranks)
    elsewhere = msgspec.structs.replace(found, endpoint=msgspec.structs.replace(found.endpoint, ranks=ranks))
    without = msgspec.structs.replace(found, binding=Binding(found.binding.prompt, bytes(16)))
    for prompt, forged in (
        (second, handed),
        (second, parameters_for_decode(elsewhere)),
        (first, parameters_for_decode(without)),
    ):
        with pytest.raises(httpx.HTTPStatusError) as caught:
            decode.complete(prompt, NEW_TOKENS, forged)
        assert caught.value.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    # Nothing of the first prompt is in the prefix cache, and its own request still gets its KV.
    assert tokens_of(decode.complete(second, NEW_TOKENS)) == expected
    taken = external_tokens(scene, target)
    assert tokens_of(decode.complete(first, NEW_TOKENS, handed)) == alone(first)
    assert external_tokens(scene, target) - taken == len(first)


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_a_prompt_that_its_router_gives_back_is_no_longer_lent(scene: Scene, source: str, target: str) -> None:
    engine, prompt = scene.engines[source], PROMPTS[-1]
    handed = prefill(engine, prompt)
    other = msgspec.structs.replace(handover_of(handed), binding=Binding(b"", bytes(16)))
    engine.complete(PROMPTS[0], 1, {"longshore_release": packed_handover(other)})
    assert scene.open_rooms() > 0
    engine.complete(PROMPTS[0], 1, {"longshore_release": handed["longshore"]})
    # Long before the time limit of a transfer.
    check_nothing_is_lent(scene, TRANSFER_LIMIT_S / 2)
    with pytest.raises(httpx.HTTPStatusError):
        scene.engines[target].complete(prompt, NEW_TOKENS, handed)
    check_nothing_is_lent(scene, TRANSFER_LIMIT_S / 2)


def test_prefixes_are_forgotten_once_every_block_lent_is_back(scene: Scene) -> None:
    wide, single = scene.engines[WIDE], scene.engines[SINGLE]
    cached, lent = PROMPTS[-2], PROMPTS[-1]
    generate(wide, single, cached, NEW_TOKENS)
    # Its blocks stay lent until the other engine has received them.
    handed = prefill(single, lent)
    with ThreadPoolExecutor(1) as thread:
        forgotten = thread.submit(single.forget_prefixes)
        wide.complete(lent, NEW_TOKENS, handed)
        forgotten.result()
    taken = external_tokens(scene, SINGLE)
    generate(wide, single, cached, NEW_TOKENS)
    assert external_tokens(scene, SINGLE) - taken == len(cached)


def bytes_of_a_token(scene: Scene) -> int:
    """K and V of one token in all layers and heads."""
    model = scene.engines[WIDE].options.model
    return 2 * tiny_model.LAYERS * model.kv_heads * tiny_model.HEAD_DIM * tiny_model.ELEMENT_BYTES
