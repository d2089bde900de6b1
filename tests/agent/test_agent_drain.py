"""An agent that receives SIGTERM lets open rooms finish and leaves nothing; before that, requests with very many pages."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from agent_fleet import World
from agent_world import EVENT_LIMIT_S, START_LIMIT_S, Agent, is_worker, wait_for
from fault_judge import carries
from fault_table import DONE, wrong

from longshore_client import (
    Busy,
    Client,
    Half,
    HelloRefused,
    KVLayout,
    ModelShape,
    Parallel,
    Reason,
    RoomEventKind,
    connect,
    create_region,
    pool_geometry,
)

PAGE_COUNT = 131_072
# Pages of one token, and of so few bytes that there can be many.
MODEL = ModelShape.kv(layers=1, kv_heads=1, head_dim=2, element_bytes=1)
LAYOUT = KVLayout(MODEL, Parallel(), page_size=1)


@dataclass
class Pair:
    """An agent with one engine that writes and one that reads. Writes stay open while the gate's file is missing."""

    agent: Agent
    writer: Client
    reader: Client
    source: memoryview
    target: memoryview
    pages: list[list[int]]
    gate: Path
    mark: Path

    def fill(self) -> None:
        self.source[:] = os.urandom(len(self.source))

    def move(self, room: int, tokens: int) -> None:
        """Claim and offer the first tokens; do not wait for them."""
        self.reader.receive(room, self.writer.endpoint(START_LIMIT_S), self.pages[1][:tokens], 0, tokens)
        self.writer.send(room, self.pages[0][:tokens], 0, tokens, last=True)

    def arrived(self, room: int, tokens: int) -> bool:
        """Wait for the end of a room, and compare its tokens one by one."""
        assert self.reader.wait(room, Half.TARGET, timeout_s=EVENT_LIMIT_S).kind is RoomEventKind.DONE
        return self.has_arrived(tokens)

    def has_arrived(self, tokens: int) -> bool:
        """Whether the first tokens are the same on both sides."""
        near, far = (bytes(side) for side in (self.source, self.target))
        plane_bytes = len(near) // 2
        return all(
            near[start : start + 2] == far[goal : goal + 2]
            for plane in range(2)
            for start, goal in (
                (plane * plane_bytes + 2 * self.pages[0][token], plane * plane_bytes + 2 * self.pages[1][token])
                for token in range(tokens)
            )
        )


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("drain")
    gate, mark = directory / "gate", directory / "mark"
    rule = {"kind": "hold", "peer": "reader.0.0", "count": None, "until": str(gate), "mark": str(mark)}
    gate.touch()
    world = World(
        directory,
        LONGSHORE_LOOPBACK_FAULTS=msgspec.json.encode([rule]).decode(),
        LONGSHORE_FORCE_WAY="Staged",
        LONGSHORE_HEARTBEAT_S="0.2",
        LONGSHORE_PEER_TIMEOUT_S="10",
    )
    try:
        agent = world.agent("agent")
        assert agent.http
        with ThreadPoolExecutor(2) as starters:
            clients = list(
                starters.map(
                    lambda name: connect(agent.socket, instance=name, layout=LAYOUT, timeout_s=START_LIMIT_S),
                    ["writer", "reader"],
                )
            )
        geometry = pool_geometry(LAYOUT, PAGE_COUNT)
        views = []
        for client in clients:
            descriptor, memory = create_region(geometry.region_bytes[0])
            client.register_pool(0, geometry, [descriptor])
            os.close(descriptor)
            views.append(memoryview(memory))
        pages = [random.Random(half).sample(range(PAGE_COUNT), PAGE_COUNT) for half in range(2)]
        yield Pair(agent, *clients, *views, pages, gate, mark)
        for client in clients:
            client.close()
    finally:
        gate.touch()
        world.close()


@pytest.fixture(autouse=True)
def running(pair) -> None:
    """Restart the agent if the test before ended it; wait until it serves both engines."""
    if pair.agent.process.poll() is not None:
        pair.agent.start()
        for client in (pair.writer, pair.reader):
            client.endpoint(START_LIMIT_S)


@carries(wrong("lists of 131,072 pages through sockets with default buffers"))
def test_lists_of_131072_pages_pass_in_both_directions_through_sockets_with_default_buffers(pair, judge):
    judge.begin(pair.agent, pair.agent)
    pair.fill()
    pair.move(1, PAGE_COUNT)
    assert pair.arrived(1, PAGE_COUNT)
    judge.sees(pair.writer.wait(1, Half.SOURCE, timeout_s=EVENT_LIMIT_S).kind.name, DONE)
    judge.counts()


