"""Sets up real agents and real engine clients, and moves one request's KV between them by one way.

Called by `transfer`, `rooms` and `crossover`. Every way has its own decode agent, because the way is a setting of the
decode side. For `Direct`, the decode engine registers with the prefill agent. All ways share one prefill agent, the decode
pages, and the prefill engines of equal layout.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshore_cli.lifetime import Watch, parts_watched
from longshore_cli.local_agents import LocalAgent
from longshore_client import Client, Half
from longshore_lab.bench.errors import BenchError
from longshore_lab.bench.pages import SequencePages, open_pages
from longshore_lab.devices import CPU, HOST, Placement, device_of
from longshore_lab.test_engine.ranks import registered, side_by_side
from longshore_wire.engine_messages import RoomEvent, RoomEventKind
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel

# A worker touches all of its staging memory before it answers.
_START_S = 120.0
_ROOM_S = 120.0
_LOOK_PAUSE_S = 0.002
# Polling interval of a decode engine for events, and so the error of every time of `move_many`. A room between GPUs takes less.
_EVENT_PAUSE_S = 0.0005
_GPU_EVENT_PAUSE_S = 0.00005
_PREFETCH_S = 10.0
# A probe of the wire takes 5 s at most.
_WIRE_S = 15.0
UNKNOWN_WIRE = "Unknown"


@dataclass(frozen=True)
class Course:
    """One line of the table: a way between two layouts, with digests or without."""

    name: str
    way: str
    source_tp: int
    target_tp: int
    digest: bool = False

    @property
    def ring(self) -> str:
        """Size of the decode agent's ring. A room may hold a quarter of it, which must fit several of the largest slabs."""
        return "2Gi" if self.way == "Staged" else "64Mi"


@dataclass(frozen=True)
class Moved:
    """One transfer. `core_s` is the processor time of all workers that took part."""

    seconds: float
    core_s: float


@dataclass(frozen=True)
class Crowd:
    """Concurrent transfers.

    Attributes:
        seconds: of each room, from the call of its `send` (that of the first rank that calls it) to the last target rank's DONE.
        whole_s: from the first `send` of all to the last DONE of all.
    """

    seconds: list[float]
    whole_s: float


@dataclass(frozen=True)
class Engine:
    """All ranks of one engine instance."""

    name: str
    clients: list[Client]
    pages: list[SequencePages]
    agent: LocalAgent


