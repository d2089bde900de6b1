"""Tests the SGLang connector with what SGLang 0.5.16 lacks: it tells no tokens of a chunk, and frees failed pages at once."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import stand_in_sglang as fake
from scene import FAILED, RELEASED
from stand_in_sglang import OLD, ROOM, KVPoll, installed
from test_engine_sglang import engines_of, final, granted, receiver_of, sender_of, target, wait_for

from longshore_client import Reason
from longshore_engines.asks import Grant, Left
from longshore_wire.engine_messages import Cancel, Offer


@pytest.fixture
def make(tmp_path, monkeypatch):
    with engines_of(tmp_path, monkeypatch, OLD) as made:
        yield made


def test_a_hook_tells_senders_of_their_requests():
    with installed(OLD):
        plugin = importlib.import_module("longshore_engines.sglang")
        plugin.register()
        assert [each[:2] for each in fake.Hooks.registered[-2:]] == [
            ("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender", plugin._sender_made),
            ("sglang.srt.managers.scheduler.Scheduler.abort_request", plugin._aborted),
        ]
        told = []
        request = SimpleNamespace(disagg_kv_sender=SimpleNamespace(told=told.append))
        queue = SimpleNamespace(transfer_backend=fake.Backend.NIXL)
        plugin._sender_made(True, queue, request, 2)
        queue.transfer_backend = fake.Backend("longshore")
        plugin._sender_made(False, queue, request, 2)
        assert told == []
        plugin._sender_made(True, queue, request, 2)
        assert told == [request]
        # SGLang's own senders, of requests with which it tests its health, are not told.
        plugin._sender_made(True, queue, SimpleNamespace(disagg_kv_sender=object()), 2)


@pytest.mark.parametrize(("mode", "told"), [("prefill", ["r-1"]), ("decode", [])])
def test_a_hook_tells_senders_of_waiting_prompts_that_are_aborted(monkeypatch, mode, told):
    with installed(OLD):
        plugin = importlib.import_module("longshore_engines.sglang")
        monkeypatch.setitem(
            fake.WORLD,
            "disagg",
            SimpleNamespace(disaggregation_transfer_backend="longshore", disaggregation_mode=mode),
        )
        aborted = []
        waiting = [
            SimpleNamespace(rid=rid, disagg_kv_sender=SimpleNamespace(abort=lambda rid=rid: aborted.append(rid)))
            for rid in ("r-1", "s-2")
        ]
        waiting.append(SimpleNamespace(rid="r-3", disagg_kv_sender=None))
        scheduler = SimpleNamespace(disaggregation_mode=SimpleNamespace(value=mode), waiting_queue=waiting)
        plugin._aborted(scheduler, SimpleNamespace(abort_all=False, rid="r-"))
        assert aborted == told
        plugin._aborted(scheduler, SimpleNamespace(abort_all=True, rid=""))
        assert aborted[len(told) :] == (["r-1", "s-2"] if told else [])


def test_the_tokens_of_chunks_follow_from_their_pages_and_the_length_of_the_prompt(make):
    prefill = make("prefill")
    sender = sender_of(prefill)
    sender.prompt_tokens = 6
    sender.send(np.array([1]), None)
    sender.send(np.array([2]), None)
    offers = prefill.heard(Offer, 2)
    assert [(each.caches[0].first_token, each.caches[0].end_token, each.last) for each in offers] == [
        (0, 4, False),
        (4, 6, True),
    ]


def test_a_request_that_failed_at_another_rank_fails_here_only_when_its_pages_were_released(make):
    decode = make("decode")
    receiver = receiver_of(decode)
    granted(decode, receiver)
    failed = []

    def fail():
        with pytest.raises(fake.TransferError) as caught:
            receiver.failure_exception()
        failed.append(caught.value)

    thread = threading.Thread(target=fail)
    thread.start()
    decode.heard(Cancel)
    assert failed == []
    decode.agent.say(target(FAILED, reason=Reason.CANCELLED))
    assert failed == []
    decode.agent.say(target(RELEASED))
    thread.join()
    assert receiver.conclude_state == KVPoll.Failed
    assert "another rank" in str(failed[0])
    assert isinstance(decode.sent(2)[1], Left)
    assert decode.manager._draining == {}


def test_an_agent_that_does_not_release_pages_in_time_ends_the_engine(make, monkeypatch):
    decode = make("decode")
    module = importlib.import_module("longshore_engines.sglang_versions")
    killed = []
    monkeypatch.setattr(module, "RELEASE_LIMIT_S", 0.0)
    monkeypatch.setattr(module.os, "kill", lambda *arguments: killed.append(arguments))
    receiver = receiver_of(decode)
    granted(decode, receiver)
    with pytest.raises(SystemExit, match=f"room {ROOM}: the agent has not released its pages"):
        receiver.failure_exception()
    assert killed == [(os.getppid(), signal.SIGQUIT)]


def test_a_cleared_request_leaves_no_entry_at_its_prefill(make):
    decode = make("decode")
    receiver = receiver_of(decode)
    rooms = decode.manager.addr_to_rooms_tracker[receiver.bootstrap_addr]
    assert rooms == {ROOM}
    receiver.clear()
    assert rooms == set()


def test_an_abort_has_its_reason(make):
    decode = make("decode")
    receiver = receiver_of(decode)
    granted(decode, receiver)
    receiver.abort()
    decode.heard(Cancel)
    decode.agent.say(target(RELEASED))
    assert final(receiver) == KVPoll.Failed
    with pytest.raises(fake.TransferError, match="AbortReq") as caught:
        receiver.failure_exception()
    assert not caught.value.is_from_another_rank


def test_where_prefill_was_is_forgotten_before_it_is_asked_again(make, monkeypatch):
    decode = make("decode")
    module = importlib.import_module("longshore_engines.sglang_decode")
    receiver = receiver_of(decode)
    decode.sent()
    decode.manager.connection_pool.update({"10.0.0.1:8998_0_0_0": [], "10.0.0.11:8998_0_0_0": []})
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.0)
    receiver.poll()
    assert [address for address, _ in decode.manager.sent[:1]] == ["tcp://10.0.0.1:7000"]
    wait_for(lambda: [address for address, _ in decode.manager.sent][1:] == ["tcp://10.0.0.9:7009"])
    assert list(decode.manager.connection_pool) == ["10.0.0.11:8998_0_0_0"]
    decode.hears(Grant(receiver._ask, ROOM, "tokens of float32", fake.ENDPOINT))


def test_a_request_without_pages_has_sglangs_state(make):
    decode = make("decode")
    module = importlib.import_module("longshore_engines.sglang_decode")
    receiver = module.LongshoreReceiver(decode.manager, "10.0.0.1:8998", ROOM)
    assert receiver.poll() == KVPoll.Bootstrapping
    receiver.init(0)
    assert receiver.poll() == KVPoll.WaitingForInput
