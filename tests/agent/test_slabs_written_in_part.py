"""Rooms that end while a slab is written in place in part, with real agents: nobody reuses a page before its last write.

The transport lets the first batches of a slab land and holds the next ones, until the gate is open or their worker ends.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from agent_fleet import World
from agent_world import Agent, Engine, Request, room_ids, wait_for, wait_for_none

from longshore_client import Half, Reason, RoomError, RoomEvent, RoomEventKind
from longshore_wire.names import room_name

TOKENS = 128
# Batches that land before the first one that is held.
LANDED = 2


@dataclass
class Place:
    """Engines of two agents. Batches of `source` to `target` are held from number LANDED on."""

    world: World
    prefill: Agent
    decode: Agent
    source: Engine
    target: Engine
    gate: Path
    mark: Path

    def partly_written(self) -> Request:
        """Begin a room, whose first slab is then in its pages in part."""
        each = Request(self.source, self.target, TOKENS)
        each.claim()
        each.offer()
        wait_for(self.mark.exists, what="a held batch")
        rank = self.target.ranks[0]
        pages = rank.planes[:, :, each.target_pages] == rank.expected[:, :, each.target_pages]
        # Random bytes are rarely equal to the poison.
        assert 0.01 < np.mean(pages) < 0.5
        return each

    def ended(self, each: Request, half: Half) -> RoomEvent:
        engine = self.source if half is Half.SOURCE else self.target
        return engine.client.wait(each.room, half, self.source.instance)

    def released(self, each: Request, half: Half) -> None:
        engine = self.source if half is Half.SOURCE else self.target
        engine.client.wait(each.room, half, self.source.instance, [RoomEventKind.RELEASED])

    def pages_of(self, each: Request) -> np.ndarray:
        return self.target.ranks[0].planes[:, :, each.target_pages].copy()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    gate, mark = tmp_path / "open", tmp_path / "mark"
    rule = {"kind": "hold", "first": LANDED, "count": None, "until": str(gate), "mark": str(mark)}
    world = World(
        tmp_path,
        LONGSHORE_HEARTBEAT_S="0.2",
        LONGSHORE_RETRY_MS="50",
        LONGSHORE_PEER_TIMEOUT_S="4",
        LONGSHORE_FORCE_WAY="Slices",
        LONGSHORE_SLICES_BATCH="16",
        LONGSHORE_LANE_COUNT="1",
    )
    try:
        prefill = world.agent("prefill", LONGSHORE_LOOPBACK_FAULTS=json.dumps([rule]))
        decode = world.agent("decode")
        starting = [
            world.engine(prefill, "part-source", roles=[Half.SOURCE]),
            world.engine(decode, "part-target", page_size=8, roles=[Half.TARGET]),
        ]
        yield Place(world, prefill, decode, *(engine.result() for engine in starting), gate, mark)
    finally:
        gate.touch()
        world.close()


def settled(place: Place, each: Request, agents: list[Agent]) -> None:
    """Give the room's pages to other rooms, and check that these alone change them."""
    place.target.accept(each.target_pages)
    place.gate.touch()
    # The room's pages are the next ones that are taken.
    place.target.free.sort(key=lambda page: page not in each.target_pages)
    for _ in range(3):
        after = Request(place.source, place.target, TOKENS)
        assert set(after.target_pages) == set(each.target_pages)
        after.claim()
        after.offer()
        after.arrives()
        place.target.free.sort(key=lambda page: page not in each.target_pages)
    wait_for_none(lambda: [left for agent in agents for left in agent.leftovers()])
    assert place.target.intact()


@pytest.mark.parametrize("half", Half, ids=["prefill cancels", "decode cancels"])
def test_pages_of_a_cancelled_room_stay_taken_until_its_held_batches_have_ended(place: Place, half: Half) -> None:
    each = place.partly_written()
    engine = place.source if half is Half.SOURCE else place.target
    engine.client.cancel(each.room, half)
    for end in (place.ended(each, Half.SOURCE), place.ended(each, Half.TARGET)):
        assert (end.kind, end.reason, end.bytes_moved) == (RoomEventKind.FAILED, Reason.CANCELLED, 0), end
    # All messages on the first room precede those on a room without bytes, which has ended.
    empty = Request(place.source, place.target, TOKENS // 2, prefix=TOKENS // 2)
    empty.claim()
    empty.offer()
    empty.arrives()
    begun = place.prefill.metric("longshore_writes_total", way="slices")
    assert place.decode.room(each.room, Half.TARGET)["tokens_done"] == 0
    with pytest.raises(RoomError, match=f"which room {room_name(each.room)} of part-source writes"):
        place.target.client.receive(next(room_ids), place.source.endpoint(), each.target_pages, 0, TOKENS)
    before = place.pages_of(each)

    place.gate.touch()

    for each_half in Half:
        place.released(each, each_half)
    place.source.free += each.source_pages
    # The held batches have landed, and no further one was begun.
    assert not np.array_equal(place.pages_of(each), before)
    assert place.prefill.metric("longshore_writes_total", way="slices") == begun
    assert place.prefill.metric("longshore_overtaken_writes_total", way="slices") == 1
    settled(place, each, [place.prefill, place.decode])


@pytest.mark.parametrize("fault", ["worker killed", "engine left"])
def test_pages_that_a_lost_prefill_has_written_in_part_are_free_when_its_worker_has_ended(
    place: Place, fault: str
) -> None:
    each = place.partly_written()
    before = place.pages_of(each)
    pid = place.prefill.worker("part-source")["pid"]
    if fault == "worker killed":
        os.kill(pid, signal.SIGKILL)
    else:
        place.source.client.close()
    end = place.ended(each, Half.TARGET)
    reason = Reason.PEER_LOST if fault == "worker killed" else Reason.ENGINE_LOST
    assert (end.kind, end.reason, end.bytes_moved) == (RoomEventKind.FAILED, reason, 0), end
    place.released(each, Half.TARGET)
    assert not Path(f"/proc/{pid}").exists()
    # No held batch has landed, and none will.
    assert np.array_equal(place.pages_of(each), before)
    if fault == "worker killed":
        wait_for(lambda: place.source.client.connected, what="the next worker")
        place.source.free += each.source_pages
    else:
        place.source = place.world.engine(place.prefill, "part-next", roles=[Half.SOURCE]).result()
    settled(place, each, [place.prefill, place.decode])
