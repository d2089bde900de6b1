"""Prefill TP1 with pages of 16 tokens, decode TP2 with pages of 8, over Mooncake, with SGLang's defaults switched on.

Both engines have a radix cache and overlap scheduling with computation. Clients come through sglang-router's mini LB, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest
import tiny_model
from controlplane.ports import free_port
from controlplane.processes import Process
from controlplane.waiting import until
from families import TOKENS_EQUAL
from sglang_engines import LOOPBACK, Nursery, body
from sglang_prompts import LOGPROB_ERROR_MAX, MANY_PROMPTS, NEW_TOKENS, PROMPTS, SHARED_TOKENS, SHARES_A_PREFIX, Oracle
from sglang_scene import (
    DENSE,
    WINDOWED,
    Family,
    Scene,
    Side,
    answers_at_once,
    check_nothing_is_lent,
    token_bytes,
    unchanged_by_zeroing,
)
from tiny_model import TinyModel

DECODE_PAGE_TOKENS = 8
ROUTER_LIMIT_S = 120.0
# With overlap scheduling SGLang records an event of a GPU before it sends a prefix from prefill's cache early.
NO_EARLY_SEND = {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            DENSE,
            marks=pytest.mark.family("Qwen3 (K and V per head)", "each rank's heads", TOKENS_EQUAL, "TP1 → TP2"),
            id="dense",
        ),
        pytest.param(
            WINDOWED,
            marks=pytest.mark.family(
                "Laguna (sliding windows)",
                "K and V, of windowed layers the end of the prompt",
                TOKENS_EQUAL,
                "TP1 → TP2",
            ),
            id="windows",
        ),
    ],
)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return family.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(nursery: Nursery, family: Family, model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return family.alone(nursery, model, tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="module")
def scene(nursery: Nursery, model: TinyModel, alone: Oracle) -> Iterator[Scene]:
    prefill = Side(1, plain=())
    decode = Side(2, DECODE_PAGE_TOKENS, ("--disaggregation-decode-enable-radix-cache",), plain=())
    mooncake = {"backend": "Mooncake"}
    with Scene(nursery, model, prefill, decode, agent_settings=mooncake, environment=NO_EARLY_SEND) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(scene: Scene) -> None:
    """Empty the radix caches, so that each test computes and moves its own KV. SGLang refuses while a request runs."""
    for engine in scene.engines.values():
        until(lambda engine=engine: engine.http.post("/flush_cache").is_success, "the radix cache is empty")


def test_tokens_and_first_logprobs_of_24_prompts_at_once_equal_those_of_one_engine_alone(
    scene: Scene, alone: Oracle
) -> None:
    answers = answers_at_once(scene, MANY_PROMPTS)
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in MANY_PROMPTS]
    assert alone.first_logprob_error(MANY_PROMPTS, answers) < LOGPROB_ERROR_MAX


def test_with_the_moved_kv_zeroed_the_tokens_of_every_telling_prompt_differ(scene: Scene, alone: Oracle) -> None:
    assert unchanged_by_zeroing(scene, alone) == []


def test_of_a_prompt_whose_beginning_decode_has_only_the_rest_is_moved(
    scene: Scene, alone: Oracle, model: TinyModel, family: Family
) -> None:
    first = PROMPTS[-2]
    assert first[:SHARED_TOKENS] == SHARES_A_PREFIX[:SHARED_TOKENS]
    assert scene.ask(first, NEW_TOKENS)["output_ids"] == alone(first)
    until(lambda: scene.open_rooms() == 0, "the first prompt is moved")
    before = scene.received_bytes()
    assert scene.ask(SHARES_A_PREFIX, NEW_TOKENS)["output_ids"] == alone(SHARES_A_PREFIX)
    until(lambda: scene.open_rooms() == 0, "the second prompt is moved")
    moved = scene.received_bytes() - before
    rest = len(SHARES_A_PREFIX) - SHARED_TOKENS // DECODE_PAGE_TOKENS * DECODE_PAGE_TOKENS
    if family is DENSE:
        assert moved == rest * token_bytes(model)
    else:
        # Half of the layers have a window. With these SGLang uses no prefix of the first prompt.
        assert moved <= (len(SHARES_A_PREFIX) + tiny_model.WINDOW - 1) * token_bytes(model) // 2


@pytest.fixture
def router(scene: Scene, nursery: Nursery) -> Iterator[str]:
    """The address of sglang-router's mini LB in front of both engines."""
    port = free_port()
    command = [
        *(nursery.venv / "bin" / "python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--mini-lb"),
        *("--prefill", scene.prefill.url, str(scene.prefill.bootstrap_port), "--decode", scene.decode.url),
        *("--host", LOOPBACK, "--port", str(port)),
    ]
    running = Process("mini-lb", command, nursery.directory, {**os.environ, "HF_HUB_OFFLINE": "1"})
    url = f"http://{LOOPBACK}:{port}"

    def answers() -> bool:
        try:
            return running.check() and httpx.get(url + "/health").status_code > 0
        except httpx.TransportError:
            return False

    try:
        until(answers, "the router listens", ROUTER_LIMIT_S)
        yield url
    finally:
        running.stop()


def test_clients_get_the_tokens_of_one_engine_through_sglangs_mini_lb(router: str, alone: Oracle) -> None:
    prompt = PROMPTS[-1]
    answer = httpx.post(f"{router}/generate", json=body(prompt, NEW_TOKENS), timeout=ROUTER_LIMIT_S)
    assert answer.json()["output_ids"] == alone(prompt)
    completion = {
        "model": "tiny",
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{router}/v1/completions", json=completion, timeout=ROUTER_LIMIT_S)
    assert answer.json()["choices"][0]["text"].split() == [f"w{token}" for token in alone(prompt)]


def test_all_pages_are_free_at_rest(scene: Scene) -> None:
    check_nothing_is_lent(scene)
