"""Provides real agents and engine ranks for tests: processes with settings, paged memory in memfds, requests.

The engines are the test engine's. Run as a script it is one engine rank in a process of its own, which a test may kill.
Everything started here is ended by its PID.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import own_network
from agent_pages import AgentPages
from agent_template import Forked, Template

from longshore_client import Half, KVLayout, ModelShape, PageOrder, Parallel, RoomEvent, RoomEventKind
from longshore_lab.test_engine import ranks
from longshore_lab.test_engine.memory import HostMemory
from longshore_lab.test_engine.pages import Pages, content
from longshore_lab.test_engine.remote import Remote, serve
from longshore_wire.engine_messages import Endpoint
from longshore_wire.errors import Reason

T = TypeVar("T")

# Twelve heads fit every tested TP; a token is 12 KiB at TP1.
MODEL = ModelShape.kv(layers=4, kv_heads=12, head_dim=32, element_bytes=4)
PAGE_SIZE = 16
PAGE_COUNT = 96
# Many times as long as two idle cores need: to load torch in several processes concurrently, and for all else.
START_LIMIT_S = 240.0
EVENT_LIMIT_S = 90.0
_PAUSE_S = 0.01
# Unique names, so that other runs of these tests on the same host have other deployments and memory.
SESSION = os.environ.get("AGENT_WORLD_SESSION") or str(os.getpid())
DEPLOYMENT = f"tests/agents-{SESSION}"
# Buffers so small that every request has several slabs and the ring wraps soon.
CHEAP = {
    "LONGSHORE_DEPLOYMENT": DEPLOYMENT,
    "LONGSHORE_BACKEND": "Loopback",
    "LONGSHORE_RING_BYTES": "8Mi",
    "LONGSHORE_RING_EXTENT_BYTES": "2Mi",
    "LONGSHORE_LANE_BYTES": "1Mi",
    "LONGSHORE_SLAB_BYTES_MIN": "64Ki",
    # One process simulates many engines.
    "LONGSHORE_PROCESS_WORKERS_MAX": "1000",
    "LONGSHORE_USER_WORKERS_MAX": "1000",
    # Many tests use engines of one agent and test the path between two agents, so direct copies are off.
    "LONGSHORE_DIRECT": "false",
    # A new measurement must not change the modes that tests expect.
    "LONGSHORE_CROSSOVER_FILE": str(Path(__file__).with_name("no_measurements.json")),
}
BOTH = (Half.SOURCE, Half.TARGET)
room_ids = itertools.count(2**63 + 1)
# Agents that were not stopped yet.
living_agents: list[Agent] = []
_PATH = os.pathsep.join(entry for entry in sys.path if entry)
template = Template(_PATH)


def wait_for_none(found: Callable[[], list[str]], limit_s: float = EVENT_LIMIT_S) -> None:
    """Wait until `look` finds nothing; fail after `limit_s` with the last findings."""
    last: list[str] = []

    def is_none() -> bool:
        last[:] = found()
        return not last

    try:
        wait_for(is_none, limit_s)
    except AssertionError as error:
        raise AssertionError(f"after {limit_s:g} s still found: {last}") from error


def wait_for(condition: Callable[[], T | None], limit_s: float = EVENT_LIMIT_S, what: str = "") -> T:
    """Return the condition's first true value; fail after `limit_s`."""
    end_s = time.monotonic() + limit_s
    pause = threading.Event()
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {limit_s:g} s: {what or condition}"
        pause.wait(_PAUSE_S)
    return found


