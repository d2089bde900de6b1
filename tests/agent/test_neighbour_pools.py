"""Tests neighbour pools, which arrive region by region: wrong regions are closed, and no pool is mapped partially."""

from __future__ import annotations

import os
from typing import Any

from fake_device import FakeDevice, outbound_slab
from page_shapes import Shape, create_memfd

from longshore_agent.pipeline.slabs import Ends, OutboundEnd
from longshore_agent.worker.neighbour_pools import NeighbourPools
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import Attach, PoolInfo

OWNER = PeerId("decode", 0, 0)
SHAPE = Shape(layers=2, split=True)
ATTACH = Attach(
    2, "test", "decode", 9, SHAPE.layout, "Loopback", b"", None, (PoolInfo(0, SHAPE.geometry, ()),), 1 << 20
)


class Scene:
    """A source worker whose target is a neighbour; `lanes` are the slabs that may be copied."""

    def __init__(self, device: Any = None) -> None:
        self.lanes: list[Any] = []
        self.asked = 0
        self.ends = Ends()
        self.attached = {(Half.SOURCE, OWNER): ATTACH}
        copier: Any = FakeDevice()
        own = PeerId("prefill", 0, 0)
        self.near = NeighbourPools(own, device, self.attached, self.ends, self._ask, self.lanes.append, copier)

    def _ask(self, *_: object) -> None:
        self.asked += 1

    def put(self, slab: int) -> Any:
        made = outbound_slab(slab, 1 << 10)
        self.near.put(made)
        return made


def region(fill: int) -> int:
    """One region of the pool, filled with a byte."""
    length_bytes = SHAPE.geometry.region_bytes[0]
    descriptor = create_memfd("longshore-test", length_bytes)
    os.pwrite(descriptor, bytes([fill]) * length_bytes, 0)
    return descriptor


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_pool_that_comes_region_by_region_is_mapped_whole_and_in_order() -> None:
    scene = Scene()
    job = scene.put(0)
    for fill in (1, 2):
        assert scene.lanes == []
        scene.near.pool_given(OWNER, 0, fill - 1, 2, region(fill))
    assert scene.lanes == [job]
    assert [int(job.neighbour.region(index)[0]) for index in range(2)] == [1, 2]


def test_a_region_that_comes_after_its_owner_was_lost_is_closed_and_no_region_of_what_its_next_life_gives() -> None:
    scene = Scene()
    scene.put(0)
    regions = [region(1), region(2)]
    scene.near.pool_given(OWNER, 0, 0, 2, regions[0])
    scene.near.pool_gone(OWNER)
    found = scene.ends.take()
    assert [type(result) for result in found] == [OutboundEnd]
    scene.near.pool_given(OWNER, 0, 1, 2, regions[1])
    assert not any(map(is_open, regions))
    job = scene.put(1)
    for fill in (3, 4):
        scene.near.pool_given(OWNER, 0, fill - 3, 2, region(fill))
    assert scene.lanes == [job]
    assert [int(job.neighbour.region(index)[0]) for index in range(2)] == [3, 4]


def test_a_region_of_an_answer_that_was_refused_is_no_region_of_the_next() -> None:
    scene = Scene()
    scene.put(0)
    first = region(1)
    scene.near.pool_given(OWNER, 0, 0, 2, first)
    # The second descriptor was lost in transit.
    scene.near.pool_given(OWNER, 0, 1, 2, None)
    assert [type(end) for end in scene.ends.take()] == [OutboundEnd]
    assert not is_open(first)
    slab = scene.put(1)
    late = region(9)
    scene.near.pool_given(OWNER, 0, 1, 2, late)
    for index, fill in ((1, 4), (0, 3)):
        assert scene.lanes == []
        scene.near.pool_given(OWNER, 0, index, 2, region(fill))
    assert not is_open(late)
    assert scene.lanes == [slab]
    assert [int(slab.neighbour.region(index)[0]) for index in range(2)] == [3, 4]
