"""Runs real agents as processes of this machine, for `up`, the demo, benchmarks and tests.

An agent has its own process group, so that an interrupt from the terminal reaches only its parent. It is tethered to
that parent, so that it ends even if the parent is killed. Uses agents by their command only.
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

import msgspec

from longshore_cli import up_directory
from longshore_cli.lifetime import Watch
from longshore_cli.metrics_page import MetricsPage
from longshore_cli.status_pages import OK, AgentPages
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.names import ENVIRONMENT_PREFIX, SOCKET_FILE, SOCKET_PATH_BYTES_MAX, room_name

# Includes the self-test. On a busy machine with few cores, loading the libraries takes most of the time.
READY_TIMEOUT_S = 120.0
# Polling interval while an agent starts.
_LOOK_S = 0.05
# Above an agent's own limits for draining and for ending its workers. Afterwards its whole group is killed.
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 25


class LocalAgentError(LongshoreError):
    """An agent did not start, did not become ready or ended; carries the end of its log."""

    reason = Reason.WORKER_LOST


class LocalAgent:
    """One agent. Use it as a context manager, or call `start`, `wait_ready` and `stop`. It can be restarted after its end.

    Start it from a thread that outlives it: the agent ends with that thread.

    Args:
        settings: names of docs/reference/settings.md in lower case without prefix; numbers as text or int.
        directory: the agent's own, created if missing. Holds the socket, the state file and `agent.log`.
    Attributes:
        socket_path: the socket for engines, which may connect before the agent runs.
    """

    def __init__(self, settings: Mapping[str, str | int | float], directory: Path) -> None:
        self.directory = directory
        self.log_path = directory / "agent.log"
        self.socket_path = str(directory / SOCKET_FILE)
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
        """Watch the running agent; return a function that ends the watch."""
        process = self._process
        assert process is not None, "the agent was not started"
        # Another thread may have reaped it without having stored its status yet; `wait` waits for that.
        return watch.add(process.pid, f"the agent in {self.directory}", self.log_tail, process.wait)

    def workers_watched_by(self, watch: Watch, instances: Collection[str]) -> Callable[[], None]:
        """Watch the workers of these engine instances, since a measurement with a replaced worker is invalid.

        Returns:
            A function that ends the watch.
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
        """The address of its HTTP pages, `http://host:port`, known once it serves."""
        if not self._http:
            self._http = up_directory.state(self.directory).http
        return self._http

    def start(self) -> None:
        """Start the process and return at once."""
        assert not self.running, "the agent was started already"
        self.directory.mkdir(parents=True, exist_ok=True)
        # The old state file has its predecessor's address.
        self._http = ""
        (self.directory / up_directory.STATE_FILE).unlink(missing_ok=True)
        # The caller's variables with our prefix are not for the agent, which refuses unknown ones.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        environment |= {ENVIRONMENT_PREFIX + name: value for name, value in self._settings.items()}
        environment[f"{ENVIRONMENT_PREFIX}RUN_DIRECTORY"] = str(self.directory)
        command = [sys.executable, "-m", "longshore_cli.tethered", str(os.getpid()), "longshore_agent.main"]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once `/readyz` reports ready.

        Raises:
            LocalAgentError: it ended, or was not ready in time; names the failed checks.
        """
        assert self._process is not None, "start it first"
        deadline_s = time.monotonic() + timeout_s
        said = "it does not serve yet"
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise LocalAgentError(self._ended())
            try:
                status, body = self._get("/readyz")
                if status == OK:
                    return
                said = body.decode()
            except (OSError, http.client.HTTPException):
                pass  # No state file or no listener yet: look again.
            time.sleep(_LOOK_S)
        where = f"the agent in {self.directory}"
        raise LocalAgentError(f"{where} is not ready after {timeout_s:.0f} s: {said}\n{self.log_tail()}")

    def _ended(self) -> str:
        """Return a message with the directory, exit status and end of the log."""
        assert self._process is not None
        return f"the agent in {self.directory} ended with {self._process.returncode}:\n{self.log_tail()}"

    def get(self, path: str) -> Any:
        """Return the decoded JSON of a page.

        Raises:
            LocalAgentError: the agent does not answer, or answers with an error.
        """
        return msgspec.json.decode(self._page(path))

    def status(self) -> dict[str, Any]:
        """Return `/v1/status`."""
        found: dict[str, Any] = self.get("/v1/status")
        return found

    def room(self, room: int) -> dict[str, Any]:
        """Return `/v1/rooms/<name of the room>`."""
        found: dict[str, Any] = self.get(f"/v1/rooms/{room_name(room)}")
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
        """Send SIGTERM and return at once, so that several agents end concurrently; `stop` waits for the end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the agent and its workers at once; return when the agent has ended."""
        # It has not been reaped, so no other process or group can have its PID.
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
        if status != OK:
            raise LocalAgentError(f"GET {path}: {status} {body.decode(errors='replace')}")
        return body

    def _get(self, path: str) -> tuple[int, bytes]:
        with AgentPages.at(self.http) as pages:
            answer = pages.ask(path)
            return answer.status, answer.body


def make_keys(directory: Path) -> None:
    """Write the CURVE keys of a new deployment into `directory`, which is created if missing.

    Raises:
        LocalAgentError: the keys cannot be written, or exist: existing keys are never overwritten.
    """
    command = [sys.executable, "-m", "longshore_agent.control.curve", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalAgentError(done.stderr.strip() or f"making keys ended with {done.returncode}")