class Agent(AgentPages):
    """One real agent. `settings` are variables added to CHEAP; `inside` is a prefix of its command, such as nsenter."""

    def __init__(self, directory: Path, inside: Sequence[str] = (), **settings: str) -> None:
        self.directory = directory
        self._inside = inside
        directory.mkdir()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LONGSHORE_")}
        self._environment = environment | {
            **CHEAP,
            **settings,
            "LONGSHORE_RUN_DIRECTORY": str(directory),
            "PYTHONPATH": _PATH,
        }
        living_agents.append(self)
        self.start()

    def start(self) -> None:
        """Start the process, also after an earlier one has ended."""
        (self.directory / "agent.json").unlink(missing_ok=True)
        self.process: Forked | subprocess.Popen[bytes]
        # Forks of the template are on its host, which has one network, and have its modules.
        if self._inside or own_network.inside() or template.path != _PATH:
            with (self.directory / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    [*self._inside, sys.executable, "-m", "longshore_agent.main"],
                    env=self._environment,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
        else:
            self.process = template.start(self._environment, str(self.directory / "log"))
        self._http = ""

    @property
    def socket(self) -> str:
        return str(self.directory / "agent.sock")

    @property
    def http(self) -> str:
        """Return the address of its HTTP pages; wait until it serves them."""
        if not self._http:
            state = self.directory / "agent.json"
            wait_for(lambda: state.exists() and state.stat().st_size > 0, START_LIMIT_S, f"the agent of {state}")
            self._http = json.loads(state.read_bytes())["http"]
        return self._http

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def children(self) -> list[int]:
        """Return the PIDs of its workers and of its self-test."""
        paths = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [pid for path in paths for pid in map(int, path.read_text().split()) if is_worker(pid)]

    def stop(self, limit_s: float = 60.0) -> int:
        """End it and all of its processes; return its exit status."""
        if self in living_agents:
            living_agents.remove(self)
        children = self.children() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    if is_worker(pid):
                        os.kill(pid, signal.SIGKILL)


def is_worker(pid: int) -> bool:
    """Whether a PID is still that of a worker or a self-test. The process that forks them is neither."""
    with contextlib.suppress(OSError):
        return b"\0longshore_agent." in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class AgentSocket(NamedTuple):
    """An agent as an engine in another process sees it."""

    socket: str
    http: str = "the test's process waits for its address"


class Engine(ranks.Engine):
    """All ranks of one replica of an engine, in this process."""

    def __init__(
        self,
        agent: Agent | AgentSocket,
        instance: str,
        tp: int = 1,
        *,
        pp: int = 1,
        dp: int = 1,
        dp_rank: int = 0,
        model: ModelShape = MODEL,
        page_size: int = PAGE_SIZE,
        page_count: int = PAGE_COUNT,
        order: PageOrder = PageOrder.NHD,
        stage_layers: tuple[int, ...] | None = None,
        blob_bytes: int = 0,
        roles: Sequence[Half] = BOTH,
    ) -> None:
        assert agent.http
        place = Parallel(tp, 0, pp, 0, dp, dp_rank)
        layout = KVLayout(model, place, page_size, order, stage_layers=stage_layers, blob_bytes=blob_bytes)
        count = page_count * PAGE_SIZE // page_size
        name = memory_name(instance)
        super().__init__(
            agent.socket, instance, layout, roles, count, START_LIMIT_S, lambda _, size: HostMemory(size, name)
        )
        self.agent = agent
        for rank in self.ranks:
            rank.poison()


def poisoned(layout: KVLayout, page_count: int, name: str) -> Pages:
    """Return pages that no agent knows, with that name in /proc."""
    pages = Pages(layout, page_count, lambda length_bytes: HostMemory(length_bytes, name))
    pages.poison()
    return pages


@dataclass
class Request:
    """One request's transfer from `source` to `target`: tokens [prefix, total), offered in chunks that end at `cuts`."""

    source: Engine
    target: Engine
    total: int
    prefix: int = 0
    cuts: Sequence[int] = ()
    room: int = field(default_factory=lambda: next(room_ids))
    digest: bool = False
    binding: dict[str, Any] = field(default_factory=dict)  # prompt and capability, as `send` and `receive` take them
    source_pages: list[int] = field(default_factory=list)
    target_pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source_pages = self.source.take_pages(0, self.total)
        self.target_pages = self.target.take_pages(self.prefix, self.total)
        self.data = content(self.room, self.total, self.source.ranks[0].layout)
        for rank in self.source.ranks:
            rank.put(rank.planes, self.source_pages, self.data, 0, self.total)
            rank.put(rank.expected, self.source_pages, self.data, 0, self.total)

    def offer(self) -> None:
        """Offer all chunks at all ranks."""
        for chunk in range(len(self.cuts) + 1):
            self.offer_chunk(chunk)

    def offer_chunk(self, chunk: int) -> None:
        edges = [0, *self.cuts, self.total]
        first, end = edges[chunk], edges[chunk + 1]
        size = self.source.page_size
        pages = self.source_pages[first // size : -(-end // size)]
        for rank in self.source.ranks:
            rank.client.send(self.room, pages, first, end, last=end == self.total, **self.binding)

    def claim(self) -> None:
        """Claim at all ranks, and expect the bytes."""
        endpoint = self.source.endpoint()
        for rank in self.target.ranks:
            tokens = (self.prefix, self.total)
            rank.client.receive(self.room, endpoint, self.target_pages, *tokens, digest=self.digest, **self.binding)
            if self.target_pages:
                rank.put(rank.expected, self.target_pages, self.data, self.prefix, self.total)

    def ends(self, limit_s: float = EVENT_LIMIT_S) -> list[RoomEvent]:
        """Wait until both halves have ended and are released at every rank; return their ends."""
        events = [
            ranks.wait_ended(rank.client, self.room, half, self.source.instance, time.monotonic() + limit_s)
            for half, engine in ((Half.SOURCE, self.source), (Half.TARGET, self.target))
            for rank in engine.ranks
        ]
        self.give_back(events)
        return events

    def give_back(self, ends: Sequence[RoomEvent]) -> None:
        """Free the released pages of both sides. Those of a failed room have unspecified bytes."""
        self.source.free += self.source_pages
        if all(end.kind is RoomEventKind.DONE for end in ends):
            self.target.free += self.target_pages
        else:
            self.target.accept(self.target_pages)

    def arrives(self, limit_s: float = EVENT_LIMIT_S) -> None:
        """Wait for the end, which must be DONE."""
        ends = self.ends(limit_s)
        assert {(end.kind, end.reason) for end in ends} == {(RoomEventKind.DONE, Reason.NONE)}, ends


class EngineProcess(Remote):
    """One engine rank of TP1 in a separate process. Only that process and the agent have its memfd open."""

    def __init__(
        self, agent: Agent, instance: str, *, page_size: int = PAGE_SIZE, roles: Sequence[Half] = BOTH
    ) -> None:
        assert agent.http
        self.instance = instance
        words = [agent.socket, instance, str(page_size), *(half.name for half in roles)]
        super().__init__([sys.executable, __file__, *words], {"AGENT_WORLD_SESSION": SESSION})

    def endpoint(self) -> Endpoint:
        return msgspec.json.decode(self.ask("endpoint"), type=Endpoint)


class ServedEngine:
    """The other end of `EngineProcess`."""

    def __init__(self, socket: str, instance: str, page_size: int, roles: Sequence[Half]) -> None:
        self._engine = Engine(AgentSocket(socket), instance, page_size=page_size, roles=roles)
        (self._rank,) = self._engine.ranks

    def endpoint(self) -> str:
        return msgspec.json.encode(self._rank.client.endpoint(START_LIMIT_S)).decode()

    def send(self, *, room: int, pages: list[int], total: int) -> str:
        self._rank.put(self._rank.planes, pages, content(room, total, self._rank.layout), 0, total)
        self._rank.client.send(room, pages, 0, total, last=True)
        return "sent"

    def receive(self, *, room: int, endpoint: str, pages: list[int], total: int) -> str:
        self._rank.client.receive(room, msgspec.json.decode(endpoint, type=Endpoint), pages, 0, total)
        return "claimed"

    def end(self, *, room: int) -> str:
        return self._rank.client.wait(room, Half.SOURCE, timeout_s=EVENT_LIMIT_S).reason.name

    def close(self) -> None:
        self._engine.close()


def memory_name(instance: str) -> str:
    """Return the name of an instance's pages in /proc."""
    return f"pages-{SESSION}-{instance}"


def holders_of(instance: str) -> dict[int, list[str]]:
    """Return the PIDs that map or hold open an instance's pages, and how. Without any, the kernel frees the pages."""
    name = f"memfd:{memory_name(instance)} "
    found: dict[int, list[str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end during the scan.
        with contextlib.suppress(OSError):
            uses = [line for line in (process / "maps").read_text().splitlines() if name in line]
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    uses += [str(entry)] if name in f"{entry.readlink()} " else []
            if uses:
                found[int(process.name)] = uses
    return found


def cpu_s(pid: int) -> float:
    """Return a process's processor seconds by its kernel clock, because /proc counts in steps of 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)


def wakes(pid: int) -> int:
    """Return how often the threads of a process have gone to sleep so far."""
    found = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        found += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def main() -> None:
    """Run one engine rank until stdin ends."""
    socket, instance, page_size = sys.argv[1:4]
    served = ServedEngine(socket, instance, int(page_size), [Half[name] for name in sys.argv[4:]])
    serve(served)
    served.close()


if __name__ == "__main__":
    main()
