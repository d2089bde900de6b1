"""Tests that a worker starts when its engine connects. If it cannot start, the engine gets the reason at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import agent_world
import pytest
from agent_world import Agent, wait_for

from longshore_agent.settings import Settings
from longshore_agent.supervisor import reception
from longshore_agent.supervisor.loop import Supervisor
from longshore_client import HelloRefused, KVLayout, ModelShape, Parallel, connect
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Hello
from longshore_wire.errors import LongshoreError, Reason

UNKNOWN = "GPU-7e375b68-5e7c-3244-17df-0d90019d4b71"
LAYOUT = KVLayout(ModelShape.kv(2, 2, 64, 2), Parallel(), 16)
# Time to load a worker's libraries on a busy machine.
START_LIMIT_S = 240.0
# Delays the import of fastapi until a file exists.
GATE = """
import pathlib, sys, time
class Gate:
    def find_spec(self, name, path=None, target=None):
        while name == "fastapi" and not pathlib.Path({path!r}).exists():
            time.sleep(0.01)
sys.meta_path.insert(0, Gate())
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    # As on a node with a driver, where only the worker can list the GPUs.
    monkeypatch.setattr(reception, "_DRIVER_FILE", Path("/dev/null"))
    found = Supervisor(Settings(deployment="tests/start", run_directory=str(tmp_path)))
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found
    found.stop()
    thread.join(START_LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.shows("argument.connect.device")
def test_an_engine_on_a_gpu_that_its_node_does_not_have_is_refused_by_name_and_its_worker_is_not_started_again(
    agent: Supervisor,
) -> None:
    begin_s = time.monotonic()
    with pytest.raises(HelloRefused, match=UNKNOWN) as refused:
        connect(agent.socket_path, instance="a", layout=LAYOUT, device=UNKNOWN, timeout_s=START_LIMIT_S)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert time.monotonic() - begin_s < START_LIMIT_S
    wait_for(lambda: not agent.snapshot().workers, what="the end of the worker")
    assert agent.metrics.snapshot().value("longshore_worker_restarts_total") == 0


def test_an_engine_is_taken_in_while_the_libraries_of_http_are_still_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, gate = tmp_path / "site", tmp_path / "gate"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GATE.format(path=str(gate)))
    monkeypatch.setattr(agent_world, "_PATH", f"{site}:{agent_world._PATH}")
    # A program, since forks have the libraries.
    agent = Agent(tmp_path / "agent", inside=["env"])
    try:
        with connect(agent.socket, instance="early", layout=LAYOUT, timeout_s=START_LIMIT_S):
            assert not (agent.directory / "agent.json").exists()
            gate.touch()
            worker = agent.worker("early")
            assert worker is not None
            assert worker["state"] == "ready"
    finally:
        gate.touch()
        assert agent.stop() == 0


def test_a_bug_that_one_hello_meets_ends_neither_the_agent_nor_the_next_engines_hello(
    agent: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = reception.Reception.admit

    def failing(self: reception.Reception, hello: Hello) -> PeerId:
        if hello.instance == "odd":
            raise AttributeError(hello.instance)
        return admit(self, hello)

    monkeypatch.setattr(reception.Reception, "admit", failing)
    # Such a refusal may pass, so that the engine tries again until its time is over.
    with pytest.raises(LongshoreError, match="the agent met a bug; its log has the traceback"):
        connect(agent.socket_path, instance="odd", layout=LAYOUT, timeout_s=1.0)
    with connect(agent.socket_path, instance="even", layout=LAYOUT, timeout_s=START_LIMIT_S):
        wait_for(lambda: agent.snapshot().workers, what="the worker of the next engine")
