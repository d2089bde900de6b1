"""Tests clients that disconnect at every stage of a request: no block stays lent, and the next request works.

vLLM treats a closed connection as an abort.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from controlplane.waiting import until
from engines import Engine, Nursery, client, tokens_of
from prompts import NEW_TOKENS, PROMPTS, Family, Oracle, random_prompt
from scene import TO_PREFILL, Scene, Side, check_nothing_is_lent, generate, held, prefill, rooms_open

WIDE, SINGLE = "wide", "single"
PROMPT, OTHER = PROMPTS[-1], PROMPTS[-2]
# After this time prefill takes back blocks that no decode engine has claimed.
TRANSFER_LIMIT_S = 40.0
END_LIMIT_S = TRANSFER_LIMIT_S + 100.0
LEAVING_COUNT = 8

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def scene(nursery: Nursery, family: Family) -> Iterator[Scene]:
    sides = [Side(WIDE, 2, extra=family.extra), Side(SINGLE, 1, extra=family.extra)]
    with Scene(nursery, family.model, sides, transfer_limit_s=TRANSFER_LIMIT_S) as running:
        yield running


@pytest.fixture(scope="module")
def alone(family: Family) -> Oracle:
    return family.alone


@pytest.fixture(autouse=True)
def _fresh(scene: Scene) -> None:
    """Empty the prefix caches, so that each test computes its own KV."""
    for engine in scene.engines.values():
        engine.forget_prefixes()


def running_count(engine: Engine) -> float:
    return engine.metrics().total("vllm:num_requests_running")


def check_next_request(scene: Scene, alone: Oracle) -> None:
    assert generate(scene.engines[WIDE], scene.engines[SINGLE], OTHER, NEW_TOKENS) == alone(OTHER)


def test_clients_that_leave_while_their_prompts_are_computed(scene: Scene, alone: Oracle) -> None:
    source = scene.engines[WIDE]
    # A single one would end before the test observes it.
    with contextlib.ExitStack() as clients:
        for number in range(LEAVING_COUNT):
            clients.enter_context(client(source, random_prompt(300 + number, 2000), 1, TO_PREFILL))
        until(lambda: running_count(source) > 0, "prefill works on them")
    check_nothing_is_lent(scene, END_LIMIT_S)
    check_next_request(scene, alone)


def test_a_client_that_leaves_between_prefill_and_decode(scene: Scene, alone: Oracle) -> None:
    prefill(scene.engines[WIDE], PROMPT)
    assert scene.open_rooms() > 0
    check_nothing_is_lent(scene, END_LIMIT_S)
    check_next_request(scene, alone)


def test_a_client_that_leaves_while_decode_waits_for_the_kv(scene: Scene, alone: Oracle) -> None:
    handed = prefill(scene.engines[WIDE], PROMPT)
    with held(scene, WIDE), client(scene.engines[SINGLE], PROMPT, NEW_TOKENS, handed):
        until(lambda: rooms_open(scene, SINGLE) > 0, "decode has claimed the room")
    check_nothing_is_lent(scene, END_LIMIT_S)
    check_next_request(scene, alone)


def test_a_client_that_leaves_while_decode_generates(scene: Scene, alone: Oracle) -> None:
    parts = scene.engines[SINGLE].stream(PROMPT, 1000, prefill(scene.engines[WIDE], PROMPT))
    # A busy engine sends several tokens at once.
    first = tokens_of(next(parts))
    assert first
    assert first == alone(PROMPT)[: len(first)]
    parts.close()
    check_nothing_is_lent(scene, END_LIMIT_S)
    check_next_request(scene, alone)
