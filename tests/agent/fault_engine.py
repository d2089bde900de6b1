"""Provides engine ranks for tests of faults, in this process or in a separate one that may be killed.

`Actor` carries out the commands. `Doomed` passes them to an `Actor` in a separate process. Each answer is one word: the
result of a call or the end of a half of a room. Used by the fault scenes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from agent_world import SESSION, Agent, AgentSocket, Engine, wait_for
from fault_table import DONE, LEFT_OPEN, failed, refused

from longshore_client import LongshoreError, ModelShape, WaitTimeout
from longshore_lab.test_engine.pages import content
from longshore_lab.test_engine.remote import Remote, serve
from longshore_wire.engine_messages import Endpoint, Half, RoomEventKind

# A token is 2 KiB: 64 of them are one slab.
MODEL = ModelShape.kv(layers=4, kv_heads=4, head_dim=16, element_bytes=4)
SLAB_TOKENS = 64
RELEASED = "released"


class Actor:
    """One engine of TP1, with its offers and claims by room."""

    def __init__(self, agent: Agent | AgentSocket, instance: str, half: Half, page_size: int) -> None:
        self.instance = instance
        self.engine = Engine(agent, instance, model=MODEL, page_size=page_size, roles=[half])
        self._half = half
        self._pages: dict[int, list[int]] = {}

    @property
    def pid(self) -> int:
        return os.getpid()

    def endpoint(self) -> str:
        return msgspec.json.encode(self.engine.endpoint()).decode()

    def epoch(self) -> int:
        return self.engine.client.epoch

    def is_connected(self) -> bool:
        return self.engine.client.connected

    def send(self, room: int, first: int, end: int, total: int, *, last: bool) -> str:
        """Offer tokens [first, end) of a room; return "", or the reason of a refusal."""
        rank, size = self.engine.ranks[0], self.engine.page_size
        if room not in self._pages:
            self._pages[room] = self.engine.take_pages(0, total)
            data = content(room, total, rank.layout)
            for where in (rank.planes, rank.expected):
                rank.put(where, self._pages[room], data, 0, total)
        pages = self._pages[room][first // size : -(-end // size)]
        return _said(lambda: self.engine.client.send(room, pages, first, end, last=last))

    def receive(self, room: int, endpoint: str, total: int) -> str:
        """Claim a room; return "", or the reason of a refusal."""
        found = msgspec.json.decode(endpoint, type=Endpoint)
        pages = self.engine.take_pages(0, total)
        said = _said(lambda: self.engine.client.receive(room, found, pages, 0, total))
        if said:
            self.engine.free += pages
            return said
        rank = self.engine.ranks[0]
        self._pages[room] = pages
        rank.put(rank.expected, pages, content(room, total, rank.layout), 0, total)
        return ""

    def cancel(self, room: int) -> str:
        return _said(lambda: self.engine.client.cancel(room, self._half))

    def end(self, room: int, limit_s: float) -> str:
        """Wait until a half has ended; return its end."""
        try:
            event = self.engine.client.wait(room, self._half, timeout_s=limit_s)
        except WaitTimeout:
            return LEFT_OPEN
        if event.kind is RoomEventKind.DONE:
            return DONE
        assert event.text, f"room {room} failed without a text"
        return failed(event.reason)

    def release(self, room: int, limit_s: float) -> str:
        """Free a room's pages once its half is released. A failed room's pages may hold any bytes."""
        pages = self._pages.pop(room, None)
        if pages is None:
            return "had none"
        try:
            self.engine.client.wait(room, self._half, None, [RoomEventKind.RELEASED], limit_s)
        except WaitTimeout:
            return "not released"
        self.engine.accept(pages)
        return RELEASED

    def forget(self, room: int) -> None:
        """Free the pages of a room that was refused, so that no half of it was ever open."""
        self.engine.accept(self._pages.pop(room, []))

    def events_left(self) -> list[int]:
        """Take the events for which no test waited; return their rooms."""
        return [event.room for event in self.engine.client.poll()]

    def is_intact(self) -> bool:
        return self.engine.intact()

    def close(self) -> None:
        self.engine.close()


def _said(call: Any) -> str:
    try:
        call()
    except LongshoreError as error:
        return refused(error.reason) if str(error) else "refused without a word"
    return ""


class Doomed(Remote):
    """An `Actor` in a separate process, whose memory is not open in this one."""

    def __init__(self, agent: Agent, instance: str, half: Half, page_size: int) -> None:
        assert agent.http
        self.instance = instance
        words = [agent.socket, instance, str(int(half)), str(page_size)]
        super().__init__([sys.executable, __file__, *words], {"AGENT_WORLD_SESSION": SESSION})
        assert self.ask("is_connected")

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_") or not hasattr(Actor, method):
            raise AttributeError(method)
        return lambda *arguments, **named: self.ask(method, *arguments, **named)

    def stop(self) -> None:
        """Stop all of its threads; return when they have stopped."""
        freeze(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def freeze(pid: int) -> None:
    """Send SIGSTOP to a process; return when all of its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _is_stopped(pid))


def _is_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def main() -> None:
    """Run one engine rank until stdin ends."""
    socket, instance, half, page_size = sys.argv[1:5]
    actor = Actor(AgentSocket(socket), instance, Half(int(half)), int(page_size))
    serve(actor)
    actor.close()


if __name__ == "__main__":
    main()
