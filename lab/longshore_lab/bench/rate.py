"""Runs the programs that measure a bare transport and the bare stages of a transfer, and requests numbers from them.

Called by `transfer` between its own measurements, so that both run under the same conditions.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from longshore_lab.bench.errors import BenchError
from longshore_wire.layout import ModelShape

_RATE_PROGRAM = "longshore_lab.rate"
_PATH_PROGRAM = "longshore_lab.bare_path"
_END_S = 20.0


@dataclass(frozen=True)
class Sample:
    """One measurement. `core_s` is the processor time of both processes."""

    seconds: float
    core_s: float
    wire: str


class _Program:
    """One program that answers a line of JSON with a line of JSON until its input ends; a context manager."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._program = program
        command = [sys.executable, "-m", program, *arguments]
        # Its own process group: the benchmark handles an interrupt from the terminal and then ends this process.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # It has not been reaped, so no other process or group can have its PID.
        if kind is not None and self._process.returncode is None:
            # Its result is no longer needed. Killing the whole group at once avoids errors about lost processes.
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, **request: str | int) -> Sample:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self._program} ended with {self._process.wait()}: its messages are above")
        answer = json.loads(line)
        if not answer["equal"]:
            raise BenchError(f"{self._program} left wrong bytes: {request}")
        return Sample(answer["seconds"], answer["core_s"], answer.get("wire", ""))


class TransportRate(_Program):
    """Two processes with the bare transport and buffers of `bytes_max`."""

    def __init__(self, backend: str, bytes_max: int) -> None:
        super().__init__(_RATE_PROGRAM, "--backend", backend, "--bytes-max", str(bytes_max))

    def write(self, length_bytes: int) -> Sample:
        """Move bytes by one descriptor."""
        return self._ask(what="write", length_bytes=length_bytes)

    def slices(self, length_bytes: int, slice_bytes: int, batch: int) -> Sample:
        """Move bytes slice by slice, in batches of a prepared list."""
        return self._ask(what="slices", length_bytes=length_bytes, slice_bytes=slice_bytes, batch=batch)

    def copy(self, length_bytes: int) -> Sample:
        """Copy bytes within one process, on one thread."""
        return self._ask(what="copy", length_bytes=length_bytes)


class BarePath(_Program):
    """One process for each rank that only gathers, writes and scatters."""

    def __init__(
        self, backend: str, model: ModelShape, page_size: int, tokens_max: int, source_tp: int, target_tp: int
    ) -> None:
        scene = {
            "backend": backend,
            "model": msgspec.to_builtins(model),
            "page_size": page_size,
            "tokens_max": tokens_max,
            "source_tp": source_tp,
            "target_tp": target_tp,
        }
        super().__init__(_PATH_PROGRAM, "--scene", json.dumps(scene))

    def move(self, tokens: int) -> Sample:
        """Move the KV of the first tokens."""
        return self._ask(tokens=tokens)
