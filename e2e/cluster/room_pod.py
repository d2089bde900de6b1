"""An engine without a model, for pods of the agent's image: moves rooms between pods and compares every byte.

    room_pod.py source SOCKET PORT TP                  prefill with pages of 16 tokens; serves one target at a time
    room_pod.py target SOCKET HOST:PORT ROOMS TOKENS   decode of TP1 with pages of 8 tokens; moves ROOMS rooms in sequence
    room_pod.py open SOCKET HOST:PORT                  decode of one room that prefill never sends, which stays open

Its pods get this file from a ConfigMap. It prints one JSON object a line for each room: its end, the time, and whether the
bytes are correct. Both sides derive the expected bytes from the room's number.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

import longshore_client as ls

T = TypeVar("T")

MODEL = ls.ModelShape(layers=4, kv_heads=4, head_dim=32, element_bytes=4)
SOURCE_PAGE, TARGET_PAGE = 16, 8
TOKENS_MAX = 16384
# A node that boots and an agent that starts take tens of seconds.
LIMIT_S = 150.0
_RETRY_S = 0.1
_ASK_LIMIT_S = 20.0


class Rank:
    """One rank with its pages, shared with the agent at `path`."""

    def __init__(self, path: str, instance: str, layout: ls.KVLayout, half: ls.Half) -> None:
        count = TOKENS_MAX // layout.page_size
        geometry = ls.pool_geometry(layout, count)
        descriptor, memory = ls.create_region(geometry.region_bytes[0])
        shape = (2, len(layout.layers), count, layout.page_size, len(layout.heads), MODEL.head_dim)
        self.pages = np.frombuffer(memory, np.float32).reshape(shape)
        self.layout, self.half = layout, half
        self.client = ls.connect(path, instance=instance, layout=layout, roles=(half,), timeout_s=LIMIT_S)
        self.client.register_pool(0, geometry, [descriptor])
        os.close(descriptor)

    def ended(self, room: int, instance: str) -> ls.RoomEvent:
        """Wait until a room has ended and its pages are released; return its end."""
        event = self.client.wait(room, self.half, instance, timeout_s=LIMIT_S)
        self.client.wait(room, self.half, instance, {ls.RoomEventKind.RELEASED}, timeout_s=LIMIT_S)
        return event


def insist(call: Callable[[], T]) -> T:
    """Repeat a call while the agent is busy or away."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return call()
        except (ls.Busy, ls.AgentLost) as error:
            if time.monotonic() > end_s:
                raise
            time.sleep(error.retry_after_s if isinstance(error, ls.Busy) else _RETRY_S)


def content(room: int, tokens: int) -> np.ndarray:
    """Return a room's cache, [K and V, layer, token, head, element]."""
    shape = (2, MODEL.layers, tokens, MODEL.kv_heads, MODEL.head_dim)
    return np.random.default_rng(room).random(shape, np.float32)


def say(**words: Any) -> None:
    """Print one object."""
    sys.stdout.write(json.dumps({"at": round(time.time(), 3)} | words) + "\n")
    sys.stdout.flush()


def source(path: str, port: int, tp: int) -> None:
    """Serve targets until the pod ends."""
    instance = f"prefill-{uuid.uuid4().hex[:6]}"
    layouts = [ls.KVLayout(MODEL, ls.Parallel(tp=tp, tp_rank=rank), SOURCE_PAGE) for rank in range(tp)]
    ranks = [Rank(path, instance, layout, ls.Half.SOURCE) for layout in layouts]
    say(instance=instance)
    with socket.create_server(("0.0.0.0", port)) as server:
        while True:
            connection, _ = server.accept()
            # A target whose node is off never closes its connection.
            connection.settimeout(LIMIT_S)
            with connection, connection.makefile("rw") as stream:
                try:
                    for line in stream:
                        stream.write(json.dumps(serve(ranks, instance, json.loads(line))) + "\n")
                        stream.flush()
                except OSError as error:
                    say(lost=str(error))


