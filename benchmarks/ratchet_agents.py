"""Counts what a room between two real agents takes: messages, wake-ups of both workers, and their system calls.

Run by `ratchet`; prints one line of JSON. A room is claimed before it is offered, and is alone. The count of messages is the
lowest of several rooms, since a heartbeat or a repeat may fall into one; that of wake-ups is their lower quartile. System
calls are those of twice as many rooms less those of so many, so that attaching strace does not count. Each is the median of
several runs, since a run in which a thread spins has twice the calls.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agent_fleet import World
from agent_world import Engine, Request, wakes

from longshore_client import Half

_TOKENS = 64
_ROOMS = 30
_RUNS = 5
_LIMIT_S = 60.0


def move(source: Engine, target: Engine) -> Request:
    """Move one room; return it."""
    room = Request(source, target, _TOKENS)
    room.claim()
    room.offer()
    room.arrives()
    return room


def traced(pids: list[int], act: Callable[[], object]) -> int:
    """Return the system calls of the processes while `act` runs."""
    with tempfile.NamedTemporaryFile() as out:
        attached = [word for pid in pids for word in ("-p", str(pid))]
        command = ["strace", "-f", "-c", "-U", "calls,name", "-o", out.name, *attached]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            # It says so of each thread, which it has then stopped; and it lets them go on.
            for _ in pids:
                said = strace.stderr.readline()
                assert "attached" in said, said
            act()
            strace.send_signal(signal.SIGINT)
            strace.communicate(timeout=_LIMIT_S)
        lines = Path(out.name).read_text(encoding="utf-8").splitlines()
    return sum(
        int(line.split()[0]) for line in lines if line.split()[:1] and line.split()[0].isdigit() and "total" not in line
    )


def moved(source: Engine, target: Engine, count: int) -> None:
    """Move rooms one after another."""
    for _ in range(count):
        move(source, target)


def of_one_room(fewer: Sequence[int], more: Sequence[int], rooms: int) -> float:
    """Return the calls of one room from runs of so many rooms and of twice as many."""
    return (statistics.median(more) - statistics.median(fewer)) / rooms


def main() -> None:
    """Count and print."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), LONGSHORE_HEARTBEAT_S="5", LONGSHORE_PEER_TIMEOUT_S="60")
        agents = world.agent("prefill"), world.agent("decode")
        halves = ((agents[0], "prefill", Half.SOURCE), (agents[1], "decode", Half.TARGET))
        starting = [world.engine(agent, name, roles=[half]) for agent, name, half in halves]
        source, target = (engine.result() for engine in starting)
        for _ in range(_ROOMS):
            move(source, target)
        pids = [agent.status()["workers"][0]["pid"] for agent in agents]
        messages, woken = [], []
        for _ in range(_ROOMS):
            before = sum(map(wakes, pids))
            room = move(source, target)
            woken.append(sum(map(wakes, pids)) - before)
            pages = [agent.room_page(room.room) for agent in agents]
            spans = [span for page in pages if page is not None for span in page["spans"]]
            messages.append(sum(span["kind"] == "send" for span in spans))
        fewer, more = (
            [traced(pids, partial(moved, source, target, count)) for _ in range(_RUNS)]
            for count in (_ROOMS, 2 * _ROOMS)
        )
        world.close()
    name = "room of real agents"
    found = {
        "messages": min(messages),
        "wake-ups": statistics.quantiles(woken)[0],
        "system calls": of_one_room(fewer, more, _ROOMS),
    }
    print(json.dumps({f"{name}: {what}": counted for what, counted in found.items()}))


if __name__ == "__main__":
    main()
