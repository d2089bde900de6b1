"""Tests that a worker's process ends if its control thread fails, for example with its GPU, or its transport hangs."""

from __future__ import annotations

import os
import subprocess
import sys

# The extra thread would keep the interpreter from ending, as hanging native code may.
PROGRAM = """
import threading
from types import SimpleNamespace
from longshore_agent.errors import DeviceError
from longshore_agent.settings import Settings
from longshore_agent.worker import main

class Worker:
    def __init__(self, *_):
        threading.Thread(target=threading.Event().wait).start()
    def run(self):
        raise DeviceError("cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS (700)")

main.Worker = Worker
main.NodeLink = lambda _: None
main.socket.socket = lambda *_, **__: SimpleNamespace(recv=lambda _: b"orders")
config = SimpleNamespace(name="p/0/0", device="cpu", settings=Settings())
main.WorkerConfig = SimpleNamespace(from_bytes=lambda _: config)
main.main()
"""


def test_a_worker_whose_control_thread_fails_ends_at_once_and_says_why() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, "p/0/0", "0"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 70
    assert "MainThread died" in ended.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in ended.stderr


# A library that hangs in a call may hold a lock that its shutdown needs.
STUCK = """
import threading
from types import SimpleNamespace
from longshore_agent.worker.loop import Worker

closed = SimpleNamespace(close=lambda: None)
runner = SimpleNamespace(writing=lambda: ["a write that never ends"])
resources = SimpleNamespace(runner=runner, close=threading.Event().wait)
mover = SimpleNamespace(finish_copies=lambda: None, resources=resources)
requests = SimpleNamespace(pools={})
Worker._close(SimpleNamespace(mover=mover, requests=requests, engine=closed, net=closed, _knocker=closed, _link=closed))
"""


def test_a_worker_with_a_write_that_never_ends_is_gone_though_its_transport_does_not_close() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in _close" in ended.stderr
