"""Tests a full run directory, and a clock that is set back between two lives of a worker: rooms still work."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import agent_world
import pytest
from agent_fleet import World
from agent_world import START_LIMIT_S, Agent, Engine, Request, wait_for

FILESYSTEM_BYTES = 256 << 10
# A clock that is set back by the number of seconds in the file.
CLOCK = """
import pathlib, time
_time_ns, _file = time.time_ns, pathlib.Path({path!r})
time.time_ns = lambda: _time_ns() - int(_file.read_text()) * 1_000_000_000
"""
DAY_S = 86400


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A directory on a separate small filesystem."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a filesystem")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FILESYSTEM_BYTES}", "longshore-test", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(directory: Path) -> Path:
    """Fill the filesystem of a directory to the last byte."""
    path = directory / "filling"
    with path.open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        while filling.write(bytes(4096)):
            pass
    assert os.statvfs(directory).f_bavail == 0
    return path


@pytest.fixture
def cramped(small: Path) -> Iterator[Agent]:
    """An agent with its run directory on the small filesystem."""
    agent = Agent(small / "agent")
    yield agent
    agent.stop()


def test_engines_come_in_and_rooms_arrive_while_the_run_directory_is_full(small, cramped):
    assert cramped.http
    filling = fill(small)
    prefill = Engine(cramped, "prefill")
    decode = Engine(cramped, "decode")
    room = Request(prefill, decode, 100)
    room.claim()
    room.offer()
    room.arrives()
    assert cramped.process.poll() is None
    filling.unlink()
    for engine in (prefill, decode):
        engine.close()
    assert cramped.stop() == 0


def test_an_agent_that_cannot_write_into_its_run_directory_says_so_and_does_not_start(small):
    directory = small / "agent"
    directory.mkdir()
    fill(small)
    ended = subprocess.run(
        [sys.executable, "-m", "longshore_agent.main"],
        env={**os.environ, "LONGSHORE_RUN_DIRECTORY": str(directory), "LONGSHORE_BACKEND": "Loopback"},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert (
        f"LONGSHORE_RUN_DIRECTORY: {directory}: agent.json cannot be written: No space left on device" in ended.stderr
    )
    assert "Traceback" not in ended.stderr


def test_the_first_room_of_a_worker_that_starts_after_the_clock_was_set_back_arrives(world, tmp_path, monkeypatch):
    site, clock = tmp_path / "site", tmp_path / "clock"
    site.mkdir()
    clock.write_text("0")
    (site / "sitecustomize.py").write_text(CLOCK.format(path=str(clock)))
    monkeypatch.setattr(agent_world, "_PATH", f"{site}:{agent_world._PATH}")
    source, target = world.agent("source"), world.agent("target")
    starting = [world.engine(source, "prefill"), world.engine(target, "decode")]
    prefill, decode = [engine.result() for engine in starting]

    def arrives() -> None:
        room = Request(prefill, decode, 100)
        room.claim()
        room.offer()
        room.arrives()

    arrives()
    clock.write_text(str(DAY_S))
    for agent, engine in ((source, prefill), (target, decode)):
        worker = agent.worker(engine.instance)
        os.kill(worker["pid"], signal.SIGKILL)
        wait_for(lambda engine=engine, old=worker: engine.client.epoch != int(old["epoch"]), what="the next worker")
        wait_for(lambda engine=engine: engine.endpoint().ranks[0].epoch == engine.client.epoch)
        assert engine.client.epoch > int(worker["epoch"])
        arrives()
