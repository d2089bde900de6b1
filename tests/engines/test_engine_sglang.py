"""Tests the SGLang connector's reaction to SGLang's calls, with a fake SGLang and a fake agent: when a state is final."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import stand_in_sglang as fake
import torch
from fake_agent import WAIT_S, FakeAgent
from scene import DONE, FAILED, RELEASED, event
from stand_in_sglang import (
    AUX_LENGTHS,
    DIM,
    ENDPOINT,
    HANDOVER,
    HEADS,
    LAYERS,
    LAYOUT,
    PAGE_TOKENS,
    ROOM,
    KVPoll,
    installed,
)

from longshore_client import ArgumentError, Endpoint, Half, Reason
from longshore_client.arguments import CacheTokens
from longshore_engines import sglang_pools
from longshore_engines.asks import TAG, VERSION, Ask, Decline, FirstToken, Grant, Left, frames_of, message_of, own_key
from longshore_engines.handover import Prompt, packed_handover
from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.engine_messages import (
    ENGINE_PROTOCOL_VERSION,
    Cancel,
    EndpointUpdate,
    Hello,
    Offer,
    Receive,
    RegisterPool,
    Welcome,
)
from longshore_wire.layout import Parallel

ROWS = (b"12345678", b"abcd")


def wait_for(predicate):
    deadline_s = time.monotonic() + WAIT_S
    never = threading.Event()
    while not predicate():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        never.wait(0.01)


class Engine:
    """One rank with its pool, its rows on first tokens, and its connection to a fake agent."""

    def __init__(self, tmp_path, monkeypatch, role, greet=None):
        self.agent = FakeAgent(str(tmp_path / role), greet=greet)
        monkeypatch.setenv("LONGSHORE_ENGINE_SOCKET", self.agent.path)
        manager = importlib.import_module("longshore_engines.sglang_manager")
        self.pool = fake.Pool(4, torch)
        sglang_pools.share_early(self.pool)
        sglang_pools.record(self.pool)
        sglang_pools.tell(sglang_pools.Model(HEADS))
        self.rows = [(ctypes.c_char * (length * 2))() for length in AUX_LENGTHS]
        tensors = [*self.pool.k_buffer, *self.pool.v_buffer]
        args = SimpleNamespace(
            kv_data_ptrs=[tensor.data_ptr() for tensor in tensors],
            kv_cache_dtype_str="float32",
            page_size=PAGE_TOKENS,
            pp_rank=0,
            system_dp_rank=None,
            state_types=[],
            num_draft_entries=0,
            total_kv_head_num=HEADS,
            aux_data_ptrs=[ctypes.addressof(row) for row in self.rows],
            aux_item_lens=list(AUX_LENGTHS),
        )
        options = SimpleNamespace(
            speculative_algorithm=None,
            dp_size=1,
            disaggregation_decode_allocation_policy="early",
            enable_memory_saver=False,
            enable_hierarchical_cache=False,
        )
        self.manager = manager.LongshoreManager(args, fake.Mode(role), options)

    def heard(self, kind, count=1):
        self.agent.expect(lambda: len([each for each in self.agent.heard if isinstance(each, kind)]) >= count)
        return self.agent.of(kind)

    def sent(self, count=1):
        """Return the messages to peers, once there are so many."""
        wait_for(lambda: len(self.manager.sent) >= count)
        return [message_of(parts, (own_key(os.environ),)) for _, parts in self.manager.sent]

    def hears(self, message, keys=()):
        self.manager.heard.put(frames_of(message, keys))

    def stop(self):
        self.manager.halves.close()
        self.agent.stop()


@contextmanager
def engines_of(tmp_path, monkeypatch, *version, greet=None):
    """Yield what makes engines of a version of SGLang."""
    engines = []
    with installed(*version):

        def made(role):
            engines.append(Engine(tmp_path, monkeypatch, role, greet))
            return engines[-1]

        yield made
        for each in engines:
            each.stop()


@pytest.fixture
def make(tmp_path, monkeypatch):
    with engines_of(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def decode(make):
    return make("decode")


@pytest.fixture
def prefill(make):
    engine = make("prefill")
    instance = engine.manager.client.instance
    engine.agent.say(EndpointUpdate(Endpoint(instance, LAYOUT, ENDPOINT.ranks)))
    return engine


def request_of(*, parameters=None, n=1, ids=range(6), **changed):
    plain = {
        "sampling_params": SimpleNamespace(custom_params=parameters, n=n),
        "origin_input_ids": list(ids),
        "lora_id": None,
        "multimodal_inputs": None,
        "input_embeds": None,
        "extra_key": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**plain | changed)


REQUEST = request_of()
DIGEST = Prompt(6, range(6)).digest(6)


def told(receiver, request, rows=None):
    receiver.told(request, rows, lambda: 6)


def receiver_of(engine, *, prefix=0):
    module = importlib.import_module("longshore_engines.sglang_decode")
    receiver = module.LongshoreReceiver(engine.manager, "10.0.0.1:8998", ROOM)
    told(receiver, REQUEST)
    receiver.init(0)
    receiver.send_metadata(np.array([2, 3]), 1, None, decode_prefix_len=prefix)
    return receiver


def granted(engine, receiver):
    engine.hears(Grant(receiver._ask, ROOM, "tokens of float32", ENDPOINT))
    engine.heard(Receive)
    wait_for(lambda: engine.manager.client.is_open(ROOM, Half.TARGET, "prefill-0"))


def target(kind, **more):
    return event(kind, room=ROOM, half=Half.TARGET, **more)


def sender_of(engine):
    module = importlib.import_module("longshore_engines.sglang_prefill")
    sender = module.LongshoreSender(engine.manager, "10.0.0.1:8998", ROOM)
    sender.init(2, 1)
    return sender


def final(request):
    """Return the state once it is final."""
    wait_for(lambda: request.poll() in {KVPoll.Failed, KVPoll.Success})
    return request.poll()


def test_the_pool_is_registered_as_rows_of_tokens(decode):
    (pool,) = decode.heard(RegisterPool)
    row_bytes = HEADS * DIM * 4
    assert pool.geometry.page_count == 4
    assert [(each.page_stride, each.token_stride, each.head_stride) for each in pool.geometry.planes] == [
        (PAGE_TOKENS * row_bytes, row_bytes, DIM * 4)
    ] * (2 * LAYERS)


def test_a_pipeline_stage_tells_the_layers_of_all_stages(make):
    fake.WORLD["parallel"] = fake.parallel(pp_size=2, pp_group=fake.Group([LAYERS + 1]))
    (hello,) = make("prefill").heard(Hello)
    assert hello.layout.model.layers == 2 * LAYERS + 1
    assert (hello.layout.parallel.pp, hello.layout.stage_layers) == (2, (LAYERS, LAYERS + 1))


def test_decode_asks_claims_and_is_done_when_pages_are_released_and_the_first_token_is_there(decode):
    receiver = receiver_of(decode)
    (ask,) = decode.sent()
    assert (ask.prompt, ask.ask) == (ROOM, receiver._ask)
    granted(decode, receiver)
    (claim,) = decode.heard(Receive)
    assert (claim.caches[0].first_token, claim.caches[0].end_token, claim.caches[0].page_count) == (0, 6, 2)
    decode.agent.say(target(DONE))
    wait_for(lambda: receiver.half.done)
    assert receiver.poll() == KVPoll.Transferring
    decode.agent.say(target(RELEASED))
    wait_for(lambda: receiver.half.ended)
    assert receiver.poll() == KVPoll.Transferring
    decode.hears(FirstToken(receiver._ask, ROWS))
    assert final(receiver) == KVPoll.Success
    assert tuple(row[length : 2 * length] for row, length in zip(decode.rows, AUX_LENGTHS, strict=True)) == ROWS


def test_a_prefix_that_decode_has_is_not_claimed(decode):
    receiver = receiver_of(decode, prefix=4)
    receiver._pages = [3]
    granted(decode, receiver)
    (claim,) = decode.heard(Receive)
    assert (claim.caches[0].first_token, claim.caches[0].end_token, claim.caches[0].page_count) == (4, 6, 1)


def test_an_abort_is_final_only_when_no_process_writes_the_pages(decode):
    receiver = receiver_of(decode)
    granted(decode, receiver)
    receiver.abort()
    decode.heard(Cancel)
    decode.agent.say(target(FAILED, reason=Reason.CANCELLED))
    assert isinstance(decode.sent(2)[1], Left)
    assert receiver.poll() == KVPoll.Transferring
    decode.agent.say(target(RELEASED))
    assert final(receiver) == KVPoll.Failed
    with pytest.raises(fake.TransferError, match="AbortReq"):
        receiver.failure_exception()


def test_pages_of_a_request_that_failed_at_another_rank_are_kept_until_this_rank_is_released(decode):
    receiver = receiver_of(decode)
    granted(decode, receiver)
    with pytest.raises(fake.TransferError):
        receiver.failure_exception()
    receiver.ensure_abort_notified(force_arm=True)
    decode.heard(Cancel)
    assert not decode.manager.is_abort_release_safe(ROOM, 1)
    decode.agent.say(target(FAILED, reason=Reason.CANCELLED))
    decode.agent.say(target(RELEASED))
    wait_for(lambda: decode.manager.is_abort_release_safe(ROOM, 1))
    decode.manager.clear_deferred_abort_state(ROOM)
    assert decode.manager._draining == {}


def test_a_first_token_that_comes_after_the_request_was_forgotten_is_not_written(decode):
    receiver = receiver_of(decode)
    receiver.abort()
    final(receiver)
    receiver.clear()
    decode.hears(FirstToken(receiver._ask, ROWS))
    decode.hears(Grant(receiver._ask, ROOM, "tokens of float32", ENDPOINT))
    wait_for(decode.manager.heard.empty)
    later = receiver_of(decode)
    granted(decode, later)
    assert [bytes(row) for row in decode.rows] == [bytes(len(row)) for row in decode.rows]
    assert len(decode.heard(Receive)) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Decline(0, "prefill: out of memory"), "out of memory"),
        (Grant(0, ROOM, "tokens of bfloat16", ENDPOINT), "data type of the KV cache"),
        (FirstToken(0, (b"short",)), "--disaggregation-enable-kv-checksum"),
    ],
)
def test_an_answer_that_decode_cannot_use_fails_the_request_with_the_reason(decode, answer, reason):
    receiver = receiver_of(decode)
    decode.hears(msgspec.structs.replace(answer, ask=receiver._ask))
    assert final(receiver) == KVPoll.Failed
    with pytest.raises(fake.TransferError) as caught:
        receiver.failure_exception()
    assert reason in str(caught.value)


def test_an_ask_without_an_answer_is_repeated_at_prefills_present_address(decode, monkeypatch):
    module = importlib.import_module("longshore_engines.sglang_decode")
    receiver = receiver_of(decode)
    decode.sent()
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.0)
    receiver.poll()
    first, again = decode.sent(2)[:2]
    assert first == again
    assert [address for address, _ in decode.manager.sent[:2]] == ["tcp://10.0.0.1:7000", "tcp://10.0.0.9:7009"]


def test_a_prompt_that_does_not_come_in_time_fails_with_the_name_of_the_limit(decode):
    receiver = receiver_of(decode)
    decode.manager.waiting_timeout = 0
    assert final(receiver) == KVPoll.Failed
    with pytest.raises(fake.TransferError, match="SGLANG_DISAGGREGATION_WAITING_TIMEOUT"):
        receiver.failure_exception()


def test_a_prefill_that_cannot_serve_fails_its_requests_and_not_the_engine(decode):
    assert decode.manager.try_ensure_parallel_info("10.0.0.1:8998") is False
    module = importlib.import_module("longshore_engines.sglang_decode")
    receiver = module.LongshoreReceiver(decode.manager, "10.0.0.1:8998", ROOM)
    receiver.abort()
    with pytest.raises(fake.TransferError, match="another kv_cache_dtype"):
        receiver.failure_exception()


def handed(engine, rows, *, handover=HANDOVER, wants_logprobs=False, top_logprobs=0, **changed):
    """Return a receiver whose request has a handover, after SGLang gave it pages."""
    parameters = {"longshore": packed_handover(handover), "first_token": 40, **changed}
    request = request_of(
        parameters=parameters,
        return_logprob=wants_logprobs,
        logprob=SimpleNamespace(top_logprobs_num=top_logprobs),
    )
    module = importlib.import_module("longshore_engines.sglang_decode")
    receiver = module.LongshoreReceiver(engine.manager, "10.0.0.5:8100", 99)
    told(receiver, request, rows)
    receiver.init(0)
    if receiver.poll() == KVPoll.WaitingForInput:
        receiver.send_metadata(np.array([2, 3]), 1, None, decode_prefix_len=0)
    return receiver


@pytest.mark.parametrize("prompt", [DIGEST, b""])
def test_a_handover_is_claimed_with_its_capability_and_the_digest_of_the_prompt_here(decode, prompt):
    handed(decode, fake.Rows(torch), handover=msgspec.structs.replace(HANDOVER, binding=Binding(prompt, b"capability")))
    (claim,) = decode.heard(Receive)
    assert claim.binding == Binding(DIGEST, b"capability")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"binding": Binding(Prompt(6, range(1, 7)).digest(6), b"capability")}, "the handover is of another prompt"),
        ({"tokens": 5}, "6 tokens here and 5 at prefill"),
    ],
)
def test_a_handover_of_another_prompt_leaves_its_room_to_the_request_whose_prompt_it_is(decode, changed, reason):
    receiver = handed(decode, fake.Rows(torch), handover=msgspec.structs.replace(HANDOVER, **changed))
    assert final(receiver) == KVPoll.Failed
    with pytest.raises(fake.TransferError, match=reason):
        receiver.failure_exception()
    handed(decode, fake.Rows(torch), handover=msgspec.structs.replace(HANDOVER, binding=Binding(DIGEST, b"capability")))
    (claim,) = decode.heard(Receive)
    assert (claim.binding.prompt, len(claim.caches[0].pages) > 0) == (DIGEST, True)


def test_both_sides_state_the_digest_of_the_prompt(prefill, decode):
    sender = sender_of(prefill)
    sender.told(REQUEST)
    sender.send(np.array([1, 2]), None, 6)
    (offer,) = prefill.heard(Offer)
    assert offer.binding == Binding(DIGEST, b"")
    receiver = receiver_of(decode)
    granted(decode, receiver)
    (claim,) = decode.heard(Receive)
    assert claim.binding == offer.binding


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_id": "a"},
        {"extra_key": "elastic_ep_size=2"},
        {"multimodal_inputs": object()},
        {"input_embeds": []},
        {"pd_rebootstrap_in_progress": True},
    ],
)
def test_a_prompt_of_which_the_other_engine_knows_other_names_has_no_digest(prefill, changed):
    sender = sender_of(prefill)
    sender.told(request_of(**changed))
    sender.send(np.array([1, 2]), None, 6)
    assert [offer.binding for offer in prefill.heard(Offer)] == [UNBOUND]


def test_prompts_of_equal_tokens_and_another_salt_have_another_digest(prefill):
    module = importlib.import_module("longshore_engines.sglang_prefill")
    found = {module.digest_of(request_of(**each)) for each in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})}
    assert len(found) == 3 and b"" not in found


@pytest.mark.parametrize("room", [0, -1, 2**64, None, [5], "5", True])
def test_a_room_that_sglang_cannot_keep_fails_its_request_and_reaches_no_tensor_of_sglangs(prefill, room):
    module = importlib.import_module("longshore_engines.sglang_prefill")
    sender = module.LongshoreSender(prefill.manager, "10.0.0.1:8998", room)
    request = request_of(bootstrap_room=room)
    sender.told(request)
    assert (sender.poll(), request.bootstrap_room) == (KVPoll.Failed, 0)
    with pytest.raises(fake.TransferError, match=re.escape(f"bootstrap_room is {room}")):
        sender.failure_exception()


@pytest.mark.parametrize("room", [[5], "5", None, -1])
def test_a_room_that_sglang_cannot_keep_fails_its_request_at_decode(decode, room):
    module = importlib.import_module("longshore_engines.sglang_decode")
    receiver = module.LongshoreReceiver(decode.manager, "10.0.0.1:8998", room)
    request = request_of(bootstrap_room=room)
    told(receiver, request)
    receiver.init(0)
    assert final(receiver) == KVPoll.Failed
    assert isinstance(request.bootstrap_room, int)
    with pytest.raises(fake.TransferError, match=re.escape(f"bootstrap_room is {room}")):
        receiver.failure_exception()


def test_a_request_for_several_answers_fails_at_both_sides_before_anything_is_computed(prefill, decode):
    sender = sender_of(prefill)
    sender.told(request_of(n=2))
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(fake.TransferError, match="n is 2"):
        sender.failure_exception()
    module = importlib.import_module("longshore_engines.sglang_decode")
    receiver = module.LongshoreReceiver(decode.manager, "10.0.0.1:8998", ROOM)
    told(receiver, request_of(n=2))
    receiver.init(0)
    assert final(receiver) == KVPoll.Failed
    with pytest.raises(fake.TransferError, match="n is 2"):
        receiver.failure_exception()


def test_a_handover_in_the_request_is_claimed_without_asking_prefill_and_has_the_first_token(decode):
    rows = fake.Rows(torch)
    receiver = handed(decode, rows, wants_logprobs=True, first_logprob=-0.5)
    (claim,) = decode.heard(Receive)
    assert (claim.room, claim.caches[0].first_token, claim.caches[0].end_token, claim.caches[0].page_count) == (
        ROOM,
        0,
        6,
        2,
    )
    assert decode.manager.sent == []
    assert decode.manager.prefill_info_table["10.0.0.5:8100"].dp_size == 1
    wait_for(lambda: decode.manager.client.is_open(ROOM, Half.TARGET, "prefill-0"))
    decode.agent.say(target(DONE))
    wait_for(lambda: receiver.half.done)
    assert receiver.poll() == KVPoll.Transferring
    decode.agent.say(target(RELEASED))
    assert final(receiver) == KVPoll.Success
    assert (rows.output_ids[1, 0].item(), rows.bootstrap_room[1, 0].item()) == (40, 99)
    assert rows.output_token_logprobs_val[1, 0].item() == -0.5
    assert rows.cached_tokens[1].sum().item() == 0
    assert rows.output_ids[0].sum().item() == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"longshore": "%"}, "custom_params.longshore is no handover"),
        ({"first_token": None}, "custom_params.first_token is None"),
        ({"first_token": True}, "custom_params.first_token is True"),
        ({"first_token": 1 << 31}, "custom_params.first_token is 2147483648"),
        ({"wants_logprobs": True}, "custom_params.first_logprob is None"),
        ({"wants_logprobs": True, "first_logprob": 0.0, "top_logprobs": 2}, "top logprobs"),
        ({"wants_logprobs": True, "first_logprob": 1e308}, "custom_params.first_logprob is 1e+308"),
        ({"wants_logprobs": True, "first_logprob": 10**400}, "custom_params.first_logprob is 1000"),
        ({"wants_logprobs": True, "first_logprob": float("nan")}, "custom_params.first_logprob is nan"),
        ({"handover": msgspec.structs.replace(HANDOVER, content="FLASH_ATTN float32")}, "pages: tokens"),
    ],
)
def test_a_handover_that_decode_cannot_use_fails_the_request_with_the_reason(decode, changed, reason):
    receiver = handed(decode, fake.Rows(torch), **changed)
    assert final(receiver) == KVPoll.Failed
    with pytest.raises(fake.TransferError) as caught:
        receiver.failure_exception()
    assert reason in str(caught.value)
    # Prefill releases its pages, if the handover tells which: an empty claim says that decode needs none.
    empty = [] if "longshore" in changed else [(changed.get("handover", HANDOVER).room, 0)]
    assert [(claim.room, claim.caches[0].page_count) for claim in decode.heard(Receive, len(empty))] == empty


def test_prefill_offers_chunks_without_decode_and_hands_out_the_first_token_with_the_last(prefill):
    sender = sender_of(prefill)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.send(np.array([1]), None, num_kv_tokens=4)
    prefill.heard(Offer)
    prefill.hears(Ask(VERSION, 3, ROOM, "10.0.0.2", 7002))
    assert isinstance(prefill.sent()[0], Grant)
    prefill.rows[0][8:16], prefill.rows[1][4:8] = ROWS
    sender.send(np.array([2]), None, num_kv_tokens=2)
    offers = prefill.heard(Offer, 2)
    assert [(each.caches[0].first_token, each.caches[0].end_token, each.last) for each in offers] == [
        (0, 4, False),
        (4, 6, True),
    ]
    assert prefill.sent(2)[1] == FirstToken(3, ROWS)
    instance = prefill.manager.client.instance
    prefill.agent.say(event(DONE, room=ROOM, instance=instance))
    wait_for(lambda: sender.half.done)
    assert sender.poll() == KVPoll.Transferring
    prefill.agent.say(event(RELEASED, room=ROOM, instance=instance))
    assert final(sender) == KVPoll.Success
    sender.clear()
    assert prefill.manager.senders == {}


def test_a_prompt_that_decode_has_left_is_cancelled_at_prefill(prefill):
    sender = sender_of(prefill)
    sender.send(np.array([1]), None, num_kv_tokens=4)
    prefill.heard(Offer)
    prefill.hears(Ask(VERSION, 3, ROOM, "10.0.0.2", 7002))
    prefill.sent()
    prefill.hears(Left(ROOM, "10.0.0.2", 7002, "the client has left"))
    prefill.heard(Cancel)
    sender.send(np.array([2]), None, num_kv_tokens=2)
    assert len(prefill.agent.of(Offer)) == 1
    instance = prefill.manager.client.instance
    prefill.agent.say(event(FAILED, room=ROOM, instance=instance, reason=Reason.CANCELLED))
    prefill.agent.say(event(RELEASED, room=ROOM, instance=instance))
    assert final(sender) == KVPoll.Failed
    with pytest.raises(fake.TransferError, match="the client has left"):
        sender.failure_exception()


def test_a_prompt_that_no_decode_takes_is_cancelled_after_sglangs_limit(prefill):
    prefill.manager.bootstrap_timeout = 0
    sender = sender_of(prefill)
    sender.send(np.array([1, 2]), None, num_kv_tokens=6)
    prefill.heard(Offer)
    wait_for(lambda: sender.poll() == KVPoll.Transferring and prefill.agent.of(Cancel))
    assert "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT" in sender.half.failure


@pytest.mark.parametrize(
    ("limit_s", "reason"), [(1, "no decode engine took it within 1 s"), (300, "at a sibling rank")]
)
def test_a_sibling_whose_limit_passes_a_moment_earlier_leaves_the_reason(prefill, limit_s, reason):
    prefill.manager.bootstrap_timeout = limit_s
    sender = sender_of(prefill)
    sender.send(np.array([1, 2]), None, num_kv_tokens=6)
    prefill.heard(Offer)
    instance = prefill.manager.client.instance
    failed = event(FAILED, room=ROOM, instance=instance, reason=Reason.CANCELLED)
    prefill.agent.say(msgspec.structs.replace(failed, text="at a sibling rank: cancelled by its engine"))
    prefill.agent.say(event(RELEASED, room=ROOM, instance=instance))
    assert final(sender) == KVPoll.Failed
    with pytest.raises(fake.TransferError, match=reason):
        sender.failure_exception()


def test_messages_that_are_none_change_nothing(prefill):
    for frames in ([], [b"other"], [TAG], [TAG, b"\xc1"], [TAG, b"", b""]):
        prefill.manager.heard.put(frames)
    sender_of(prefill)
    prefill.hears(Ask(VERSION, 3, ROOM, "10.0.0.2", 7002))
    assert isinstance(prefill.sent()[0], Grant)


KEYS = (b"n" * 32, b"o" * 32)


def test_strangers_get_and_change_nothing_where_the_deployment_has_keys(tmp_path, monkeypatch):
    def greet(hello):
        return Welcome(ENGINE_PROTOCOL_VERSION, 1, "demo", 60_000_000_000, engine_keys=KEYS)

    with engines_of(tmp_path, monkeypatch, greet=greet) as made:
        prefill, decode = made("prefill"), made("decode")
        prefill.agent.say(EndpointUpdate(ENDPOINT))
        sender_of(prefill)
        receiver = receiver_of(decode)
        decode.sent()
        asked = message_of(decode.manager.sent[0][1], KEYS[1:])
        for keys in ((), (b"stranger",)):
            prefill.hears(msgspec.structs.replace(asked, host="10.0.0.66"), keys)
            decode.hears(Decline(receiver._ask, "a stranger says no"), keys)
        # The peers' agents have only the keys of the revision before.
        prefill.hears(asked, KEYS[1:])
        decode.hears(FirstToken(receiver._ask, ROWS), KEYS[1:])
        assert [(type(each), each.ask) for each in prefill.sent()] == [(Grant, asked.ask)]
        wait_for(lambda: receiver._has_first_token)
        assert receiver.failure == ""


def test_nobody_can_guess_an_ask(decode):
    asks = {decode.manager.new_ask(None) for _ in range(100)}
    assert len(asks) == 100
    assert max(asks) > 1 << 56


def test_nothing_is_hooked_for_a_release_that_was_not_tested_and_it_ends_if_it_was_chosen(monkeypatch):
    with installed("0.5.24"):
        plugin = importlib.import_module("longshore_engines.sglang")
        monkeypatch.setattr("sys.argv", ["server", "--disaggregation-transfer-backend", "nixl"])
        plugin.register()
        assert fake.Hooks.registered == []
        monkeypatch.setattr("sys.argv", ["server", "--disaggregation-transfer-backend", "longshore"])
        with pytest.raises(SystemExit, match=r"0\.5\.24 is not supported"):
            plugin.register()


def test_hooks_do_nothing_unless_the_backend_is_chosen():
    with installed():
        plugin = importlib.import_module("longshore_engines.sglang")
        plugin.register()
        assert fake.WORLD["choices"] == ["longshore"]
        assert len(fake.Hooks.registered) == 9
        assert fake.Backend("longshore").value == "longshore"
        with pytest.raises(ValueError, match="unknown"):
            fake.Backend("unknown")
        fake.WORLD["disagg"].disaggregation_transfer_backend = "nixl"
        kind = SimpleNamespace(name="MANAGER")
        assert plugin._kv_class(lambda *given: given, fake.Backend.NIXL, kind) == (fake.Backend.NIXL, kind)
        pool = fake.Pool(1, torch)
        plugin._shared(None, pool)
        assert not pool.k_buffer[0].is_shared()
        queue = SimpleNamespace(transfer_backend=fake.Backend.NIXL, deferred_kv_release_timeout=30.0)
        request = SimpleNamespace(kv_receiver=SimpleNamespace())
        plugin._receiver_made(request, queue)
        plugin._release_waits(None, queue)
        assert (vars(request.kv_receiver), queue.deferred_kv_release_timeout) == ({}, 30.0)
        ours = SimpleNamespace(
            transfer_backend=fake.Backend("longshore"), metadata_buffers=None, _rebootstrap_prefill_len=len
        )
        plugin._receiver_made(request, ours)
        heard = []
        receiver = SimpleNamespace(told=lambda *given: heard.append(given))
        plugin._receiver_made(SimpleNamespace(kv_receiver=receiver, req=[1, 2, 3]), ours)
        ((request, buffers, length),) = heard
        assert (request, buffers, length()) == ([1, 2, 3], None, 3)
        fake.WORLD["disagg"].disaggregation_transfer_backend = "longshore"
        plugin._shared(None, pool)
        plugin._release_waits(None, queue)
        assert pool.k_buffer[0].is_shared()
        assert queue.deferred_kv_release_timeout == float("inf")


def states_pool(tp, tp_rank):
    """The pool of states of one rank: 2 layers, 5 slots, 4 heads of q and k of 32 channels and 8 of v of 16."""
    channels = (2 * 4 * 32 + 8 * 16) // tp
    cache = SimpleNamespace(
        conv=[torch.zeros((2, 5, channels, 3), dtype=torch.bfloat16)], temporal=torch.zeros((2, 5, 8 // tp, 16, 32))
    )
    return SimpleNamespace(
        mamba_cache=cache, _slot_siblings=(), conv_shard_groups=[128, 128, 128], conv_slice_axis=0, tp_rank=tp_rank
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_states_are_caches_of_their_own_whose_sections_are_split_by_their_own_heads(tp):
    kv = fake.Pool(4, torch)
    pools = sglang_pools.Pools(kv, (states_pool(tp, 0),), PAGE_TOKENS)
    parallel = Parallel(tp=tp, tp_rank=0)
    shared = sglang_pools.shared_pools(pools, sglang_pools.Model(HEADS * tp), [[LAYERS]], parallel)
    for region in shared.regions:
        os.close(region)
    names = [each.name for each in shared.layout.caches]
    assert names == ["kv", "conv", "ssm"]
    _, conv, ssm = shared.layout.caches
    assert [(plane.heads, plane.row_bytes) for plane in conv.model.planes] == [(4, 192), (4, 192), (8, 96)]
    assert [(plane.heads, plane.row_bytes) for plane in ssm.model.planes] == [(8, 16 * 32 * 4)]
    assert {conv.page_size, ssm.page_size} == {2}
    assert "gated delta rules" in sglang_pools.content_of(pools)


def test_layers_with_a_window_are_a_cache_of_their_own_before_states():
    pools = sglang_pools.Pools(fake.Pool(4, torch), (states_pool(1, 0), fake.Pool(3, torch)), PAGE_TOKENS, 5)
    shared = sglang_pools.shared_pools(pools, sglang_pools.Model(HEADS), [[LAYERS, LAYERS]], Parallel())
    for region in shared.regions:
        os.close(region)
    assert [each.name for each in shared.layout.caches] == ["kv", "window", "conv", "ssm"]
    assert [each.page_count for each in shared.geometries] == [4, 3, 5, 5]
    assert sglang_pools.content_of(pools).count(";") == 1


def test_a_rank_with_one_kv_head_of_layers_of_unequal_heads_is_refused():
    pool = fake.Pool(4, torch)
    pool.k_buffer = pool.v_buffer = [torch.zeros(4 * PAGE_TOKENS, 1, 8)]
    pools = sglang_pools.Pools(pool, (), PAGE_TOKENS)
    model = sglang_pools.Model(1, {"num_key_value_heads": 1, "swa_num_key_value_heads": 2})
    with pytest.raises(ArgumentError, match="by swa_num_key_value_heads, 2"):
        sglang_pools.shared_pools(pools, model, [[1]], Parallel(tp=2))


@pytest.mark.parametrize(
    ("page_tokens", "prompt", "pages", "own", "first_token"),
    [
        # Decode's pages are larger than prefill's: its first page begins before what prefill has.
        (4, 14, [7, 8], [7, 8], 9),
        (16, 14, [7], [7], 9),
        # SGLang's scheduler counts one token more than layers read, for some models.
        (1, 14, [2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7], 9),
        # A prefix that decode has, up to a whole page, is in the window.
        (4, 14, [8], [8], 12),
        (4, 3, [7], [7], 0),
    ],
)
def test_a_window_begins_at_its_first_token_whatever_the_pages(page_tokens, prompt, pages, own, first_token):
    pools = sglang_pools.Pools(fake.Pool(4, torch), (fake.Pool(9, torch), states_pool(1, 0)), page_tokens, 5)
    window, conv, ssm = pools.state_tokens([np.array(pages), [np.array(3)]], prompt)
    assert window == CacheTokens(1, own, first_token, prompt)
    assert (conv, ssm) == (CacheTokens(2, (3,), 0, prompt), CacheTokens(3, (3,), 0, prompt))


def test_a_prompt_has_a_slot_of_both_parts_of_states():
    pools = sglang_pools.Pools(fake.Pool(4, torch), (states_pool(1, 0),))
    assert [
        (each.cache, each.pages, each.first_token, each.end_token) for each in pools.state_tokens([[np.array(3)]], 14)
    ] == [
        (1, (3,), 0, 14),
        (2, (3,), 0, 14),
    ]
    assert pools.state_tokens((), 14) == []
