"""Finds the agents of a deployment and starts test engines beside them: in their pods, or as processes of this machine.

Called by `command`. A test engine is `python -m longshore_lab.test_engine`. Its connection carries lines of
`longshore_spec.verify_messages`; when the connection or the pipe closes, it ends, and its agent releases everything.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

from longshore_cli import up_directory
from longshore_cli.cluster import AgentPod, Cluster
from longshore_cli.status_pages import AgentPages
from longshore_cli.threads import Threads
from longshore_cli.up_directory import CONFIG_FILE, Member
from longshore_spec import manifest
from longshore_spec.agent_config import AgentConfig
from longshore_spec.verify_messages import Answer, Ask, Refused, Start, Started, WantedMemory
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.names import ENVIRONMENT_PREFIX, SOCKET_FILE

_MODULE = "longshore_lab.test_engine"
# Added to a request's own limit, for the connection and a busy machine.
_MORE_S = 30.0
# Below the idle limits of usual proxies, and of the test engine.
_ALIVE_EVERY_S = 20.0
_READ_BYTES = 1 << 16
# For a test engine's end after that of its input. Then it is killed, which its agent takes for the same.
_END_LIMIT_S = 5.0
# Agents and pairs at the same time. Each has a connection to the API server.
TOGETHER_MAX = 32
_ANSWER: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)

T = TypeVar("T", bound=Answer)


class VerifyError(LongshoreError):
    """There are no agents to test, or a test engine cannot be started or refuses a request; says why."""

    reason = Reason.INTERNAL


class Program(Protocol):
    """A running test engine; see `cluster.PodProgram`."""

    def write(self, data: bytes) -> None:
        """Write to its standard input."""

    def read_line(self, limit_s: float) -> bytes:
        """Return a line of its standard output; empty: none came in time."""

    def close(self) -> None:
        """Close its standard input, which ends it."""


class Place:
    """An agent beside which a test engine can run.

    Args:
        name: of its node.
        problem: why none can run; empty: nothing is known against it.
    """

    def __init__(
        self,
        name: str,
        *,
        prefill: bool,
        decode: bool,
        start: Callable[[], Program],
        pages: AgentPages | None,
        problem: str = "",
    ) -> None:
        self.name, self.prefill, self.decode = name, prefill, decode
        self.pages, self.problem = pages, problem
        self._start = start

    def engine(
        self, programs: Programs, room_bytes: int, room_count: int, limit_s: float, memory: WantedMemory = "auto"
    ) -> Engine:
        """Start a test engine, which `programs` ends. Raises LongshoreError."""
        if self.problem:
            raise VerifyError(self.problem, reason=Reason.WORKER_LOST)
        program = self._start()
        programs.add(program)
        run = uuid.uuid4().hex[:12]
        return Engine(program, Start(run, self.prefill, self.decode, room_bytes, room_count, limit_s, memory))


class Programs:
    """Running test engines. A context manager, whose end ends them, and at once each that starts later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False
        self._running: list[Program] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._is_over = True
        with Threads(TOGETHER_MAX) as threads:
            ended = [threads.submit(program.close) for program in self._running]
            threads.finish()
        for each in ended:
            each.result()

    def add(self, program: Program) -> None:
        """Take a program that has just started. Any thread may call it."""
        with self._lock:
            if not self._is_over:
                self._running.append(program)
                return
        program.close()


