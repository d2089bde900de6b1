"""Provides real agents, and engine ranks with pages in GPU memory, each in its own process, for tests and benchmarks.

Run as a script it is one engine rank. Its pages are torch's, as those of most engines, and hold gigabytes. So their content
is not the test engine's: each process computes it on its GPU, from (seed, plane, token, head, element).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cache_oracle import POISON as STATE_POISON
from cache_oracle import Memory, content, state_geometry

from longshore_cli.metrics_page import MetricsPage
from longshore_client import (
    CacheTokens,
    Half,
    KVLayout,
    ModelShape,
    PageOrder,
    Parallel,
    TargetMemory,
    connect,
    create_region,
    pool_geometry,
)
from longshore_client.cuda import device_name, device_region
from longshore_lab.test_engine.remote import Remote, serve
from longshore_wire.engine_messages import Endpoint, RoomEventKind
from longshore_wire.layout import Plane, PoolGeometry

# Time to load torch and the transport in several processes concurrently.
START_LIMIT_S = 60.0
ROOM_LIMIT_S = 60.0
POISON = 0x5AA5
# Pages do not begin at the start of their allocation, like most engines' pages.
OFFSET_BYTES = 1 << 20
# Conv states by their sections, then recurrent states: of GDN, and of Mamba2 with one group. Smaller than real ones.
STATES = {
    "gdn": (Plane(4, 256, 3), Plane(4, 256, 3), Plane(16, 256, 3), Plane(16, 512, 32)),
    "mamba": (Plane(16, 128, 3), Plane(1, 128, 3), Plane(1, 128, 3), Plane(16, 256, 64)),
}
SLOT_COUNT = 12
# The name of pages in host memory in /proc.
HOST_PAGES = "longshore-host-pages"
_PLANTS = str(Path(__file__).parent / "plants")
_PAUSE_S = 0.005


class GPUAgent:
    """One real agent; `settings` are environment variables.

    With `PLANT_FILE` its copies can be damaged; see `plants/sitecustomize.py`.
    """

    def __init__(self, **settings: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="longshore-gpu-")
        self.directory = Path(self._folder.name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LONGSHORE_")}
        path = [_PLANTS, *sys.path] if "PLANT_FILE" in settings else sys.path
        environment |= {"LONGSHORE_DEPLOYMENT": "tests/gpu", "PYTHONPATH": os.pathsep.join(path), **settings}
        environment |= {"LONGSHORE_RUN_DIRECTORY": str(self.directory)}
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "longshore_agent.main"], env=environment, stderr=log, stdin=subprocess.DEVNULL
            )

    @property
    def socket(self) -> str:
        return str(self.directory / "agent.sock")

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            sys.stderr.write(self.log()[-6000:])
        self.close()


def agent_page(agent: GPUAgent, path: str) -> str:
    """Return a page of an agent's HTTP server."""
    http = json.loads((agent.directory / "agent.json").read_bytes())["http"]
    with urllib.request.urlopen(http + path, timeout=10) as answer:
        return str(answer.read().decode())


def agent_status(agent: GPUAgent) -> dict[str, Any]:
    """Return an agent's status."""
    return dict(json.loads(agent_page(agent, "/v1/status")))


def writes_by_way(agent: GPUAgent) -> dict[str, float]:
    """Return the writes of an agent's workers so far, by way."""
    return MetricsPage(agent_page(agent, "/metrics")).by("way", "longshore_writes_total")


def wire_between(one: int, other: int) -> str:
    """Return the wire that a probe must find between two GPUs (torch's indexes), by `nvidia-smi`.

    On one GPU it is CUDA IPC.
    """
    from longshore_agent.memory import cuda
    from longshore_agent.transports import nvml

    if one == other:
        return "CudaIPC"
    names = [cuda.device_uuid(index) for index in (one, other)]
    rows = {}
    if shutil.which("nvidia-smi") is not None:
        listed = _nvidia_smi("--query-gpu=uuid", "--format=csv,noheader").split()
        lines = [line.split() for line in _nvidia_smi("topo", "-p2p", "n").splitlines()]
        # " GPU0  X  OK": the header of the table has no X.
        table = [words[1:] for words in lines if words and words[0].startswith("GPU") and "X" in words]
        rows = dict(zip(listed, (dict(zip(listed, row, strict=False)) for row in table), strict=False))
    if set(names) <= set(rows):
        return "NVLink" if rows[names[0]][names[1]] == "OK" else "CudaIPC"
    # Without nvidia-smi, only NVML can tell.
    return "NVLink" if nvml.joined_by_nvlink(*names) else "CudaIPC"


