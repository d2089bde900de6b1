"""Decode retracts requests whose KV was moved, and resumes them.

It does so because its pool is full, and keeps a copy of the KV; or because it is paused, as for new weights. Then prefill
computes the prompt and the tokens generated so far again, and decode gets all KV once more under the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang_engines import Nursery, body
from sglang_prompts import Oracle, random_prompt
from sglang_scene import DENSE, GATED, WINDOWED, Family, Scene, Side, at_once, check_nothing_is_lent, token_bytes
from tiny_model import TinyModel

PROMPTS = tuple(random_prompt(seed, 100) for seed in range(400, 406))
# Six requests end with 1,800 tokens.
NEW_TOKENS = 200
POOL = ("--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16")
FAMILIES = {"dense": DENSE, "windows": WINDOWED, "states": GATED}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return family.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone_longer(
    nursery: Nursery, family: Family, model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Oracle:
    return family.alone(nursery, model, tmp_path_factory.mktemp("plugins"), PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def scene(nursery: Nursery, family: Family, model: TinyModel, alone_longer: Oracle) -> Iterator[Scene]:
    with Scene(nursery, model, Side(2), Side(1, extra=POOL), environment=family.switches) as running:
        yield running


def test_a_request_that_is_retracted_after_its_kv_was_moved_ends_with_the_tokens_of_one_engine_alone(
    scene: Scene, alone_longer: Oracle
) -> None:
    answers = [found["output_ids"] for found in at_once(scene, PROMPTS, NEW_TOKENS)]
    assert "etract" in scene.decode.log_path.read_text(encoding="utf-8", errors="replace").split("ready to roll")[-1]
    assert answers == [alone_longer(prompt) for prompt in PROMPTS]
    check_nothing_is_lent(scene)


def test_a_request_that_prefill_computes_again_after_a_pause_ends_with_the_tokens_of_one_engine_alone(
    scene: Scene, alone_longer: Oracle, model: TinyModel, family: Family
) -> None:
    prompt, decode = PROMPTS[0], scene.decode.http
    content = body(prompt, NEW_TOKENS, **scene.routed())
    with ThreadPoolExecutor(1) as thread:
        computed = thread.submit(scene.prefill.post, content)
        parts = scene.decode.stream(content)
        first = next(parts)["output_ids"]
        before = scene.received_bytes()
        decode.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        decode.post("/continue_generation", json={}).raise_for_status()
        tokens = [part["output_ids"] for part in parts][-1]
        computed.result()
    assert len(first) < len(tokens)
    assert tokens == alone_longer(prompt)
    assert scene.received_bytes() - before >= (1 if family.has_state else len(prompt) * token_bytes(model))
    check_nothing_is_lent(scene)
