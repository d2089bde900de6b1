"""The engine of own_engine.py as two pods. Their environment gives their role and layout. See docs/how-to/engine-pods.md.

engine_pod.py prefill [LEADER] offers the pages that decode asks for, at PORT
engine_pod.py decode ADDRESS   asks prefill for a request each second, and compares every byte

In a group of a LeaderWorkerSet each pod of prefill has a part of the ranks. LEADER is the address of the group's first pod.
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

PORT, GROUP_PORT = 7000, 7001
PAUSE_S = 1.0
TP, PAGE_SIZE = (int(os.environ[f"LONGSHORE_ENGINE_{name}"]) for name in ("TENSOR_PARALLEL", "PAGE_SIZE"))
PAGES = list(range(-(-TOKENS // PAGE_SIZE)))
# A LeaderWorkerSet sets these; without one, all ranks are in this pod.
GROUP_SIZE, INDEX = (
    int(os.environ.get(f"LWS_{name}", alone)) for name, alone in (("GROUP_SIZE", 1), ("WORKER_INDEX", 0))
)


class Order(msgspec.Struct):
    """Decode's request: tokens of this room; without a room, prefill's endpoint."""

    room: int | None = None


def ranks_of(half: ls.Half, instance: str) -> list[Rank]:
    """Return this pod's ranks of an instance. The client finds the agent's socket in the environment."""
    own = range(TP * INDEX // GROUP_SIZE, TP * (INDEX + 1) // GROUP_SIZE)
    layouts = [ls.KVLayout(MODEL, ls.Parallel(tp=TP, tp_rank=rank), page_size=PAGE_SIZE) for rank in own]
    return [Rank(None, instance, layout, half, page_count=len(PAGES)) for layout in layouts]


def content(room: int) -> np.ndarray:
    """Return the cache of a request, which both pods can compute."""
    shape = (2, MODEL.layers, TOKENS, MODEL.kv_heads, MODEL.head_dim)
    return np.random.default_rng(room).random(shape, np.float32)


def run_prefill() -> None:
    """Answer decode engines, one after another, with the ranks of all pods of the group."""
    instance = ls.new_instance()
    workers = group(instance)
    ranks = ranks_of(ls.Half.SOURCE, instance)
    server = socket.create_server(("", PORT))
    print("prefill is registered", flush=True)
    while True:
        connection, _ = server.accept()
        with connection, connection.makefile("rwb") as stream:
            for line in stream:
                order = msgspec.json.decode(line, type=Order)
                if order.room is None:
                    tell(stream, ranks[0].client.endpoint(timeout_s=LIMIT_S))
                    continue
                for worker in workers:
                    tell(worker, order)
                ends = sent(ranks, order.room)
                for worker in workers:
                    ends += msgspec.json.decode(worker.readline())
                tell(stream, ends)


def sent(ranks: list[Rank], room: int) -> list[str]:
    """Offer a request at these ranks; return how the room ended at each."""
    prefill(ranks, room, PAGES, content(room), TOKENS)
    return [rank.ended(room, rank.client.instance).kind.name for rank in ranks]


def group(instance: str) -> list[BinaryIO]:
    """Wait for the other pods of the group and tell them the name that all of its ranks have; return their streams."""
    server = socket.create_server(("", GROUP_PORT))
    workers = [server.accept()[0].makefile("rwb") for _ in range(GROUP_SIZE - 1)]
    for worker in workers:
        tell(worker, instance)
    return workers


def run_worker(leader: str) -> None:
    """Offer what the group's first pod orders, until that pod ends."""
    with connected(leader, GROUP_PORT) as connection, connection.makefile("rwb") as stream:
        ranks = ranks_of(ls.Half.SOURCE, msgspec.json.decode(stream.readline()))
        print(f"prefill is registered in pod {INDEX}", flush=True)
        # The next order comes with the next request, whenever that is.
        connection.settimeout(None)
        for line in stream:
            tell(stream, sent(ranks, msgspec.json.decode(line, type=Order).room))


def tell(stream: BinaryIO, what: object) -> None:
    """Send one line."""
    stream.write(msgspec.json.encode(what) + b"\n")
    stream.flush()


def run_decode(address: str) -> None:
    """Move one request after another, until something fails."""
    ranks = ranks_of(ls.Half.TARGET, ls.new_instance())
    print("decode is registered", flush=True)
    with connected(address, PORT) as connection, connection.makefile("rb") as answers:
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


def connected(address: str, port: int) -> socket.socket:
    """Return a connection to prefill. Its pod may start later than this one, and its name is unknown until then."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=LIMIT_S)
        except OSError as error:
            if time.monotonic() > end_s:
                sys.exit(f"prefill at {address}:{port} was not reached within {LIMIT_S:g} s: {error}")
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
    if sys.argv[1] == "prefill" and INDEX:
        run_worker(sys.argv[2])
    elif sys.argv[1] == "prefill":
        run_prefill()
    else:
        run_decode(sys.argv[2])
