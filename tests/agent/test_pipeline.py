"""Tests by spans and metrics of real agents that the stages of one pair's slabs overlap and that all its lanes work."""

from __future__ import annotations

from typing import Any

import pytest
from agent_fleet import World
from agent_world import Engine, Request, wait_for

from longshore_wire.engine_messages import Half

LANES = 4
TOKENS = 5000  # 61 MB: 15 slabs that fill a lane's buffer
# Stages of one slab take a millisecond, so on a busy machine a room may show no overlap.
ROOMS_MAX = 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Engine, Engine]:
    settings = {
        "LONGSHORE_BACKEND": "NIXL",
        "LONGSHORE_LANE_BYTES": "4Mi",
        "LONGSHORE_SLAB_BYTES_MIN": "1Mi",
        "LONGSHORE_RING_BYTES": "128Mi",
    }
    world = World(tmp_path_factory.mktemp("pipeline"), **settings, LONGSHORE_RING_EXTENT_BYTES="64Mi")
    try:
        source = world.engine(world.agent("prefill"), "from", page_count=400, roles=[Half.SOURCE])
        target = world.engine(
            world.agent("decode", LONGSHORE_FORCE_WAY="Staged"), "to", page_count=400, roles=[Half.TARGET]
        )
        yield source.result(), target.result()
    finally:
        world.close()


def spans_of(engine: Engine, room: int, stage: str) -> dict[int, dict[str, Any]]:
    """Return the spans of one stage of a room, by slab."""
    page = engine.agent.room_page(room)
    assert page is not None
    return {span["slab"]: span for span in page["spans"] if span["stage"] == stage}


def meets(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["start_ns"] < other["end_ns"] and other["start_ns"] < one["end_ns"]


def moved(source: Engine, target: Engine) -> int:
    each = Request(source, target, TOKENS)
    each.claim()
    wait_for(lambda: source.agent.room(each.room, Half.SOURCE), what="the claim to reach prefill")
    each.offer()
    each.arrives()
    assert target.ranks[0].intact()
    return each.room


def test_the_wire_of_a_slab_meets_the_gather_of_the_next_and_the_scatter_of_one_before(pair):
    source, target = pair
    gathered, scattered = 0, 0
    for _ in range(ROOMS_MAX):
        room = moved(source, target)
        gathers, writes, scatters = (
            spans_of(source, room, "gather"),
            spans_of(source, room, "write"),
            spans_of(target, room, "scatter"),
        )
        assert len(writes) > 2 * LANES
        gathered += sum(meets(write, gathers[slab + 1]) for slab, write in writes.items() if slab + 1 in gathers)
        scattered += sum(meets(write, scatter) for write in writes.values() for scatter in scatters.values())
        if gathered and scattered:
            break
    assert gathered
    assert scattered


def test_a_single_pair_keeps_every_lane_at_work(pair):
    source, target = pair

    def lanes() -> list[float]:
        return [
            source.agent.metric("longshore_lane_bytes_total", worker="from/0/0", lane=str(lane))
            for lane in range(LANES)
        ]

    before = lanes()

    def even() -> bool:
        """Whether each lane has at least a tenth. A lane's thread may get no processor for a while."""
        moved(source, target)
        used = [after - earlier for after, earlier in zip(lanes(), before, strict=True)]
        return min(used) >= 0.1 * sum(used)

    wait_for(even, what="a tenth of the bytes from each lane")
