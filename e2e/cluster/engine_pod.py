"""The reference engine in pods of two nodes: a prompt is prefilled at TP4 on one node and decoded at TP1 on the other.

    engine_pod.py source SOCKET PORT PROMPTS
    engine_pod.py target SOCKET HOST:PORT PROMPTS TOKENS

The target compares the digests of both sides' pages, and its tokens with those of a single engine. Its pods get this file
and `room_pod` from a ConfigMap, and mount the checkout for the engine itself.
"""

from __future__ import annotations

import base64
import json
import socket
import sys
import uuid
from typing import Any

import msgspec
import numpy as np
from room_pod import call, say

from longshore_client import Endpoint, Half
from longshore_lab.engine import connector
from longshore_lab.engine.config import RankOptions
from longshore_lab.engine.pages import pages_for
from longshore_lab.engine.processes import EngineProcesses

PROMPT_TOKENS, CHUNK_TOKENS = 500, 256
SOURCE_TP, SOURCE_PAGE, TARGET_PAGE = 4, 16, 8
LIMIT_S = 120.0
_AGENT = "agent"


def engine(half: Half, path: str, tp: int, page_size: int) -> EngineProcesses:
    """Start an instance that is connected to the agent of this node."""
    registration = connector.Registration(f"{half.name.lower()}-{uuid.uuid4().hex[:6]}", path)
    own = msgspec.msgpack.encode(connector.ConnectorOptions(half, {_AGENT: registration}))
    options = RankOptions(tp=tp, page_size=page_size, extension=connector.EXTENSION)
    return EngineProcesses(options, [own] * tp)


def order(running: EngineProcesses, command: connector.Command) -> list[bytes]:
    """Give a command to the connector of every rank."""
    return running.extra([msgspec.msgpack.encode(command)] * running.options.tp)


def digests(running: EngineProcesses, pages: list[int]) -> Any:
    """Return the digests of a prompt's pages by layer and head."""
    return msgspec.to_builtins(running.digest(pages, 0, PROMPT_TOKENS))


def source(path: str, port: int, prompts: int) -> int:
    """Prefill prompts and offer their pages."""
    with engine(Half.SOURCE, path, SOURCE_TP, SOURCE_PAGE) as running:
        with socket.create_server(("0.0.0.0", port)) as server:
            server.settimeout(LIMIT_S)
            connection, _ = server.accept()
        connection.settimeout(LIMIT_S)
        stream = connection.makefile("rw")
        endpoint = base64.b64encode(order(running, connector.GetEndpoint(_AGENT))[0]).decode()
        stream.write(json.dumps({"endpoint": endpoint}) + "\n")
        stream.flush()
        for _ in range(prompts):
            ask = json.loads(stream.readline())
            room, prompt = ask["room"], ask["prompt"]
            pages = running.allocator.allocate(pages_for(PROMPT_TOKENS, SOURCE_PAGE))
            for first in range(0, PROMPT_TOKENS, CHUNK_TOKENS):
                end = min(first + CHUNK_TOKENS, PROMPT_TOKENS)
                tokens = running.prefill(prompt, pages, first, end)
                part = pages[first // SOURCE_PAGE : -(-end // SOURCE_PAGE)]
                offered = connector.Part(room, part, first, end, end == PROMPT_TOKENS)
                order(running, connector.Offer(_AGENT, [offered]))
            order(running, connector.Await(_AGENT, [room], LIMIT_S))
            answer = {"first": tokens.tokens[0], "digests": digests(running, pages)}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
            running.release(pages)
    return 0


def target(path: str, peer: str, prompts: int, count: int) -> int:
    """Decode prompts whose pages arrive; return 0 if all bytes and tokens are equal."""
    alone = EngineProcesses(RankOptions(page_size=SOURCE_PAGE))
    bad = 0
    with alone, engine(Half.TARGET, path, 1, TARGET_PAGE) as running:
        stream = call(peer, LIMIT_S, LIMIT_S)
        endpoint = msgspec.msgpack.decode(base64.b64decode(json.loads(stream.readline())["endpoint"]), type=Endpoint)
        for number in range(1, prompts + 1):
            prompt = [int(token) for token in np.random.default_rng(number).integers(0, 512, PROMPT_TOKENS)]
            pages = running.allocator.allocate(pages_for(PROMPT_TOKENS + count, TARGET_PAGE))
            part = connector.Part(number, pages[: -(-PROMPT_TOKENS // TARGET_PAGE)], 0, PROMPT_TOKENS)
            order(running, connector.Claim(_AGENT, endpoint, [part]))
            stream.write(json.dumps({"room": number, "prompt": prompt}) + "\n")
            stream.flush()
            arrived = msgspec.msgpack.decode(
                order(running, connector.Await(_AGENT, [number], LIMIT_S))[0], type=connector.Arrived
            )
            answer = json.loads(stream.readline())
            first = answer["first"]
            tokens = [first, *running.decode(pages, PROMPT_TOKENS, first, count - 1).tokens]
            equal_bytes = digests(running, pages) == answer["digests"]
            equal_tokens = tokens == alone.generate(prompt, count).tokens
            bad += not (equal_bytes and equal_tokens)
            say(prompt=number, bytes=arrived.bytes_moved, equal_bytes=equal_bytes, equal_tokens=equal_tokens)
            running.release(pages)
    return 1 if bad else 0


def main() -> int:
    """Run the source or the target, as the arguments say."""
    role, path, where, prompts, *rest = sys.argv[1:]
    if role == "source":
        return source(path, int(where), int(prompts))
    return target(path, where, int(prompts), int(rest[0]))


if __name__ == "__main__":
    sys.exit(main())
