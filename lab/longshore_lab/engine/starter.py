"""Starts an engine's rank processes: one process loads torch once, and every rank is a fork of it.

Called by `processes` and by code that starts several instances, from one thread at a time. Loading torch takes seconds of
a core, a fork milliseconds. `rank_main` is the program of these processes. This module does not load torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

import msgspec

from longshore_lab.engine import commands
from longshore_lab.engine.errors import EngineError

# Time to load torch on a busy host with few cores.
LOAD_TIMEOUT_S = 300.0
# Time limit of one answer: the starter only forks and reports ends.
_ANSWER_TIMEOUT_S = 30.0
_ANSWER_BYTES_MAX = 4096


class RankProcess:
    """A rank's process, a child of the starter. Made by `RankStarter.start`.

    Attributes:
        pid: 0 before it runs.
        status: exit status, negative for a signal; None before its end.
    """

    def __init__(self, starter: RankStarter) -> None:
        self._starter = starter
        self._pidfd = -1
        self.pid = 0
        self.status: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end and return its status. A process that was not started yet is dropped and returns 0.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if not self.pid:
            self._starter.drop(self)
        if self.status is None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000):
                assert timeout_s is not None
                raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout_s)
        while self.status is None:
            # If the starter is lost, its ranks end with it.
            with contextlib.suppress(EngineError):
                self._starter.hear(_ANSWER_TIMEOUT_S)
        return self.status

    def kill(self) -> None:
        """Send SIGKILL if it runs."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def take_along(self) -> None:
        """Kill it by SIGKILL and wait for its end without the starter."""
        if self._pidfd >= 0:
            self.kill()
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll()
        self.has_ended(-signal.SIGKILL)

    def has_started(self, pid: int, pidfd: int) -> None:
        """Record the start that the starter reports."""
        self.pid, self._pidfd = pid, pidfd

    def has_ended(self, status: int) -> None:
        """Record the end that the starter reports."""
        self.status = status
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class RankStarter:
    """The process that has loaded torch. Use as a context manager, or call `close` when its ranks have ended."""

    def __init__(self) -> None:
        self._link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._loaded = False
        self._waiting: list[tuple[RankProcess, socket.socket]] = []
        self._forking: list[RankProcess] = []
        self._running: dict[int, RankProcess] = {}
        self._decoder = msgspec.msgpack.Decoder(commands.StarterAnswer)
        with other:
            command = [sys.executable, "-m", "longshore_lab.engine.rank_main", str(other.fileno())]
            # Torch reads the thread count when it loads. More than one thread a rank would oversubscribe the cores, and only
            # a single-threaded process may fork.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            # Its own process group: the driver handles an interrupt from the terminal and then ends its ranks.
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, process_group=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """PID of the starter's process."""
        return self._process.pid

    def start(self, connection: socket.socket) -> RankProcess:
        """Return a rank that takes over and serves `connection`. It runs when `wait_started` returns."""
        process = RankProcess(self)
        self._waiting.append((process, connection))
        return process

    def wait_started(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Wait until torch is loaded and every requested rank of all instances runs.

        Raises:
            EngineError: not in time, or the process ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._loaded:
            self.hear(deadline_s - time.monotonic())
        while self._waiting:
            process, connection = self._waiting.pop(0)
            self._forking.append(process)
            with connection:
                try:
                    socket.send_fds(self._link, [b"start"], [connection.fileno()])
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise self._lost() from error
        while self._forking:
            self.hear(_ANSWER_TIMEOUT_S)

    def drop(self, process: RankProcess) -> None:
        """Cancel the start of a rank. If its start is in progress, it runs when this returns."""
        for waiting, connection in self._waiting:
            if waiting is process:
                connection.close()
                process.has_ended(0)
        self._waiting = [entry for entry in self._waiting if entry[0] is not process]
        while process in self._forking:
            with contextlib.suppress(EngineError):
                self.hear(_ANSWER_TIMEOUT_S)

    def hear(self, timeout_s: float) -> None:
        """Receive one answer of the process.

        Raises:
            EngineError: no answer in time, or the process ended.
        """
        self._link.settimeout(max(0.001, timeout_s))
        try:
            data, descriptors, *_ = socket.recv_fds(self._link, _ANSWER_BYTES_MAX, 1)
        except TimeoutError as error:
            self._end()
            raise EngineError(f"the process that starts ranks did not answer within {timeout_s:.0f} s") from error
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            raise self._lost()
        match self._decoder.decode(data):
            case commands.Loaded():
                self._loaded = True
            case commands.Started(pid):
                process = self._forking.pop(0)
                process.has_started(pid, descriptors[0])
                self._running[pid] = process
            case commands.Ended(pid, status):
                self._running.pop(pid).has_ended(status)

    def close(self) -> None:
        """End the process and all ranks that still run."""
        self._link.close()
        self._end()

    def _lost(self) -> EngineError:
        status = self._end()
        return EngineError(f"the process that starts ranks ended with status {status}: start the instance again")

    def _end(self) -> int:
        """End the process and its ranks, if they run; return its status."""
        for process in [*self._running.values(), *self._forking]:
            process.take_along()
        self._running.clear()
        self._forking.clear()
        self._process.kill()
        return self._process.wait()
