"""Clients that leave, and engines and agents that are killed, at every stage: a reason in the answer, no page lost.

Transfers take milliseconds. If one must be in progress, the workers of an agent are stopped until after the event.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import tiny_model
from controlplane.waiting import until
from sglang_engines import Engine, Nursery, body
from sglang_prompts import NEW_TOKENS, PROMPTS, SHARES_A_PREFIX, Oracle, random_prompt
from sglang_scene import (
    DENSE,
    GATED,
    WINDOWED,
    Family,
    Scene,
    Side,
    check_nothing_is_lent,
    held,
    rooms_open,
    token_bytes,
    tokens_in_use,
)
from tiny_model import TinyModel

from longshore_cli.local_agents import LocalAgentError

PROMPT, OTHER = PROMPTS[-1], PROMPTS[-2]
# Short, because tests wait for it; long enough that a peer on a busy machine is not considered dead.
PEER_TIMEOUT_S = 15
# SGLang's own limits, for the same reason. Prefill waits for decode, and decode for prefill.
LIMITS = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "40", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "40"}
# Above the product's own time limits, on a machine with other load.
END_LIMIT_S = 140.0

pytestmark = pytest.mark.timeout(900)


# Prefill has a radix cache, and sends a prefix from it before it computes the rest. That of states needs a GPU.
CACHED = ("--disable-overlap-schedule",)
PLAIN = {
    "tensor": (DENSE, Side(2, plain=CACHED)),
    "pipeline": (DENSE, Side(1, plain=CACHED, pp=2)),
}
KINDS = PLAIN | {"windows": (WINDOWED, Side(2, plain=CACHED)), "states": (GATED, Side(2))}
# For tests of what does not depend on the family.
of_dense_models = pytest.mark.parametrize("kind", PLAIN, indirect=True, scope="module")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Family, Side]:
    """The family, and the prefill engine."""
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model(kind: tuple[Family, Side], tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return kind[0].make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(
    nursery: Nursery, kind: tuple[Family, Side], model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Oracle:
    return kind[0].alone(nursery, model, tmp_path_factory.mktemp("plugins"), (PROMPT, OTHER, SHARES_A_PREFIX))


@pytest.fixture(scope="module")
def scene(nursery: Nursery, kind: tuple[Family, Side], model: TinyModel) -> Iterator[Scene]:
    family, prefill = kind
    settings, environment = {"peer_timeout_s": PEER_TIMEOUT_S}, {**LIMITS, **family.switches}
    with Scene(nursery, model, prefill, Side(1), agent_settings=settings, environment=environment) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(scene: Scene) -> None:
    """Restart killed engines and empty the radix cache, so that no test depends on another."""
    for engine in scene.engines.values():
        if not engine.processes():
            start_again(engine)
    flush(scene)


def flush(scene: Scene) -> None:
    until(lambda: scene.prefill.http.post("/flush_cache").is_success, "no request runs at prefill", END_LIMIT_S)


def start_again(engine: Engine) -> None:
    engine.kill()
    engine.start()
    engine.wait_ready()


def engine_count(scene: Scene, role: str) -> int:
    """Return the number of ranks that are registered with an agent; 0 while it does not answer."""
    try:
        return sum(len(worker["engines"]) for worker in scene.agents[role].status()["workers"])
    except LocalAgentError:
        return 0


@contextlib.contextmanager
def client(engine: Engine, content: Mapping[str, Any]) -> Iterator[None]:
    """A client that sends a request and disconnects at the end of the block, whether or not an answer has come."""
    data = json.dumps(content).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: e2e\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", engine.port)) as connection:
        connection.sendall(head.encode() + data)
        yield


@contextlib.contextmanager
def both_clients(scene: Scene, content: Mapping[str, Any]) -> Iterator[None]:
    with client(scene.prefill, content), client(scene.decode, content):
        yield


@contextlib.contextmanager
def asked(scene: Scene, *engines: Engine) -> Iterator[dict[str, Future[Any]]]:
    """A request at these engines, whose answers the test awaits."""
    content = body(PROMPT, NEW_TOKENS, **scene.routed())
    threads = ThreadPoolExecutor(len(engines))
    try:
        yield {engine.options.name: threads.submit(engine.post, content) for engine in engines}
    finally:
        threads.shutdown(wait=False)


def reason_of(answer: Future[Any]) -> str:
    with pytest.raises(httpx.HTTPError) as caught:
        answer.result(END_LIMIT_S)
    return str(caught.value)


def check_next_request(scene: Scene, alone: Oracle) -> None:
    def answers() -> bool:
        """SGLang's decode notices a new prefill by its heartbeats, and refuses requests until then."""
        try:
            return bool(scene.ask(OTHER, NEW_TOKENS)["output_ids"] == alone(OTHER))
        except httpx.HTTPStatusError as error:
            raise AssertionError(str(error)) from error

    until(answers, "the next request is answered", END_LIMIT_S)
    flush(scene)
    check_nothing_is_lent(scene, END_LIMIT_S)


