"""The engine of own_engine.py as two pods. Their environment gives their role and layout. See docs/how-to/engine-pods.md.

engine_pod.py prefill          offers the pages that decode asks for, at PORT
engine_pod.py decode ADDRESS   asks prefill for a request each second, and compares every byte
"""

from __future__ import annotations

import os
import socket
import sys
import time
from functools import partial
from typing import BinaryIO

import msgspec
import numpy as np
from own_engine import LIMIT_S, MODEL, TOKENS, Rank, insist, prefill

import longshore_client as ls

PORT = 7000
PAUSE_S = 1.0
TP, PAGE_SIZE = (int(os.environ[f"LONGSHORE_ENGINE_{name}"]) for name in ("TENSOR_PARALLEL", "PAGE_SIZE"))
PAGES = list(range(-(-TOKENS // PAGE_SIZE)))


class Order(msgspec.Struct):
    """Decode's request: tokens of this room; without a room, prefill's endpoint."""

    room: int | None = None


def ranks_of(half: ls.Half) -> list[Rank]:
    """Return the ranks of a new instance. The client finds the agent's socket in the environment."""
    instance = ls.new_instance()
    layouts = [ls.KVLayout(MODEL, ls.Parallel(tp=TP, tp_rank=rank), page_size=PAGE_SIZE) for rank in range(TP)]
    return [Rank(None, instance, layout, half, page_count=len(PAGES)) for layout in layouts]


def content(room: int) -> np.ndarray:
    """Return the cache of a request, which both pods can compute."""
    shape = (2, MODEL.layers, TOKENS, MODEL.kv_heads, MODEL.head_dim)
    return np.random.default_rng(room).random(shape, np.float32)


def run_prefill() -> None:
    """Answer decode engines, one after another."""
    ranks = ranks_of(ls.Half.SOURCE)
    server = socket.create_server(("", PORT))
    print("prefill is registered", flush=True)
    while True:
        connection, _ = server.accept()
        with connection, connection.makefile("rwb") as stream:
            for line in stream:
                order = msgspec.json.decode(line, type=Order)
                if order.room is None:
                    answer = msgspec.json.encode(ranks[0].client.endpoint(timeout_s=LIMIT_S))
                else:
                    prefill(ranks, order.room, PAGES, content(order.room), TOKENS)
                    ends = [rank.ended(order.room, rank.client.instance).kind.name for rank in ranks]
                    answer = msgspec.json.encode(ends)
                stream.write(answer + b"\n")
                stream.flush()


def run_decode(address: str) -> None:
    """Move one request after another, until something fails."""
    ranks = ranks_of(ls.Half.TARGET)
    print("decode is registered", flush=True)
    with connected(address) as connection, connection.makefile("rb") as answers:
        ask = partial(asked, connection, answers)
        while True:
            room = time.time_ns()
            endpoint = msgspec.json.decode(ask(Order()), type=ls.Endpoint)
            for rank in ranks:
                insist(partial(rank.client.receive, room, endpoint, PAGES, 0, TOKENS))
            ask(Order(room))
            ends = [rank.ended(room, endpoint.instance) for rank in ranks]
            cache = content(room)
            parts = [(rank, slice(rank.layout.heads.start, rank.layout.heads.stop)) for rank in ranks]
            same = all(
                np.array_equal(rank.tokens(PAGES)[:, :, :TOKENS], cache[:, :, :, heads]) for rank, heads in parts
            )
            kinds = " ".join(end.kind.name for end in ends)
            print(
                f"{kinds}, {sum(end.bytes_moved for end in ends)} bytes, {'equal' if same else 'NOT EQUAL'}", flush=True
            )
            time.sleep(PAUSE_S)


def connected(address: str) -> socket.socket:
    """Return a connection to prefill. Its pod may start later than this one, and its name is unknown until then."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=LIMIT_S)
        except OSError as error:
            if time.monotonic() > end_s:
                sys.exit(f"prefill at {address}:{PORT} was not reached within {LIMIT_S:g} s: {error}")
        time.sleep(PAUSE_S)


def asked(connection: socket.socket, answers: BinaryIO, order: Order) -> bytes:
    """Return prefill's answer. If prefill has ended, end this program, which its pod starts again."""
    try:
        connection.sendall(msgspec.json.encode(order) + b"\n")
        answer = answers.readline()
    except OSError as error:
        sys.exit(f"prefill does not answer any more: {error}")
    if not answer.endswith(b"\n"):
        sys.exit("prefill does not answer any more: it has closed the connection")
    return answer


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        run_prefill()
    else:
        run_decode(sys.argv[2])
