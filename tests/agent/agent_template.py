"""Forks agents and their workers from a process that has imported all that they import: most of what their start takes.

`agent_world` runs it as a program, with one end of a SOCK_SEQPACKET pair. A request is a new agent's environment and log,
answered with its PID; or a PID, answered with the exit status of that agent, or null while it runs. Each agent has a
process without threads, which forks the agent's workers and its self-test. They become the agent's own children.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

_REQUEST_BYTES_MAX = 1 << 20
# Several templates may import their libraries at once.
_ANSWER_LIMIT_S = 120.0
_OF_AGENTS = ("longshore_agent.main", "longshore_agent.status.app", "longshore_agent.status.server")
_OF_THEIR_CHILDREN = ("longshore_agent.worker.main", "longshore_agent.self_test", "longshore_agent.transports.loopback")
_COMMAND_BYTES_MAX = 400
_DESCRIPTORS_MAX = 8
_PR_SET_CHILD_SUBREAPER = 36


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
        self.path = path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def _begin(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(_ANSWER_LIMIT_S)
        with theirs:
            self._process = subprocess.Popen(
                # Forks write their own command over the last word.
                [sys.executable, __file__, str(theirs.fileno()), "-" * _COMMAND_BYTES_MAX],
                # As of workers: one thread a process.
                env=os.environ | {"PYTHONPATH": self.path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
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
    for module in (*_OF_AGENTS, *_OF_THEIR_CHILDREN):
        importlib.import_module(module)
    importlib.import_module("longshore_agent.kernels.cpu_copy").compile_loop()
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
            log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(log, sys.stderr.fileno())
            os.close(log)
            _fork_children_of_this()
            sys.exit(_run(request["environment"], _OF_AGENTS[0]))
        link.send(json.dumps(pid).encode())


def _run(environment: dict[str, str], module: str, *arguments: str) -> int:
    """Be the program `python -m MODULE ARGUMENT...` until its end; return its exit status."""
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    command = "\0".join([sys.executable, "-m", module, *arguments]).encode()
    ctypes.memmove(begin, command.ljust(end - begin, b"\0"), end - begin)
    sys.argv = [module, *arguments]
    return int(importlib.import_module(module).main())


def _fork_children_of_this() -> None:
    """Start the process that forks this agent's children, and let Popen ask it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # So it becomes the parent of processes whose parent has ended.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if not os.fork():
        ours.close()
        _fork_children(theirs)
    theirs.close()
    of_programs = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    # The places of its arguments are the same in CPython 3.11 to 3.13.
    def start(self: Any, args: Any, *others: Any) -> None:
        if args[:2] != [sys.executable, "-m"]:
            of_programs(self, args, *others)
            return
        passed, environment, (stdout, *_) = others[3], others[5], others[12:]
        # The descriptor that each of the descriptors sent becomes.
        places = {descriptor: descriptor for descriptor in passed} | ({} if stdout == -1 else {stdout: 1})
        request = {"command": args[2:], "environment": environment, "places": list(places.values())}
        socket.send_fds(ours, [json.dumps(request).encode()], list(places))
        self.pid = int(ours.recv(_REQUEST_BYTES_MAX))
        self._child_created = True
        self._close_pipe_fds(*others[9:15])

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


def _fork_children(link: socket.socket) -> NoReturn:
    """Fork the children of an agent until it ends."""
    while True:
        data, sent, _, _ = socket.recv_fds(link, _REQUEST_BYTES_MAX, _DESCRIPTORS_MAX)
        if not data:
            os._exit(0)
        request = json.loads(data)
        said, say = os.pipe()
        if not (between := os.fork()):
            if child := os.fork():
                os.write(say, str(child).encode())
                os._exit(0)
            link.close()
            os.close(said)
            os.close(say)
            for descriptor, place in zip(sent, request["places"], strict=True):
                if descriptor != place:
                    os.dup2(descriptor, place)
                    os.close(descriptor)
            status = _run(request["environment"], *request["command"])
            sys.stdout.flush()
            # The interpreter's normal end would copy each page that it shares with the other forks.
            os._exit(status)
        # Then the child's parent is the agent.
        os.waitpid(between, 0)
        link.send(os.read(said, _REQUEST_BYTES_MAX))
        for descriptor in (said, say, *sent):
            os.close(descriptor)


if __name__ == "__main__":
    main()