def test_engines_of_an_agent_that_was_killed_hear_of_their_rooms_and_are_served_by_the_next_one(pair):
    pair.fill()
    pair.gate.unlink()
    pair.mark.unlink(missing_ok=True)
    pair.move(2, 1000)
    wait_for(pair.mark.exists, what="a held write")
    children, epochs = pair.agent.children(), (pair.writer.epoch, pair.reader.epoch)

    pair.agent.process.kill()
    pair.agent.process.wait()
    wait_for(lambda: not any(is_worker(pid) for pid in children), what="orphaned workers to end")
    pair.gate.touch()
    pair.agent.start()

    # The engines repeat both halves, and new workers listen at the old ports. So the room is done, unless the reader's
    # worker started so much earlier than the writer's that it considers the writer lost. Then both engines get the
    # failure.
    ends = [
        client.wait(2, half, timeout_s=EVENT_LIMIT_S)
        for client, half in zip((pair.writer, pair.reader), Half, strict=True)
    ]
    assert {end.reason for end in ends} in ({Reason.NONE}, {Reason.PEER_LOST}), ends
    assert {end.kind for end in ends} == {RoomEventKind.FAILED if ends[0].reason else RoomEventKind.DONE}, ends
    assert ends[0].reason or pair.has_arrived(1000)
    pair.move(3, 1000)
    assert pair.arrived(3, 1000)
    assert not set(epochs) & {pair.writer.epoch, pair.reader.epoch}


def answers_to_the_end(agent: Agent) -> set[int]:
    """Poll an agent's readiness until it stops listening; return the status codes."""
    found = set()
    with contextlib.suppress(OSError, http.client.HTTPException):
        while True:
            found.add(agent.ask("/v1/status")[0])
    return found


def test_sigterm_lets_open_rooms_finish_refuses_new_engines_and_rooms_and_leaves_nothing(pair):
    pair.fill()
    # The room is claimed but not fully offered when the agent is told to end.
    pair.reader.receive(5, pair.writer.endpoint(START_LIMIT_S), pair.pages[1][1000:1100], 0, 100)
    wait_for(lambda: pair.agent.room(5, Half.SOURCE), what="the claim at the source")
    pair.mark.unlink(missing_ok=True)
    pair.gate.unlink()
    pair.move(4, 1000)
    wait_for(pair.mark.exists, what="a held write")
    # The agent's self-test may still be running.
    children = wait_for(lambda: len(found := pair.agent.children()) == 2 and found)

    pair.agent.process.send_signal(signal.SIGTERM)
    wait_for(lambda: {worker["state"] for worker in pair.agent.status()["workers"]} == {"draining"})
    assert pair.agent.ask("/readyz")[0] == 503
    with pytest.raises(HelloRefused, match="takes no engine now") as refused:
        connect(pair.agent.socket, instance="newcomer", layout=LAYOUT, timeout_s=5)
    assert refused.value.reason is Reason.SHUTTING_DOWN
    with pytest.raises(Busy, match="the agent stops"):
        pair.writer.send(6, pair.pages[0][:10], 0, 10, last=True)
    with pytest.raises(Busy, match="the agent stops"):
        pair.reader.receive(7, pair.writer.endpoint(START_LIMIT_S), pair.pages[1][2000:2010], 0, 10)
    pair.writer.send(5, pair.pages[0][1000:1100], 0, 100, last=True)
    with ThreadPoolExecutor(1) as asking:
        assert pair.agent.ask("/v1/status")[0] == 200
        asked = asking.submit(answers_to_the_end, pair.agent)
        pair.gate.touch()
        assert pair.arrived(4, 1000)
        assert pair.reader.wait(5, Half.TARGET, timeout_s=EVENT_LIMIT_S).kind is RoomEventKind.DONE
        assert pair.writer.wait(5, Half.SOURCE, timeout_s=EVENT_LIMIT_S).kind is RoomEventKind.DONE
        assert pair.agent.process.wait(EVENT_LIMIT_S) == 0
        assert asked.result() <= {200, 503}
    assert not any(is_worker(pid) for pid in children)
    assert {path.name for path in pair.agent.directory.iterdir()} == {"log", "lives.json"}
    assert not [line for line in pair.agent.log().splitlines() if "terminate called" in line or "Traceback" in line]
    names = {name for name in Path("/proc/net/unix").read_text().split() if str(pair.agent.directory) in name}
    assert not names
