"""Tests a worker whose GPU fails or hangs: engine and peers get the reason, the process ends, and the next one serves.

The workers are real and run on a CPU. Code that is injected into their processes simulates the devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import agent_world
import pytest
from agent_world import START_LIMIT_S, Agent, Engine, EngineProcess, Request, is_worker, wait_for

from longshore_agent.worker import ending
from longshore_client import Half, Reason, RoomEventKind

HANGS = "device GPU-7 has ended no copy for 5 s: it hangs"
# Every process of the agent loads it first. Files in its directory control the faults.
PLAYED = f"""
import os, sys, threading
from pathlib import Path

place = Path(__file__).parent

def play():
    from longshore_agent.errors import DeviceError
    from longshore_agent.worker.engine_requests import EngineRequests
    from longshore_agent.worker.loop import Worker
    from longshore_agent.worker.moving import Mover

    while (place / "hold").exists():
        threading.Event().wait(0.01)
    drive, engine_lost, let_go = Mover.drive, Worker._engine_lost, EngineRequests.let_go

    def driven(self):
        instance = sys.orig_argv[-2].partition("/")[0]
        if (place / f"hangs-{{instance}}").exists() and not self.failure:
            raise DeviceError({HANGS!r})
        return drive(self)

    def lost(self, *arguments):
        if (place / "driver-hangs").exists():
            self.mover.resources.device = object()
        engine_lost(self, *arguments)

    def unmapped(self, pool):
        if (place / "driver-hangs").exists():
            threading.Event().wait()
        return let_go(self, pool)

    Mover.drive, Worker._engine_lost, EngineRequests.let_go = driven, lost, unmapped

if "longshore_agent.worker.main" in sys.orig_argv:
    play()
"""


class Place:
    """Yield an agent, and the directory that controls its workers' devices."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signs = path / "played"
        self.signs.mkdir()
        (self.signs / "sitecustomize.py").write_text(PLAYED)
        monkeypatch.setattr(agent_world, "_PATH", f"{self.signs}:{agent_world._PATH}")
        self.agent = Agent(path / "agent")

    def unready(self) -> str:
        status, body = self.agent.ask("/readyz")
        failed = [check for check in json.loads(body)["checks"] if not check["ok"]]
        assert bool(failed) == (status == 503)
        return "; ".join(f"{check['reason']}: {check['message']}" for check in failed)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    found = Place(tmp_path, monkeypatch)
    yield found
    found.agent.stop()


def move(prefill: Engine, decode: Engine) -> None:
    each = Request(prefill, decode, 40)
    each.offer()
    each.claim()
    each.arrives()


def test_a_device_that_hangs_fails_its_rooms_and_readiness_with_the_reason_and_its_worker_is_replaced(
    place: Place,
) -> None:
    prefill, decode = (Engine(place.agent, name) for name in ("prefill", "decode"))
    move(prefill, decode)
    each = Request(prefill, decode, 100, cuts=[50])
    each.claim()
    each.offer_chunk(0)
    wait_for(lambda: place.agent.room(each.room, Half.SOURCE), what="the room at prefill")
    wait_for(lambda: not place.unready(), what="a ready agent")
    before = place.agent.worker("decode")
    (place.signs / "hold").touch()
    (place.signs / "hangs-decode").touch()
    # Both engines may use their pages again: the process that could still access them has ended.
    ends = each.ends()
    assert [(end.half, end.kind) for end in ends] == [(half, RoomEventKind.FAILED) for half in Half]
    assert all(HANGS in end.text for end in ends), ends
    assert ends[Half.TARGET].reason is Reason.WORKER_LOST
    said = wait_for(place.unready, what="an agent that is not ready")
    assert said.startswith("WorkerFailed: worker decode/0/0 failed")
    assert HANGS in said
    # The agent reports it as long as no worker serves the engine.
    wait_for(lambda: (place.agent.worker("decode") or before)["epoch"] != before["epoch"], what="the next worker")
    assert HANGS in place.unready()
    for sign in ("hangs-decode", "hold"):
        (place.signs / sign).unlink()
    wait_for(lambda: not place.unready(), START_LIMIT_S, "the next worker")
    again = place.agent.worker("decode")
    assert (again["error"], again["restarts"]) == ("", 1)
    move(prefill, decode)
    assert place.agent.metric("longshore_worker_restarts_total") == 1


def test_a_worker_whose_engine_was_killed_ends_also_where_the_driver_does_not_return(place: Place) -> None:
    killed = EngineProcess(place.agent, "decode")
    killed.endpoint()
    worker = place.agent.worker("decode")
    (place.signs / "driver-hangs").touch()
    killed.kill()
    wait_for(lambda: not is_worker(worker["pid"]), what="the end of the worker")
    assert "in unmapped" in place.agent.log()
    (place.signs / "driver-hangs").unlink()
    killed.close()
    again = EngineProcess(place.agent, "decode")
    again.endpoint()
    again.close()


def test_a_worker_that_ends_waits_for_less_than_what_was_promised_of_the_memory_of_a_killed_engine() -> None:
    waits_s = ending.FAREWELL_MAPPED_NS / 1e9 + ending.COPIES_LIMIT_S
    assert waits_s < ending.END_LIMIT_S < 2
