"""Measures the speed of a bare transport between two processes, without an agent.

Benchmarks run it as `python -m longshore_lab.rate --backend NIXL --bytes-max N` and divide by its rates. Reads requests
from standard input, one JSON object a line, and answers each with one, so that a benchmark can alternate between this and
its own measurements. Ends with its input. Requests (`Request`): `write` (one descriptor), `slices` (a prepared list,
written in batches) and `copy` (a plain copy on one thread, in one process). Drives progress as an agent's lanes do.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import IO, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from longshore_agent.errors import TransportError
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.transports import BACKENDS, create
from longshore_agent.transports.answers import own_output, say
from longshore_agent.transports.base import Pieces, Selection, Transport, Write, WriteState
from longshore_wire.names import Wire, wire_name

# The same limit as in an agent's lanes: see longshore_agent.pipeline.life.
OPEN_BATCHES_MAX = 4
# The target's polling interval for notices, as in a worker that expects bytes. It polls without pause if bytes need it.
_LOOK_PAUSE_S = 0.001
# The same as a lane's first pause.
_WRITE_PAUSE_S = 0.00005
_PROBE_BYTES = 1 << 20

_T = TypeVar("_T")


class Request(msgspec.Struct, frozen=True):
    """One measurement.

    Attributes:
        what: `write`, `slices` or `copy`.
        length_bytes: bytes to move, at most `--bytes-max`.
        slice_bytes, batch: for `slices` only: bytes of one slice, slices of one write.
    """

    what: str
    length_bytes: int
    slice_bytes: int = 1024
    batch: int = 1000


class Answer(msgspec.Struct, frozen=True):
    """The times of a request. `core_s` is the processor time of both processes."""

    seconds: float
    core_s: float
    wire: str
    equal: bool  # the target's bytes were compared with the source's after the clock had stopped


class _Hello(msgspec.Struct, frozen=True):
    metadata: bytes
    address: int


class _Order(msgspec.Struct, frozen=True):
    """A command to the target: drive the transport, rest, or return the checksum of its bytes and wipe them."""

    what: str
    length_bytes: int = 0


class Target:
    """The process that receives the writes."""

    def __init__(self, backend: str, length_bytes: int, out: IO[bytes]) -> None:
        self._transport = create(backend, "rate-target")
        self._buffer = StagingBuffer(length_bytes)
        self._transport.register(self._buffer.address, length_bytes)
        self._out = out

    def serve(self) -> None:
        """Execute orders until the input ends."""
        source = sys.stdin.buffer
        say(self._out, _Hello(self._transport.metadata(), self._buffer.address))
        self._transport.connect(msgspec.json.decode(source.readline(), type=_Hello).metadata)
        say(self._out, _Order("ready"))
        while line := source.readline():
            order = msgspec.json.decode(line, type=_Order)
            if order.what == "drive":
                say(self._out, order)
                pause_s = _LOOK_PAUSE_S if order.length_bytes else 0.0
                while not select.select([source], [], [], pause_s)[0]:
                    self._transport.notices()
            elif order.what == "sum":
                view = self._buffer.view(0, order.length_bytes)
                say(self._out, _Order("sum", checksum(view)))
                view[:] = 0
        self._transport.close()


class Meter:
    """The process that writes and measures."""

    def __init__(self, backend: str, length_bytes: int) -> None:
        self._length_bytes = length_bytes
        self._source, self._copy = StagingBuffer(length_bytes), StagingBuffer(length_bytes)
        self._source.view(0, length_bytes)[:] = np.random.default_rng(1).integers(0, 256, length_bytes, np.uint8)
        self._transport: Transport = create(backend, "rate-source")
        self._transport.register(self._source.address, length_bytes)
        command = [sys.executable, "-m", __spec__.name, "--backend", backend, "--bytes-max", str(length_bytes)]
        self._process = subprocess.Popen([*command, "--target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        hello = self._heard(_Hello)
        self._remote = hello.address
        self._peer = self._transport.connect(hello.metadata)
        self._tell(_Hello(self._transport.metadata(), self._source.address))
        self._heard(_Order)
        self._wire: Wire | None = None
        self._drive()
        probe_bytes = min(_PROBE_BYTES, length_bytes)
        self._wire = self._transport.probe_wire(self._peer, self._source.address, self._remote, probe_bytes)
        self._rest()

    def measure(self, request: Request) -> Answer:
        """Execute one request. Raises TransportError."""
        if not 1 <= request.length_bytes <= self._length_bytes:
            raise TransportError(f"length_bytes is {request.length_bytes}: give 1 to {self._length_bytes}")
        if request.what == "copy":
            return self._measure_copy(request.length_bytes)
        run, length_bytes = self._prepared(request)
        self._drive()
        core_s, begin_s = self._core_s(), time.perf_counter()
        run()
        seconds, core_s = time.perf_counter() - begin_s, self._core_s() - core_s
        self._rest()
        self._tell(_Order("sum", length_bytes))
        found = self._heard(_Order).length_bytes
        # A sum of words does not depend on the order of the slices, which this does not check.
        return Answer(
            seconds,
            core_s,
            wire_name(self._wire),
            found == checksum(self._source.view(0, length_bytes)),
        )

    def close(self) -> None:
        """End the target."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._transport.close()

    def _prepared(self, request: Request) -> tuple[Callable[[], None], int]:
        """Return the function to time and the bytes that it moves. A list is prepared before the clock starts."""
        if request.what == "write":
            pieces = Pieces.one(self._source.address, self._remote, request.length_bytes)
            return lambda: self._finish(self._begun(pieces)), request.length_bytes
        if request.what != "slices" or request.slice_bytes % 8 or request.batch < 1:
            raise TransportError(f"{request}: ask for write, slices (of 8 bytes or a multiple) or copy")
        count = max(1, request.length_bytes // request.slice_bytes)
        places = np.arange(count, dtype=np.uint64)
        # Adjacent slices become separated, so that the transport cannot merge them.
        mixed = np.concatenate([places[::2], places[1::2]])
        step = np.uint64(request.slice_bytes)
        pieces = Pieces(
            places * step + np.uint64(self._source.address),
            mixed * step + np.uint64(self._remote),
            np.full(count, step, dtype=np.uint64),
        )
        prepared = self._transport.prepare(self._peer, pieces)

        def run() -> None:
            open_writes: deque[Write] = deque()
            for first in range(0, count, request.batch):
                if len(open_writes) >= OPEN_BATCHES_MAX:
                    self._finish(open_writes.popleft())
                indices = np.arange(first, min(first + request.batch, count), dtype=np.int32)
                open_writes.append(self._begun(Selection(prepared, indices)))
            while open_writes:
                self._finish(open_writes.popleft())
            self._transport.release_prepared(prepared)

        return run, count * request.slice_bytes

    def _measure_copy(self, length_bytes: int) -> Answer:
        source, target = self._source.view(0, length_bytes), self._copy.view(0, length_bytes)
        core_s, begin_s = time.process_time(), time.perf_counter()
        np.copyto(target, source)
        seconds, core_s = time.perf_counter() - begin_s, time.process_time() - core_s
        return Answer(seconds, core_s, "", bool(np.array_equal(source, target)))

    def _begun(self, pieces: Pieces | Selection) -> Write:
        write = self._transport.draft(self._peer, pieces, b"")
        self._transport.start(write)
        return write

    def _finish(self, write: Write) -> None:
        while (state := self._transport.state(write)) is WriteState.OPEN:
            if not self._transport.notifies:
                # A thread of the library moves the bytes. Polling without pause would take its core.
                time.sleep(_WRITE_PAUSE_S)
        self._transport.release(write)
        if state is WriteState.FAILED:
            raise TransportError(write.error)

    def _drive(self) -> None:
        self._tell(_Order("drive", int(self._wire in self._transport.announced_by_message)))
        self._heard(_Order)

    def _rest(self) -> None:
        self._tell(_Order("rest"))

    def _core_s(self) -> float:
        return time.process_time() + time.clock_gettime(process_clock(self._process.pid))

    def _tell(self, message: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        say(self._process.stdin, message)

    def _heard(self, kind: type[_T]) -> _T:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransportError(f"the target process ended with {self._process.wait()}")
        return msgspec.json.decode(line, type=kind)


def process_clock(pid: int) -> int:
    """Return the clock id of another process's processor time, as clock_getcpuclockid of the C library computes it."""
    return (~pid << 3) | 2


def checksum(view: npt.NDArray[np.uint8]) -> int:
    """Return the wrapped sum of a buffer's words and of its last bytes."""
    words = view.size // 8 * 8
    return int(view[:words].view(np.uint64).sum()) + int(view[words:].sum(dtype=np.uint64))


def main() -> int:
    """Serve requests from standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="NIXL")
    parser.add_argument("--bytes-max", type=int, required=True, help="bytes of each buffer")
    parser.add_argument("--target", action="store_true", help="run the process that receives the writes")
    options = parser.parse_args()
    out = own_output()
    if options.target:
        Target(options.backend, options.bytes_max, out).serve()
        return 0
    meter = Meter(options.backend, options.bytes_max)
    try:
        for line in sys.stdin.buffer:
            say(out, meter.measure(msgspec.json.decode(line, type=Request)))
    finally:
        meter.close()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