class Scene:
    """One course with its engines, ready to move tokens again and again.

    Attributes:
        clocks: ids of the clocks of the workers' processor time, sources first.
    """

    _rooms = itertools.count(1)

    def __init__(self, course: Course, source: Engine, target: Engine) -> None:
        self.course = course
        self.source = source
        self.target = target
        self._endpoint = source.clients[0].endpoint(_START_S)
        self.clocks = [_process_clock(pid) for pid in self.worker_pids()]
        self.last_room = 0
        self._ranks = ThreadPoolExecutor(len(source.clients), "rank")
        self._event_pause_s = _EVENT_PAUSE_S if target.pages[0].memory.device_name == CPU else _GPU_EVENT_PAUSE_S

    def move(self, token_count: int) -> Moved:
        """Move tokens [0, n) of the sequence once and compare every byte. The claim is made before the offer.

        The clock runs from the call of `send` (that of the first rank that calls it) to the last target rank's DONE.

        Raises:
            BenchError: a room failed, or bytes are wrong.
        """
        room = self.last_room = next(self._rooms)
        for pages in self.target.pages:
            pages.wipe(token_count)
        claims = zip(self.target.clients, self.target.pages, strict=True)
        for client, pages in claims:
            table = pages.pages_of(token_count)
            client.receive(room, self._endpoint, table, 0, token_count, digest=self.course.digest)
        self._wait_prefetched(room)
        tables = [{room: pages.pages_of(token_count)} for pages in self.source.pages]
        core_s = self._core_s()
        begin_s = min(offer.result()[room] for offer in self._offer(tables, token_count))
        ends = [client.wait(room, Half.TARGET, timeout_s=_ROOM_S) for client in self.target.clients]
        seconds = time.perf_counter() - begin_s
        ends += [client.wait(room, Half.SOURCE, timeout_s=_ROOM_S) for client in self.source.clients]
        core_s = self._core_s() - core_s
        self._check(room, ends, token_count)
        return Moved(seconds, core_s)

    def move_many(self, count: int, token_count: int) -> Crowd:
        """Move `count` rooms of `token_count` tokens concurrently and compare every byte. All claims precede the offers.

        Room i moves tokens [i * token_count, (i + 1) * token_count) of the scene's sequence.

        Args:
            token_count: a multiple of the page size.
        Raises:
            BenchError: a room failed, rooms did not end in time, or bytes are wrong.
        """
        pages_each = token_count // self.target.pages[0].layout.page_size
        rooms = [next(self._rooms) for _ in range(count)]
        parts = [slice(number * pages_each, (number + 1) * pages_each) for number in range(count)]
        for pages in self.target.pages:
            pages.wipe(count * token_count)
        for room, part in zip(rooms, parts, strict=True):
            for client, pages in zip(self.target.clients, self.target.pages, strict=True):
                client.receive(room, self._endpoint, pages.table[part], 0, token_count)
        self._wait_prefetched(rooms[-1])
        tables = [
            {room: pages.table[part] for room, part in zip(rooms, parts, strict=True)} for pages in self.source.pages
        ]
        offers = self._offer(tables, token_count)
        ended_s = self._take_ends(rooms, offers)
        begun_s = {room: min(offer.result()[room] for offer in offers) for room in rooms}
        for engine, half in ((self.source, Half.SOURCE), (self.target, Half.TARGET)):
            for client in engine.clients:
                _forget_events(client, half, rooms)
        for pages in self.target.pages:
            pages.check(count * token_count)
        seconds = [ended_s[room] - begun_s[room] for room in rooms]
        return Crowd(seconds, max(ended_s.values()) - min(begun_s.values()))

    def _offer(self, tables: Sequence[Mapping[int, Sequence[int]]], token_count: int) -> list[Future[dict[int, float]]]:
        """Let each source rank offer its rooms in a thread of its own. All ranks offer a room at the same time.

        Ranks of an engine compute a step together. Without that, one rank here would be dozens of rooms ahead.

        Args:
            tables: for each rank, the pages of each room, in the order of the calls.
        Returns:
            For each rank, the time at which it called `send` for each room.
        """
        together = threading.Barrier(len(self.source.clients), timeout=_ROOM_S)

        def offer(client: Client, mine: Mapping[int, Sequence[int]]) -> dict[int, float]:
            begun_s = {}
            for room, table in mine.items():
                together.wait()
                begun_s[room] = time.perf_counter()
                client.send(room, table, 0, token_count, last=True)
            return begun_s

        return [self._ranks.submit(offer, *each) for each in zip(self.source.clients, tables, strict=True)]

    def _take_ends(self, rooms: Sequence[int], offers: Sequence[Future[Any]]) -> dict[int, float]:
        """Wait for all rooms; return the time at which each was done at its last target rank."""
        open_ranks = {room: len(self.target.clients) for room in rooms}
        ended_s: dict[int, float] = {}
        deadline_s = time.perf_counter() + _ROOM_S
        while len(ended_s) < len(rooms):
            for client in self.target.clients:
                for event in client.poll():
                    if event.kind is RoomEventKind.FAILED:
                        raise BenchError(f"{self.course.name}: room {event.room} failed: {event.text}")
                    if event.kind is RoomEventKind.DONE:
                        open_ranks[event.room] -= 1
                        if open_ranks[event.room] == 0:
                            ended_s[event.room] = time.perf_counter()
            for offer in offers:
                if offer.done():
                    offer.result()  # raises the error of a refused offer
            if time.perf_counter() > deadline_s:
                raise BenchError(f"{self.course.name}: {len(rooms) - len(ended_s)} rooms did not end")
            time.sleep(self._event_pause_s)
        return ended_s

    def close(self) -> None:
        """End the ranks' threads."""
        self._ranks.shutdown()

    def wire(self) -> str:
        """Return the wire that the prefill worker's probe found; UNKNOWN_WIRE if it found none."""
        deadline_s = time.monotonic() + _WIRE_S
        while time.monotonic() < deadline_s:
            for worker in self.source.agent.status()["workers"]:
                for peer in worker["peers"]:
                    if peer["instance"] == self.target.name and peer["wire"] != UNKNOWN_WIRE:
                        return str(peer["wire"])
            time.sleep(_LOOK_PAUSE_S)
        return UNKNOWN_WIRE

    def spans(self, room: int) -> list[dict[str, Any]]:
        """Return the spans of a room from both agents, sorted by start."""
        found = [span for engine in (self.source, self.target) for span in engine.agent.room(room)["spans"]]
        return sorted(found, key=lambda span: int(span["start_ns"]))

    def _check(self, room: int, ends: Sequence[RoomEvent], token_count: int) -> None:
        for end in ends:
            if end.reason is not Reason.NONE:
                raise BenchError(f"{self.course.name}: room {room} failed: {end.reason.name}: {end.text}")
        for pages in self.target.pages:
            pages.check(token_count)

    def _wait_prefetched(self, room: int) -> None:
        """Wait until every source rank has answered the claim with its demand."""
        deadline_s = time.monotonic() + _PREFETCH_S
        while time.monotonic() < deadline_s:
            halves = self.target.agent.room(room)["halves"]
            pairs = [pair for half in halves for pair in half["room"]["pairs"]]
            if pairs and all(pair["slabs_total"] for pair in pairs):
                return
            time.sleep(_LOOK_PAUSE_S)
        raise BenchError(f"{self.course.name}: the prefill side did not answer the claim of room {room}")

    def worker_pids(self) -> list[int]:
        """Return the PIDs of the workers, those of the source first."""
        return [pid for engine in (self.source, self.target) for pid in _worker_pids(engine)]

    def _core_s(self) -> float:
        return sum(time.clock_gettime(clock) for clock in self.clocks)


