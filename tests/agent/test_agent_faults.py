"""Tests real agents whose engines and workers are killed, stopped or cancelled during writes, or whose notices get lost."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from agent_fleet import World
from agent_world import (
    EVENT_LIMIT_S,
    Agent,
    Engine,
    EngineProcess,
    Request,
    holders_of,
    room_ids,
    wait_for,
    wait_for_none,
)
from fault_engine import freeze

from longshore_client import PoolRefused, Reason, RoomError, RoomEvent, RoomEventKind
from longshore_wire.engine_messages import Half

# Engines of this process renew their leases, too, also if it does not run for some seconds on a busy machine.
LEASE_S = 8


# A release that must not happen is waited for this long.
NOT_RELEASED_S = 0.3


class Gate:
    """A gate. While it is shut, writes to some targets stay open; the transport marks each write that it holds."""

    def __init__(self, directory: Path) -> None:
        self.path, self.mark = directory / "open", directory / "mark"

    def shut(self) -> None:
        self.path.unlink(missing_ok=True)
        self.mark.unlink(missing_ok=True)

    def open(self) -> None:
        self.path.touch()

    def wait_held(self, target: str) -> None:
        wait_for(lambda: self.mark.exists() and f" {target}.0.0\n" in self.mark.read_text(), what="a held write")

    def rules(self, *targets: str) -> list[dict[str, object]]:
        rule = {"kind": "hold", "count": None, "until": str(self.path), "mark": str(self.mark)}
        return [rule | {"peer": f"{target}.0.0"} for target in targets]


@dataclass
class Place:
    """Two agents. `steady` and killed engines offer at the first, the others claim at the second."""

    world: World
    prefill: Agent
    decode: Agent
    gate: Gate
    late_mark: Path
    steady: Engine
    gated: Engine  # pages of another size than prefill's: staged
    whole: Engine  # pages as prefill's: contiguous
    plain: Engine
    lossy: Engine
    late: Engine

    def leftovers(self) -> list[str]:
        return self.prefill.leftovers() + self.decode.leftovers()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("faults")
    gate, late_mark = Gate(directory), directory / "late"
    rules = [
        *gate.rules("gated", "whole", "victim"),
        {"kind": "late", "count": None, "peer": "late.0.0", "until": str(gate.path), "mark": str(late_mark)},
        {"kind": "drop", "count": None, "peer": "lossy.0.0", "every": 3},
        {"kind": "repeat", "count": None, "peer": "lossy.0.0", "every": 2},
    ]
    world = World(
        directory,
        LONGSHORE_LEASE_S=str(LEASE_S),
        LONGSHORE_HEARTBEAT_S="0.2",
        LONGSHORE_PEER_TIMEOUT_S="3",
        LONGSHORE_RETRY_MS="50",
    )
    try:
        prefill = world.agent("prefill", LONGSHORE_LOOPBACK_FAULTS=json.dumps(rules))
        decode = world.agent("decode")
        small, target = {"page_size": 8, "roles": [Half.TARGET]}, {"roles": [Half.TARGET]}
        starting = {
            "steady": world.engine(prefill, "steady", roles=[Half.SOURCE]),
            "gated": world.engine(decode, "gated", **small),
            "whole": world.engine(decode, "whole", **target),
            "plain": world.engine(decode, "plain", **small),
            "lossy": world.engine(decode, "lossy", **small),
            "late": world.engine(decode, "late", **small),
        }
        engines = {name: engine.result() for name, engine in starting.items()}
        yield Place(world, prefill, decode, gate, late_mark, **engines)
    finally:
        gate.open()
        world.close()


@pytest.fixture(autouse=True)
def gate_at_rest(place) -> Iterator[None]:
    """Shut the gate before each test; check afterwards that nothing is open, granted or held."""
    place.gate.shut()
    yield
    place.gate.open()
    wait_for_none(place.leftovers)


def end_of(engine: Engine, room: int, half: Half) -> RoomEvent:
    return engine.client.wait(room, half, timeout_s=EVENT_LIMIT_S)


def is_released(engine: Engine, room: int, half: Half, limit_s: float = EVENT_LIMIT_S) -> bool:
    try:
        engine.client.wait(room, half, None, [RoomEventKind.RELEASED], limit_s)
    except TimeoutError:
        return False
    return True


def claim_of(process: EngineProcess, target: Engine, total: int) -> tuple[int, list[int]]:
    """Let an engine process offer a room and `target` claim it; return the room and the target's pages."""
    room = next(room_ids)
    assert process.ask("send", room=room, pages=list(range(-(-total // 16))), total=total) == "sent"
    pages = target.take_pages(0, total)
    target.client.receive(room, process.endpoint(), pages, 0, total)
    return room, pages


@pytest.mark.parametrize(
    ("way", "lands"),
    [pytest.param("gated", True, marks=pytest.mark.rest("storms")), ("gated", False), ("whole", False)],
)
def test_memory_of_a_prefill_engine_killed_in_mid_write_is_let_go_and_other_engines_rooms_finish(place, way, lands):
    target = getattr(place, way)
    doomed = place.world.process(place.prefill, f"doomed-{way}-{lands}")
    room, pages = claim_of(doomed, target, 300)
    place.gate.wait_held(target.instance)
    wait_for(lambda: place.prefill.room(room, Half.SOURCE)["pairs"][0]["busy"])
    source, claim = place.prefill.room(room, Half.SOURCE), place.decode.room(room, Half.TARGET)
    assert [(shown["state"], shown["ended"]) for shown in (source, claim)] == [("open", False)] * 2
    beside = Request(place.steady, place.plain, 200, cuts=(100,))
    beside.claim()
    beside.offer_chunk(0)
    assert holders_of(doomed.instance)

    doomed.kill()
    wait_for(lambda: not holders_of(doomed.instance), what="the memory to be free")

    end = end_of(target, room, Half.TARGET)
    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.ENGINE_LOST), end
    assert str(doomed.pid) in end.text
    if lands:
        # The worker still has the write, so the memory of its bytes is in quarantine.
        place.gate.open()
    beside.offer_chunk(1)
    beside.arrives()
    # Otherwise the dead engine's worker must end before its writes are over, and its target must detect that.
    assert is_released(target, room, Half.TARGET)
    target.accept(pages)
    wait_for_none(place.leftovers)
    place.gate.open()
    after = Request(place.steady, target, 300)
    after.offer()
    after.claim()
    after.arrives()
    assert place.plain.intact()
    assert target.intact()


def test_memory_of_a_decode_engine_killed_in_mid_write_is_let_go_and_prefill_is_told(place):
    victim = place.world.process(place.decode, "victim", page_size=8)
    each = Request(place.steady, place.plain, 200)
    each.offer()
    victim.ask(
        "receive",
        room=each.room,
        endpoint=msgspec.json.encode(place.steady.endpoint()).decode(),
        pages=list(range(25)),
        total=200,
    )
    place.gate.wait_held("victim")
    victim.kill()
    wait_for(lambda: not holders_of("victim"), what="the memory to be free")
    end = end_of(place.steady, each.room, Half.SOURCE)
    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.ENGINE_LOST), end
    # A lane still has the slab, so prefill's pages are released only after the transport has settled the write.
    assert not is_released(place.steady, each.room, Half.SOURCE, NOT_RELEASED_S)
    place.gate.open()
    assert is_released(place.steady, each.room, Half.SOURCE)
    place.steady.free += each.source_pages
    place.plain.free += each.target_pages


@pytest.mark.parametrize("half", [Half.SOURCE, Half.TARGET])
def test_a_killed_worker_fails_its_rooms_on_both_sides_and_a_new_one_serves_the_same_engine(place, half):
    source, target = place.steady, place.gated
    agent, engine = (place.prefill, source) if half is Half.SOURCE else (place.decode, target)
    restarts = agent.metric("longshore_worker_restarts_total")
    each = Request(source, target, 300)
    each.offer()
    each.claim()
    place.gate.wait_held(target.instance)
    epoch = engine.client.epoch

    os.kill(agent.worker(engine.instance)["pid"], signal.SIGKILL)

    ends = each.ends()
    assert {end.kind for end in ends} == {RoomEventKind.FAILED}, ends
    assert {end.reason for end in ends} <= {Reason.WORKER_LOST, Reason.PEER_LOST}, ends
    assert all(end.text for end in ends)
    place.gate.open()
    wait_for(lambda: engine.client.connected and engine.client.epoch != epoch)
    assert agent.metric("longshore_worker_restarts_total") == restarts + 1
    after = Request(source, target, 250, prefix=30)
    after.claim()
    after.offer()
    after.arrives()
    assert target.intact()


def test_a_killed_worker_fails_the_rooms_of_its_sibling_ranks_too_and_nixl_goes_on_with_its_next_life(fleet_of):
    fleet = fleet_of("NIXL")
    epoch = fleet.two.ranks[1].client.epoch
    each = Request(fleet.two, fleet.three, 200, cuts=(100,))
    each.claim()
    each.offer_chunk(0)
    wait_for(lambda: (fleet.decode.room(each.room, Half.TARGET) or {"tokens_done": 0})["tokens_done"])
    os.kill(fleet.prefill.worker("two", 1)["pid"], signal.SIGKILL)
    ends = each.ends()
    assert {end.kind for end in ends} == {RoomEventKind.FAILED}, ends
    assert {end.reason for end in ends} <= {Reason.WORKER_LOST, Reason.PEER_LOST}, ends
    assert ends[0].reason is Reason.WORKER_LOST
    assert "rank 1" in ends[0].text
    wait_for(lambda: fleet.two.ranks[1].client.connected and fleet.two.ranks[1].client.epoch != epoch)
    after = Request(fleet.two, fleet.three, 333, prefix=50)
    after.claim()
    after.offer()
    after.arrives()
    assert fleet.three.intact()
    wait_for_none(fleet.leftovers)


@pytest.mark.parametrize("half", [Half.SOURCE, Half.TARGET])
@pytest.mark.parametrize("way", ["gated", "whole"])
def test_a_cancelled_room_ends_on_both_sides_and_is_released_when_no_write_is_open(place, half, way):
    target = getattr(place, way)
    each = Request(place.steady, target, 300)
    each.offer()
    each.claim()
    place.gate.wait_held(target.instance)
    asked, other = (place.steady, target) if half is Half.SOURCE else (target, place.steady)
    asked.client.cancel(each.room, half)
    for engine, its_half in ((asked, half), (other, Half(1 - half))):
        end = end_of(engine, each.room, its_half)
        assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.CANCELLED), end
    ring = place.decode.worker(target.instance)["ring"]
    assert (ring["held_bytes"] > 0) == (way == "gated")
    # Bytes may still land: in the ring, whose memory is held, or in the pages, which are then not released yet.
    if way == "gated":
        assert is_released(target, each.room, Half.TARGET)
    else:
        assert not is_released(target, each.room, Half.TARGET, NOT_RELEASED_S)
    place.gate.open()
    assert is_released(place.steady, each.room, Half.SOURCE)
    assert way == "gated" or is_released(target, each.room, Half.TARGET)
    place.steady.free += each.source_pages
    target.accept(each.target_pages)
    wait_for_none(place.leftovers)
    after = Request(place.steady, target, 300)
    after.claim()
    after.offer()
    after.arrives()
    assert target.intact()


def test_a_stopped_engine_loses_its_rooms_by_its_lease_and_the_other_side_is_told(place):
    sleeper = place.world.process(place.prefill, "sleeper")
    place.gate.shut()
    room, pages = claim_of(sleeper, place.gated, 200)
    place.gate.wait_held("gated")
    freeze(sleeper.pid)
    try:
        end = end_of(place.gated, room, Half.TARGET)
        assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.LEASE_EXPIRED), end
        shown = place.prefill.room(room, Half.SOURCE)
        assert (shown["state"], shown["reason"]) == ("failed", "LEASE_EXPIRED")
        # No other engine's lease ends with it.
        beside = Request(place.steady, place.plain, 100)
        beside.offer()
        beside.claim()
        beside.arrives()
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
    place.gate.open()
    wait_for_none(place.leftovers)
    assert sleeper.ask("end", room=room) == "LEASE_EXPIRED"
    assert is_released(place.gated, room, Half.TARGET)
    place.gated.accept(pages)
    sleeper.close()


