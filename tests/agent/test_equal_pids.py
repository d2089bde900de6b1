"""Tests that workers avoid their engine's PID: CUDA IPC fails between equal PIDs of different PID namespaces (pods)."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from longshore_agent.control.engine_link import PeerProcess, process_of
from longshore_agent.control.node_link import NodeLink
from longshore_agent.settings import Settings
from longshore_agent.supervisor import reception, slots
from longshore_agent.supervisor.loop import Supervisor
from longshore_client import Half, KVLayout, ModelShape, Parallel
from longshore_spec.status import WorkerState
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Hello

GPU = "GPU-7e375b68-5e7c-3244-17df-0d90019d4b71"
LAYOUT = KVLayout(ModelShape.kv(2, 2, 64, 2), Parallel(), 16)
LIMIT_S = 120.0
# The first process of a new namespace starts the given program with the given PID.
WITH_PID = """
import pathlib, subprocess, sys
pathlib.Path("/proc/sys/kernel/ns_last_pid").write_text(str(int(sys.argv[1]) - 1))
sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[2:]]).returncode)
"""
ENGINE = f"""
import os, sys
import longshore_client as ls
layout = ls.KVLayout(ls.ModelShape.kv(2, 2, 64, 2), ls.Parallel(), 16)
try:
    ls.connect(sys.argv[1], instance="engine", layout=layout, device=sys.argv[2], timeout_s={LIMIT_S}).close()
    print("welcome", os.getpid())
except ls.LongshoreError as error:
    print(type(error).__name__, error.reason.name, os.getpid(), error)
"""
WORKER = """
import sys
from test_equal_pids import started_with
print(*started_with(int(sys.argv[1])))
"""


def in_own_namespace(pid: int, program: str, *arguments: str) -> str:
    """Run a program with this PID in a new PID namespace; return its output."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", WITH_PID, str(pid)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [*command, program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": path},
    )
    return done.stdout + done.stderr


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """An agent with a worker on a GPU; only the worker's process is real."""
    monkeypatch.setattr(reception, "_DRIVER_FILE", Path("/dev/null"))
    found = Supervisor(Settings(deployment="tests/pids", run_directory=str(tmp_path), ring_bytes=8 << 20, drain_s=0))
    hello = Hello(ENGINE_PROTOCOL_VERSION, "other", LAYOUT, GPU, (Half.SOURCE,))
    process = subprocess.Popen(["sleep", "1000"])
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slot = slots.Slot(
        PeerId("other", 0, 0),
        hello,
        PeerProcess(0, 1, 1),
        SimpleNamespace(name="other/0/0", epoch=1),  # type: ignore[arg-type] # nobody asks for the rest of it
        process,
        os.pidfd_open(process.pid),
        NodeLink(near),
        None,
        WorkerState.READY,
    )
    found._slots[slot.key] = slot
    found._selector.register(slot.link, selectors.EVENT_READ, lambda: found._on_link(slot))
    found._selector.register(slot.pidfd, selectors.EVENT_READ, lambda: found._on_exit(slot))
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found
    found.stop()
    process.kill()
    thread.join(60)
    assert not thread.is_alive()
    far.close()


def test_an_engine_with_the_pid_of_a_worker_is_refused_with_the_way_out_if_its_memory_is_a_gpus(
    agent: Supervisor,
) -> None:
    pid = next(iter(agent._slots.values())).process.pid
    said = in_own_namespace(pid, ENGINE, agent.socket_path, GPU)
    assert said.startswith(f"HelloRefused UNSUPPORTED {pid} "), said
    assert f"PID {pid}" in said and "other/0/0" in said and "shareProcessNamespace" in said
    assert in_own_namespace(pid, ENGINE, agent.socket_path, "cpu") == f"welcome {pid}\n"


def started_with(avoided_pid: int) -> tuple[bool, bool]:
    """Start workers in this namespace, whose next PID is the avoided one; return whether each worker has that PID."""
    hello = Hello(ENGINE_PROTOCOL_VERSION, "engine", LAYOUT, "cpu", (Half.SOURCE,))
    found = []
    for avoided in ((), (avoided_pid,)):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(avoided_pid - 1))
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        key = PeerId("engine", 0, 0)
        slot = slots.start(key, hello, near, process_of(near), Settings(), 1, 0, "", avoided)
        found.append(slot.process.pid == avoided_pid)
        slot.process.kill()
        slot.close()
        far.close()
    return found[0], found[1]


def test_a_worker_gets_another_pid_than_the_engines_whose_memory_it_opens() -> None:
    assert in_own_namespace(50, WORKER, "777") == "True False\n"
