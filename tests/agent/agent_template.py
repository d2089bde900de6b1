"""Forks agents from a process that has imported all that they import, which takes half of an agent's start.

`agent_world` runs it as a program, with one end of a SOCK_SEQPACKET pair. A request is a new agent's environment and log,
answered with its PID; or a PID, answered with the exit status of that agent, or null while it runs.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

_REQUEST_BYTES_MAX = 1 << 20
# Several templates may import their libraries at once.
_ANSWER_LIMIT_S = 120.0


class Forked:
    """An agent. It has those methods of a Popen that tests use."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template, self.pid = template, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._template.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                poller = select.poll()
                poller.register(ended, select.POLLIN)
                poller.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(ended)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(["agent"], timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that agents are forked from; it starts with the first of them. Threads may share it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def _begin(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(_ANSWER_LIMIT_S)
        with theirs:
            self._process = subprocess.Popen(
                # The last word names in /proc what its forks are.
                [sys.executable, __file__, str(theirs.fileno()), "longshore_agent.main"],
                env=os.environ | {"PYTHONPATH": self._path},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, environment: dict[str, str], log: str) -> Forked:
        return Forked(self, self.ask({"environment": environment, "log": log}))

    def ask(self, request: Any) -> Any:
        with self._lock:
            if self._process is None:
                self._begin()
            self._link.send(json.dumps(request).encode())
            return json.loads(self._link.recv(_REQUEST_BYTES_MAX))

    def close(self) -> None:
        if self._process is not None:
            self._link.close()
            self._process.wait()


def main() -> None:
    """Fork agents until the other end of the pair is closed."""
    import longshore_agent.main
    import longshore_agent.status.app
    import longshore_agent.status.server

    link = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()
    while data := link.recv(_REQUEST_BYTES_MAX):
        request = json.loads(data)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            link.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if not pid:
            link.close()
            gc.unfreeze()
            os.environ.clear()
            os.environ.update(request["environment"])
            log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(log, sys.stderr.fileno())
            os.close(log)
            sys.exit(longshore_agent.main.main([]))
        link.send(json.dumps(pid).encode())


if __name__ == "__main__":
    main()
