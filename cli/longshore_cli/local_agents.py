"""Real agents as processes of this machine, for the demo, benchmarks and tests.

An agent lives in a process group of its own, so that an interrupt from the terminal reaches only who started it, and
is tied to its parent, so that nothing of it outlives a parent that was killed. Knows agents by their command only.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from longshore_cli.lifetime import Watch
from longshore_cli.metrics_page import MetricsPage
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.names import ENVIRONMENT_PREFIX

# Includes the self-test; on a busy machine with few cores loading the libraries takes most of it.
READY_TIMEOUT_S = 120.0
# How often a starting agent is looked at.
_LOOK_S = 0.05
# Above an agent's own limits for draining and for ending its workers; after this its whole group is killed.
STOP_TIMEOUT_S = 20.0
HTTP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 25
# sun_path is 108 bytes with its closing zero.
SOCKET_PATH_BYTES_MAX = 107
_OK = 200


class LocalAgentError(LongshoreError):
    """An agent did not start, did not become ready or ended; carries the end of its log."""

    reason = Reason.WORKER_LOST


class AgentState(msgspec.Struct, frozen=True):
    """What an agent writes into its directory when it serves."""

    pid: int
    socket: str
    http: str


class LocalAgent:
    """One agent; use as a context manager, or call `start`, `wait_ready` and `stop`. After its end it may be started again.

    Start it from a thread that outlives it: the agent ends with that thread.

    Args:
        settings: by name without prefix, in lower case, as docs/reference/settings.md has them; numbers as text or int.
        directory: its own; made if missing. Holds the socket, the state file and `agent.log`.
    Attributes:
        socket_path: where engines connect; they may do so before the agent is there.
    """

    def __init__(self, settings: Mapping[str, str | int | float], directory: Path) -> None:
        self.directory = directory
        self.log_path = directory / "agent.log"
        self.socket_path = str(directory / "agent.sock")
        if len(os.fsencode(self.socket_path)) > SOCKET_PATH_BYTES_MAX:
            raise LocalAgentError(f"{self.socket_path} is too long for a socket: use a directory with a shorter path")
        self._settings = {name.upper(): str(value) for name, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._http = ""

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """PID of the agent's supervisor."""
        assert self._process is not None, "the agent was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the agent's process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def watched_by(self, watch: Watch) -> Callable[[], None]:
        """Have the running agent watched; return what ends that."""
        process = self._process
        assert process is not None, "the agent was not started"
        return watch.add(process.pid, f"the agent in {self.directory}", self.log_tail, lambda: process.returncode)

    def workers_watched_by(self, watch: Watch, instances: Collection[str]) -> Callable[[], None]:
        """Have the workers of these engine instances watched: of one that is replaced nothing counts; return what ends that.

        Raises:
            LocalAgentError: the agent does not answer.
            PartEndedError: a worker has just ended.
        """
        ends = []
        for worker in self.status()["workers"]:
            name = str(worker["worker"])
            if name.split("/", maxsplit=1)[0] in instances:
                ends.append(
                    watch.add(int(worker["pid"]), f"the worker {name} of the agent in {self.directory}", self.log_tail)
                )

        def end() -> None:
            for each in ends:
                each()

        return end

    @property
    def http(self) -> str:
        """The address of its pages, `http://host:port`; known once it serves."""
        if not self._http:
            self._http = msgspec.json.decode((self.directory / "agent.json").read_bytes(), type=AgentState).http
        return self._http

    def start(self) -> None:
        """Start the process and return at once."""
        assert not self.running, "the agent was started already"
        self.directory.mkdir(parents=True, exist_ok=True)
        # They say where its predecessor served.
        self._http = ""
        (self.directory / "agent.json").unlink(missing_ok=True)
        # An agent refuses variables of the product that it does not know, and none of the caller's are meant for it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        environment |= {ENVIRONMENT_PREFIX + name: value for name, value in self._settings.items()}
        environment[f"{ENVIRONMENT_PREFIX}RUN_DIRECTORY"] = str(self.directory)
        command = [sys.executable, "-m", "longshore_cli.tethered", str(os.getpid()), "longshore_agent.main"]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once `/readyz` says yes.

        Raises:
            LocalAgentError: it ended, or is not ready in time; says which checks fail.
        """
        assert self._process is not None, "start it first"
        deadline_s = time.monotonic() + timeout_s
        said = "it does not serve yet"
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise LocalAgentError(self._ended())
            try:
                status, body = self._get("/readyz")
                if status == _OK:
                    return
                said = body.decode()
            except (OSError, http.client.HTTPException):
                pass  # No state file or no listener yet: look again.
            time.sleep(_LOOK_S)
        where = f"the agent in {self.directory}"
        raise LocalAgentError(f"{where} is not ready after {timeout_s:.0f} s: {said}\n{self.log_tail()}")

    def _ended(self) -> str:
        """Say where and how the agent ended, and its last words."""
        assert self._process is not None
        return f"the agent in {self.directory} ended with {self._process.returncode}:\n{self.log_tail()}"

    def get(self, path: str) -> Any:
        """Return the decoded JSON of a page.

        Raises:
            LocalAgentError: the agent does not answer, or with an error.
        """
        return msgspec.json.decode(self._page(path))

    def status(self) -> dict[str, Any]:
        """Return `/v1/status`."""
        found: dict[str, Any] = self.get("/v1/status")
        return found

    def room(self, room: int) -> dict[str, Any]:
        """Return `/v1/rooms/<room>`."""
        found: dict[str, Any] = self.get(f"/v1/rooms/{room}")
        return found

    def metrics(self) -> MetricsPage:
        """Return `/metrics`, parsed."""
        return MetricsPage(self._page("/metrics").decode())

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of its log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"{self.log_path}: {error.strerror}"

    def terminate(self) -> None:
        """Ask the agent to end and return at once, so that several end side by side; `stop` waits for it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End the agent and its workers by SIGKILL, at one moment; returns when the agent is gone."""
        # It has not been waited for, so its number is still its own, and so is the group's.
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """End the agent and its workers; a second call, or one before `start`, does nothing."""
        if self._process is None:
            return
        self.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _page(self, path: str) -> bytes:
        try:
            status, body = self._get(path)
        except (OSError, http.client.HTTPException) as error:
            if self._process is not None and not self.running:
                raise LocalAgentError(self._ended()) from error
            raise LocalAgentError(f"the agent in {self.directory}: GET {path}: {error}\n{self.log_tail()}") from error
        if status != _OK:
            raise LocalAgentError(f"GET {path}: {status} {body.decode(errors='replace')}")
        return body

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.http).netloc, timeout=HTTP_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def make_keys(directory: Path) -> None:
    """Write the CURVE keys of a new deployment into `directory`, which is made if missing.

    Raises:
        LocalAgentError: they cannot be written; says why. Keys that are there already are kept.
    """
    command = [sys.executable, "-m", "longshore_agent.control.curve", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalAgentError(done.stderr.strip() or f"making keys ended with {done.returncode}")
