"""Measures the gathers, writes and scatters of a staged transfer alone, without messages between the peers.

`longshore bench transfer` runs it as `python -m longshore_lab.bare_path` and divides by its rates. One process a rank, as
in the product, with the product's own kernels, staging buffers, transport, lanes and slabs. But every slab's place is
agreed before the clock starts, nothing can fail, wait for credit, be cancelled or be repeated, and one datagram reports
each slab that has landed. Reads a `Request` a line from standard input and answers each with an `Answer`.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import IO, TypeVar

import msgspec
import numpy as np

from longshore_agent.errors import TransportError
from longshore_agent.kernels.copier import View, pool_view, slab_view
from longshore_agent.kernels.cpu_copy import compile_loop, copy_rows
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_agent.pipeline.runners import sleep_until
from longshore_agent.pipeline.waits import Written
from longshore_agent.settings import Settings
from longshore_agent.transports import BACKENDS, create
from longshore_agent.transports.answers import own_output, say
from longshore_agent.transports.base import Pieces, Transport
from longshore_lab.rate import checksum, process_clock
from longshore_wire.layout import KVLayout, ModelShape, Parallel, PlaneGeometry, PoolGeometry
from longshore_wire.plan import Pair, plan
from longshore_wire.slabs import SlabGrid, slab_bytes, slab_limit_bytes, slab_units
from longshore_wire.ways import Staging

# The product's own sizes.
_SIZES = Settings()
# A target drives its transport this often while bytes are due, as a worker does.
_DRIVE_PAUSE_S = 0.001
_LANDED = struct.Struct("<II")

_T = TypeVar("_T")


class Scene(msgspec.Struct, frozen=True):
    """The layouts and sizes of a run; the same for all of its processes."""

    backend: str
    model: ModelShape
    page_size: int
    tokens_max: int
    source_tp: int
    target_tp: int

    def layout(self, tp: int, rank: int) -> KVLayout:
        """Return the layout of one rank."""
        return KVLayout(self.model, Parallel(tp=tp, tp_rank=rank), self.page_size)

    def pairs(self) -> tuple[Pair, ...]:
        """Return all pairs of ranks with the slices that they move."""
        return plan(self.layout(self.source_tp, 0), self.layout(self.target_tp, 0), staging=Staging.ALWAYS).pairs

    def grid(self, pair: Pair, tokens: int) -> SlabGrid:
        """Return the slabs of one pair, cut as in the product."""
        limit = slab_limit_bytes(_SIZES.lane_bytes, self.ring_bytes, self.source_tp)
        return SlabGrid(
            0, tokens, slab_units(pair.unit_bytes, tokens, limit, _SIZES.slab_bytes_min, 2 * _SIZES.lane_count)
        )

    @property
    def ring_bytes(self) -> int:
        """Size of a target rank's ring in bytes: every slab has its own place."""
        token_bytes = self.model.kinds * self.model.layers * self.model.kv_heads * self.model.head_bytes
        return self.tokens_max * token_bytes + self.source_tp * (_SIZES.lane_bytes + (1 << 20))


class Request(msgspec.Struct, frozen=True):
    """Move the first `tokens` of the sequence once."""

    tokens: int


class Answer(msgspec.Struct, frozen=True):
    """The times of a request. `core_s` is the processor time of all ranks; `equal`: sent and received checksums agree."""

    seconds: float
    core_s: float
    equal: bool


class _Hello(msgspec.Struct, frozen=True):
    metadata: bytes
    address: int = 0  # of the ring
    notices: bytes = b""  # where a target receives notices of landed slabs


class _Sum(msgspec.Struct, frozen=True):
    value: int


