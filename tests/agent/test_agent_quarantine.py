"""Real agents with memory in quarantine: other rooms avoid it, and above a quarter of the ring the worker is replaced."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent_fleet import World
from agent_world import Agent, Engine, Request, is_worker, wait_for, wait_for_none

from longshore_client import Half, LongshoreError, Reason, RoomEventKind

RING_BYTES = 8 << 20
# Slabs of a room that are granted at once (the default). Together they take an eighth of the ring.
WINDOW = 4


@dataclass
class Place:
    """Engines: `stuck` writes only with an open gate (to `tardy` late), `steady` always; `hasty` has no time to drain."""

    prefill: Agent
    other: Agent
    decode: Agent
    brief: Agent
    gate: Path
    mark: Path
    stuck: Engine
    steady: Engine
    calm: Engine
    tardy: Engine
    hasty: Engine

    def leftovers(self) -> list[str]:
        return [left for agent in (self.prefill, self.other, self.decode, self.brief) for left in agent.leftovers()]

    def give_up(self, target: Engine, tokens: int) -> Request:
        """Cancel a room whose writes are held open; its memory stays held."""
        self.mark.unlink(missing_ok=True)
        each = Request(self.stuck, target, tokens)
        each.offer()
        each.claim()
        wait_for(self.mark.exists, what="a held write")
        wait_for(lambda: self.prefill.room(each.room, Half.SOURCE)["pairs"][0]["busy"] == WINDOW, what="all its grants")
        target.client.cancel(each.room, Half.TARGET)
        end = target.client.wait(each.room, Half.TARGET, self.stuck.instance)
        assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.CANCELLED), end
        target.client.wait(each.room, Half.TARGET, self.stuck.instance, [RoomEventKind.RELEASED])
        target.accept(each.target_pages)
        return each


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("quarantine")
    gate, mark = directory / "open", directory / "mark"
    rule = {"count": None, "until": str(gate), "mark": str(mark)}
    rules = [rule | {"kind": "late", "peer": "tardy.0.0"}, rule | {"kind": "hold"}]
    world = World(
        directory,
        LONGSHORE_RING_BYTES=str(RING_BYTES),
        LONGSHORE_HEARTBEAT_S="0.2",
        LONGSHORE_RETRY_MS="50",
        # More time than a busy machine needs to release three rooms. Tests wait for it twice.
        LONGSHORE_PEER_TIMEOUT_S="8",
        LONGSHORE_DRAIN_S="60",
        LONGSHORE_FORCE_WAY="Staged",
        # Each room has four granted slabs, and each of four rooms its own lane, so a stuck room does not block the others.
        LONGSHORE_LANE_COUNT="16",
        LONGSHORE_SLAB_BYTES_MIN="256Ki",
    )
    try:
        prefill = world.agent("prefill", LONGSHORE_LOOPBACK_FAULTS=json.dumps(rules))
        agents = {"other": world.agent("other"), "decode": world.agent("decode")}
        brief = world.agent("brief", LONGSHORE_DRAIN_S="0")
        starting = {
            "stuck": world.engine(prefill, "stuck", roles=[Half.SOURCE], page_count=192),
            "steady": world.engine(agents["other"], "steady", roles=[Half.SOURCE]),
            "calm": world.engine(agents["decode"], "calm", roles=[Half.TARGET]),
            "tardy": world.engine(agents["decode"], "tardy", roles=[Half.TARGET]),
            "hasty": world.engine(brief, "hasty", roles=[Half.TARGET]),
        }
        engines = {name: engine.result() for name, engine in starting.items()}
        yield Place(prefill, agents["other"], agents["decode"], brief, gate, mark, **engines)
    finally:
        gate.touch()
        world.close()


@pytest.fixture(autouse=True)
def gate_at_rest(place) -> Iterator[None]:
    """Shut the gate before each test; check afterwards that nothing is open, granted or held."""
    place.gate.unlink(missing_ok=True)
    yield
    place.gate.touch()
    wait_for_none(place.leftovers)


def ring_of(place: Place, engine: Engine = None) -> dict[str, int]:
    return (place.decode if engine is None else engine.agent).worker((engine or place.calm).instance)["ring"]


def test_rooms_go_round_memory_in_quarantine_and_late_bytes_change_no_page_of_theirs(place):
    pid, before = place.decode.worker("calm")["pid"], place.decode.metric("longshore_worker_replacements_total")
    each = place.give_up(place.calm, 100)
    held = ring_of(place)["held_bytes"]
    assert 0 < 4 * held <= RING_BYTES
    rounds = ring_of(place)["rounds"]
    # The next rooms get the room's pages at once, and the ring wraps while its memory is held.
    for turn in range(12):
        request = Request(place.steady, place.calm, 300 + turn)
        request.claim()
        request.offer()
        request.arrives()
    assert ring_of(place)["rounds"] > rounds
    assert ring_of(place)["held_bytes"] == held
    beside = Request(place.steady, place.calm, 280, cuts=(140,))
    beside.claim()
    beside.offer_chunk(0)
    place.gate.touch()
    beside.offer_chunk(1)
    beside.arrives()
    place.stuck.client.wait(each.room, Half.SOURCE, None, [RoomEventKind.RELEASED])
    place.stuck.free += each.source_pages
    wait_for_none(place.leftovers)
    assert place.calm.intact()
    assert place.decode.worker("calm")["pid"] == pid
    assert place.decode.metric("longshore_worker_replacements_total") == before


def test_more_than_a_quarter_in_quarantine_for_a_moment_replaces_nobody(place):
    pid, before = place.decode.worker("calm")["pid"], place.decode.metric("longshore_worker_replacements_total")
    stuck = [place.give_up(place.calm, 150) for _ in range(3)]
    assert ring_of(place)["held_bytes"] * 4 > RING_BYTES
    place.gate.touch()
    for each in stuck:
        place.stuck.client.wait(each.room, Half.SOURCE, None, [RoomEventKind.RELEASED])
        place.stuck.free += each.source_pages
    wait_for_none(place.leftovers)
    assert place.decode.worker("calm")["pid"] == pid
    assert place.decode.metric("longshore_worker_replacements_total") == before
    assert place.calm.intact()


@pytest.mark.shows("agent.drain_s")
def test_above_a_quarter_a_worker_finishes_what_is_open_takes_nothing_new_and_is_replaced_under_its_engine(place):
    client, agent = place.calm.client, place.decode
    worker, epoch = agent.worker("calm"), client.epoch
    before = [agent.metric(f"longshore_worker_{name}_total") for name in ("replacements", "restarts")]
    beside = Request(place.steady, place.calm, 200, cuts=(100,))
    beside.claim()
    beside.offer_chunk(0)
    wait_for(lambda: (agent.room(beside.room, Half.TARGET) or {"tokens_done": 0})["tokens_done"])

    stuck = [place.give_up(place.calm, 150) for _ in range(3)]

    shown = wait_for(lambda: (found := agent.worker("calm")) and found["error"] and found)
    assert shown["ring"]["held_bytes"] * 4 > RING_BYTES
    assert "in quarantine" in shown["error"]
    assert shown["pid"] == worker["pid"]
    assert agent.metric("longshore_worker_replacements_total") == before[0] + 1
    fresh = Request(place.steady, place.calm, 60)
    fresh.offer()
    with pytest.raises(LongshoreError, match=r"is being replaced, as .* in quarantine") as refused:
        fresh.claim()
    assert refused.value.reason is Reason.BUSY
    beside.offer_chunk(1)
    beside.arrives()

    wait_for(lambda: client.connected and client.epoch != epoch, what="the next worker")
    assert not is_worker(worker["pid"])
    now = agent.worker("calm")
    assert (now["restarts"], now["error"]) == (worker["restarts"] + 1, "")
    assert now["engines"][0]["pid"] == os.getpid()
    assert ring_of(place)["held_bytes"] == 0
    assert agent.metric("longshore_worker_replacements_total") == before[0] + 1
    # It did not die; deaths have another counter.
    assert agent.metric("longshore_worker_restarts_total") == before[1]
    fresh.claim()
    fresh.arrives()
    place.gate.touch()
    for each in stuck:
        place.stuck.client.wait(each.room, Half.SOURCE, None, [RoomEventKind.RELEASED])
        place.stuck.free += each.source_pages
    again = Request(place.stuck, place.calm, 300)
    again.claim()
    again.offer()
    again.arrives()
    assert place.calm.intact()


@pytest.mark.shows("agent.drain_s")
def test_a_room_that_does_not_end_within_the_drain_limit_fails_on_both_sides_with_the_cause(place):
    client, epoch = place.hasty.client, place.hasty.client.epoch
    waiting = Request(place.steady, place.hasty, 200, cuts=(100,))
    waiting.claim()
    waiting.offer_chunk(0)
    stuck = []
    for _ in range(3):
        # The worker may be gone before the last one.
        with contextlib.suppress(AssertionError):
            stuck.append(place.give_up(place.hasty, 150))
    ends = waiting.ends()
    assert {end.kind for end in ends} == {RoomEventKind.FAILED}, ends
    assert {end.reason for end in ends} == {Reason.WORKER_LOST}, ends
    assert all("in quarantine" in end.text for end in ends), ends
    wait_for(lambda: client.connected and client.epoch != epoch, what="the next worker")
    place.gate.touch()
    after = Request(place.steady, place.hasty, 200)
    after.claim()
    after.offer()
    after.arrives()
    for each in stuck:
        place.stuck.client.wait(each.room, Half.SOURCE, None, [RoomEventKind.RELEASED])
        place.stuck.free += each.source_pages
    assert place.hasty.intact()


def test_a_writer_with_a_write_that_may_still_land_finishes_its_other_rooms_before_it_is_replaced(place):
    client, agent = place.stuck.client, place.prefill
    epoch, before = client.epoch, agent.metric("longshore_worker_replacements_total")
    # The gate is open for the room that continues, and shut for the one whose write fails.
    place.gate.touch()
    beside = Request(place.stuck, place.calm, 200, cuts=(100,))
    beside.claim()
    beside.offer_chunk(0)
    wait_for(lambda: (place.decode.room(beside.room, Half.TARGET) or {"tokens_done": 0})["tokens_done"])
    place.gate.unlink()
    place.mark.unlink(missing_ok=True)
    each = Request(place.stuck, place.tardy, 100)
    each.offer()
    each.claim()
    end = place.tardy.client.wait(each.room, Half.TARGET, place.stuck.instance)
    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.TRANSFER_FAILED), end
    shown = wait_for(lambda: (found := agent.worker("stuck")) and found["error"] and found)
    assert "could not be settled" in shown["error"]
    assert ring_of(place, place.tardy)["held_bytes"]
    assert client.epoch == epoch

    place.gate.touch()
    beside.offer_chunk(1)
    beside.arrives()

    wait_for(lambda: client.connected and client.epoch != epoch, what="the next worker")
    assert agent.metric("longshore_worker_replacements_total") == before + 1
    # Its end proves that no write is open, so tardy's memory for it is free.
    wait_for(lambda: not ring_of(place, place.tardy)["held_bytes"])
    place.stuck.free += each.source_pages
    assert place.calm.intact()
