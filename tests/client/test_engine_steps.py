"""Tests the steps of an engine's calls and events: kept only for an agent that asks, sent once a half, and bounded."""

from __future__ import annotations

import pytest
from line import LEASE_NS, agent_and_client
from scene import DONE, ENDPOINT, FAILED, RELEASED, event

from longshore_client import Half
from longshore_client.ledger import HalfKey
from longshore_client.steps import STEP_HALVES_MAX, Steps
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, ENGINE_STEPS_MAX, EngineSteps, Refused, Welcome
from longshore_wire.errors import Reason, RoomError


def asking(hello):
    return Welcome(ENGINE_PROTOCOL_VERSION, 1, "demo", LEASE_NS, steps=True)


def refuse(message):
    return Refused(message.request, Reason.TOKENS_OVERLAP, "the next begins at 8")


def names(message):
    return [step.name for step in message.steps]


def test_an_agent_that_does_not_ask_gets_no_steps_and_none_are_kept():
    line, client = agent_and_client()
    client.send(7, [0], 0, 4, last=True)
    line.say(event(DONE), event(RELEASED))
    assert [each.kind for each in client.poll()] == [DONE, RELEASED]
    assert line.of(EngineSteps) == []
    assert len(line.core.steps) == 0


def test_an_agent_that_asks_gets_the_steps_of_a_half_once_when_it_is_over():
    line, client = agent_and_client(greet=asking)
    client.send(7, [0], 0, 2, last=False)
    client.send(7, [0], 2, 4, last=True)
    line.say(event(DONE))
    assert client.wait(7, Half.SOURCE).kind is DONE
    assert line.of(EngineSteps) == []
    line.say(event(RELEASED))
    client.poll()
    (message,) = line.of(EngineSteps)
    assert (message.half, message.instance, message.room) == (Half.SOURCE, "prefill-0", 7)
    assert names(message) == ["send", "send waits", "send", "send waits", "DONE"]
    assert all(step.start_ns <= step.end_ns for step in message.steps)
    for call, waiting in (message.steps[:2], message.steps[2:4]):
        assert call.end_ns == waiting.start_ns
        assert (call.waits, waiting.waits) == (False, True)
    assert len(line.core.steps) == 0


def test_a_half_whose_engine_takes_its_end_after_the_release_is_reported_then():
    line, client = agent_and_client(greet=asking)
    client.receive(7, ENDPOINT, [0], 0, 4)
    line.say(event(FAILED, half=Half.TARGET), event(RELEASED, half=Half.TARGET))
    assert line.of(EngineSteps) == []
    client.poll()
    (message,) = line.of(EngineSteps)
    assert names(message) == ["receive", "receive waits", "FAILED", "RELEASED"]


def test_a_call_that_returns_after_its_half_was_reported_is_in_the_report_and_leaves_nothing_behind():
    steps, key = Steps(), HalfKey(Half.SOURCE, "prefill-0", 7)
    steps.wanted = True
    steps.sent(key, "send", 1, 2)
    steps.arrived(event(DONE), 3)
    steps.arrived(event(RELEASED), 3)
    (found,) = steps.taken([event(DONE)], 4)
    steps.answered(key, "send", 2, 5)
    assert names(found) == ["send", "DONE"]
    assert len(steps) == 0


def test_steps_of_a_worker_that_is_gone_are_not_sent_to_the_next():
    line, client = agent_and_client(greet=asking)
    client.send(7, [0], 0, 4, last=True)
    line.say(event(DONE))
    client.poll()
    line.lose()
    line.agent(epoch=2)
    assert not line.core.steps.wanted
    assert len(line.core.steps) == 0
    assert line.of(EngineSteps) == []


def test_a_refused_call_leaves_no_steps():
    line, client = agent_and_client(greet=asking, answer=refuse)
    for room in range(7, 10):
        with pytest.raises(RoomError):
            client.send(room, [0], 0, 4, last=True)
    assert len(line.core.steps) == 0


def test_an_engine_that_never_takes_an_event_keeps_the_steps_of_a_limited_number_of_halves():
    steps = Steps()
    steps.wanted = True
    for room in range(STEP_HALVES_MAX + 10):
        for _ in range(ENGINE_STEPS_MAX):
            steps.sent(HalfKey(Half.SOURCE, "prefill-0", room), "send", 1, 2)
            steps.answered(HalfKey(Half.SOURCE, "prefill-0", room), "send", 2, 3)
    assert len(steps) == STEP_HALVES_MAX
    last = STEP_HALVES_MAX + 9
    steps.arrived(event(RELEASED, room=last), 4)
    steps.arrived(event(DONE, room=last), 4)
    (found,) = steps.taken([event(DONE, room=last), event(DONE, room=0)], 5)
    assert len(found.steps) == ENGINE_STEPS_MAX
    assert found.steps[-1].name == "DONE"
