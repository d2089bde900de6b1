"""What the transport does by itself between two processes: runs the agent's `rate` program and asks it.

Called by `transfer`, between its own measurements, so that both see the same machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from longshore_cli.bench.errors import BenchError

_PROGRAM = "longshore_agent.transports.rate"
_END_S = 20.0


@dataclass(frozen=True)
class Sample:
    """One measurement. `core_s` is the processor time of both processes."""

    seconds: float
    core_s: float
    wire: str


class TransportRate:
    """Two processes with the bare transport and buffers of `bytes_max`; a context manager."""

    def __init__(self, backend: str, bytes_max: int) -> None:
        command = [sys.executable, "-m", _PROGRAM, "--backend", backend, "--bytes-max", str(bytes_max)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def write(self, length_bytes: int) -> Sample:
        """Move bytes by one descriptor."""
        return self._ask(what="write", length_bytes=length_bytes)

    def slices(self, length_bytes: int, slice_bytes: int, batch: int) -> Sample:
        """Move bytes slice by slice, in batches of a prepared list."""
        return self._ask(what="slices", length_bytes=length_bytes, slice_bytes=slice_bytes, batch=batch)

    def copy(self, length_bytes: int) -> Sample:
        """Copy bytes within one process, on one thread."""
        return self._ask(what="copy", length_bytes=length_bytes)

    def _ask(self, **request: str | int) -> Sample:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{_PROGRAM} ended with {self._process.wait()}: its messages are above")
        answer = json.loads(line)
        if not answer["equal"]:
            raise BenchError(f"the transport by itself left wrong bytes: {request}")
        return Sample(answer["seconds"], answer["core_s"], answer["wire"])
