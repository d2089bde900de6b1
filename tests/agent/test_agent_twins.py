"""Two decode engines that use one instance name at two agents: one is told so by that name, the other is served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from agent_fleet import World
from agent_world import Request, wait_for, wait_for_none

from longshore_client import Half
from longshore_wire.engine_messages import RoomEventKind
from longshore_wire.errors import Reason


@pytest.fixture
def place(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("twins"), LONGSHORE_HEARTBEAT_S="0.1", LONGSHORE_PEER_TIMEOUT_S="1")
    left, right = world.agent("left"), world.agent("right")
    prefill = world.engine(left, "prefill", 2)
    older = world.engine(left, "twin", roles=[Half.TARGET]).result()
    # Its worker begins after that of the other one is there.
    newer = world.engine(right, "twin", roles=[Half.TARGET]).result()
    yield SimpleNamespace(prefill=prefill.result(), older=older, newer=newer, agents=(left, right))
    world.close()


def test_the_newer_twin_is_served_and_the_older_one_fails_with_the_name_and_the_way_out(place):
    first = Request(place.prefill, place.older, 90)
    first.claim()
    first.offer()
    first.arrives()
    second = Request(place.prefill, place.newer, 90)
    second.claim()
    second.offer()
    second.arrives()

    def refusal() -> str:
        """Claim at the older one; what it says once it has learned that its connection is not its own any more."""
        rank = place.older.ranks[0]
        before = rank.expected.copy()
        room = Request(place.prefill, place.older, 40)
        room.claim()
        # Nothing is to arrive.
        rank.expected[:] = before
        end = place.older.client.wait(room.room, Half.TARGET, "prefill", timeout_s=20)
        assert end.kind is RoomEventKind.FAILED
        assert end.reason in (Reason.PEER_LOST, Reason.STALE_EPOCH)
        return end.text if end.reason is Reason.STALE_EPOCH else ""

    said = wait_for(refusal)
    assert "decode twin rank 0" in said
    assert "give each its own" in said

    for _ in range(5):
        assert refusal()
        each = Request(place.prefill, place.newer, 90, prefix=7)
        each.offer()
        each.claim()
        each.arrives()
    assert place.newer.intact()
    assert place.older.intact()
    wait_for_none(lambda: [left for agent in place.agents for left in agent.leftovers()], 10)
