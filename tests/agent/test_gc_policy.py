"""Tests that a worker runs the cyclic GC only while idle, and never over the objects that it loaded at its start."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import agent_world
import pytest
from agent_world import Agent, Engine, Request, wait_for

from longshore_agent.worker.gc_policy import GCPolicy

SECOND_NS = 1_000_000_000
# Every interpreter imports it at its start. A worker records the number of frozen objects at each collection.
NOTES = """
import gc, os, sys
if "longshore_agent.worker.main" in sys.orig_argv:
    notes = open(os.path.join({directory!r}, str(os.getpid())), "a", buffering=1)
    gc.callbacks.append(lambda phase, _: notes.write(f"{{gc.get_freeze_count()}}\\n"))
"""


class Ring:
    """An object that only the cyclic GC frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def heap() -> Iterator[GCPolicy]:
    """The GC policy in this process; restores the GC's state afterwards."""
    thresholds = gc.get_threshold()
    # The test run has excluded its own objects.
    gc.unfreeze()
    gc.collect()
    yield GCPolicy(0)
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def age() -> None:
    """Run as many young collections as make a full one due."""
    for _ in range(20):
        gc.collect(1)


def test_what_was_loaded_is_not_looked_through_again(heap: GCPolicy) -> None:
    before = len(gc.get_objects())
    heap.settle()
    assert len(gc.get_objects()) < before // 10


def test_garbage_is_found_once_no_room_has_been_open_for_a_while(heap: GCPolicy) -> None:
    heap.settle()
    ring = Ring()
    garbage = weakref.ref(ring)
    age()
    del ring
    heap.rest(5 * SECOND_NS, busy=True)
    heap.rest(5 * SECOND_NS + 1, busy=False)
    assert garbage() is not None
    heap.rest(6 * SECOND_NS, busy=False)
    assert garbage() is None


def test_a_worker_that_rests_looks_only_when_something_may_have_come(heap: GCPolicy) -> None:
    heap.settle()
    gc.collect()
    garbage = weakref.ref(Ring())
    heap.rest(5 * SECOND_NS, busy=False)
    assert garbage() is not None


def test_workers_that_move_rooms_do_not_look_through_what_they_have_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, notes = tmp_path / "site", tmp_path / "notes"
    for directory in (site, notes):
        directory.mkdir()
    (site / "sitecustomize.py").write_text(NOTES.format(directory=str(notes)))
    monkeypatch.setattr(agent_world, "_PATH", f"{site}:{agent_world._PATH}")
    agent = Agent(tmp_path / "agent")
    source, target = Engine(agent, "p"), Engine(agent, "d")

    def left_out() -> list[int]:
        return [int(path.read_text().splitlines()[-1]) for path in notes.iterdir() if path.stat().st_size]

    def moved() -> bool:
        request = Request(source, target, 100)
        request.claim()
        request.offer()
        request.arrives()
        return len(left_out()) == 2 and min(left_out()) > 10_000

    wait_for(moved, what="a look in both workers")
    for engine in (source, target):
        engine.close()
    agent.stop()
