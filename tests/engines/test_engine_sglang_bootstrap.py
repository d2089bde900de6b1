"""Tests what SGLang's bootstrap server tells a router: where the KV of a prompt will be, or why it can't say."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import threading
from asyncio import timeout
from types import SimpleNamespace

import pytest
import zmq
from stand_in_sglang import ENDPOINT, HANDOVER, ROOM, installed

from longshore_engines.asks import TAG, Ask, Decline, Grant, Left, frames_of, message_of, own_key
from longshore_engines.handover import handover_of


@pytest.fixture
def rank():
    """The socket of prefill's first rank, and its port."""
    with zmq.Context.instance().socket(zmq.PULL) as socket:
        yield socket, socket.bind_to_random_port("tcp://127.0.0.1")


def told_router(port, answer, *, dp_size=1, **query):
    """Return the status and the body of the bootstrap server's answer to a router."""
    with installed():
        module = importlib.import_module("longshore_engines.sglang_bootstrap")
        server = module.LongshoreBootstrapServer("127.0.0.1", 0)
        server.port, server.dp_size = port, dp_size
        replies = threading.Thread(target=answer or (lambda: None))
        replies.start()
        found = asyncio.run(server._handle_handover(SimpleNamespace(query=query)))
        replies.join()
        return found.status, json.loads(found.body)


def answering(socket, make):
    """Return a call that answers one ask, as prefill's first rank does, with what `make` returns for it."""

    def answer():
        keys = (own_key(os.environ),)
        ask = message_of(socket.recv_multipart(), keys)
        with zmq.Context.instance().socket(zmq.PUSH) as push:
            push.connect(f"tcp://{ask.host}:{ask.port}")
            push.send_multipart([TAG, b"\xc1"])
            push.send_multipart(frames_of(Decline(ask.ask, "a stranger says no"), ()))
            push.send_multipart(frames_of(make(ask), keys))

    return answer


def test_a_router_gets_the_handover_of_a_prompt_at_prefill(rank):
    socket, port = rank
    answer = answering(socket, lambda ask: Grant(ask.ask, ask.prompt, "tokens of float32", ENDPOINT))
    status, body = told_router(port, answer, room=str(ROOM), tokens="6")
    assert (status, body["do_remote_prefill"], body["do_remote_decode"]) == (200, True, False)
    assert handover_of(body) == HANDOVER


@pytest.mark.parametrize(
    ("dp_size", "query", "status", "text"),
    [
        (1, {"room": "7"}, 400, "tokens"),
        (1, {"room": "7", "tokens": "six"}, 400, "tokens"),
        (None, {"room": "7", "tokens": "6"}, 503, "not registered"),
        (2, {"room": "7", "tokens": "6"}, 501, "2 replicas"),
    ],
)
def test_a_router_that_cannot_be_told_gets_the_reason(dp_size, query, status, text):
    found, body = told_router(1, None, dp_size=dp_size, **query)
    assert found == status
    assert text in body["error"]["message"]


def test_a_prompt_that_prefill_declines_is_no_handover(rank):
    socket, port = rank
    answer = answering(socket, lambda ask: Decline(ask.ask, "prefill's agent is away"))
    status, body = told_router(port, answer, room=str(ROOM), tokens="6")
    assert (status, body["error"]["message"]) == (502, "prefill's agent is away")


def test_a_prompt_that_prefill_never_gets_is_left_after_the_limit(rank, monkeypatch):
    socket, port = rank
    heard = []

    def hear():
        heard.extend(message_of(socket.recv_multipart(), (own_key(os.environ),)) for _ in range(2))

    monkeypatch.setattr(asyncio, "timeout", lambda _limit_s: timeout(0.05))
    status, body = told_router(port, hear, room=str(ROOM), tokens="6")
    assert (status, [type(each) for each in heard]) == (502, [Ask, Left])
    assert "send it to prefill" in body["error"]["message"]
