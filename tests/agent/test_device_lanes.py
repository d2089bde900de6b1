"""Tests the order of a GPU worker's gathers and writes: events decide, no call blocks, no memory is freed too early."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from agent_world import wait_for
from event_scene import BASE, EventScene
from fake_device import PEER, RING, FakeWrite, outbound_slab

from longshore_agent.errors import DeviceError, MemoryLostError
from longshore_agent.pipeline import life
from longshore_agent.pipeline.slabs import ProbeEnd, WireProbe
from longshore_agent.status.spans import StageLog
from longshore_agent.transports.base import Pieces, WriteState
from longshore_agent.worker.resources import lanes_bytes
from longshore_wire.ring import Ring
from longshore_wire.slabs import slab_bytes
from longshore_wire.ways import Way

SLAB_BYTES = 1 << 20


class Scene(EventScene):
    """An idle source with room for `slabs` slabs."""

    def __init__(self, slabs: int = 4) -> None:
        super().__init__(memory_bytes=slabs * slab_bytes(SLAB_BYTES), lane_count=2)

    def put(self, *slabs: int) -> list[Any]:
        made = [outbound_slab(slab, SLAB_BYTES) for slab in slabs]
        for slab in made:
            self.runner.send(slab)
        return made

    def gathered(self, *slabs: int) -> None:
        for copy in self.device.gathers:
            copy.done = copy.done or copy.slab.effect.slab in slabs
        self.turn()

    def wrote(self, index: int, state: WriteState = WriteState.DONE) -> None:
        self.transport.begun[index].state = state
        self.turn()


def test_a_write_is_looked_up_while_its_gather_runs_and_begins_once_its_event_has_passed() -> None:
    scene = Scene()
    scene.put(0, 1)
    scene.turn()
    assert [copy.slab.effect.slab for copy in scene.device.gathers] == [0, 1]
    assert len(scene.transport.drafts) == 2
    assert not scene.transport.begun
    scene.gathered(0)
    assert scene.transport.begun == scene.transport.drafts[:1]
    write = scene.transport.begun[0]
    assert (write.source, write.length_bytes) == (BASE + scene.device.gathers[0].begin_bytes, slab_bytes(SLAB_BYTES))
    assert scene.outcomes() == []
    scene.wrote(0)
    assert scene.outcomes() == [(0, "", False)]


def test_the_next_slab_is_gathered_and_written_while_a_write_is_open() -> None:
    scene = Scene()
    scene.put(0, 1, 2)
    scene.gathered(0, 1)
    assert len(scene.transport.begun) == 2
    assert [copy.slab.effect.slab for copy in scene.device.gathers] == [0, 1, 2]
    assert scene.outcomes() == []


@pytest.mark.parametrize("lane_bytes", [64 << 20, (1 << 20) + 1])
def test_all_lanes_together_hold_a_slab_of_a_lane_s_size_each_beside_their_trailers(lane_bytes: int) -> None:
    memory = Ring(lanes_bytes(4, lane_bytes))
    assert all(memory.allocate(slab_bytes(lane_bytes)) for _ in range(4))


def test_few_gathers_go_ahead_of_the_wire_and_few_writes_are_open() -> None:
    scene = Scene(slabs=20)
    scene.put(*range(10))
    ahead = len(scene.device.gathers)
    assert ahead < 5
    for _ in range(10):
        scene.gathered(*range(10))
    assert len(scene.transport.begun) < 5
    assert len(scene.device.gathers) == len(scene.transport.begun) + ahead


def test_a_write_that_is_over_is_told_of_and_the_next_begins_between_the_slabs_of_an_offer() -> None:
    scene = Scene(slabs=8)
    scene.put(0, 1)
    scene.gathered(0)
    scene.transport.begun[0].state = WriteState.DONE
    scene.device.gathers[1].done = True
    scene.put(2)
    assert scene.transport.begun[0].released, "its target would hear of it only after the last slab is queued"
    assert scene.transport.begun == scene.transport.drafts[:2]


def test_a_hurried_thread_ends_the_oldest_write_begins_the_next_and_gathers_into_its_memory() -> None:
    scene = Scene(slabs=2)
    scene.put(0, 1, 2)
    scene.gathered(0)
    gathers = list(scene.device.gathers)
    assert len(gathers) == 2
    scene.runner.hurry()
    assert scene.device.gathers == gathers
    scene.transport.begun[0].state = WriteState.DONE
    gathers[1].done = True
    scene.runner.hurry()
    assert scene.transport.begun[0].released
    assert scene.transport.begun == scene.transport.drafts[:2]
    assert scene.device.gathers[2].begin_bytes == gathers[0].begin_bytes
    assert scene.outcomes() == []
    scene.turn()
    assert scene.outcomes() == [(0, "", False)]


def test_memory_of_a_slab_is_another_s_only_after_its_write_has_ended() -> None:
    scene = Scene(slabs=2)
    scene.put(0, 1, 2)
    scene.gathered(0, 1)
    assert len(scene.device.gathers) == 2
    scene.wrote(1)
    assert len(scene.device.gathers) == 3
    assert scene.device.gathers[2].begin_bytes == scene.device.gathers[1].begin_bytes
    scene.gathered(2)
    assert scene.transport.begun[2].source == scene.transport.begun[1].source != scene.transport.begun[0].source


def test_a_room_that_is_given_up_is_not_gathered_not_written_and_waited_for_where_its_write_is_open() -> None:
    scene = Scene(slabs=3)
    jobs = scene.put(0, 1, 2)
    scene.gathered(0)
    for job in jobs:
        job.cancelled = True
    scene.gathered(1)
    assert [write.begun for write in scene.transport.drafts] == [True, False, False][: len(scene.transport.drafts)]
    assert scene.transport.drafts[1].dropped
    scene.gathered(2)
    assert (0, "", True) not in scene.outcomes()
    assert {(1, "", True), (2, "", True)} == set(scene.outcomes())
    scene.wrote(0)
    assert (0, "", True) in scene.outcomes()
    assert scene.transport.begun == scene.transport.drafts[:1]


def test_lanes_that_are_stopped_begin_nothing_more_and_let_go_of_what_the_device_has_done() -> None:
    scene = Scene()
    scene.put(0, 1, 2, 3)
    queued = len(scene.device.gathers)
    scene.runner.stop()
    scene.gathered(0, 1, 2, 3)
    assert len(scene.device.gathers) == queued
    assert all(copy.ended for copy in scene.device.gathers)
    assert not scene.transport.begun
    assert {(slab, "", True) for slab in range(4)} == set(scene.outcomes())


def test_a_failed_write_is_told_with_its_reason_and_whether_its_bytes_may_still_land() -> None:
    scene = Scene()
    scene.put(0)
    scene.gathered(0)
    scene.transport.begun[0].error = "the peer is dead"
    scene.wrote(0, WriteState.FAILED)
    assert scene.outcomes() == [(0, "the peer is dead", False)]
    assert not scene.ended[0].settled


def test_a_write_that_cannot_be_looked_up_fails_once_the_device_has_left_its_memory() -> None:
    scene = Scene(slabs=1)
    scene.transport.refuses = True
    scene.put(0, 1)
    scene.turn()
    assert scene.outcomes() == []
    assert len(scene.device.gathers) == 1
    scene.gathered(0)
    assert [outcome[0] for outcome in scene.outcomes()] == [0]
    assert "not connected" in scene.ended[0].error
    assert scene.device.gathers[0].ended
    assert len(scene.device.gathers) == 2


def test_a_pool_that_has_left_fails_its_slab_and_takes_no_memory() -> None:
    scene = Scene(slabs=1)
    scene.device.pool_gone = True
    scene.put(0)
    scene.device.pool_gone = False
    scene.put(1)
    scene.turn()
    assert [outcome[0] for outcome in scene.outcomes()] == [0]
    assert len(scene.device.gathers) == 1


def test_no_write_begins_while_a_probe_measures_the_wire() -> None:
    scene = Scene()
    scene.transport.probing = threading.Event()
    probe = WireProbe(PEER, "decode", RING, 12)
    scene.runner.probe(probe)
    scene.put(0)
    scene.gathered(0)
    assert not scene.transport.begun
    scene.transport.probing.set()
    found: list[Any] = []
    wait_for(lambda: found.extend(scene.ends.take()) or found, what="the probe's result")
    assert found == [ProbeEnd(probe, "CudaIPC")]
    scene.runner.end_probe(probe)
    scene.turn()
    assert len(scene.transport.begun) == 1


def test_a_slab_that_is_given_up_leaves_its_pages_while_a_probe_measures_the_wire() -> None:
    scene = Scene(slabs=1)
    scene.transport.probing = threading.Event()
    scene.runner.probe(WireProbe(PEER, "decode", RING, 12))
    jobs = scene.put(0)
    jobs[0].cancelled = True
    scene.turn()
    assert scene.outcomes() == []
    scene.gathered(0)
    assert scene.outcomes() == [(0, "", True)]
    assert scene.device.gathers[0].ended
    assert scene.transport.drafts[0].dropped
    scene.put(1)
    assert len(scene.device.gathers) == 2
    scene.transport.probing.set()


def test_slabs_that_are_given_up_wait_for_no_write_of_another_room_that_does_not_end() -> None:
    scene = Scene(slabs=20)
    jobs = scene.put(*range(8))
    for _ in range(8):
        scene.gathered(*range(8))
    open_count = len(scene.transport.begun)
    waiting = range(open_count, 8)
    # All waiting ones except the first, which stays the next to be written.
    for slab in waiting[1:]:
        jobs[slab].cancelled = True
    for _ in range(8):
        scene.gathered(*range(8))
    assert scene.outcomes() == [(slab, "", True) for slab in waiting[1:]]
    assert [copy.ended for copy in scene.device.gathers] == [True] * (open_count + 2)
    scene.wrote(0)
    assert len(scene.transport.begun) == open_count + 1
    assert not scene.transport.begun[-1].dropped


def test_slabs_that_are_given_up_are_answered_at_once_behind_one_that_waits_for_memory() -> None:
    scene = Scene(slabs=2)
    jobs = scene.put(*range(6))
    scene.gathered(0, 1)
    assert len(scene.transport.begun) == 2
    for slab in (3, 5):
        jobs[slab].cancelled = True
    scene.runner.drop_cancelled()
    scene.turn()
    assert sorted(scene.outcomes()) == [(3, "", True), (5, "", True)]
    # The remaining ones keep their order.
    for index in (0, 1):
        scene.wrote(index)
    assert [copy.slab.effect.slab for copy in scene.device.gathers] == [0, 1, 2, 4]


def test_what_was_done_is_recorded_and_then_the_lanes_are_idle() -> None:
    scene = Scene()
    scene.put(0, 1)
    scene.gathered(0, 1)
    scene.wrote(0)
    scene.wrote(1)
    assert len(scene.ended) == 2
    assert not scene.runner.busy
    assert sorted(span.stage for span in scene.spans.of_room(1, limit=10)) == ["gather", "gather", "write", "write"]
    assert sum(lane.slabs for lane in scene.runner.lanes()) == 2
    assert scene.metrics.snapshot().value("longshore_writes_total", way="staged") == 2


@pytest.mark.parametrize("transport_announces", [True, False])
def test_a_control_message_is_asked_for_exactly_where_the_transport_tells_nothing(transport_announces: bool) -> None:
    scene = Scene()
    job = outbound_slab(0, SLAB_BYTES)
    job.transport_announces = transport_announces
    scene.runner.send(job)
    scene.gathered(0)
    scene.wrote(0)
    assert bool(scene.transport.begun[0].notice) is transport_announces
    assert scene.ended[0].must_announce is not transport_announces


def test_jobs_whose_writes_are_open_are_held_until_they_end_also_those_given_up() -> None:
    scene = Scene()
    jobs = scene.put(0, 1)
    scene.gathered(0)
    assert scene.runner.writing() == (jobs[0],)
    for job in jobs:
        job.cancelled = True
    scene.runner.drop_cancelled()
    scene.gathered(1)
    # The other one was dropped before it began.
    assert scene.runner.writing() == (jobs[0],)
    scene.wrote(0)
    assert scene.runner.writing() == ()


def test_writes_begin_in_the_order_of_their_copies_though_both_are_over_between_two_looks() -> None:
    scene = Scene()
    scene.put(0, 1)
    asked: list[int] = []
    for copy in scene.device.gathers:
        copy.done = True
    first = scene.device.gathers[0]
    passed = first.passed

    def passed_the_second_time() -> bool:
        asked.append(0)
        return len(asked) > 1 and passed()

    first.passed = passed_the_second_time  # type: ignore[method-assign]
    for _ in range(3):
        scene.runner.hurry()
        scene.turn()
    assert scene.transport.begun == scene.transport.drafts[:2]


def test_a_slab_whose_pages_cannot_be_let_go_fails_alone_and_gives_its_memory_and_its_place_back() -> None:
    scene = Scene(slabs=1)
    scene.put(0, 1)

    def fails() -> bool:
        raise DeviceError("cuIpcCloseMemHandle")

    scene.device.gathers[0].end = fails  # type: ignore[method-assign]
    scene.gathered(0)
    scene.turn()
    assert scene.outcomes() == [(0, "cuIpcCloseMemHandle", False)]
    assert scene.transport.drafts[0].dropped
    scene.gathered(1)
    assert scene.transport.begun == scene.transport.drafts[1:]


def test_a_failed_write_in_place_stays_unsettled_though_its_engine_has_cut_its_memory_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    one = Pieces.one(BASE, BASE, 64)
    monkeypatch.setattr(life, "pieces_in_place", lambda *_: one)

    class Torn:
        @contextlib.contextmanager
        def in_use(self) -> Iterator[None]:
            yield
            raise MemoryLostError("cut short")

    transport = scene.transport
    transport.prepare = lambda _peer, pieces: pieces
    transport.release_prepared = lambda _prepared: None
    transport.draft = lambda *_: transport.drafts.append(FakeWrite(0, 64, b"")) or transport.drafts[-1]
    slab = outbound_slab(0, 64, pool=Torn())
    slab.effect.way = Way.SLICES  # type: ignore[misc]
    monkeypatch.setattr(type(slab), "remote_target", lambda _: None)
    tools = dataclasses.replace(scene.runner._staged_tools, log=StageLog(scene.metrics, scene.spans, later=False))
    run = life.outbound(slab, tools)
    wait = next(run)
    transport.begun[0].state, transport.begun[0].error = WriteState.FAILED, "the peer is dead"
    assert wait.passed()
    with pytest.raises(StopIteration) as stop:
        next(run)
    assert (stop.value.value.error, stop.value.value.settled) == ("the peer is dead", False)