def waits_at_decode(scene: Scene) -> Callable[[], bool]:
    return lambda: rooms_open(scene, "decode") > 0


@pytest.mark.parametrize("kind", [*PLAIN, "windows"], indirect=True, scope="module")
def test_a_prefix_of_prefills_radix_cache_is_moved_to_decode_which_does_not_have_it(
    scene: Scene, alone: Oracle, model: TinyModel, kind: tuple[Family, Side]
) -> None:
    assert scene.ask(OTHER, NEW_TOKENS)["output_ids"] == alone(OTHER)
    before = scene.received_bytes()
    answer = scene.ask(SHARES_A_PREFIX, NEW_TOKENS)
    assert answer["output_ids"] == alone(SHARES_A_PREFIX)
    assert answer["meta_info"]["cached_tokens"] > 0
    # Half of the layers of the other model have a window, with the token that is computed.
    shares = (1.0, 0.0) if kind[0] is DENSE else (0.5, 0.5)
    moved = (shares[0] * len(SHARES_A_PREFIX) + shares[1] * (tiny_model.WINDOW - 1)) * token_bytes(model)
    until(lambda: scene.received_bytes() - before == moved, f"{moved} bytes came")


def test_clients_that_leave_while_their_prompts_are_computed(scene: Scene, alone: Oracle) -> None:
    with contextlib.ExitStack() as clients:
        for number in range(6):
            content = body(random_prompt(300 + number, 2000), NEW_TOKENS, **scene.routed())
            clients.enter_context(both_clients(scene, content))
        until(lambda: tokens_in_use(scene.prefill) > 0, "prefill works on them")
    check_next_request(scene, alone)


def test_clients_that_leave_while_decode_waits_for_the_kv(scene: Scene, alone: Oracle) -> None:
    with held(scene, "prefill"), both_clients(scene, body(PROMPT, NEW_TOKENS, **scene.routed())):
        until(waits_at_decode(scene), "decode has claimed the room")
    check_next_request(scene, alone)


def test_clients_that_leave_while_decode_generates(scene: Scene, alone: Oracle) -> None:
    content = body(PROMPT, 1000, **scene.routed())
    with client(scene.prefill, content):
        parts = scene.decode.stream(content)
        first = next(parts)["output_ids"]
        assert first == alone(PROMPT)[: len(first)]
        parts.close()
    check_next_request(scene, alone)


@of_dense_models
def test_a_prompt_that_only_prefill_gets_is_given_up_after_sglangs_limit(scene: Scene, alone: Oracle) -> None:
    with asked(scene, scene.prefill) as answers:
        assert "no decode engine took it within 40 s" in reason_of(answers["prefill"])
    check_next_request(scene, alone)


@of_dense_models
def test_a_prompt_that_only_decode_gets_is_given_up_after_sglangs_limit(scene: Scene, alone: Oracle) -> None:
    with asked(scene, scene.decode) as answers:
        assert "the prompt did not come within 40 s" in reason_of(answers["decode"])
    check_next_request(scene, alone)


@of_dense_models
@pytest.mark.parametrize("room", [0, -1])
def test_a_room_that_sglang_cannot_keep_is_refused_by_name_at_both_sides(
    scene: Scene, alone: Oracle, room: int
) -> None:
    content = body(PROMPT, NEW_TOKENS, **scene.routed(room=room))
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(engine.post, content) for engine in scene.engines.values()]
        reasons = [reason_of(answer) for answer in answers]
    assert all(f"bootstrap_room is {room}" in reason for reason in reasons), reasons
    check_next_request(scene, alone)


