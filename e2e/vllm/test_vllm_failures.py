"""Kills engines and agents at every stage of a transfer. The request ends as the policy says, and the next one works.

Transfers take milliseconds. If one must be in progress, the workers of prefill's agent are stopped until after the kill.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from controlplane.waiting import until
from engines import Engine, Nursery, tokens_of
from prompts import NEW_TOKENS, PROMPTS, Family, Oracle
from scene import Scene, Side, generate, has_no_block_in_use, held, prefill, rooms_open

from longshore_cli.local_agents import LocalAgentError

LENIENT, STRICT = "lenient", "strict"
# Each engine is prefill in one case and decode in the other, so that both policies are tested.
DIRECTIONS = [pytest.param(LENIENT, STRICT, id="fail"), pytest.param(STRICT, LENIENT, id="recompute")]
PROMPT = PROMPTS[-1]
OTHER = PROMPTS[-2]
# Short, because tests wait for it; long enough that a peer on a busy machine is not considered dead.
PEER_TIMEOUT_S = 15
TRANSFER_LIMIT_S = 40.0
# Above the product's own time limits, on a machine with other load.
END_LIMIT_S = TRANSFER_LIMIT_S + 100.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def scene(nursery: Nursery, family: Family) -> Iterator[Scene]:
    sides = [Side(LENIENT, 2, policy="recompute", extra=family.extra), Side(STRICT, 1, extra=family.extra)]
    with Scene(nursery, family.model, sides, PEER_TIMEOUT_S, TRANSFER_LIMIT_S) as running:
        yield running


@pytest.fixture(scope="module")
def alone(family: Family) -> Oracle:
    return family.alone


@pytest.fixture(scope="module")
def moved_tokens(family: Family) -> int:
    """The tokens of the next request that move."""
    return len(OTHER) - family.held_back


@pytest.fixture(autouse=True)
def _fresh(scene: Scene) -> None:
    """Restart killed engines and empty the prefix caches, so that no test depends on another."""
    for engine in scene.engines.values():
        if not engine.processes():
            engine.kill()
            start_again(engine)
        engine.forget_prefixes()


def engine_count(scene: Scene, side: str) -> int:
    """Return the number of ranks that are registered with an agent; 0 while it does not answer."""
    try:
        return sum(len(worker["engines"]) for worker in scene.agents[side].status()["workers"])
    except LocalAgentError:
        return 0


@contextlib.contextmanager
def under_way(scene: Scene, source: str, target: str) -> Iterator[Future[list[int]]]:
    """A request whose decode waits for its KV. The bytes move at the end of the block."""
    handed = prefill(scene.engines[source], PROMPT)
    thread = ThreadPoolExecutor(1)
    try:
        with held(scene, source):
            asked = thread.submit(lambda: tokens_of(scene.engines[target].complete(PROMPT, NEW_TOKENS, handed)))
            until(lambda: rooms_open(scene, target) > 0, "decode has claimed the room")
            yield asked
    finally:
        thread.shutdown(wait=False)


def check_policy(scene: Scene, target: str, alone: Oracle, asked: Future[list[int]]) -> None:
    if scene.engines[target].options.transfer["kv_load_failure_policy"] == "recompute":
        assert asked.result(END_LIMIT_S) == alone(PROMPT)
    else:
        with pytest.raises(httpx.HTTPStatusError) as caught:
            asked.result(END_LIMIT_S)
        assert caught.value.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR


def check_next_request(scene: Scene, source: str, target: str, alone: Oracle, tokens: int) -> None:
    """Another prompt is moved, not computed again."""
    engine = scene.engines[target]

    def taken() -> float:
        return engine.metrics().total("vllm:external_prefix_cache_hits_total")

    before = taken()
    assert generate(scene.engines[source], engine, OTHER, NEW_TOKENS) == alone(OTHER)
    assert taken() - before == tokens


def start_again(engine: Engine) -> None:
    engine.start()
    engine.wait_ready()


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_prefill_is_killed_before_decode_asks_for_its_kv(
    scene: Scene, alone: Oracle, moved_tokens: int, source: str, target: str
) -> None:
    handed = prefill(scene.engines[source], PROMPT)
    scene.engines[source].kill()
    until(lambda: not engine_count(scene, source), "the agent has let go of the engine")
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(lambda: tokens_of(scene.engines[target].complete(PROMPT, NEW_TOKENS, handed)))
        check_policy(scene, target, alone, asked)
    start_again(scene.engines[source])
    check_next_request(scene, source, target, alone, moved_tokens)


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_prefill_is_killed_while_its_kv_is_under_way(
    scene: Scene, alone: Oracle, moved_tokens: int, source: str, target: str
) -> None:
    with under_way(scene, source, target) as asked:
        scene.engines[source].kill()
    # The worker maps the pages until it notices the death. A room that it finishes before that is complete.
    if asked.exception(END_LIMIT_S) is None:
        assert asked.result() == alone(PROMPT)
    else:
        check_policy(scene, target, alone, asked)
    start_again(scene.engines[source])
    check_next_request(scene, source, target, alone, moved_tokens)


def test_prefill_is_killed_after_the_transfer_and_decode_goes_on(
    scene: Scene, alone: Oracle, moved_tokens: int
) -> None:
    source, target = scene.engines[LENIENT], scene.engines[STRICT]
    parts = target.stream(PROMPT, NEW_TOKENS, prefill(source, PROMPT))
    tokens = tokens_of(next(parts))
    source.kill()
    for part in parts:
        if part["choices"]:
            tokens += tokens_of(part)
    assert tokens == alone(PROMPT)
    start_again(source)
    check_next_request(scene, LENIENT, STRICT, alone, moved_tokens)


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked", "never-asked"])
def test_decode_is_killed_and_prefill_gets_its_blocks_back(
    scene: Scene, alone: Oracle, moved_tokens: int, *, is_asked: bool
) -> None:
    source, target = LENIENT, STRICT
    if is_asked:
        with under_way(scene, source, target) as asked:
            scene.engines[target].kill()
        with pytest.raises(httpx.HTTPError):
            asked.result(END_LIMIT_S)
    else:
        prefill(scene.engines[source], PROMPT)
        scene.engines[target].kill()
    # The prefix cache is emptied only if no block is held.
    until(lambda: has_no_block_in_use(scene.engines[source]), "prefill holds no block any more", END_LIMIT_S)
    assert tokens_of(scene.engines[source].complete(PROMPT, NEW_TOKENS)) == alone(PROMPT)
    start_again(scene.engines[target])
    check_next_request(scene, source, target, alone, moved_tokens)


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_an_agent_is_killed_while_kv_is_under_way_and_comes_back(
    scene: Scene, alone: Oracle, moved_tokens: int, source: str, target: str, victim: str
) -> None:
    side = source if victim == "source" else target
    agent = scene.agents[side]
    with under_way(scene, source, target) as asked:
        agent.kill()
    agent.start()
    ranks = scene.engines[side].options.tp
    until(lambda: engine_count(scene, side) == ranks, "the engine has found its new agent", END_LIMIT_S)
    # The engines report open rooms to the new agent, so the request may also succeed.
    if asked.exception(END_LIMIT_S) is None:
        assert asked.result() == alone(PROMPT)
    else:
        check_policy(scene, target, alone, asked)
    check_next_request(scene, source, target, alone, moved_tokens)
