"""Two real agents with engines between which rooms move, for the test of the web page and for its pictures."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from agent_fleet import World
from agent_world import EVENT_LIMIT_S, Agent, Engine, Request, room_ids
from browser import HOST

from longshore_client import Half, RoomError, RoomEventKind

TOKENS = 700
DEPLOYMENT = "team/llama-70b"


@dataclass
class Pages:
    """Two agents, and their engines: two ranks of prefill, one of decode."""

    prefill: Agent
    decode: Agent
    source: Engine
    target: Engine

    def moves(self, tokens: int = TOKENS) -> int:
        """Move a room, which succeeds; return its number."""
        request = Request(self.source, self.target, tokens)
        request.claim()
        request.offer()
        request.arrives()
        return request.room

    def fails(self) -> None:
        """Begin a room whose prompt is shorter than decode claims, so that it fails."""
        request = Request(self.source, self.target, 64)
        request.claim()
        halves = [(Half.TARGET, rank) for rank in self.target.ranks]
        # The first rank's offer may fail the room before the second one's.
        with contextlib.suppress(RoomError):
            for rank in self.source.ranks:
                rank.client.send(request.room, request.source_pages[:3], 0, 48, last=True)
                halves.append((Half.SOURCE, rank))
        for half, rank in halves:
            end = rank.client.wait(request.room, half, self.source.instance, timeout_s=EVENT_LIMIT_S)
            assert end.kind is RoomEventKind.FAILED, end
            rank.client.wait(request.room, half, self.source.instance, [RoomEventKind.RELEASED], EVENT_LIMIT_S)
        request.give_back([end])

    @contextlib.contextmanager
    def waits_for_a_silent_peer(self) -> Iterator[int]:
        """Let decode claim a room of an instance whose addresses accept connections and never answer."""
        with contextlib.ExitStack() as silent:
            endpoint = self.source.endpoint()
            ranks = tuple(
                msgspec.structs.replace(rank, address=f"{HOST}:{silent.enter_context(server).getsockname()[1]}")
                for rank in endpoint.ranks
                for server in [socket.create_server((HOST, 0))]
            )
            room = next(room_ids)
            pages = self.target.take_pages(0, 64)
            claimed = msgspec.structs.replace(endpoint, instance="llama-prefill-9", ranks=ranks)
            self.target.client.receive(room, claimed, pages, 0, 64)
            yield room

    @contextlib.contextmanager
    def busy(self, pause_s: float = 0.0) -> Iterator[None]:
        """Move rooms one after the other."""
        over = threading.Event()

        def move() -> None:
            while not over.wait(pause_s):
                self.moves()

        mover = threading.Thread(target=move)
        mover.start()
        try:
            yield
        finally:
            over.set()
            mover.join()


@contextlib.contextmanager
def pages(directory: Path, **settings: str) -> Iterator[Pages]:
    """Start the agents and engines, and move a first room."""
    world = World(directory, **settings)
    try:
        prefill = world.agent("prefill", LONGSHORE_NODE="gpu-node-3", LONGSHORE_DEPLOYMENT=DEPLOYMENT)
        decode = world.agent("decode", LONGSHORE_NODE="gpu-node-7", LONGSHORE_DEPLOYMENT=DEPLOYMENT)
        starts = world.engine(prefill, "llama-prefill-0", 2), world.engine(decode, "llama-decode-0")
        found = Pages(prefill, decode, *(start.result() for start in starts))
        found.moves()
        yield found
    finally:
        world.close()