def serve(ranks: list[Rank], instance: str, ask: dict[str, int]) -> Any:
    """Answer one request: for the endpoint, to send a room, or for a room's end at the source."""
    if not ask:
        return msgspec.to_builtins(insist(partial(ranks[0].client.endpoint, LIMIT_S)))
    if "cancelled" in ask:
        room = ask["room"]
        if ask["cancelled"]:
            for rank in ranks:
                with suppress(ls.LongshoreError):
                    rank.client.cancel(room, ls.Half.SOURCE)
        return {"ends": [rank.ended(room, instance).kind.name for rank in ranks]}
    room, tokens = ask["room"], ask["tokens"]
    cache, page_count = content(room, tokens), -(-tokens // SOURCE_PAGE)
    pages = list(reversed(range(page_count)))
    for rank in ranks:
        heads = rank.layout.heads
        part = np.zeros((2, MODEL.layers, page_count * SOURCE_PAGE, len(heads), MODEL.head_dim), np.float32)
        part[:, :, :tokens] = cache[:, :, :, heads.start : heads.stop]
        rank.pages[:, :, pages] = part.reshape(2, MODEL.layers, page_count, SOURCE_PAGE, len(heads), MODEL.head_dim)
    for rank in ranks:
        # The offer is refused because the room has failed meanwhile. The target gets an event.
        with suppress(ls.RoomError):
            insist(partial(rank.client.send, room, pages, 0, tokens, last=True))
    return {}


def decode_rank(path: str) -> Rank:
    """Return the rank of a new instance for decode."""
    instance = f"decode-{uuid.uuid4().hex[:6]}"
    rank = Rank(path, instance, ls.KVLayout(MODEL, ls.Parallel(), TARGET_PAGE), ls.Half.TARGET)
    say(instance=instance)
    return rank


def rooms() -> Iterator[int]:
    """Yield numbers of rooms that no earlier process of the cluster has used."""
    return itertools.count(time.time_ns())


def open_room(path: str, peer: str) -> int:
    """Claim a room that prefill never sends; return after its end."""
    rank, room = decode_rank(path), next(rooms())
    with call(peer) as stream:
        endpoint = msgspec.convert(exchange(stream, {}), ls.Endpoint)
    # Large enough to be staged: pages that prefill writes itself are released only when prefill is known to have stopped.
    pages = list(range(TOKENS_MAX // TARGET_PAGE))
    insist(partial(rank.client.receive, room, endpoint, pages, 0, TOKENS_MAX))
    say(claimed=room)
    say_end(room, rank.ended(room, endpoint.instance))
    rank.client.close()
    return 0


def target(path: str, peer: str, room_count: int, tokens: int) -> int:
    """Move rooms; return 0 if all were DONE with the right bytes."""
    rank = decode_rank(path)
    bad, stream = 0, None
    for room in itertools.islice(rooms(), room_count):
        try:
            if stream is None:
                stream = call(peer)
            endpoint = msgspec.convert(exchange(stream, {}), ls.Endpoint)
            event = move(rank, stream, room, endpoint, tokens)
            failed = event.kind is not ls.RoomEventKind.DONE
            bad += failed
            stream.readline()
            # As a router does: tell prefill that its pages are no longer needed.
            ends = exchange(stream, {"room": room, "cancelled": int(failed)})
        except (OSError, ValueError) as error:
            say(lost=str(error))
            stream, bad = None, bad + 1
            continue
        say(source=ends)
    say(bad=bad)
    rank.client.close()
    return 1 if bad else 0


def move(rank: Rank, stream: Any, room: int, endpoint: ls.Endpoint, tokens: int) -> ls.RoomEvent:
    """Claim a room, ask for it, wait for its end and compare."""
    pages = list(range(-(-tokens // TARGET_PAGE)))
    rank.pages[:] = -1
    insist(partial(rank.client.receive, room, endpoint, pages, 0, tokens))
    stream.write(json.dumps({"room": room, "tokens": tokens}) + "\n")
    stream.flush()
    event = rank.ended(room, endpoint.instance)
    moved = rank.pages[:, :, pages].reshape(2, MODEL.layers, -1, MODEL.kv_heads, MODEL.head_dim)[:, :, :tokens]
    equal = bool(np.array_equal(moved, content(room, tokens)))
    say_end(room, event, equal=equal)
    return event


def say_end(room: int, event: ls.RoomEvent, **words: Any) -> None:
    """Print how a room ended."""
    end, reason = event.kind.name, event.reason.name
    say(room=room, end=end, reason=reason, text=event.text, bytes=event.bytes_moved, **words)


def exchange(stream: Any, ask: dict[str, int]) -> Any:
    """Send one request and return its answer."""
    stream.write(json.dumps(ask) + "\n")
    stream.flush()
    return json.loads(stream.readline())


def call(peer: str, limit_s: float = LIMIT_S, ask_limit_s: float = _ASK_LIMIT_S) -> Any:
    """Connect to the source at HOST:PORT; it may still be starting.

    Args:
        limit_s: for the connection.
        ask_limit_s: for each answer.
    """
    host, port = peer.rsplit(":", 1)
    end_s = time.monotonic() + limit_s
    while True:
        try:
            connection = socket.create_connection((host, int(port)), ask_limit_s)
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_RETRY_S)
        else:
            connection.settimeout(ask_limit_s)
            return connection.makefile("rw")


def main() -> int:
    """Run the source or the target, as the arguments say."""
    role, *rest = sys.argv[1:]
    if role == "target":
        return target(rest[0], rest[1], int(rest[2]), int(rest[3]))
    if role == "open":
        return open_room(rest[0], rest[1])
    source(rest[0], int(rest[1]), int(rest[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
