"""Tests a GPU's scatters: they are queued at once, end by their events, and count only if their trailers were right."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from agent_world import wait_for
from event_scene import HOUR_NS, EventScene
from fake_device import inbound_slab

from longshore_agent.errors import DeviceError
from longshore_agent.kernels.digest import Digests
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.plan import Pair
from longshore_wire.ways import Way

WRONG = bytes(64)
ROUTE = Pair(0, 0, (0, 1), ((0, 1),), 1, Way.STAGED)
POOL: Any = SimpleNamespace(layout=KVLayout(ModelShape.kv(1, 1, 1, 1), Parallel(), 1))


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


def test_a_copy_that_the_driver_has_queued_in_part_fails_its_slab_alone() -> None:
    scene = Scene()
    scene.put(0)
    scene.put(1)
    scene.turn()
    scene.device.scatters[0].unmapped = DeviceError("the driver refuses a launch")
    scene.passed()
    scene.turn()
    assert scene.reasons() == [(0, Reason.INTERNAL, False), (1, Reason.NONE, False)]


@pytest.mark.parametrize(("found", "reason"), [(b"12345678", Reason.NONE), (b"1234567x", Reason.DIGEST_MISMATCH)])
def test_a_scatter_fails_its_slab_if_the_digests_of_its_pages_are_not_the_sources(found: bytes, reason: Reason) -> None:
    scene = Scene()
    slab = scene.put(0)
    slab.effect.digest_key, slab.effect.digests, slab.effect.route = b"key", b"12345678", ROUTE
    slab.pool = POOL
    scene.turn()
    scene.device.scatters[0].digests = Digests(b"", found)
    scene.passed()
    scene.turn()
    assert scene.reasons() == [(0, reason, False)]


def test_spans_are_recorded_and_then_the_scatters_are_idle() -> None:
    scene = Scene()
    scene.put(0)
    scene.passed()
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