class Stage:
    """All agents and engines of one run. A context manager by `open_stage`."""

    def __init__(self, stack: ExitStack, settings: Mapping[str, str], directory: Path, watch: Watch) -> None:
        self._stack = stack
        self._watch = watch
        self._engines_watched: set[str] = set()
        self._settings = settings
        self._directory = directory

    def agent(self, name: str, **settings: str) -> LocalAgent:
        """Start one agent; it may not be ready yet."""
        agent = LocalAgent({**self._settings, **settings}, self._directory / name)
        self._stack.callback(agent.stop)
        agent.start()
        self._stack.callback(agent.watched_by(self._watch))
        return agent

    def beside(self, stack: ExitStack) -> Stage:
        """Return a stage whose engines end with `stack`, before the agents."""
        return Stage(stack, self._settings, self._directory, self._watch)

    def scene(self, course: Course, source: Engine, target: Engine) -> Scene:
        """Set up a course between registered engines and watch their workers, which must not end."""
        for engine in (source, target):
            if engine.name not in self._engines_watched:
                self._engines_watched.add(engine.name)
                self._stack.callback(engine.agent.workers_watched_by(self._watch, [engine.name]))
        scene = Scene(course, source, target)
        self._stack.callback(scene.close)
        return scene

    def engine(self, name: str, agent: LocalAgent, pages: list[SequencePages], half: Half) -> Engine:
        """Register all ranks of an engine at an agent."""

        def register(mine: SequencePages) -> Client:
            client = registered(agent.socket_path, name, mine, (half,), _START_S)
            self._stack.callback(client.close)
            return client

        return Engine(name, side_by_side(register, pages), pages, agent)

    def pages(
        self,
        model: ModelShape,
        tp: int,
        page_size: int,
        token_count: int,
        seed: int,
        devices: Sequence[str] = (),
    ) -> list[SequencePages]:
        """Make the pools of all ranks of an engine, on these GPUs or in shared memory."""
        made = []
        for rank in range(tp):
            layout = KVLayout(model, Parallel(tp=tp, tp_rank=rank), page_size)
            made.append(open_pages(layout, token_count, seed + rank, device_of(devices, rank)))
            self._stack.callback(made[-1].close)
        return made


