"""Tests direct copies of a GPU's worker: events report completed slabs; pools stay mapped while a kernel may use them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from event_scene import EventScene
from fake_device import outbound_slab
from page_shapes import Shape, create_memfd, opened

from longshore_agent.errors import DeviceError
from longshore_agent.memory.pools import KVPool
from longshore_agent.worker.neighbour_pools import NeighbourPools
from longshore_spec.status import LaneStatus
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import Attach, PoolInfo
from longshore_wire.ways import Way

SHAPE = Shape(layers=2)
SLAB_BYTES = 1 << 20
LANES = 4


def owner(name: str) -> PeerId:
    return PeerId(name, 0, 0)


class Scene(EventScene):
    """A source worker of a GPU with its pool, and neighbours whose pools are delivered on demand."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(lane_count=LANES)
        self.pool = pool
        self.attached: dict[Any, Attach] = {}
        # The rest of the device is simulated in this host's memory.
        copier: Any = self.device
        self.asked: list[Any] = []
        self.near = NeighbourPools(
            owner("own"),
            None,
            self.attached,
            self.ends,
            lambda asked, _: self.asked.append(asked),
            self.runner.send,
            copier,
        )

    def give(self) -> None:
        """Deliver the requested pools; slabs that waited for them are queued."""
        for owner, _, number in map(msgspec.structs.astuple, self.asked):
            info = PoolInfo(number, SHAPE.geometry, ())
            said = Attach(2, "test", owner.instance, 9, SHAPE.layout, "Loopback", b"", None, (info,), 1 << 20)
            self.attached[Half.SOURCE, owner] = said
            region = create_memfd("longshore-test", SHAPE.geometry.region_bytes[0])
            self.near.pool_given(owner, number, 0, 1, region)
        self.asked.clear()

    def put(self, *slabs: int, name: str = "decode", comes: bool = True, room: int = 1) -> list[Any]:
        made = [outbound_slab(slab, SLAB_BYTES, room, self.pool) for slab in slabs]
        for slab in made:
            slab.effect.way, slab.effect.peer = Way.DIRECT, owner(name)  # type: ignore[misc]
            self.near.put(slab)
        if comes:
            self.give()
        return made

    def passes(self, *slabs: int) -> None:
        for copy in self.device.directs:
            copy.done = copy.done or copy.slab.effect.slab in slabs
        self.turn()

    def queued(self) -> list[int]:
        return [copy.slab.effect.slab for copy in self.device.directs]

    def value(self, name: str, **labels: str) -> float:
        while self.runner.busy:
            self.turn()
        return self.metrics.snapshot().value(name, **labels)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack.enter_context(opened(SHAPE, seed=1)))