class Engine:
    """A test engine with its registered instances. One thread uses it at a time. Raises LongshoreError.

    Attributes:
        started: its instances, and the memory of their pages.
    """

    def __init__(self, program: Program, start: Start) -> None:
        self._program = program
        self._limit_s = start.limit_s + _MORE_S
        # Why it is lost. A late answer would otherwise be taken for that of the next request.
        self._lost = ""
        self.started = self.ask(start, Started)

    def ask(self, ask: Ask, kind: type[T]) -> T:
        """Return the answer to a request. Raises VerifyError: it was refused, or did not come."""
        answer = self._answer(msgspec.json.encode(ask) + b"\n")
        if isinstance(answer, Refused):
            reason = Reason[answer.reason] if answer.reason in Reason.__members__ else Reason.INTERNAL
            raise VerifyError(answer.text, reason=reason)
        assert isinstance(answer, kind), "each request has one kind of answer"
        return answer

    def _answer(self, line: bytes) -> Answer:
        if self._lost:
            raise VerifyError(self._lost, reason=Reason.WORKER_LOST)
        self._lost = "the test engine was lost before"
        self._program.write(line)
        found = self._program.read_line(self._limit_s)
        if not found:
            raise VerifyError(f"the test engine did not answer within {self._limit_s:g} s", reason=Reason.TIMED_OUT)
        try:
            answer = _ANSWER.decode(found)
        except msgspec.DecodeError as error:
            raise VerifyError(f"the test engine answered {found[:200]!r}: install the agents' release here") from error
        self._lost = ""
        return answer

    def stay(self) -> None:
        """Send the line that keeps the connection alive. Any thread may call it."""
        self._program.write(b"\n")


@contextmanager
def kept_alive(engines: Sequence[Engine]) -> Iterator[None]:
    """Keep the connections of idle test engines alive during the block.

    A line may still be under way after it, since a connection that hangs holds it: the engine's end ends it.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(_ALIVE_EVERY_S):
            for engine in engines:
                try:
                    engine.stay()
                except LongshoreError:
                    continue  # The next request to it tells.
                except Exception:
                    if over.is_set():
                        return  # Its connection was closed during the call.
                    raise

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[tuple[list[Place], AgentConfig]]:
    """Find the agents of a deployment, or of a directory of `longshore up`, and their config. Raises LongshoreError."""
    with ExitStack() as stack:
        if arguments.directory is not None:
            places = [_local(member, stack) for member in up_directory.members(arguments.directory)]
            config = up_directory.config(arguments.directory)
        else:
            found = stack.enter_context(Cluster.connect(arguments))
            config = manifest.read(found.deployment(arguments.name)).agent_config()
            places = [_in_pod(found, pod) for pod in found.agents(arguments.name)]
        for role in ("prefill", "decode"):
            if not any(getattr(place, role) for place in places):
                raise VerifyError(f"there is no agent for {role}: `kubectl describe dgdep` says why")
        yield places, config


def _in_pod(cluster: Cluster, pod: AgentPod) -> Place:
    return Place(
        pod.node or pod.name,
        prefill=pod.roles in {"prefill", "both"},
        decode=pod.roles in {"decode", "both"},
        start=lambda: cluster.start(pod, ["python", "-m", _MODULE]),
        pages=cluster.pages(pod),
        problem="" if pod.ready else f"pod {pod.name} is not ready: `kubectl describe pod {pod.name}` says why",
    )


def _local(member: Member, stack: ExitStack) -> Place:
    command = [sys.executable, "-m", _MODULE, "--config", str(member.directory.parent / CONFIG_FILE)]
    command += ["--socket", str(member.directory / SOCKET_FILE)]
    return Place(
        member.name,
        prefill=member.role == "prefill",
        decode=member.role == "decode",
        start=lambda: LocalProgram(command),
        pages=stack.enter_context(member.pages()),
        problem=member.problem,
    )


class LocalProgram:
    """A test engine as a child process. It ends with its standard input, also if this process is killed."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        # A group of its own, so that an interrupt from the terminal reaches the command alone.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,
            bufsize=0,
        )
        self._data = b""

    def write(self, data: bytes) -> None:
        """See Program. Raises VerifyError: it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
        except OSError as error:
            raise VerifyError(self._ended()) from error

    def read_line(self, limit_s: float) -> bytes:
        """See Program. Raises VerifyError: it has ended."""
        assert self._process.stdout is not None
        while b"\n" not in self._data:
            if not select.select([self._process.stdout], [], [], limit_s)[0]:
                return b""
            read = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not read:
                raise VerifyError(self._ended())
            self._data += read
        line, _, self._data = self._data.partition(b"\n")
        return line

    def close(self) -> None:
        """End it."""
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()

    def _ended(self) -> str:
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip()
        return f"the test engine has ended with {self._process.wait()}: {said[-400:]}"
