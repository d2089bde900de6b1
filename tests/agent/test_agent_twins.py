"""Two engines use one instance name at two agents: one is refused with that name, the other is served."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from agent_fleet import World
from agent_world import EVENT_LIMIT_S, Request, wait_for, wait_for_none

from longshore_client import Half
from longshore_wire.engine_messages import RoomEventKind
from longshore_wire.errors import Reason


@pytest.fixture
def place(tmp_path_factory):
    # Each refused room ends after one timeout. A peer whose process is found has four times as long.
    world = World(tmp_path_factory.mktemp("twins"), LONGSHORE_HEARTBEAT_S="0.2", LONGSHORE_PEER_TIMEOUT_S="2")
    left, right = world.agent("left"), world.agent("right")
    prefill = world.engine(left, "prefill", 2)
    older = world.engine(left, "twin", roles=[Half.TARGET]).result()
    # Its worker starts after the other engine's worker runs.
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
        """Claim at the older one; return the failure after it detects that the newer one has its connection."""
        rank = place.older.ranks[0]
        before = rank.expected.copy()
        room = Request(place.prefill, place.older, 40)
        room.claim()
        # No bytes may arrive.
        rank.expected[:] = before
        end = place.older.client.wait(room.room, Half.TARGET, "prefill", timeout_s=EVENT_LIMIT_S)
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
    wait_for_none(lambda: [left for agent in place.agents for left in agent.leftovers()])


@pytest.fixture
def prefill_place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prefill-twins")
    gate, mark = directory / "open", directory / "mark"
    rule = {"kind": "hold", "count": None, "until": str(gate), "mark": str(mark)}
    world = World(
        directory,
        LONGSHORE_HEARTBEAT_S="0.2",
        LONGSHORE_PEER_TIMEOUT_S="4",
        LONGSHORE_FORCE_WAY="Staged",
        LONGSHORE_RING_BYTES=str(1 << 20),
        LONGSHORE_SLAB_BYTES_MIN="64Ki",
    )
    left = world.agent("left", LONGSHORE_LOOPBACK_FAULTS=json.dumps([rule]))
    right, decode = world.agent("right"), world.agent("decode")
    first = world.engine(left, "twin", 2, roles=[Half.SOURCE])
    second = world.engine(right, "twin", 2, roles=[Half.SOURCE])
    steady = world.engine(right, "steady", 2, roles=[Half.SOURCE])
    target = world.engine(decode, "decode", roles=[Half.TARGET])
    yield SimpleNamespace(
        first=first.result(),
        second=second.result(),
        steady=steady.result(),
        target=target.result(),
        agents=(left, right, decode),
        gate=gate,
        mark=mark,
    )
    world.close()


def test_a_claim_from_a_second_prefill_engine_of_one_name_frees_nothing_that_the_first_one_may_write(prefill_place):
    place = prefill_place
    held = Request(place.first, place.target, 90)
    held.offer()
    held.claim()
    wait_for(place.mark.exists, what="a held write")

    wrong = Request(place.second, place.target, 40)
    before = place.target.ranks[0].expected.copy()
    wrong.claim()
    place.target.ranks[0].expected[:] = before
    end = place.target.client.wait(wrong.room, Half.TARGET, "twin", timeout_s=EVENT_LIMIT_S)
    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.STALE_EPOCH)
    assert re.search("prefill twin rank [01] answers at", end.text) and "give each its own" in end.text
    place.target.client.wait(wrong.room, Half.TARGET, "twin", [RoomEventKind.RELEASED])
    place.target.accept(wrong.target_pages)

    # Other rooms wrap the ring several times around the first room's memory.
    for _ in range(12):
        each = Request(place.steady, place.target, 60)
        each.offer()
        each.claim()
        each.arrives()
    place.gate.touch()
    held.arrives()
    assert place.target.intact()
    wait_for_none(lambda: [left for agent in place.agents for left in agent.leftovers()])