@of_dense_models
def test_a_request_for_two_answers_is_refused_by_name_at_both_sides(scene: Scene, alone: Oracle) -> None:
    content = body(PROMPT, NEW_TOKENS, **scene.routed())
    content["sampling_params"]["n"] = 2
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(engine.post, content) for engine in scene.engines.values()]
        assert all("n is 2" in reason_of(answer) for answer in answers)
    check_next_request(scene, alone)


def test_a_decode_request_of_another_prompt_of_equal_length_gets_nothing_of_the_room(
    scene: Scene, alone: Oracle
) -> None:
    place, other = scene.routed(), random_prompt(900, len(PROMPT))
    with ThreadPoolExecutor(2) as threads:
        requests = ((scene.prefill, PROMPT), (scene.decode, other))
        answers = [threads.submit(engine.post, body(prompt, NEW_TOKENS, **place)) for engine, prompt in requests]
        assert all("PROMPT_MISMATCH" in reason_of(answer) for answer in answers)
    check_next_request(scene, alone)
    # The other prompt's KV is not in decode's radix cache under this one's tokens.
    assert scene.ask(PROMPT, NEW_TOKENS)["output_ids"] == alone(PROMPT)


def test_a_number_of_a_prompt_that_is_used_again_moves_the_new_prompt(scene: Scene, alone: Oracle) -> None:
    for prompt in (PROMPT, OTHER):
        content = body(prompt, NEW_TOKENS, **scene.routed(room=77))
        with ThreadPoolExecutor(2) as threads:
            prefill, decode = (threads.submit(engine.post, content) for engine in scene.engines.values())
            assert decode.result()["output_ids"] == alone(prompt)
            prefill.result()


def test_prefill_is_killed_while_its_kv_is_under_way(scene: Scene, alone: Oracle) -> None:
    with asked(scene, scene.prefill, scene.decode) as answers:
        with held(scene, "prefill"):
            until(waits_at_decode(scene), "decode has claimed the room")
            scene.prefill.kill()
        reason_of(answers["prefill"])
        assert "KVTransferError" in reason_of(answers["decode"])
    start_again(scene.prefill)
    check_next_request(scene, alone)


def test_prefill_is_killed_after_the_transfer_and_decode_goes_on(scene: Scene, alone: Oracle) -> None:
    content = body(PROMPT, 300, **scene.routed())
    with ThreadPoolExecutor(1) as thread:
        computed = thread.submit(scene.prefill.post, content)
        parts = scene.decode.stream(content)
        next(parts)
        computed.result()
        scene.prefill.kill()
        tokens = [part["output_ids"] for part in parts][-1]
    assert len(tokens) == 300
    assert tokens[:NEW_TOKENS] == alone(PROMPT)
    start_again(scene.prefill)
    check_next_request(scene, alone)


def test_decode_is_killed_and_prefill_gets_its_pages_back(scene: Scene, alone: Oracle) -> None:
    with asked(scene, scene.prefill, scene.decode) as answers:
        with held(scene, "prefill"):
            until(waits_at_decode(scene), "decode has claimed the room")
            scene.decode.kill()
        reason_of(answers["decode"])
        assert "KVTransferError" in reason_of(answers["prefill"])
    flush(scene)
    until(lambda: tokens_in_use(scene.prefill) == 0, "prefill has all its pages", END_LIMIT_S)
    start_again(scene.decode)
    check_next_request(scene, alone)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_agent_is_killed_while_kv_is_under_way_and_comes_back(scene: Scene, alone: Oracle, role: str) -> None:
    agent = scene.agents[role]
    with asked(scene, scene.prefill, scene.decode) as answers:
        with held(scene, "prefill"):
            until(waits_at_decode(scene), "decode has claimed the room")
            agent.kill()
        agent.start()
        ranks = scene.engines[role].options.tp
        until(lambda: engine_count(scene, role) == ranks, "the engine has found its new agent", END_LIMIT_S)
        # The engines report open rooms to the new agent, so the request may also succeed.
        if answers["decode"].exception(END_LIMIT_S) is None:
            assert answers["decode"].result()["output_ids"] == alone(PROMPT)
        else:
            assert "KVTransferError" in reason_of(answers["decode"])
        answers["prefill"].exception(END_LIMIT_S)
    check_next_request(scene, alone)
