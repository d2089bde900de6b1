"""An engine without a model, for pods of the agent's image: moves rooms between pods and compares every byte.

    room_pod.py source SOCKET PORT TP                  prefill with pages of 16 tokens; serves one target at a time
    room_pod.py target SOCKET HOST:PORT ROOMS TOKENS   decode of TP1 with pages of 8 tokens; moves ROOMS rooms in sequence
    room_pod.py open SOCKET HOST:PORT                  decode of one room that prefill never sends, which stays open

Its pods get this file from a ConfigMap, and the test engine, of which it is made, from their image. It prints one JSON object
a line for each room: its end, the time, and whether the bytes are correct. Both sides derive the expected bytes from the
room's number.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

import longshore_client as ls
from longshore_lab.test_engine.pages import content
from longshore_lab.test_engine.ranks import Engine, insist, wait_ended

MODEL = ls.ModelShape.kv(layers=4, kv_heads=4, head_dim=32, element_bytes=4)
SOURCE_PAGE, TARGET_PAGE = 16, 8
TOKENS_MAX = 16384
# A node that boots and an agent that starts take tens of seconds.
LIMIT_S = 150.0
_RETRY_S = 0.1
_ASK_LIMIT_S = 20.0


def start(path: str, role: str, layout: ls.KVLayout, half: ls.Half) -> Engine:
    """Return a new instance with the agent at `path`."""
    instance = f"{role}-{uuid.uuid4().hex[:6]}"
    engine = Engine(path, instance, layout, (half,), TOKENS_MAX // layout.page_size, LIMIT_S)
    say(instance=instance)
    return engine


def end_s() -> float:
    """Return when a call that begins now must have succeeded."""
    return time.monotonic() + LIMIT_S


def say(**words: Any) -> None:
    """Print one object."""
    sys.stdout.write(json.dumps({"at": round(time.time(), 3)} | words) + "\n")
    sys.stdout.flush()


def source(path: str, port: int, tp: int) -> None:
    """Serve targets until the pod ends."""
    engine = start(path, "prefill", ls.KVLayout(MODEL, ls.Parallel(tp=tp), SOURCE_PAGE), ls.Half.SOURCE)
    with socket.create_server(("0.0.0.0", port)) as server:
        while True:
            connection, _ = server.accept()
            # A target whose node is off never closes its connection.
            connection.settimeout(LIMIT_S)
            with connection, connection.makefile("rw") as stream:
                try:
                    for line in stream:
                        stream.write(json.dumps(serve(engine, json.loads(line))) + "\n")
                        stream.flush()
                except OSError as error:
                    say(lost=str(error))


def serve(engine: Engine, ask: dict[str, int]) -> Any:
    """Answer one request: for the endpoint, to send a room, or for a room's end at the source."""
    if not ask:
        return msgspec.to_builtins(insist(partial(engine.client.endpoint, LIMIT_S), end_s()))
    if "cancelled" in ask:
        room, half = ask["room"], ls.Half.SOURCE
        if ask["cancelled"]:
            for rank in engine.ranks:
                with suppress(ls.LongshoreError):
                    rank.client.cancel(room, half)
        events = [wait_ended(rank.client, room, half, engine.instance, end_s()) for rank in engine.ranks]
        return {"ends": [event.kind.name for event in events]}
    room, tokens = ask["room"], ask["tokens"]
    pages = list(reversed(range(-(-tokens // SOURCE_PAGE))))
    data = content(room, tokens, engine.ranks[0].layout)
    for rank in engine.ranks:
        rank.put(rank.planes, pages, data, 0, tokens)
    for rank in engine.ranks:
        # The offer is refused because the room has failed meanwhile. The target gets an event.
        with suppress(ls.RoomError):
            insist(partial(rank.client.send, room, pages, 0, tokens, last=True), end_s())
    return {}


def start_decode(path: str) -> Engine:
    """Return a new instance for decode."""
    return start(path, "decode", ls.KVLayout(MODEL, ls.Parallel(), TARGET_PAGE), ls.Half.TARGET)


def rooms() -> Iterator[int]:
    """Yield numbers of rooms that no earlier process of the cluster has used."""
    return itertools.count(time.time_ns())


def open_room(path: str, peer: str) -> int:
    """Claim a room that prefill never sends; return after its end."""
    engine, room = start_decode(path), next(rooms())
    with call(peer) as stream:
        endpoint = msgspec.convert(exchange(stream, {}), ls.Endpoint)
    # Large enough to be staged: pages that prefill writes itself are released only when prefill is known to have stopped.
    pages = list(range(TOKENS_MAX // TARGET_PAGE))
    insist(partial(engine.client.receive, room, endpoint, pages, 0, TOKENS_MAX), end_s())
    say(claimed=room)
    say_end(room, wait_ended(engine.client, room, ls.Half.TARGET, endpoint.instance, end_s()))
    engine.close()
    return 0


def target(path: str, peer: str, room_count: int, tokens: int) -> int:
    """Move rooms; return 0 if all were DONE with the right bytes."""
    engine = start_decode(path)
    bad, stream = 0, None
    for room in itertools.islice(rooms(), room_count):
        try:
            if stream is None:
                stream = call(peer)
            endpoint = msgspec.convert(exchange(stream, {}), ls.Endpoint)
            event = move(engine, stream, room, endpoint, tokens)
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
    engine.close()
    return 1 if bad else 0


def move(engine: Engine, stream: Any, room: int, endpoint: ls.Endpoint, tokens: int) -> ls.RoomEvent:
    """Claim a room, ask for it, wait for its end and compare all pages."""
    (rank,) = engine.ranks
    pages = list(range(-(-tokens // TARGET_PAGE)))
    rank.poison()
    insist(partial(rank.client.receive, room, endpoint, pages, 0, tokens), end_s())
    stream.write(json.dumps({"room": room, "tokens": tokens}) + "\n")
    stream.flush()
    event = wait_ended(rank.client, room, ls.Half.TARGET, endpoint.instance, end_s())
    rank.put(rank.expected, pages, content(room, tokens, rank.layout), 0, tokens)
    say_end(room, event, equal=rank.intact())
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
