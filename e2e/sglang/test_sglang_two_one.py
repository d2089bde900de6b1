"""Prefill TP2 and decode TP1 with the real SGLang: tokens and first logprobs equal those of one engine alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import zmq
from controlplane.waiting import until
from families import TOKENS_EQUAL
from open_ports import OpenPort, listening
from sglang_engines import CHUNK_TOKENS, Engine, Nursery, body
from sglang_prompts import LOGPROB_ERROR_MAX, LONG_PROMPT, NEW_TOKENS, PROMPTS, Oracle
from sglang_scene import Scene, Side, answers_at_once, check_nothing_is_lent, token_bytes, unchanged_by_zeroing
from tiny_model import TinyModel

from longshore_engines.asks import VERSION, Ask, Grant, frames_of, message_of

# Above the time in which prefill takes a request.
ANSWER_LIMIT_MS = 60_000
# Where the bootstrap server says where a rank listens.
RANK = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank={}&target_pp_rank=0"

pytestmark = [pytest.mark.shortest, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def scene(nursery: Nursery, model: TinyModel, alone: Oracle) -> Iterator[Scene]:
    with Scene(nursery, model, Side(2), Side(1)) as running:
        yield running


@pytest.mark.family("Qwen3 (K and V per head)", "each rank's heads", TOKENS_EQUAL, "TP2 → TP1")
def test_tokens_and_first_logprobs_of_prompts_that_are_moved_at_once_equal_those_of_one_engine_alone(
    scene: Scene, alone: Oracle
) -> None:
    answers = answers_at_once(scene, PROMPTS)
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in PROMPTS]
    assert alone.first_logprob_error(PROMPTS, answers) < LOGPROB_ERROR_MAX
    check_nothing_is_lent(scene)


def test_with_the_moved_kv_zeroed_the_tokens_of_every_telling_prompt_differ(scene: Scene, alone: Oracle) -> None:
    assert unchanged_by_zeroing(scene, alone) == []


def test_the_first_slab_leaves_before_the_last_chunk_is_computed(scene: Scene, alone: Oracle, model: TinyModel) -> None:
    before, gathered = scene.received_bytes(), scene.gathered_bytes()
    whole = len(LONG_PROMPT) * token_bytes(model)
    engine = scene.prefill.processes()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(scene.ask, LONG_PROMPT, NEW_TOKENS)
        until(lambda: scene.received_bytes() > before, "a slab has arrived")
        for pid in engine:
            os.kill(pid, signal.SIGSTOP)
        try:
            # Nothing more can be computed or offered. Only slabs of chunks that were offered before still arrive.
            until(lambda: scene.gathered_bytes() - gathered == scene.received_bytes() - before, "no slab is on its way")
            arrived = scene.received_bytes() - before
            assert 0 < arrived <= whole - CHUNK_TOKENS * token_bytes(model)
            assert not asked.done()
        finally:
            for pid in engine:
                os.kill(pid, signal.SIGCONT)
        assert asked.result()["output_ids"] == alone(LONG_PROMPT)
    assert scene.received_bytes() - before == whole


def test_a_client_that_streams_gets_the_same_tokens(scene: Scene, alone: Oracle) -> None:
    prompt = PROMPTS[-2]
    content = body(prompt, NEW_TOKENS, **scene.routed())
    with ThreadPoolExecutor(1) as thread:
        computed = thread.submit(scene.prefill.post, content)
        parts = list(scene.decode.stream(content))
        computed.result()
    assert parts[-1]["output_ids"] == alone(prompt)
    assert len(parts) > 1


def test_a_stranger_that_knows_the_number_of_a_prompt_is_not_told_where_it_is(scene: Scene, alone: Oracle) -> None:
    prompt, room = PROMPTS[-2], 4711
    rank = httpx.get(f"http://127.0.0.1:{scene.prefill.bootstrap_port}{RANK.format(0)}").raise_for_status().json()
    with zmq.Context() as context, context.socket(zmq.PULL) as hears, context.socket(zmq.PUSH) as says:
        port = hears.bind_to_random_port("tcp://127.0.0.1")
        says.connect(f"tcp://{rank['rank_ip']}:{rank['rank_port']}")
        with ThreadPoolExecutor(1) as thread:
            content = body(prompt, NEW_TOKENS, **scene.routed(room))
            computed = thread.submit(scene.prefill.post, content)
            for ask, keys in ((1, ()), (2, (b"guessed",)), (3, (scene.keys.engines,))):
                says.send_multipart(frames_of(Ask(VERSION, ask, room, "127.0.0.1", port), keys))
            # Answers come in the order of the asks.
            assert hears.poll(ANSWER_LIMIT_MS)
            answer = message_of(hears.recv_multipart(), (scene.keys.engines,))
            assert isinstance(answer, Grant)
            assert answer.ask == 3
            assert scene.decode.post(content)["output_ids"] == alone(prompt)
            computed.result()
    check_nothing_is_lent(scene)


def test_the_connectors_sockets_listen_at_the_engines_address_alone(scene: Scene) -> None:
    """See the ports in docs/security.md."""

    def ports(engine: Engine) -> set[OpenPort]:
        return {port for pid in engine.processes() for port in listening(pid)}

    address = f"http://127.0.0.1:{scene.prefill.bootstrap_port}"
    before = ports(scene.prefill)
    # The bootstrap server listens for answers once a router has asked for a handover.
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{address}/longshore/handover", params={"room": 4712, "tokens": 9}, timeout=1)
    opened = ports(scene.prefill) - before
    assert {port.address for port in opened} == {"127.0.0.1"}
    ranks = {httpx.get(f"{address}{RANK.format(rank)}").raise_for_status().json()["rank_port"] for rank in (0, 1)}
    of_ranks = {port for port in before if port.port in ranks}
    assert (len(of_ranks), {port.address for port in of_ranks}) == (2, {"127.0.0.1"})
