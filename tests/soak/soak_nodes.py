"""The soak's processes: nodes, each an agent and its engine, of one deployment a transport.

Called by the soak's other modules. Every process started here is ended by its id. Signals use a process's descriptor, since
its id may belong to another process by then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from soak_messages import EngineSpec, FromEngine, ToEngine

from longshore_cli.local_agents import LocalAgent, LocalAgentError, make_keys
from longshore_client import Half, PageOrder
from longshore_spec.agent_config import Backend
from longshore_wire.engine_messages import Endpoint

# Maximum tokens of a room, and maximum open rooms of one engine: its pool holds exactly these.
ROOM_TOKENS_MAX = 1536
ENGINE_ROOMS_MAX = 10
# Heartbeats and the peer timeout are the product's defaults. The lease is shorter than the longest stop, an idle room ends
# within a pause, and buffers are so small that every ring wraps.
LEASE_S = 15.0
ROOM_TIMEOUT_S = 30.0
SETTINGS: dict[str, str | int | float] = {
    "lease_s": LEASE_S,
    "room_timeout_s": ROOM_TIMEOUT_S,
    "ring_bytes": 4 << 20,
    "ring_extent_bytes": 1 << 20,
    "lane_count": 2,
    "lane_bytes": 512 << 10,
    "slab_bytes_min": 32 << 10,
}
END_LIMIT_S = 20.0
# An engine's memory must show the client's memory, not the freed arrays of ended rooms that the C library keeps.
ENGINE_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}
_PATH = os.pathsep.join(entry for entry in sys.path if entry)


@dataclass(frozen=True)
class Shape:
    """The layout of an engine's pages."""

    half: Half
    tp: int
    page_size: int
    order: PageOrder


# TP2 -> TP1, TP2 -> TP3, TP1 -> TP1 and TP1 -> TP3; no two have pages of one size and order.
SHAPES = {
    "prefill-a": Shape(Half.SOURCE, 2, 16, PageOrder.NHD),
    "prefill-b": Shape(Half.SOURCE, 1, 8, PageOrder.HND),
    "decode-a": Shape(Half.TARGET, 1, 32, PageOrder.NHD),
    "decode-b": Shape(Half.TARGET, 3, 16, PageOrder.HND),
}