def mappings() -> int:
    """Return the number of neighbours' regions that this process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("longshore-test")


def test_all_slabs_of_an_offer_are_queued_at_once_and_each_is_told_of_when_its_event_has_passed(scene: Scene) -> None:
    scene.put(0, 1, 2, comes=False)
    scene.turn()
    assert scene.queued() == []
    scene.give()
    assert scene.queued() == [0, 1, 2]
    scene.turn()
    assert scene.outcomes() == []
    assert scene.runner.copying
    scene.passes(0)
    assert scene.outcomes() == [(0, "", False)]
    scene.passes(1, 2)
    assert scene.outcomes() == [(0, "", False), (1, "", False), (2, "", False)]
    assert all(result.must_announce and result.settled for result in scene.ended)
    assert not scene.runner.copying
    assert not scene.pool.busy


def test_slabs_end_in_the_order_in_which_the_device_does_them(scene: Scene) -> None:
    scene.put(0, 1)
    scene.passes(1)
    assert scene.outcomes() == []
    scene.passes(0)
    assert [slab for slab, _, _ in scene.outcomes()] == [0, 1]


def test_the_device_is_given_a_bounded_number_of_slabs_and_the_next_when_one_has_passed(scene: Scene) -> None:
    scene.put(*range(40))
    given = len(scene.queued())
    assert 4 <= given <= 16
    scene.turn()
    assert len(scene.queued()) == given
    scene.passes(0, 1)
    assert scene.queued() == list(range(given + 2))
    for _ in range(40):
        scene.passes(*range(40))
    assert [slab for slab, _, _ in scene.outcomes()] == list(range(40))


def test_a_slab_that_is_given_up_before_the_device_has_it_is_dropped_and_another_one_counts_as_overtaken(
    scene: Scene,
) -> None:
    jobs = scene.put(*range(40))
    given = len(scene.queued())
    for job in jobs:
        job.cancelled = True
    scene.turn()
    assert scene.queued() == list(range(given))
    assert scene.outcomes() == [(slab, "", True) for slab in range(given, 40)]
    assert scene.pool.busy
    scene.passes(*range(given))
    assert sorted(scene.outcomes()) == [(slab, "", True) for slab in range(40)]
    assert not any(result.must_announce for result in scene.ended)
    assert scene.value("longshore_overtaken_writes_total", way="direct") == given
    assert scene.value("longshore_writes_total", way="direct") == given
    assert sum(lane.slabs for lane in scene.runner.lanes()) == 0
    assert not scene.pool.busy


def test_a_room_that_is_given_up_waits_for_a_slab_of_another_room_and_not_for_all_that_were_queued_before(
    scene: Scene,
) -> None:
    jobs = scene.put(*range(100))
    given = len(scene.queued())
    for job in jobs[90:]:
        job.cancelled = True
    scene.runner.drop_cancelled()
    scene.passes(0)
    assert scene.outcomes() == [*((slab, "", True) for slab in range(90, 100)), (0, "", False)]
    assert scene.queued() == list(range(given + 1))
    for _ in range(100):
        scene.passes(*range(90))
    assert scene.queued() == list(range(90))


def test_a_neighbour_s_pool_is_unmapped_when_the_last_kernel_that_writes_it_has_passed_and_not_before(
    scene: Scene,
) -> None:
    before = mappings()
    scene.put(0, 1)
    scene.near.pool_gone(owner("decode"), 0)
    assert scene.near.take_unmapped() == []
    scene.passes(0)
    assert scene.near.take_unmapped() == []
    assert mappings() == before + 1
    scene.passes(1)
    assert mappings() == before
    assert scene.near.take_unmapped() == [(owner("decode"), 0)]
    assert scene.near.take_unmapped() == []
    assert scene.outcomes() == [(0, "", False), (1, "", False)]


def test_a_neighbour_that_is_lost_is_unmapped_with_its_last_kernel_too_and_one_that_lives_keeps_its_pages(
    scene: Scene,
) -> None:
    before = mappings()
    scene.put(0)
    scene.put(1, name="other")
    scene.near.pool_gone(owner("decode"))
    scene.turn()
    assert mappings() == before + 2
    scene.passes(0)
    assert mappings() == before + 1
    scene.passes(1)
    assert mappings() == before + 1
    assert scene.outcomes() == [(0, "", False), (1, "", False)]
    scene.near.pool_gone(owner("other"))
    assert mappings() == before


def test_our_own_pool_is_unmapped_when_the_last_kernel_that_reads_it_has_passed(scene: Scene) -> None:
    scene.put(0, 1)
    assert not scene.pool.close()
    scene.passes(0)
    assert not scene.pool.wait_closed(0)
    scene.passes(1)
    assert scene.pool.wait_closed(0)


def test_a_slab_whose_pool_has_left_before_the_device_got_it_fails_with_the_reason(scene: Scene) -> None:
    jobs = scene.put(*range(40))
    given = len(scene.queued())
    scene.near.pool_gone(owner("decode"), 0)
    for _ in range(40):
        scene.passes(*range(40))
    failed = [text for slab, text, _ in scene.outcomes() if slab >= given]
    assert len(failed) == len(jobs) - given
    assert all("unregistered" in text for text in failed)
    assert scene.near.take_unmapped() == [(owner("decode"), 0)]


def test_a_launch_that_fails_fails_its_slab_alone(scene: Scene) -> None:
    scene.device.failure = DeviceError("the driver refuses")
    scene.put(0)
    scene.device.failure = None
    scene.put(1)
    scene.passes(1)
    assert scene.outcomes() == [(0, "the driver refuses", False), (1, "", False)]
    assert [result.must_announce for result in scene.ended] == [False, True]
    assert not scene.pool.busy


def test_a_device_that_has_failed_is_told_to_whoever_turns(scene: Scene) -> None:
    scene.put(0)
    scene.device.directs[0].broken = DeviceError("an illegal address")
    with pytest.raises(DeviceError, match="illegal address"):
        scene.turn()


def test_lanes_that_are_stopped_give_the_device_nothing_more_and_let_go_of_what_it_has_done(scene: Scene) -> None:
    jobs = scene.put(*range(40))
    given = len(scene.queued())
    scene.runner.stop()
    for job in jobs:
        job.cancelled = True
    scene.passes(*range(40))
    assert len(scene.queued()) == given
    assert sorted(scene.outcomes()) == [(slab, "", True) for slab in range(40)]
    assert not scene.pool.busy


def test_a_room_whose_kernel_is_compiled_waits_alone_and_goes_on_in_its_order(scene: Scene) -> None:
    scene.device.compiling.add(7)
    scene.put(0, 1, room=7)
    scene.put(2, 3)
    assert scene.queued() == [2, 3]
    assert scene.runner.busy
    scene.passes(2, 3)
    assert scene.outcomes() == [(2, "", False), (3, "", False)]
    # The device is idle, but the thread must poll again.
    assert scene.runner.busy
    assert not scene.runner.copying
    scene.device.compiling.clear()
    scene.turn()
    scene.put(4)
    assert scene.queued() == [2, 3, 0, 1, 4]
    scene.passes(0, 1, 4)
    assert [slab for slab, _, _ in scene.outcomes()] == [2, 3, 0, 1, 4]


def test_a_room_waits_for_its_kernel_while_another_s_is_there(scene: Scene) -> None:
    scene.device.compiling |= {7, 8}
    scene.put(0, 1, room=7)
    scene.put(2, 3, room=8)
    scene.device.compiling.discard(7)
    scene.turn()
    assert scene.queued() == [0, 1]
    scene.device.compiling.clear()
    scene.turn()
    assert scene.queued() == [0, 1, 2, 3]


def test_a_room_that_is_given_up_does_not_wait_for_its_kernel(scene: Scene) -> None:
    scene.device.compiling.add(7)
    jobs = scene.put(0, 1, 2, room=7)
    for job in jobs[:2]:
        job.cancelled = True
    scene.turn()
    assert scene.outcomes() == [(0, "", True), (1, "", True)]
    scene.runner.stop()
    scene.turn()
    assert scene.outcomes() == [(0, "", True), (1, "", True), (2, "", True)]
    assert not scene.device.directs


def test_a_room_that_is_given_up_does_not_wait_for_the_kernel_of_an_older_one(scene: Scene) -> None:
    scene.device.compiling |= {7, 8}
    scene.put(0, room=7)
    (doomed,) = scene.put(1, room=8)
    doomed.cancelled = True
    scene.turn()
    assert scene.outcomes() == [(1, "", True)]


def test_a_kernel_that_cannot_be_compiled_fails_the_slab_that_waits_for_it(scene: Scene) -> None:
    scene.device.compiling.add(7)
    scene.put(0, room=7)
    scene.device.compiling.clear()
    scene.device.failure = DeviceError("there is no compiler")
    scene.turn()
    assert scene.outcomes() == [(0, "there is no compiler", False)]
    scene.device.failure = None
    scene.put(1, room=7)
    scene.passes(1)
    assert scene.outcomes()[1:] == [(1, "", False)]


def test_what_was_done_is_counted_once_and_the_time_of_a_slab_begins_when_the_one_before_it_ends(scene: Scene) -> None:
    scene.put(0, 1, 2)
    assert [lane.busy for lane in scene.runner.lanes()] == [True, False, False, False]
    scene.passes(0)
    scene.passes(1, 2)
    assert scene.value("longshore_writes_total", way="direct") == 3
    assert scene.value("longshore_stage_bytes_total", stage="write") == 3 * SLAB_BYTES
    assert scene.runner.lanes() == (
        LaneStatus(0, False, 3, 3 * SLAB_BYTES),
        *(LaneStatus(index, False, 0, 0) for index in range(1, LANES)),
    )
    spans = sorted(scene.spans.of_room(1, limit=10), key=lambda span: span.start_ns)
    assert [span.stage for span in spans] == ["write"] * 3
    for span, following in itertools.pairwise(spans):
        assert span.end_ns <= following.start_ns


def test_pages_of_a_claim_that_came_before_its_pool_was_mapped_go_to_the_device_when_it_is(scene: Scene) -> None:
    decode = owner("decode")
    first, second, third, fourth, fifth = (np.array([page], "<i4").tobytes() for page in range(5))
    scene.near.expect(decode, 0, first, 0)
    scene.near.expect(decode, 0, second, 3 * SHAPE.page_size)
    assert scene.device.admitted == []
    scene.give()
    assert scene.device.admitted == ["write direct [0]", "write direct [1]"]
    scene.near.expect(decode, 0, third, SHAPE.page_size)
    assert scene.device.admitted[2:] == ["write direct [2]"]
    # A pool that is never delivered leaves no state.
    scene.near.pool_gone(decode, 0)
    scene.near.expect(decode, 0, fourth, 0)
    scene.near.pool_gone(decode, 0)
    scene.near.expect(decode, 0, fifth, 0)
    scene.give()
    assert scene.device.admitted[3:] == ["write direct [4]"]