@contextmanager
def open_stage(settings: Mapping[str, str], directory: Path) -> Iterator[Stage]:
    """Yield a stage; at the end close clients, then agents, then pages."""
    with parts_watched() as watch, ExitStack() as stack:
        yield Stage(stack, settings, directory, watch)


@contextmanager
def open_scenes(
    courses: Sequence[Course],
    model: ModelShape,
    page_size: int,
    token_count: int,
    settings: Mapping[str, str],
    directory: Path,
    placement: Placement = HOST,
) -> Iterator[list[Scene]]:
    """Start agents and engines for all courses, with the sequence's KV in every prefill engine's pages.

    Args:
        settings: settings of all agents, by their names in docs/reference/settings.md.
        directory: an empty directory for the agents' sockets.
        placement: the devices of the pages.
    """
    with open_stage(settings, directory) as stage:
        target_pages = {
            tp: stage.pages(model, tp, page_size, token_count, 100, placement.decode)
            for tp in sorted({c.target_tp for c in courses})
        }
        source_pages = {
            tp: stage.pages(model, tp, page_size, token_count, 200, placement.prefill)
            for tp in sorted({c.source_tp for c in courses})
        }
        for pages in itertools.chain(*source_pages.values()):
            pages.fill(token_count)
        prefill = stage.agent("prefill")
        decodes = [
            prefill
            if course.way == "Direct"
            else stage.agent(f"decode-{index}", force_way=course.way, ring_bytes=course.ring)
            for index, course in enumerate(courses)
        ]
        for agent in (prefill, *decodes):
            agent.wait_ready()
        sources = {tp: stage.engine(f"prefill-{tp}", prefill, pages, Half.SOURCE) for tp, pages in source_pages.items()}
        scenes = []
        for index, (course, agent) in enumerate(zip(courses, decodes, strict=True)):
            target = stage.engine(f"decode-{index}", agent, target_pages[course.target_tp], Half.TARGET)
            scenes.append(stage.scene(course, sources[course.source_tp], target))
        # With torch loaded, a garbage collection takes 100 ms, which must not delay a room.
        gc.collect()
        gc.freeze()
        yield scenes


def check_direct(scenes: Sequence[Scene]) -> None:
    """Raise BenchError if a direct course was staged, as agents do between GPUs without peer access."""
    for scene in scenes:
        by_worker = scene.source.agent.metrics().by("worker", "longshore_writes_total", way="direct")
        mine = sum(count for worker, count in by_worker.items() if worker.startswith(f"{scene.source.name}/"))
        if scene.course.way == "Direct" and not mine:
            raise BenchError(
                f"{scene.course.name}: no write was direct: these GPUs do not reach each other's memory; choose others, or one"
            )


def _forget_events(client: Client, half: Half, rooms: Sequence[int]) -> None:
    """Drop the last events of finished rooms, so that the next run does not receive them."""
    if half is Half.SOURCE:
        for room in rooms:
            client.wait(room, half, timeout_s=_ROOM_S)
    client.poll()


def _process_clock(pid: int) -> int:
    """Return the id of the clock of a process's processor time. /proc has a resolution of only 10 ms."""
    return (~pid << 3) | 2


def _worker_pids(engine: Engine) -> list[int]:
    workers = engine.agent.status()["workers"]
    pids = [int(worker["pid"]) for worker in workers if str(worker["worker"]).startswith(f"{engine.name}/")]
    if len(pids) != len(engine.clients):
        raise BenchError(f"{len(pids)} workers serve the {len(engine.clients)} ranks of {engine.name}")
    return pids
