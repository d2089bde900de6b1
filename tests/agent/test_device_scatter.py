"""Tests a GPU's scatters: they are queued at once, end by their events, and count only if their trailers were right."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from agent_world import wait_for
from event_scene import HOUR_NS, EventScene
from fake_device import inbound_slab

from longshore_wire.errors import Reason

WRONG = bytes(64)


class Scene(EventScene):
    """Return an idle target over a device that reads these trailers first, and correct ones afterwards."""

    def __init__(self, trailers: Iterable[bytes] = (), deadline_ns: int = HOUR_NS) -> None:
        super().__init__(deadline_ns=deadline_ns, trailers=trailers)

    def put(self, number: int) -> Any:
        slab = inbound_slab(number)
        self.runner.receive(slab)
        return slab

    def passed(self) -> None:
        for copy in self.device.scatters:
            copy.done = True
        self.turn()

    def reasons(self) -> list[tuple[int, Reason, bool]]:
        return [(end.slab.effect.slab, end.reason, end.dropped) for end in self.ended]


def test_a_landed_slab_is_queued_at_once_and_over_when_its_event_has_passed() -> None:
    scene = Scene()
    scene.put(0)
    scene.put(1)
    assert [copy.slab.effect.slab for copy in scene.device.scatters] == [0, 1]
    scene.device.scatters[0].done = True
    scene.turn()
    assert scene.reasons() == [(0, Reason.NONE, False)]
    scene.passed()
    assert scene.reasons() == [(0, Reason.NONE, False), (1, Reason.NONE, False)]
    assert all(copy.ended for copy in scene.device.scatters)


def test_a_slab_whose_trailer_was_wrong_is_scattered_again_and_counts_once_it_was_right() -> None:
    scene = Scene([WRONG, WRONG])
    scene.put(0)
    scene.passed()
    assert scene.reasons() == []
    assert scene.runner.busy

    def again() -> list[Any]:
        scene.passed()
        return scene.ended

    wait_for(again, what="the third scatter")
    assert scene.reasons() == [(0, Reason.NONE, False)]
    assert len(scene.device.scatters) == 3


def test_a_trailer_that_stays_wrong_fails_its_slab_at_the_deadline() -> None:
    scene = Scene([WRONG] * 1000, deadline_ns=1)
    scene.put(0)
    assert time.monotonic_ns() > 1
    scene.passed()
    assert scene.reasons() == [(0, Reason.TRAILER_MISMATCH, False)]
    assert "slab 0 of room 1 ends with None" in scene.ended[0].error


def test_a_room_that_is_given_up_is_not_scattered_and_not_waited_for() -> None:
    scene = Scene([WRONG] * 1000)
    job = scene.put(0)
    job.cancelled = True
    scene.passed()
    assert scene.reasons() == [(0, Reason.TRAILER_MISMATCH, False)]
    late = inbound_slab(1)
    late.cancelled = True
    scene.runner.receive(late)
    scene.turn()
    assert scene.reasons()[1:] == [(1, Reason.NONE, True)]
    assert len(scene.device.scatters) == 1


def test_a_slab_that_nobody_cancelled_fails_if_its_pool_has_left() -> None:
    scene = Scene()
    scene.device.pool_gone = True
    scene.put(0)
    scene.turn()
    assert scene.reasons() == [(0, Reason.UNKNOWN_POOL, False)]
    assert not scene.device.scatters


def test_spans_are_written_down_when_nothing_waits_and_then_the_scatters_are_idle() -> None:
    scene = Scene()
    scene.put(0)
    scene.passed()
    for _ in range(10):
        scene.turn()
    assert not scene.runner.busy
    assert [span.stage for span in scene.spans.of_room(1, limit=10)] == ["scatter"]


def test_a_runner_that_is_stopped_copies_no_slab_again_whose_trailer_was_refused() -> None:
    scene = Scene([WRONG] * 1000)
    scene.put(0)
    scene.passed()
    assert scene.runner.busy
    scene.runner.stop()
    wait_for(scene.turn, what="the end of the slab")
    assert scene.reasons() == [(0, Reason.NONE, True)]
    assert len(scene.device.scatters) == 1
