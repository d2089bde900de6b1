"""Tests the next worker of a rank: the messages it gets before it serves its engine, and the conditions for its start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_fleet import World
from agent_world import EVENT_LIMIT_S, Request, room_ids, wait_for, wait_for_none

from longshore_agent.control.node_link import EndpointKnown, RoomFailed, Started
from longshore_agent.settings import Settings
from longshore_agent.supervisor.failed_rooms import FAILED_ROOMS_MAX, FailedRooms
from longshore_agent.supervisor.loop import Supervisor
from longshore_agent.supervisor.slots import Slot
from longshore_client import Client, Half
from longshore_spec.status import WorkerState
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Hello, RoomEventKind
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import RoomKey

FAMILY = ("prefill", 0)
# Datagrams of any size: Linux counts at least 768 bytes for each, and the buffer has 208 KiB.
MORE_THAN_A_LINK_HOLDS = 3000


def _failure(room: int, text: str = "enough") -> RoomFailed:
    return RoomFailed(Half.SOURCE, RoomKey("prefill", room), Reason.CANCELLED, text)


def test_a_new_worker_is_told_of_the_newest_rooms_that_its_family_has_failed_each_with_the_first_reason():
    failed = FailedRooms(kept_s=10)
    assert failed.add(FAMILY, _failure(1), 0)
    assert not failed.add(FAMILY, _failure(1, "at a sibling rank: enough"), 1)
    failed.add(FAMILY, _failure(2), 5)
    failed.add(("other", 0), _failure(3), 5)
    assert [message.text for message in failed.of(FAMILY, 9)] == ["enough", "enough"]
    assert [message.key.room for message in failed.of(FAMILY, 11)] == [2]
    for room in range(FAILED_ROOMS_MAX + 10):
        failed.add(FAMILY, _failure(100 + room), 12)
    told = [message.key.room for message in failed.of(FAMILY, 12)]
    assert (len(told), told[0]) == (FAILED_ROOMS_MAX, 110)
    failed.forget(FAMILY)
    assert failed.of(FAMILY, 12) == []


@dataclass
class Link:
    """The supervisor's end of a worker's link."""

    said: list[object] = field(default_factory=list)
    closed: bool = False
    wants_write: bool = False

    def send(self, message: object, descriptor: int | None = None) -> None:
        self.said.append(message)


def two_ranks(directory: Path, first: WorkerState) -> tuple[Supervisor, Slot, Slot]:
    """Return a supervisor and the workers of both ranks of an engine; the second one is READY."""
    supervisor = Supervisor(Settings(run_directory=str(directory)))
    hello = Hello(1, "prefill", KVLayout(ModelShape.kv(1, 2, 8, 2), Parallel(2), 16), "cpu", (Half.SOURCE,))
    slots = []
    for rank, state in enumerate((first, WorkerState.READY)):
        config = SimpleNamespace(name=f"prefill/0/{rank}", agent="", epoch=1)
        near, far = socket.socketpair()
        with far:
            slots.append(
                Slot(PeerId("prefill", 0, rank), hello, None, config, None, -1, Link(), near, state)  # type: ignore[arg-type]
            )
    supervisor._slots = {slot.key: slot for slot in slots}
    return supervisor, *slots


def test_a_rank_whose_engine_has_ended_unnoticed_by_its_stopped_worker_is_in_no_endpoint(tmp_path):
    supervisor, again, former = two_ranks(tmp_path, WorkerState.READY)
    engines = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    for slot, engine in zip((again, former), engines, strict=True):
        slot.engine_pidfd = os.pidfd_open(engine.pid)

    def ranks() -> list[tuple[int, ...]]:
        supervisor._publish(again.key)
        said = [[each for each in slot.link.said if isinstance(each, EndpointKnown)] for slot in (again, former)]
        return [tuple(address.rank for address in each[-1].endpoint.ranks) for each in said]

    assert ranks() == [(0, 1), (0, 1)]
    engines[1].kill()
    engines[1].wait()
    assert ranks() == [(0,), (0, 1)]
    engines[0].kill()
    engines[0].wait()
    assert ranks() == [(0,), (0, 1)]
    for slot in (again, former):
        os.close(slot.engine_pidfd)
        slot.connection.close()


def test_a_worker_that_has_started_hears_of_a_failure_before_it_says_that_it_serves_its_engine(tmp_path):
    supervisor, starting, other = two_ranks(tmp_path, WorkerState.STARTING)
    first, second = (RoomFailed(Half.SOURCE, RoomKey("prefill", room), Reason.CANCELLED, "enough") for room in (1, 2))

    supervisor._obey(other, first)
    supervisor._obey(starting, Started("127.0.0.1:1", 1, ""))
    supervisor._obey(other, second)

    assert isinstance(starting.link, Link)
    told = [message.key.room for message in starting.link.said if isinstance(message, RoomFailed)]
    assert told == [1, 2]
    other.connection.close()


@pytest.fixture
def place(tmp_path):
    world = World(tmp_path, LONGSHORE_HEARTBEAT_S="0.2", LONGSHORE_PEER_TIMEOUT_S="4", LONGSHORE_DIRECT="true")
    agent = world.agent("agent")
    prefill = world.engine(agent, "prefill", 2, roles=[Half.SOURCE])
    decode = world.engine(agent, "decode", roles=[Half.TARGET])
    yield SimpleNamespace(agent=agent, prefill=prefill.result(), decode=decode.result())
    world.close()


def test_an_offer_that_is_said_to_a_rank_s_next_worker_fails_if_a_sibling_has_failed_its_room_meanwhile(place):
    each = Request(place.prefill, place.decode, 40)
    each.offer()
    os.kill(place.agent.worker("prefill")["pid"], signal.SIGKILL)
    place.prefill.ranks[1].client.cancel(each.room, Half.SOURCE)

    end = place.prefill.ranks[0].client.wait(each.room, Half.SOURCE, timeout_s=EVENT_LIMIT_S)

    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.CANCELLED)
    assert end.text.endswith("at a sibling rank: cancelled by its engine")
    wait_for_none(place.agent.leftovers)


def fail_rooms(client: Client, count: int) -> None:
    """Offer and cancel rooms, one after another."""
    for _ in range(count):
        room = next(room_ids)
        client.send(room, [0], 0, 1, last=False)
        client.cancel(room, Half.SOURCE)
        client.wait(room, Half.SOURCE, kinds=[RoomEventKind.RELEASED], timeout_s=EVENT_LIMIT_S)
        client.poll()


def test_a_rank_s_next_worker_serves_it_after_more_failed_rooms_than_its_link_holds_at_once(place):
    rank = place.prefill.ranks[1]
    fail_rooms(place.prefill.client, MORE_THAN_A_LINK_HOLDS)
    epoch = rank.client.epoch

    os.kill(place.agent.worker("prefill", 1)["pid"], signal.SIGKILL)

    wait_for(lambda: rank.client.connected and rank.client.epoch != epoch, what="the next worker")
    each = Request(place.prefill, place.decode, 40)
    each.offer()
    each.claim()
    each.arrives()


def test_a_worker_that_stood_still_hears_of_all_rooms_that_its_siblings_have_failed_meanwhile(place):
    each = Request(place.prefill, place.decode, 40)
    each.offer()
    stopped = place.agent.worker("prefill", 1)["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        fail_rooms(place.prefill.client, MORE_THAN_A_LINK_HOLDS)
        place.prefill.client.cancel(each.room, Half.SOURCE)
    finally:
        os.kill(stopped, signal.SIGCONT)

    end = place.prefill.ranks[1].client.wait(each.room, Half.SOURCE, timeout_s=EVENT_LIMIT_S)

    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.CANCELLED)
    wait_for(lambda: place.agent.worker("prefill", 1)["silent_s"] < 1, what="an answer of the worker")
    wait_for_none(place.agent.leftovers)


def test_a_rank_gets_no_new_worker_while_a_neighbour_may_still_write_the_pages_that_its_last_one_had(place):
    first = Request(place.prefill, place.decode, 40)
    first.offer()
    first.claim()
    first.arrives()
    writer = place.agent.worker("prefill")["pid"]
    os.kill(writer, signal.SIGSTOP)
    try:
        os.kill(place.agent.worker("decode")["pid"], signal.SIGKILL)
        wait_for(lambda: place.agent.worker("decode") is None, what="the end of decode's worker")
        refused = place.agent.metric("longshore_refused_messages_total", reason="busy")
        wait_for(
            lambda: place.agent.metric("longshore_refused_messages_total", reason="busy") >= refused + 3,
            what="decode's engine to be sent away",
        )
        assert place.agent.worker("decode") is None
    finally:
        os.kill(writer, signal.SIGCONT)
    wait_for(lambda: place.decode.client.connected, what="decode's next worker")
    second = Request(place.prefill, place.decode, 40)
    second.offer()
    second.claim()
    second.arrives()
    assert place.decode.intact()


def test_a_room_that_failed_while_its_prefill_agent_was_ended_and_started_again_fails_there_too(tmp_path):
    world = World(tmp_path, LONGSHORE_HEARTBEAT_S="0.2", LONGSHORE_PEER_TIMEOUT_S="4", LONGSHORE_LEASE_S="60")
    try:
        near, far = world.agent("near"), world.agent("far")
        prefill = world.engine(near, "prefill", roles=[Half.SOURCE]).result()
        decode = world.engine(far, "decode", roles=[Half.TARGET]).result()
        first = Request(prefill, decode, 40)
        first.offer()
        first.claim()
        first.arrives()
        second = Request(prefill, decode, 40)
        endpoint = prefill.endpoint()
        near.stop()
        decode.client.receive(second.room, endpoint, second.target_pages, 0, second.total)
        failed = decode.client.wait(second.room, Half.TARGET, "prefill", timeout_s=EVENT_LIMIT_S)
        assert (failed.kind, failed.reason) == (RoomEventKind.FAILED, Reason.PEER_LOST)

        near.start()
        wait_for(lambda: prefill.client.connected)
        try:
            second.offer()
            reason = prefill.client.wait(second.room, Half.SOURCE, timeout_s=EVENT_LIMIT_S).reason
        except LongshoreError as refused:
            # The agent already knew of the failure.
            reason = refused.reason
        assert reason is Reason.PEER_LOST
    finally:
        world.close()