def test_workers_that_did_not_run_for_longer_than_the_peer_timeout_do_not_take_each_other_for_lost(place):
    each, witness = Request(place.steady, place.gated, 200), Request(place.steady, place.plain, 100)
    place.gate.open()
    for request in (each, witness):
        request.claim()
    wait_for(lambda: all(place.prefill.room(request.room, Half.SOURCE) for request in (each, witness)))
    absent = [place.prefill.worker("steady")["pid"], place.decode.worker("gated")["pid"]]
    for pid in absent:
        freeze(pid)
    try:
        # A peer that keeps running. It shows when the timeout has passed.
        end = end_of(place.plain, witness.room, Half.TARGET)
        assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.PEER_LOST), end
    finally:
        for pid in absent:
            os.kill(pid, signal.SIGCONT)
    each.offer()
    each.arrives()
    assert place.gated.intact()
    for agent, worker in ((place.prefill, "steady/0/0"), (place.decode, "gated/0/0")):
        assert agent.metric("longshore_absent_seconds_total", worker=worker) > 1.0
    assert is_released(place.plain, witness.room, Half.TARGET)
    place.steady.free += witness.source_pages
    place.plain.accept(witness.target_pages)


@pytest.mark.shows("agent.loopback_faults")
def test_lost_and_repeated_notices_change_nothing_but_the_count_of_stale_messages(place):
    def counts() -> list[float]:
        steady = {"worker": "steady/0/0"}
        return [
            place.prefill.metric("longshore_writes_total", way="staged", **steady),
            place.prefill.metric("longshore_slabs_total", half="source", **steady),
            place.decode.metric("longshore_slabs_total", half="target", worker="lossy/0/0"),
            place.decode.metric("longshore_stale_messages_total", message="SlabReady", worker="lossy/0/0"),
            place.decode.metric("longshore_retries_total", worker="lossy/0/0"),
        ]

    before = counts()
    found = [Request(place.steady, place.lossy, 150 + 50 * number, cuts=(64,)) for number in range(4)]
    for each in found:
        each.offer()
        each.claim()
    for each in found:
        each.arrives()
    assert place.lossy.intact()
    slabs = [place.prefill.room(each.room, Half.SOURCE) for each in found]
    assert all(room["state"] == "done" for room in slabs)
    writes, sent, taken, stale, retries = (after - earlier for after, earlier in zip(counts(), before, strict=True))
    assert writes == sent == taken >= 16
    assert stale > 0
    assert retries > 0


