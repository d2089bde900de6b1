"""Tests the effect of each of an agent's variables on moving bytes, with real lanes, rings and threads in one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from worker_side import Make, Side, claim, offer, pages, run, side_maker

from longshore_agent.worker.health import WorkerHealth
from longshore_wire.engine_messages import Accepted, Half
from longshore_wire.errors import Reason

S = 10**9


@pytest.fixture
def make() -> Iterator[Make]:
    with side_maker() as build:
        yield build


def pair(make: Make, **settings: str) -> tuple[Side, Side]:
    """A prefill and a decode side with the same variables, whose pages differ in size."""
    variables = {f"LONGSHORE_{name.upper()}": value for name, value in settings.items()}
    source, target = make("P", Half.SOURCE, **variables), make("D", Half.TARGET, page_size=8, **variables)
    source.register()
    target.register()
    return source, target


def moved(make: Make, **settings: str) -> Side:
    """Move one room and compare its bytes; return the prefill side with its counters."""
    source, target = pair(make, **settings)
    run(source, target, 1)
    assert (source.ended[1].reason, target.ended[1].reason) == (Reason.NONE, Reason.NONE)
    near, far = source.bytes.reshape(4, -1, 32), target.bytes.reshape(4, -1, 32)
    tokens = np.arange(24)
    there = np.array([7, 3, 5])[tokens // 8] * 8 + tokens % 8
    assert np.array_equal(far[:, there], near[:, 4 + tokens])
    return source


def counted(side: Side, name: str, way: str) -> float:
    return side.metrics.snapshot().value(f"longshore_{name}_total", way=way)


@pytest.mark.shows("agent.slices_batch")
def test_slices_travel_in_writes_of_as_many_as_are_set(make: Make) -> None:
    for batch in (7, 1000):
        side = moved(make, slices_batch=str(batch), force_way="Slices", slab_bytes_min="32Ki")
        pieces, writes = counted(side, "write_pieces", "slices"), counted(side, "writes", "slices")
        assert pieces > 7
        assert (writes == 1) == (batch == 1000)
        assert writes >= pieces / batch


@pytest.mark.shows("agent.ring_extent_bytes")
def test_a_write_is_cut_where_extents_of_the_ring_end(make: Make) -> None:
    found = {}
    for extent_bytes in (1 << 20, 2 << 20):
        source, target = pair(make, ring_bytes="2Mi", ring_extent_bytes=str(extent_bytes), lane_bytes="1Mi")
        region = target.mover.resources.ring_region
        assert region is not None
        assert region.extent_bytes == extent_bytes
        # The next slab begins a little before the first mebibyte of the ring and ends behind it.
        ring = target.target.granter.ring
        assert ring.allocate((1 << 20) - 128) is not None
        run(source, target, 1)
        found[extent_bytes] = counted(source, "write_pieces", "staged") - counted(source, "writes", "staged")
    assert found == {1 << 20: 1, 2 << 20: 0}


@pytest.mark.shows("agent.scatter_threads", "agent.lane_count", "field.prefill.staging.lanes")
@pytest.mark.parametrize("count", [1, 3])
def test_as_many_threads_scatter_and_as_many_lanes_write_as_are_set(make: Make, count: int) -> None:
    before = set(threading.enumerate())
    source, target = pair(make, scatter_threads=str(count), lane_count=str(count))
    begun = Counter(thread.name.partition("-")[0] for thread in set(threading.enumerate()) - before)
    assert (begun["scatter"], begun["lane"]) == (count, count)
    assert len(source.mover.resources.runner.lanes()) == count
    run(source, target, 1)
    assert source.ended[1].reason is Reason.NONE


@pytest.mark.shows("agent.quarantine_percent")
@pytest.mark.parametrize(("percent", "ill"), [("10", True), ("90", False)])
def test_a_worker_is_replaced_above_the_part_in_quarantine_that_is_set(make: Make, percent: str, *, ill: bool) -> None:
    target = make(
        "D", Half.TARGET, LONGSHORE_QUARANTINE_PERCENT=percent, LONGSHORE_PEER_TIMEOUT_S="5", LONGSHORE_RING_BYTES="1Mi"
    )
    health = WorkerHealth(target.config.settings, target.mover, target.target)
    ring = target.target.granter.ring
    region = ring.allocate(1 << 19)
    assert region is not None
    ring.hold(region)
    assert health.illness(1) == ""
    assert ("of the ring are in quarantine" in health.illness(1 + 5 * S)) == ill


@pytest.mark.shows("agent.ring_bytes")
def test_a_worker_without_a_ring_is_brought_no_staged_bytes(make: Make) -> None:
    source, target = pair(make, ring_bytes="0", force_way="Slices")
    assert target.mover.resources.ring_region is None
    run(source, target, 1)
    assert (target.ended[1].reason, counted(source, "writes", "staged")) == (Reason.NONE, 0)
    assert isinstance(source.say(offer(2, 0, 4, pages(1))), Accepted)
    assert isinstance(target.say(claim(2, 4, pages(1))), Accepted)
