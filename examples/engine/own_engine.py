"""A minimal engine with Longshore: a prefill instance of TP 2 and a decode instance of TP 1. See docs/how-to/engines.md.

Run it beside `longshore up -f examples/engine/deployment.yaml --directory DIR`, with DIR as its argument. All ranks
are in this process, so that it can compare bytes; in an engine each rank is a process with one client.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

import longshore_client as ls

MODEL = ls.ModelShape.kv(layers=4, kv_heads=4, head_dim=32, element_bytes=4)
PREFILL_TP = 2
TOKENS, CHUNK_TOKENS = 100, 64
LIMIT_S = 60.0
TARGET = ls.Half.TARGET


class Rank:
    """One rank: its pages as [K and V, layer, page, token, head, element], shared with the agent at `socket`."""

    def __init__(self, socket: str | None, instance: str, layout: ls.KVLayout, half: ls.Half, page_count: int) -> None:
        geometry = ls.pool_geometry(layout, page_count)
        descriptor, memory = ls.create_region(geometry.region_bytes[0])
        shape = (2, len(layout.layers), page_count, layout.page_size, len(layout.heads), MODEL.head_dim)
        self.pages = np.frombuffer(memory, np.float32).reshape(shape)
        self.layout, self.half = layout, half
        self.client = ls.connect(socket, instance=instance, layout=layout, roles=(half,))
        self.client.register_pool(0, geometry, [descriptor])
        os.close(descriptor)

    def tokens(self, page_ids: list[int]) -> np.ndarray:
        """Return a copy of these pages' content, as [K and V, layer, token, head, element]."""
        found = self.pages[:, :, page_ids]
        return found.reshape(*found.shape[:2], -1, *found.shape[4:])

    def ended(self, room: int, instance: str) -> ls.RoomEvent:
        """Wait for the end of this rank's half of a room. On return the agent no longer uses the pages."""
        event = self.client.wait(room, self.half, instance, timeout_s=LIMIT_S)
        self.client.wait(room, self.half, instance, {ls.RoomEventKind.RELEASED}, timeout_s=LIMIT_S)
        return event


def insist(call: Callable[[], None]) -> None:
    """Repeat a call while the agent's queues are full or it restarts. A refused call has sent nothing."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return call()
        except (ls.Busy, ls.AgentLost) as error:
            if time.monotonic() > end_s:
                raise
            time.sleep(error.retry_after_s if isinstance(error, ls.Busy) else 0.1)


def prefill(ranks: list[Rank], room: int, page_ids: list[int], cache: np.ndarray, end_token: int) -> None:
    """Compute (here: copy) the tokens up to `end_token` chunk by chunk, and offer each chunk as soon as it is complete."""
    for first in range(0, end_token, CHUNK_TOKENS):
        end = min(first + CHUNK_TOKENS, end_token)
        for rank in ranks:
            size, heads = rank.layout.page_size, rank.layout.heads
            for token in range(first, end):
                place = rank.pages[:, :, page_ids[token // size], token % size]
                place[:] = cache[:, :, token, heads.start : heads.stop]
            ids = page_ids[first // size : -(-end // size)]
            insist(partial(rank.client.send, room, ids, first, end, last=end == TOKENS))


def into_host_memory(socket: str, endpoint: ls.Endpoint, layout: ls.KVLayout, cache: np.ndarray) -> Callable[[], bool]:
    """Claim room 3 into pages of one token in host memory; return a function that waits for it and compares it."""
    host_layout = msgspec.structs.replace(layout, page_size=1)
    client = ls.connect(socket, instance="my-sparse-decode", layout=layout, roles=(TARGET,), host_layout=host_layout)
    geometry = ls.pool_geometry(host_layout, TOKENS)
    descriptor, memory = ls.create_region(geometry.region_bytes[0])
    client.register_pool(0, geometry, [descriptor], memory=ls.TargetMemory.HOST)
    os.close(descriptor)
    insist(partial(client.receive, 3, endpoint, list(range(TOKENS)), 0, TOKENS, memory=ls.TargetMemory.HOST))

    def arrived() -> bool:
        event = client.wait(3, TARGET, timeout_s=LIMIT_S)
        same = np.array_equal(np.frombuffer(memory, np.float32), cache.ravel())
        print(
            f"room 3: {event.kind.name}, {event.bytes_moved} bytes in host memory, {'equal' if same else 'NOT EQUAL'}"
        )
        client.close()
        return same

    return arrived


def main(directory: str) -> int:
    """Move one request, abort another one, and move one into host memory; return 0 if all ended as expected."""
    near, far = f"{directory}/prefill-0/agent.sock", f"{directory}/decode-0/agent.sock"
    layouts = [ls.KVLayout(MODEL, ls.Parallel(tp=PREFILL_TP, tp_rank=rank), page_size=16) for rank in range(PREFILL_TP)]
    sources = [Rank(near, "my-prefill", layout, ls.Half.SOURCE, page_count=16) for layout in layouts]
    target = Rank(far, "my-decode", ls.KVLayout(MODEL, ls.Parallel(), page_size=8), TARGET, page_count=32)
    # Engines pass the room and this endpoint to each other with a request. It is plain data, here as JSON.
    handover = msgspec.json.encode(sources[0].client.endpoint(timeout_s=LIMIT_S))
    endpoint = msgspec.json.decode(handover, type=ls.Endpoint)

    cache = np.random.default_rng(7).random((2, MODEL.layers, TOKENS, MODEL.kv_heads, MODEL.head_dim), np.float32)
    from_pages, to_pages = [3, 9, 1, 14, 0, 7, 12], list(range(31, 18, -1))
    insist(partial(target.client.receive, 1, endpoint, to_pages, 0, TOKENS))
    prefill(sources, 1, from_pages, cache, TOKENS)
    event = target.ended(1, "my-prefill")
    same = np.array_equal(target.tokens(to_pages)[:, :, :TOKENS], cache)
    print(f"room 1: {event.kind.name}, {event.bytes_moved} bytes, {'equal' if same else 'NOT EQUAL'}")
    print("prefill:", *(rank.ended(1, "my-prefill").kind.name for rank in sources))

    # Abort the second request after its first chunk: both sides get an event and their pages back.
    insist(partial(target.client.receive, 2, endpoint, to_pages, 0, TOKENS))
    prefill(sources, 2, from_pages, cache, CHUNK_TOKENS)
    for rank in sources:
        rank.client.cancel(2, ls.Half.SOURCE)
    failed = target.ended(2, "my-prefill")
    print(f"room 2: {failed.kind.name}, {failed.reason.name}: compute the prompt at decode, its pages are free")
    print("prefill:", *(rank.ended(2, "my-prefill").kind.name for rank in sources))

    arrived = into_host_memory(far, endpoint, target.layout, cache)
    prefill(sources, 3, from_pages, cache, TOKENS)
    sparse = arrived()
    for rank in (*sources, target):
        rank.client.close()
    return 0 if same and sparse and failed.kind is ls.RoomEventKind.FAILED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