class Rank:
    """One process: its pages, in random order, its transport, and its conductor's commands."""

    def __init__(self, scene: Scene, tp: int, rank: int, name: str) -> None:
        self.scene = scene
        self.rank = rank
        self.layout = scene.layout(tp, rank)
        count = -(-scene.tokens_max // scene.page_size)
        geometry = _geometry(self.layout, count)
        descriptor = os.memfd_create("longshore-bench")
        os.posix_fallocate(descriptor, 0, geometry.region_bytes[0])
        self.memory = np.frombuffer(mmap.mmap(descriptor, geometry.region_bytes[0]), dtype=np.uint8)
        self.pool = KVPool(self.layout, geometry, [descriptor])
        os.close(descriptor)
        self.table = np.random.default_rng(rank).permutation(count).astype(np.int32)
        self.transport: Transport = create(scene.backend, name)
        compile_loop()

    def view(self, pair: Pair) -> View:
        """Return the view of the layers and heads that a pair of ranks moves."""
        return pool_view(self.pool, self.table, 0, pair.local_layers(self.layout), pair.local_heads(self.layout))


class Source(Rank):
    """A prefill rank: lanes that gather and write."""

    def __init__(self, scene: Scene, rank: int) -> None:
        super().__init__(scene, scene.source_tp, rank, f"bare-source-{rank}")
        self.memory[:] = np.random.default_rng(rank).integers(0, 256, self.memory.size, np.uint8)
        self.pairs = [pair for pair in scene.pairs() if pair.source_rank == rank]
        self._buffers = [StagingBuffer(_SIZES.lane_bytes) for _ in range(_SIZES.lane_count)]
        for buffer in self._buffers:
            self.transport.register(buffer.address, _SIZES.lane_bytes)
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._queue: queue.SimpleQueue[tuple[Pair, SlabGrid, int]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def serve(self, out: IO[bytes]) -> None:
        """Obey the conductor until the input ends; answer to `out`."""
        say(out, _Hello(self.transport.metadata()))
        self._targets = [_heard(sys.stdin.buffer, _Hello) for _ in range(self.scene.target_tp)]
        self._names = [self.transport.connect(target.metadata) for target in self._targets]
        for index, buffer in enumerate(self._buffers):
            threading.Thread(target=self._lane, args=(buffer,), name=f"lane-{index}", daemon=True).start()
        say(out, _Sum(0))
        while (line := sys.stdin.buffer.readline()) != b"":
            tokens = msgspec.json.decode(line, type=Request).tokens
            grids = [self.scene.grid(pair, tokens) for pair in self.pairs]
            # Slabs of all pairs in turns, in the order of the product's grants.
            for slab in range(max((grid.count for grid in grids), default=0)):
                for pair, grid in zip(self.pairs, grids, strict=True):
                    if slab < grid.count:
                        self._queue.put((pair, grid, slab))
            errors = [self._done.get() for grid in grids for _ in range(grid.count)]
            if any(errors):
                raise TransportError(next(error for error in errors if error))
            say(out, _Sum(0))
            sys.stdin.buffer.readline()
            say(out, _Sum(sum(self._sent(pair, tokens) for pair in self.pairs)))

    def _sent(self, pair: Pair, tokens: int) -> int:
        """Return the wrapped sum of all words that a pair moves."""
        layout, heads = self.layout, pair.local_heads(self.layout)
        shape = (layout.plane_count, len(self.table), layout.page_size, len(layout.heads), -1)
        words = self.memory.view(np.uint64).reshape(shape)[:, :, :, heads.start : heads.stop]
        whole, left = divmod(tokens, layout.page_size)
        parts = [words[:, page] for page in self.table[:whole]]
        if left:
            parts.append(words[:, self.table[whole], :left])
        return sum(int(part.sum()) for part in parts)

    def _lane(self, buffer: StagingBuffer) -> None:
        while True:
            pair, grid, slab = self._queue.get()
            try:
                self._move(buffer, pair, grid, slab)
                self._done.put("")
            except TransportError as error:
                self._done.put(str(error))

    def _move(self, buffer: StagingBuffer, pair: Pair, grid: SlabGrid, slab: int) -> None:
        tokens = grid.tokens(slab)
        view = self.view(pair)
        length_bytes = copy_rows(view, slab_view(buffer.view(0, _SIZES.lane_bytes), view, tokens), tokens)
        target = self._targets[pair.target_rank]
        place = target.address + _place(self.scene, pair, grid, slab)
        piece = Pieces.one(buffer.address, place, length_bytes)
        write = self.transport.draft(self._names[pair.target_rank], piece, b"")
        self.transport.start(write)
        written = Written(self.transport, write)
        sleep_until(written)
        if error := written.release()[0]:
            raise TransportError(error)
        self._notices.sendto(_LANDED.pack(pair.source_rank, slab), target.notices)


class Target(Rank):
    """A decode rank: a ring with a place for every slab, and threads that scatter."""

    def __init__(self, scene: Scene, rank: int) -> None:
        super().__init__(scene, scene.target_tp, rank, f"bare-target-{rank}")
        self.memory[:] = 0
        self.pairs = {pair.source_rank: pair for pair in scene.pairs() if pair.target_rank == rank}
        self._ring = StagingBuffer(scene.ring_bytes)
        # In one extent, so that no slab is cut.
        self.transport.register(self._ring.address, self._ring.length_bytes)
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notices.bind(b"")
        self._landed: queue.SimpleQueue[tuple[Pair, SlabGrid, int]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def serve(self, out: IO[bytes]) -> None:
        """Obey the conductor until the input ends; answer to `out`."""
        say(out, _Hello(self.transport.metadata(), self._ring.address, self._notices.getsockname()))
        for _ in range(self.scene.source_tp):
            self.transport.connect(_heard(sys.stdin.buffer, _Hello).metadata)
        for index in range(_SIZES.scatter_threads):
            threading.Thread(target=self._scatter, name=f"scatter-{index}", daemon=True).start()
        say(out, _Sum(0))
        while (line := sys.stdin.buffer.readline()) != b"":
            tokens = msgspec.json.decode(line, type=Request).tokens
            grids = {rank: self.scene.grid(pair, tokens) for rank, pair in self.pairs.items()}
            count = sum(grid.count for grid in grids.values())
            self._notices.settimeout(_DRIVE_PAUSE_S)
            say(out, _Sum(0))
            for _ in range(count):
                rank, slab = self._next_landed()
                self._landed.put((self.pairs[rank], grids[rank], slab))
            for _ in range(count):
                self._done.get()
            say(out, _Sum(0))
            sys.stdin.buffer.readline()
            say(out, _Sum(checksum(self.memory)))
            self.memory[:] = 0

    def _next_landed(self) -> tuple[int, int]:
        while True:
            try:
                rank, slab = _LANDED.unpack(self._notices.recv(_LANDED.size))
            except TimeoutError:
                self.transport.notices()
            else:
                return rank, slab

    def _scatter(self) -> None:
        while True:
            pair, grid, slab = self._landed.get()
            tokens = grid.tokens(slab)
            landed = self._ring.view(_place(self.scene, pair, grid, slab), pair.payload_bytes(*tokens))
            view = self.view(pair)
            copy_rows(slab_view(landed, view, tokens), view, tokens)
            self._done.put(None)


class Conductor:
    """Starts all ranks and measures them."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sources = [self._start("source", rank) for rank in range(scene.source_tp)]
        self._targets = [self._start("target", rank) for rank in range(scene.target_tp)]
        sources = [_heard(_out(process), _Hello) for process in self._sources]
        targets = [_heard(_out(process), _Hello) for process in self._targets]
        for ranks, hellos in ((self._sources, targets), (self._targets, sources)):
            for process, hello in itertools.product(ranks, hellos):
                say(_in(process), hello)
        for process in self._processes:
            _heard(_out(process), _Sum)

    def measure(self, request: Request) -> Answer:
        """Move the tokens once."""
        for process in self._targets:
            say(_in(process), request)
        for process in self._targets:
            _heard(_out(process), _Sum)
        core_s, begin_s = self._core_s(), time.perf_counter()
        for process in self._sources:
            say(_in(process), request)
        for process in self._targets:
            _heard(_out(process), _Sum)
        seconds = time.perf_counter() - begin_s
        for process in self._sources:
            _heard(_out(process), _Sum)
        core_s = self._core_s() - core_s
        # A sum of words does not depend on the order of tokens and heads. The product's own tests compare bytes.
        sent, arrived = (self._sum(processes, request) for processes in (self._sources, self._targets))
        return Answer(seconds, core_s, sent == arrived)

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            _in(process).close()
        for process in self._processes:
            process.wait()

    def _sum(self, processes: list[subprocess.Popen[bytes]], request: Request) -> int:
        for process in processes:
            say(_in(process), request)
        return sum(_heard(_out(process), _Sum).value for process in processes) % 2**64

    def _start(self, role: str, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __spec__.name, "--scene", msgspec.json.encode(self._scene).decode()]
        process = subprocess.Popen([*command, f"--{role}", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes.append(process)
        return process

    def _core_s(self) -> float:
        return sum(time.clock_gettime(process_clock(process.pid)) for process in self._processes)


def _geometry(layout: KVLayout, page_count: int) -> PoolGeometry:
    """Return a geometry of consecutive planes, each with its pages in order and all heads of a token together."""
    token_bytes = len(layout.heads) * layout.model.head_bytes
    page_bytes = layout.page_size * token_bytes
    planes = tuple(
        PlaneGeometry(0, plane * page_count * page_bytes, page_bytes, token_bytes, layout.model.head_bytes)
        for plane in range(layout.plane_count)
    )
    return PoolGeometry(page_count, (layout.plane_count * page_count * page_bytes,), planes)


def _place(scene: Scene, pair: Pair, grid: SlabGrid, slab: int) -> int:
    """Return a slab's place in its target's ring."""
    share_bytes = scene.ring_bytes // scene.source_tp
    place_bytes = slab_bytes(pair.payload_bytes(0, grid.slab_tokens))
    return int(pair.source_rank * share_bytes + slab * place_bytes) // 256 * 256


def _in(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _out(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _heard(stream: IO[bytes], kind: type[_T]) -> _T:
    line = stream.readline()
    if not line:
        raise TransportError("a process of the bare path ended")
    return msgspec.json.decode(line, type=kind)


def main() -> int:
    """Run a rank or the conductor, as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", required=True, help="JSON of a Scene; its backend is one of " + ", ".join(BACKENDS))
    parser.add_argument("--source", type=int, help="run this prefill rank")
    parser.add_argument("--target", type=int, help="run this decode rank")
    options = parser.parse_args()
    out = own_output()
    scene = msgspec.json.decode(options.scene, type=Scene)
    if options.source is not None:
        Source(scene, options.source).serve(out)
        return 0
    if options.target is not None:
        Target(scene, options.target).serve(out)
        return 0
    conductor = Conductor(scene)
    try:
        while (line := sys.stdin.buffer.readline()) != b"":
            say(out, conductor.measure(msgspec.json.decode(line, type=Request)))
    finally:
        conductor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