class Victim:
    """A process that signals are sent to, by a descriptor; it may have ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return whether the process was there."""
        if self._descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EngineProcess:
    """An engine's process, which may be started again; reads its reports without waiting."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.spec = spec
        self.log_path = log
        self.endpoint: Endpoint | None = None
        self.is_ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._reports: msgspec.json.Decoder[FromEngine] = msgspec.json.Decoder(FromEngine)

    @property
    def pid(self) -> int:
        """The id of its process; 0: none."""
        return self._process.pid if self._process is not None else 0

    def fileno(self) -> int:
        """The descriptor of its reports."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self) -> None:
        """Start it; returns at once."""
        assert self._process is None
        script = str(Path(__file__).with_name("soak_engine.py"))
        command = [sys.executable, script, msgspec.json.encode(self.spec).decode()]
        environment = {**os.environ, **ENGINE_VARIABLES, "PYTHONPATH": _PATH}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, process_group=0
            )
        os.set_blocking(self.fileno(), False)
        self._unread = b""

    def tell(self, order: ToEngine) -> bool:
        """Send an order; return whether the process runs."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def read(self) -> tuple[list[FromEngine], bool]:
        """Return its reports, and whether it has ended."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            while not ended:
                part = os.read(self.fileno(), 1 << 16)
                self._unread += part
                ended = not part
        *lines, self._unread = self._unread.split(b"\n")
        return [self._reports.decode(line) for line in lines], ended

    def over(self) -> int:
        """Wait for the end of a process that ends, or was killed; return its status. Unread reports are lost."""
        assert self._process is not None
        process, self._process = self._process, None
        self.endpoint, self.is_ready = None, False
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            return process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def kill(self) -> None:
        """SIGKILL, also to one that is stopped."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.over()


@dataclass
class Node:
    """An agent and its engine."""

    fleet: str
    name: str
    shape: Shape
    agent: LocalAgent
    engine: EngineProcess
    struck_s: float = 0.0  # time of the last strike at it, or of its end

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.fleet} {self.name}"

    @property
    def is_there(self) -> bool:
        """Whether its agent runs, its engine is registered, and decode can be told of it."""
        is_known = self.engine.endpoint is not None or self.shape.half is Half.TARGET
        return self.agent.running and self.engine.is_ready and is_known and len(self.workers()) == self.shape.tp

    def workers(self) -> dict[int, int]:
        """Return the ids of its workers' processes, by rank."""
        found = {}
        for pid in children(self.agent.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"longshore_agent.worker.main" in words:
                    name = words[words.index(b"longshore_agent.worker.main") + 1]
                    found[int(name.rpartition(b"/")[2])] = pid
        return found

    def processes(self) -> dict[str, int]:
        """Return the ids of all of its processes, by their kind."""
        found = {f"worker {rank}": pid for rank, pid in self.workers().items()}
        if self.agent.running:
            found["supervisor"] = self.agent.pid
        if self.engine.pid:
            found["engine"] = self.engine.pid
        return found

    def leftovers(self) -> dict[str, str]:
        """Return what an idle agent still has open or holds, by name, with the agent's status of it."""
        found = {}
        try:
            for worker in self.agent.status()["workers"]:
                ring = worker["ring"]
                if ring and ring["used_bytes"] + ring["held_bytes"]:
                    found[f"memory of the ring of {self.fleet} {worker['worker']}"] = str(ring)
            for entry in self.agent.get("/v1/rooms?ended=false")["rooms"]:
                number = int(entry["room"]["room"])
                page = msgspec.json.encode(self.agent.room(number)).decode()
                found[f"room {number} at {self.fleet} {entry['worker']}"] = page
        except LocalAgentError as error:
            # A room may end during the query.
            found[f"{self.title}'s pages"] = str(error)
        return found


@dataclass
class Fleet:
    """A deployment with two prefill and two decode nodes over one transport; a context manager."""

    backend: Backend
    directory: Path
    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def sources(self) -> list[Node]:
        """Its prefill nodes."""
        return [node for node in self.nodes.values() if node.shape.half is Half.SOURCE]

    @property
    def targets(self) -> list[Node]:
        """Its decode nodes."""
        return [node for node in self.nodes.values() if node.shape.half is Half.TARGET]

    def __enter__(self) -> Self:
        keys = self.directory / "keys"
        make_keys(keys)
        damage = self.directory / "damage"
        damage.mkdir()
        for name, shape in SHAPES.items():
            settings = {
                **SETTINGS,
                "deployment": f"soak/{self.backend.value.lower()}",
                "node": name,
                "backend": self.backend.value,
                "keys_directory": str(keys),
            }
            agent = LocalAgent(settings, self.directory / name)
            pages = ENGINE_ROOMS_MAX * -(-ROOM_TOKENS_MAX // shape.page_size)
            spec = EngineSpec(
                agent.socket_path,
                name,
                shape.half,
                shape.tp,
                shape.page_size,
                shape.order,
                # As `agent_world.Engine` counts them: in pages of 16 tokens.
                pages * shape.page_size // 16,
                str(damage),
            )
            engine = EngineProcess(spec, self.directory / f"{name}-engine.log")
            self.nodes[name] = Node(self.backend.value, name, shape, agent, engine)
        for node in self.nodes.values():
            node.agent.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for node in self.nodes.values():
            if node.engine.pid:
                node.engine.kill()
            node.agent.terminate()
        for node in self.nodes.values():
            node.agent.stop()


def children(pid: int) -> Iterator[int]:
    """Yield the ids of a process's children."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, path.read_text().split())


def memory_of(pid: int) -> set[int]:
    """Return the inodes of engines' pages that a process maps or holds open."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:pages-" in line:
                found.add(int(line.split(maxsplit=5)[4]))
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:pages-" in str(entry.readlink()):
                    found.add(entry.stat().st_ino)
    return found


def now_s() -> float:
    """Return the time of the soak's clock."""
    return time.monotonic()
