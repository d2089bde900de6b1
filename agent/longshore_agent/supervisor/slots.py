"""Slots, one for each engine rank: its worker's process, the link to it, and its known state."""

from __future__ import annotations

import dataclasses
import errno
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from longshore_agent.control.engine_link import PeerProcess, open_pidfd
from longshore_agent.control.node_link import LAST_SNAPSHOT, NodeLink, SnapshotPart
from longshore_agent.settings import Settings
from longshore_agent.status.snapshot import WorkerSnapshot
from longshore_agent.worker.config import WorkerConfig
from longshore_spec.status import WorkerState
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Hello, RankAddress
from longshore_wire.names import ENVIRONMENT_PREFIX, TEST_INSTANCE_PREFIX
from longshore_wire.slabs import small_slab_bytes, staging_of_tests

# A worker that does not end within this time is killed.
KILL_AFTER_S = 5.0


@dataclass(slots=True)
class Slot:
    """A worker and its engine rank.

    Attributes:
        key: the rank, and its worker as peers name it.
    """

    key: PeerId
    hello: Hello
    engine: PeerProcess
    config: WorkerConfig
    process: subprocess.Popen[bytes]
    pidfd: int
    link: NodeLink
    connection: socket.socket | None  # the engine's, until the worker has it
    state: WorkerState = WorkerState.STARTING
    since_s: float = field(default_factory=time.monotonic)
    ready_s: float | None = None  # since when it serves its engine
    address: str = ""
    near: str = ""  # as of `Started`
    snapshot: WorkerSnapshot | None = None
    last_snapshot: WorkerSnapshot | None = None  # sent at its end
    answered_s: float = field(default_factory=time.monotonic)
    error: str = ""
    engine_pidfd: int | None = None  # readable once the engine's process is dead; None: the kernel cannot tell
    _parts: dict[int, list[bytes]] = field(default_factory=dict)

    def become(self, state: WorkerState) -> None:
        """Enter a state."""
        self.state, self.since_s = state, time.monotonic()

    @property
    def rank_address(self) -> RankAddress:
        """The rank's address for peers."""
        return RankAddress(self.key.rank, self.address, self.config.epoch, self.hello.engine)

    @property
    def is_served(self) -> bool:
        """Whether its worker serves an engine whose process runs. A worker that is stopped does not notice its engine's end."""
        if self.state is not WorkerState.READY or self.engine_pidfd is None:
            return self.state is WorkerState.READY
        poller = select.poll()
        poller.register(self.engine_pidfd, select.POLLIN)
        return not poller.poll(0)

    @property
    def lives(self) -> bool:
        """Whether its engine is connected or being accepted."""
        return self.state is not WorkerState.DRAINING

    def take_part(self, part: SnapshotPart) -> bool:
        """Keep one part of an answer; return whether the answer is complete."""
        parts = self._parts.setdefault(part.number, [])
        parts.append(part.data)
        if not part.last:
            return False
        del self._parts[part.number]
        self.snapshot = msgspec.msgpack.decode(b"".join(parts), type=WorkerSnapshot)
        if part.number == LAST_SNAPSHOT:
            self.last_snapshot = self.snapshot
        self.answered_s = time.monotonic()
        return True

    def described(self, restarts: int) -> WorkerSnapshot:
        """Return its newest answer, completed with the supervisor's own values."""
        now_s = time.monotonic()
        base = self.snapshot or WorkerSnapshot(
            worker=self.config.name, pid=self.process.pid, epoch=str(self.config.epoch), state=self.state
        )
        return msgspec.structs.replace(
            base,
            state=self.state,
            state_age_s=now_s - self.since_s,
            silent_s=now_s - self.answered_s,
            restarts=restarts,
            error=self.error,
            device=self.hello.device,
        )

    def close(self) -> None:
        """Kill the process if it runs, and close all descriptors."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.link.close()
        try:
            self.process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.pidfd)
        if self.engine_pidfd is not None:
            os.close(self.engine_pidfd)


def process_environment() -> dict[str, str]:
    """Return the variables of a process that the supervisor starts. Settings are passed separately."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    # One thread a process: numeric libraries would otherwise start one a core in each.
    return environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def start(
    key: PeerId,
    hello: Hello,
    connection: socket.socket,
    engine: PeerProcess,
    settings: Settings,
    epoch: int,
    port: int,
    agent: str,
    avoided_pids: Collection[int] = (),
) -> Slot:
    """Start the worker of an engine rank, with none of `avoided_pids`.

    Raises:
        OSError: descriptors, processes or memory have run out.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if is_test(key):
        settings = _for_tests(settings, hello)
    config = WorkerConfig(
        name=key.path,
        instance=key.instance,
        epoch=epoch,
        layout=hello.layout,
        roles=hello.roles,
        settings=settings,
        port=port,
        agent=agent,
        device=hello.device,
        engine=hello.engine,
        memory=hello.memory,
    )
    command = [sys.executable, "-m", "longshore_agent.worker.main", config.name, str(theirs.fileno())]
    try:
        ours.sendall(config.to_bytes())
        process = _start_process(command, theirs.fileno(), hello.device, avoided_pids)
        try:
            pidfd = os.pidfd_open(process.pid)
            engine_pidfd = open_pidfd(connection, engine.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Slot(key, hello, engine, config, process, pidfd, NodeLink(ours), connection, engine_pidfd=engine_pidfd)


def is_test(key: PeerId) -> bool:
    """Return whether this is a rank of an instance of `longshore verify`."""
    return key.instance.startswith(TEST_INSTANCE_PREFIX)


def _for_tests(settings: Settings, hello: Hello) -> Settings:
    """Return the settings of a worker of a test instance, whose staging takes little memory of the pod or the GPU."""
    lane_bytes, ring_bytes = staging_of_tests(
        settings.lane_bytes,
        settings.ring_bytes,
        hello.layout.largest_unit_bytes,
        on_gpu=hello.device != "cpu",
        cache_count=len(hello.layout.caches),
    )
    least = small_slab_bytes(settings.slab_bytes_min, lane_bytes, ring_bytes)
    return dataclasses.replace(settings, lane_bytes=lane_bytes, ring_bytes=ring_bytes, slab_bytes_min=least)


def _start_process(
    command: Sequence[str], descriptor: int, device: str, avoided_pids: Collection[int]
) -> subprocess.Popen[bytes]:
    """Start a process with none of these PIDs. The kernel gives the next process another one."""
    environment = process_environment()
    if device == "cpu":
        # Transports' libraries would open every GPU that they see.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    for _ in range(len(avoided_pids) + 1):
        process = subprocess.Popen(command, pass_fds=[descriptor], env=environment, stdin=subprocess.DEVNULL)
        if process.pid not in avoided_pids:
            return process
        process.kill()
        process.wait()
    raise OSError(errno.EAGAIN, "the kernel gave only PIDs that engines on GPUs have in their own namespaces")
