"""Tests a worker that cannot start, and the last messages of a worker that ends.

If a restart cannot help, the engine gets the error; otherwise the worker is restarted.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from longshore_agent.control.node_link import EngineLeft, NodeLink, NotStarted, SnapshotWanted
from longshore_agent.errors import DeviceError, TransportError
from longshore_agent.settings import Settings
from longshore_agent.worker import main as program
from longshore_agent.worker.config import WorkerConfig
from longshore_wire.errors import LongshoreError, Reason


class EndedError(Exception):
    """Raised where the process would end."""


def started(monkeypatch: pytest.MonkeyPatch, failure: LongshoreError) -> list[Any]:
    """Run the program of a worker that fails to start with this error; return its messages to the supervisor."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    config = SimpleNamespace(name="p/0/0", device="GPU-1", settings=Settings())

    def fail(*_: object) -> None:
        raise failure

    def end(_: int) -> None:
        raise EndedError

    monkeypatch.setattr(WorkerConfig, "from_bytes", lambda _: config)
    near.sendall(b"orders")
    monkeypatch.setattr(program, "Worker", fail)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["worker", "p/0/0", str(far.detach())])
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    for module in (sys, threading):
        monkeypatch.setattr(module, "excepthook", module.excepthook)
    link = NodeLink(near)
    try:
        with pytest.raises((EndedError, type(failure))):
            program.main()
        return [message for message, _ in link.receive()]
    finally:
        link.close()


@pytest.mark.parametrize(
    "failure",
    [
        DeviceError("the GPU has no memory left"),
        TransportError("the Mooncake that is installed has no NVLink transport", reason=Reason.UNSUPPORTED),
    ],
    ids=["device", "transport"],
)
def test_what_another_start_would_not_mend_is_told_to_the_engine(
    failure: LongshoreError, monkeypatch: pytest.MonkeyPatch
) -> None:
    (said,) = started(monkeypatch, failure)
    assert isinstance(said, NotStarted)
    assert said.reason is failure.reason
    assert str(failure) in said.text


def test_a_transport_that_may_start_the_next_time_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, TransportError("Mooncake does not start: it says -1")) == []


def test_the_last_messages_of_a_worker_arrive_although_it_ended_before_it_had_read_its_own():
    near, far = (NodeLink(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    near.send(SnapshotWanted(1, None))
    left = EngineLeft(Reason.ENGINE_LOST, "the engine closed its connection")
    far.send(left)
    far.close()
    assert near.receive() == [(left, None)]
    assert near.closed
    near.close()
