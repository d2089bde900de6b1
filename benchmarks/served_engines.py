"""Runs an engine's server on GPUs as a group of processes, for the benchmarks of real engines on GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
READY_LIMIT_S, REQUEST_LIMIT_S, END_LIMIT_S = 240.0, 120.0, 20.0
LOG_CHARACTERS = 6000


def python_path(first: str | None) -> str:
    """Return the folders that an engine's Python searches, `first` before the connectors."""
    folders = [ROOT / "engines", ROOT / "client", ROOT / "wire", Path(__file__).parent]
    return os.pathsep.join([*filter(None, [first]), *map(str, folders)])


@dataclass
class ServedEngine(ABC):
    """One server; `start` returns at once.

    Attributes:
        devices: the GPUs that its processes see.
        environment: variables in addition to those of its kind.
        arguments: further arguments of its program.
    """

    name: str
    model: Path
    devices: tuple[int, ...]
    port: int
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()

    @abstractmethod
    def command(self) -> list[str]:
        """Return the program and its arguments."""

    @abstractmethod
    def variables(self) -> dict[str, str]:
        """Return the environment in addition to ours."""

    def start(self) -> None:
        """Start its processes, in a group of their own."""
        visible = ",".join(map(str, self.devices))
        environment = os.environ | self.variables() | {"HF_HUB_OFFLINE": "1"} | dict(self.environment)
        self.log_path = self.directory / f"{self.name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                env=environment | {"CUDA_VISIBLE_DEVICES": visible},
            )
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=REQUEST_LIMIT_S, limits=limits)

    def wait_ready(self) -> None:
        """Return when it serves. Raises SystemExit with its log if it does not."""
        end_s = time.monotonic() + READY_LIMIT_S
        while True:
            try:
                if self.http.get("/health", timeout=5.0).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{self.name} does not serve:\n{self.log()}")
            time.sleep(0.1)

    def log(self) -> str:
        """Return the end of its log."""
        return self.log_path.read_text(errors="replace")[-LOG_CHARACTERS:]

    def end(self) -> None:
        """End its processes."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, signal_number)
                self.process.wait(END_LIMIT_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()
        self.http.close()