def _nvidia_smi(*arguments: str) -> str:
    return subprocess.run(["nvidia-smi", *arguments], check=False, capture_output=True, text=True, timeout=60).stdout


class EngineProcess(Remote):
    """One engine rank; its methods are those of `_Rank`."""

    def __init__(self, **environment: str) -> None:
        super().__init__([sys.executable, __file__], environment)


class _Rank:
    """The engine's side; see `EngineProcess`. torch is loaded here only."""

    def __init__(self) -> None:
        self.client: Any = None

    def allocate(
        self,
        *,
        device: int,
        layers: int,
        kv_heads: int,
        tp: int,
        rank: int,
        page_size: int,
        page_count: int,
        latent: bool = False,
        index: bool = False,
        state_layers: int = 0,
    ) -> dict[str, Any]:
        """Allocate memory for the pages and poison it. With `latent` they hold latents of DeepSeek's size.

        With `index` there is a second cache, of index keys, with the same page ids. With `state_layers` there are two more
        caches of slots, whose pages have so many layers: states of GDN and of Mamba2.
        """
        import torch

        self.torch, self.memory = torch, TargetMemory.DEVICE
        shape = ModelShape.kv(layers, kv_heads, 128, 2)
        if latent:
            shape = ModelShape.latent(layers, 576, 2)
        keys = ModelShape.latent(layers - 1, 128, 2)
        place = Parallel(tp, rank)
        others = [KVLayout(keys, place, page_size, name="index")] if index else []
        if state_layers:
            shapes = {name: ModelShape(layers - 1, planes, 2) for name, planes in STATES.items()}
            others += [KVLayout(each, place, state_layers, PageOrder.SLOT, name=name) for name, each in shapes.items()]
        self.layout = KVLayout(shape, place, page_size, others=tuple(others))
        self.device = torch.device("cuda", device)
        # By cache: its layout, geometry and pages.
        self.caches = [
            self._allocated(layout, page_count) for layout in self.layout.caches if layout.order is not PageOrder.SLOT
        ]
        self.states = [self._slots(layout) for layout in self.layout.caches[len(self.caches) :]]
        _, self.geometry, self.pages = self.caches[0]
        length = self.geometry.region_bytes[0]
        torch.cuda.synchronize(self.device)
        region = device_region(self.pages)
        return {
            "handle": region.handle.hex(),
            "offset": region.offset_bytes,
            "bytes": length,
            "device": device_name(self.pages),
        }

    def _allocated(self, layout: KVLayout, page_count: int) -> tuple[KVLayout, PoolGeometry, Any]:
        torch, geometry = self.torch, pool_geometry(layout, page_count)
        memory = torch.empty(OFFSET_BYTES + geometry.region_bytes[0], dtype=torch.uint8, device=self.device)
        sizes = (len(geometry.planes), page_count, layout.page_size, len(layout.heads), layout.model.head_dim)
        pages = memory[OFFSET_BYTES:].view(torch.int16).view(sizes)
        pages.fill_(POISON)
        return layout, geometry, pages

    def _slots(self, layout: KVLayout) -> tuple[Memory, Any]:
        """Allocate slots; return their copy on the host, which knows what they should hold, and their memory."""
        geometry = state_geometry(layout, SLOT_COUNT)
        memory = Memory(layout, geometry, [np.full(geometry.region_bytes[0], STATE_POISON, np.uint8)])
        return memory, self.torch.from_numpy(memory.data[0]).to(self.device)

    def allocate_host(self, *, layers: int, kv_heads: int, tp: int, rank: int, page_size: int, page_count: int) -> None:
        """As `allocate`, in host memory."""
        import torch

        self.torch, self.memory = torch, TargetMemory.HOST
        self.layout = KVLayout(ModelShape.kv(layers, kv_heads, 128, 2), Parallel(tp, rank), page_size)
        self.geometry = pool_geometry(self.layout, page_count)
        self.descriptor, mapped = create_region(self.geometry.region_bytes[0], HOST_PAGES)
        self.device = torch.device("cpu")
        shape = (len(self.geometry.planes), page_count, page_size, len(self.layout.heads), 128)
        self.pages = torch.frombuffer(mapped, dtype=torch.int16).view(shape)
        self.pages.fill_(POISON)
        self.caches, self.states = [(self.layout, self.geometry, self.pages)], []

    def register_host(self, *, socket: str, instance: str, device: str) -> None:
        """Register pages of `allocate_host`, of an engine whose device is `device` ("cpu": all of its pages are there)."""
        only = device == "cpu"
        self.memory = TargetMemory.DEVICE if only else TargetMemory.HOST
        self.client = connect(
            socket,
            instance=instance,
            layout=self.layout,
            device=device,
            roles=(Half.TARGET,),
            host_layout=None if only else self.layout,
            timeout_s=START_LIMIT_S,
        )
        self.client.register_pool(0, self.geometry, [self.descriptor], memory=self.memory, timeout_s=START_LIMIT_S)

    def register(self, *, socket: str, instance: str, role: str) -> None:
        self.client = connect(
            socket,
            instance=instance,
            layout=self.layout,
            device=device_name(self.pages),
            roles=(Half[role],),
            timeout_s=START_LIMIT_S,
        )
        memories = [(geometry, pages) for _, geometry, pages in self.caches]
        memories += [(state.geometry, slots) for state, slots in self.states]
        for cache, (geometry, pages) in enumerate(memories):
            self.client.register_pool(cache, geometry, [device_region(pages)], timeout_s=START_LIMIT_S)

    def endpoint(self) -> str:
        return msgspec.msgpack.encode(self.client.endpoint(START_LIMIT_S)).hex()

    def _slots_of(self, layout: KVLayout, turn: int) -> list[int]:
        """Return the slots of the sequence of this number."""
        count = layout.pages_of(0, 1)[1]
        return [count * turn + number for number in range(count)]

    def fill(self, *, seed: int, tokens: int, pages: list[int], turn: int = 0) -> None:
        """Write the content of tokens [0, tokens), as a model would."""
        for cache, (state, slots) in enumerate(self.states):
            whole = content(seed + cache, state.layout, tokens)
            state.put(state.data, self._slots_of(state.layout, turn), whole, 0, tokens)
            slots.copy_(self.torch.from_numpy(state.data[0]))
        for cache, (layout, _, held) in enumerate(self.caches):
            for plane in range(len(held)):
                self._place(held[plane], pages, self._values(seed + 1000 * cache, plane, tokens, layout))
        self.torch.cuda.synchronize(self.device)

    def poison(self) -> None:
        for _, _, held in self.caches:
            held.fill_(POISON)
        self._settle()

    def differences(self, *, sequences: list[tuple[int, int, list[int]]]) -> int:
        """Return the number of wrong elements in the pools: `pages` must hold (seed, tokens), all others poison.

        Sequences are numbered in their order.
        """
        self._settle()
        wrong = 0
        for cache, (state, slots) in enumerate(self.states):
            wanted = [np.full_like(region, STATE_POISON) for region in state.data]
            for turn, (seed, tokens, _) in enumerate(sequences):
                whole = content(seed + cache, state.layout, tokens)
                state.put(wanted, self._slots_of(state.layout, turn), whole, 0, tokens)
            wrong += int((slots.cpu().numpy() != wanted[0]).sum())
        for cache, (layout, _, held) in enumerate(self.caches):
            for plane in range(len(held)):
                expected = self.torch.full_like(held[plane], POISON)
                for seed, tokens, pages in sequences:
                    self._place(expected, pages, self._values(seed + 1000 * cache, plane, tokens, layout))
                wrong += int((expected != held[plane]).sum())
        return wrong

    def send(self, *, room: int, pages: list[int], tokens: int, chunk: int, turn: int = 0) -> tuple[float, float]:
        """Offer tokens [0, tokens) in chunks; return when the first left and when it was accepted (monotonic seconds)."""
        start_s, accepted_s = time.monotonic(), 0.0
        size = self.layout.page_size
        for first in range(0, tokens, chunk):
            end = min(first + chunk, tokens)
            ids = pages[first // size : -(-end // size)]
            others = [CacheTokens(cache, ids, first, end) for cache in range(1, len(self.caches))]
            if end == tokens:
                others += self._states(turn, tokens)
            self.client.send(room, ids, first, end, last=end == tokens, others=others)
            accepted_s = accepted_s or time.monotonic()
        return start_s, accepted_s

    def _states(self, turn: int, tokens: int) -> list[CacheTokens]:
        return [
            CacheTokens(len(self.caches) + cache, self._slots_of(state.layout, turn), 0, tokens)
            for cache, (state, _) in enumerate(self.states)
        ]

    def receive(
        self, *, room: int, endpoint: str, pages: list[int], tokens: int, digest: bool = False, turn: int = 0
    ) -> None:
        known = msgspec.msgpack.decode(bytes.fromhex(endpoint), type=Endpoint)
        others = [CacheTokens(cache, pages, 0, tokens) for cache in range(1, len(self.caches))]
        others += self._states(turn, tokens)
        self.client.receive(room, known, pages, 0, tokens, memory=self.memory, digest=digest, others=others)

    def wait(self, *, room: int, half: str, instance: str) -> tuple[str, str, float]:
        """Return the end of one half, its text and its time."""
        event = self.client.wait(room, Half[half], instance=instance, timeout_s=ROOM_LIMIT_S)
        end_s = time.monotonic()
        self.client.wait(room, Half[half], instance=instance, kinds=(RoomEventKind.RELEASED,), timeout_s=ROOM_LIMIT_S)
        return event.kind.name, event.text, end_s

    def to_host(self, *, page_count: int) -> float:
        """Copy the first pages to pinned host memory, in one piece a plane; return the seconds."""
        if not hasattr(self, "pinned"):
            self.pinned = self.torch.empty(self.pages.shape, dtype=self.pages.dtype, pin_memory=True)
        self._settle()
        begin_s = time.monotonic()
        for near, far in zip(self.pages, self.pinned, strict=True):
            far[:page_count].copy_(near[:page_count], non_blocking=True)
        self._settle()
        return time.monotonic() - begin_s

    def unregister(self) -> None:
        for cache in range(len(self.caches) + len(self.states)):
            self.client.unregister_pool(cache, self.memory)

    def free(self) -> None:
        """Free the pages' memory."""
        del self.pages, self.caches, self.states
        self.torch.cuda.empty_cache()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def _values(self, seed: int, plane: int, tokens: int, layout: KVLayout) -> Any:
        """Return [tokens, heads, elements] of one plane; the same for every rank that holds these heads."""
        torch, device = self.torch, self.device
        heads = layout.heads
        number = torch.arange(tokens, device=device)[:, None, None] + (seed * 1_000_003 + plane) * 1_000_003
        number = number * 1_000_003 + torch.arange(heads.start, heads.stop, device=device)[:, None]
        number = number * 1_000_003 + torch.arange(layout.model.head_dim, device=device)
        number *= 6364136223846793005
        return ((number >> 33) & 0x7FFF).to(torch.int16)

    def _place(self, plane: Any, pages: list[int], values: Any) -> None:
        slots = self.torch.arange(len(values), device=self.device)
        ids = self.torch.tensor(pages, device=self.device)
        size = self.layout.page_size
        plane[ids[slots // size], slots % size] = values


def main() -> None:
    """Carry out commands until standard input ends."""
    rank = _Rank()
    serve(rank)
    # The client's threads end with the process, as in an engine.
    assert threading.main_thread().is_alive()
    os._exit(0)


if __name__ == "__main__":
    main()
