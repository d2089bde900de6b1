"""Tests the timeline of a room: steps of the workers' control threads and of the engines' clients, on one clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from agent_fleet import World
from agent_world import Agent, Engine, Request

from longshore_agent.status.spans import Kind, SpanRecorder
from longshore_agent.status.steps import StepLog
from longshore_wire.engine_messages import (
    Accepted,
    CachePages,
    Cancel,
    EngineStep,
    EngineSteps,
    Half,
    Offer,
    RoomEvent,
    RoomEventKind,
)
from longshore_wire.names import room_name
from longshore_wire.peer_messages import Demand, PairKey, Ping, RoomKey

KEY = RoomKey("p", 7)
PAIR = PairKey(KEY, 1, 0, 11, 12, "d")


class Place(NamedTuple):
    prefill: Agent
    decode: Agent
    source: Engine
    target: Engine


@pytest.fixture(scope="module", params=["true", "false"], ids=["client spans", "no client spans"])
def place(request, tmp_path_factory) -> Iterator[Place]:
    world = World(tmp_path_factory.mktemp("timeline"), LONGSHORE_CLIENT_SPANS=request.param)
    try:
        agents = [world.agent(name) for name in ("prefill", "decode")]
        engines = [world.engine(agent, f"line-{tp}", tp) for agent, tp in zip(agents, (2, 1), strict=True)]
        yield Place(*agents, *(each.result() for each in engines))
    finally:
        world.close()


def moved(place: Place) -> Request:
    """Move a room, and one more, whose answers come after all messages of the first."""
    for each in (first := Request(place.source, place.target, 300), Request(place.source, place.target, 20)):
        each.claim()
        each.offer()
        each.arrives()
    return first


def spans_of(agent: Agent, room: int) -> list[dict[str, Any]]:
    """Return the spans of a room."""
    page = agent.room_page(room)
    assert page is not None
    spans: list[dict[str, Any]] = page["spans"]
    return spans


def of_engine(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [span for span in spans if span["kind"] in {"call", "wait"}]


@pytest.mark.slow
def test_a_room_between_two_agents_has_the_steps_of_workers_and_engines_in_causal_order(place: Place, request) -> None:
    moved(place)  # The claims of the first room wait until its target has dialled its sources.
    room = moved(place).room
    both = [spans_of(agent, room) for agent in (place.prefill, place.decode)]
    spans = {(span["worker"], span["stage"], span["source_rank"]): span for side in reversed(both) for span in side}

    def at(worker: str, stage: str, rank: int = -1) -> dict[str, Any]:
        return spans[worker, stage, rank]

    for rank in (0, 1):
        source, target = f"line-2/0/{rank}", "line-1/0/0"
        # The claim reaches a worker before the offer or after it.
        assert at(source, "Offer")["start_ns"] <= at(source, "gather", rank)["start_ns"]
        chain = [
            at(target, "Receive"),
            at(target, "send Claim", rank),
            at(source, "Claim", rank),
            at(source, "gather", rank),
            at(source, "write", rank),
            at(target, "SlabReady", rank),
            at(target, "scatter", rank),
            at(target, "send SlabAck", rank),
            at(source, "SlabAck", rank),
            at(source, "send DONE"),
        ]
        # Page ids may take long to reach a GPU, so the claim leaves before. Prefill takes the time of its next gather.
        assert at(target, "send Claim", rank)["end_ns"] <= at(target, "prepare pages")["start_ns"]
        starts = [span["start_ns"] for span in chain]
        assert starts == sorted(starts), [(span["stage"], span["start_ns"]) for span in chain]
        assert all(span["woken_ns"] <= span["start_ns"] <= span["end_ns"] for span in chain)
        assert at(source, "Offer")["end_ns"] <= at(source, "send Accepted")["start_ns"]
        if "no client spans" in request.node.name:
            continue
        assert at(source, "send")["start_ns"] <= at(source, "Offer")["start_ns"]
        assert at(source, "send Accepted")["start_ns"] <= at(source, "send waits")["end_ns"]
        assert at(source, "send DONE")["start_ns"] <= at(source, "DONE")["end_ns"]
        assert at(target, "receive")["start_ns"] <= at(target, "Receive")["start_ns"]
        assert at(target, "scatter", rank)["end_ns"] <= at(target, "DONE")["end_ns"]


@pytest.mark.shows("agent.client_spans")
def test_without_the_setting_no_engine_sends_its_steps(place: Place, request) -> None:
    room = moved(place).room
    found = [of_engine(spans_of(agent, room)) for agent in (place.prefill, place.decode)]
    assert [bool(spans) for spans in found] == [place_asks(request)] * 2  # client_spans


def place_asks(request: pytest.FixtureRequest) -> bool:
    return "no client spans" not in request.node.name


def test_a_room_is_told_with_the_clock_of_its_host(place: Place) -> None:
    room = moved(place).room
    before_ns = time.monotonic_ns()
    clocks = [agent.get(f"/v1/rooms/{room_name(room)}")["clock"] for agent in (place.prefill, place.decode)]
    after_ns = time.monotonic_ns()
    assert len({clock["boot_id"] for clock in clocks}) == 1
    assert clocks[0]["boot_id"]
    for clock in clocks:
        assert before_ns <= clock["received_ns"] <= clock["answered_ns"] <= after_ns


def test_steps_follow_each_other_and_take_no_more_places_than_the_recorder_has() -> None:
    spans = SpanRecorder(5)
    steps = StepLog(spans, "p", of_engines=True)
    for turn in range(10):
        steps.woken_ns = turn
        steps.begin()
        steps.asked(Offer(turn, 7, (CachePages(0, 0, 4, 0, b""),), True))
        steps.told(Accepted(turn))
        steps.answered()
        steps.prepared([KEY])
        steps.sent(Demand(PAIR, 1, 1, 1))
        steps.told(RoomEvent(Half.SOURCE, "p", 7, RoomEventKind.DONE))
    found = spans.of_room(7, limit=100)
    assert [span.stage for span in found] == ["Offer", "send Accepted", "prepare pages", "send Demand", "send DONE"]
    assert {span.woken_ns for span in found} == {9}
    gaps = [after.start_ns - before.end_ns for before, after in itertools.pairwise(found)]
    # What the thread does between an answer and the preparation is of no room.
    assert gaps.pop(1) >= 0
    assert gaps == [0, 0, 0]
    assert [(span.source_rank, span.target_rank) for span in found] == [*[(-1, -1)] * 3, (1, 0), (-1, -1)]


def test_a_room_that_opened_after_the_last_lost_step_has_all_of_its_steps() -> None:
    spans, at = SpanRecorder(2), (-1, -1)
    spans.record("Offer", RoomKey("p", 6), *at, 10, 12)
    spans.record("Offer", KEY, *at, 20, 22)
    assert spans.lost_ns == -1
    spans.record("send DONE", RoomKey("p", 6), *at, 30, 32)
    # A step that ended early may be recorded late.
    spans.record("send DONE", KEY, *at, 3, 4)
    assert (spans.lost_ns, len(spans)) == (22, 2)
    spans.record("RELEASED", KEY, *at, 40, 41)
    spans.record("RELEASED", KEY, *at, 41, 42)
    assert spans.lost_ns == 32


def test_messages_of_no_room_and_answers_to_no_request_leave_no_step() -> None:
    spans = SpanRecorder(5)
    steps = StepLog(spans, "p", of_engines=True)
    steps.handled(Ping(1, 2))
    steps.sent(Ping(1, 2))
    steps.asked(Offer(1, 7, (CachePages(0, 0, 4, 0, b""),), True))
    steps.answered()
    steps.told(Accepted(1))
    assert [span.stage for span in spans.newest(limit=9)] == ["Offer"]


def test_steps_of_an_engine_whose_end_is_before_their_start_are_dropped() -> None:
    spans = SpanRecorder(5)
    given = (
        EngineStep("send", 5, 4),
        EngineStep("send", -5, 4),
        EngineStep("send", 4, 5),
        EngineStep("DONE", 6, 7, True),
    )
    StepLog(spans, "p", of_engines=True).of_engine(EngineSteps(Half.SOURCE, "p", 7, given))
    assert [(span.stage, span.kind, span.start_ns) for span in spans.newest(limit=9)] == [
        ("send", Kind.CALL, 4),
        ("DONE", Kind.WAIT, 6),
    ]


def test_steps_of_an_engine_are_dropped_unless_the_agent_asks_for_them() -> None:
    spans = SpanRecorder(5)
    given = EngineSteps(Half.SOURCE, "p", 7, (EngineStep("send", 4, 5),))
    StepLog(spans, "p", of_engines=False).of_engine(given)
    assert len(spans) == 0


def test_long_names_of_an_engine_are_not_kept() -> None:
    spans, long = SpanRecorder(5), "n" * 60_000
    steps = StepLog(spans, "p", of_engines=True)
    steps.asked(Cancel(1, Half.TARGET, long, 7))
    steps.told(Accepted(1))
    steps.of_engine(EngineSteps(Half.SOURCE, long, 7, (EngineStep("send", 4, 5),)))
    steps.of_engine(EngineSteps(Half.SOURCE, "p", 7, (EngineStep(long, 4, 5),)))
    assert len(spans) == 0


def test_the_step_after_a_report_of_an_engine_begins_behind_it() -> None:
    spans = SpanRecorder(5)
    steps = StepLog(spans, "p", of_engines=True)
    steps.begin()
    before_ns = time.monotonic_ns()
    steps.of_engine(EngineSteps(Half.SOURCE, "p", 7, (EngineStep("send", 4, 5),)))
    steps.asked(Offer(1, 8, (CachePages(0, 0, 4, 0, b""),), True))
    (offer,) = spans.of_room(8, limit=9)
    assert offer.start_ns >= before_ns