def test_bytes_that_land_after_their_write_failed_find_their_memory_in_quarantine(place):
    epoch = place.steady.client.epoch
    each = Request(place.steady, place.late, 300)
    each.offer()
    each.claim()
    wait_for(place.late_mark.exists, what="a write that is late")
    ends = [
        end_of(engine, each.room, half) for engine, half in ((place.steady, Half.SOURCE), (place.late, Half.TARGET))
    ]
    assert {(end.kind, end.reason) for end in ends} == {(RoomEventKind.FAILED, Reason.TRANSFER_FAILED)}, ends
    ring = place.decode.worker("late")["ring"]
    assert ring["held_bytes"] > 0
    # Only the end of the writing process proves that they will not land. Its engine gets another worker.
    place.gate.open()
    wait_for(lambda: place.steady.client.connected and place.steady.client.epoch != epoch)
    wait_for_none(place.leftovers)
    assert place.late.ranks[0].intact() is False or not each.target_pages
    place.late.ranks[0].expected[:] = place.late.ranks[0].planes


def test_a_pool_is_given_back_only_when_no_write_can_reach_its_pages(place):
    target = place.whole
    each = Request(place.steady, target, 300)
    each.offer()
    each.claim()
    place.gate.wait_held("whole")
    errors: list[BaseException] = []

    def unregister() -> None:
        try:
            target.client.unregister_pool(0)
        except (PoolRefused, RoomError) as error:
            errors.append(error)

    thread = threading.Thread(target=unregister)
    thread.start()
    worker = place.decode.worker("whole")["pid"]
    end = end_of(target, each.room, Half.TARGET)
    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.CANCELLED), end
    assert worker in holders_of("whole")
    thread.join(0.3)
    assert thread.is_alive()
    place.gate.open()
    thread.join(EVENT_LIMIT_S)
    assert not thread.is_alive()
    assert not errors
    holders = holders_of("whole")
    assert holders.keys() == {os.getpid()}, holders
    with pytest.raises(RoomError) as refused:
        target.client.receive(next(room_ids), place.steady.endpoint(), each.target_pages, 0, 300)
    assert refused.value.reason is Reason.UNKNOWN_POOL
    target.client.register_pool(0, target.ranks[0].geometry, target.ranks[0].memory.regions)
    assert is_released(place.steady, each.room, Half.SOURCE)
    place.steady.free += each.source_pages
    target.accept(each.target_pages)
    assert target.intact()
