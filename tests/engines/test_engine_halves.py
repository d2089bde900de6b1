"""Tests halves of rooms that are offered chunk by chunk, against a fake agent: when the engine may reuse their pages."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from fake_agent import WAIT_S, FakeAgent, accept_all
from scene import DONE, ENDPOINT, FAILED, RELEASED, client_at, event, refuse_the_first_cancel

from longshore_client import ArgumentError, Half, Reason
from longshore_engines.halves import Halves
from longshore_wire.engine_messages import Ask, Cancel, Offer, Receive, Refused


class Scene:
    def __init__(self, path, **agent):
        self.agent = FakeAgent(path, **agent)
        self.halves = Halves(client_at(path), logging.getLogger("longshore.test"))
        self.halves.listen()

    def expect(self, kind, count=1):
        self.agent.expect(lambda: len([each for each in self.agent.heard if isinstance(each, kind)]) >= count)


def wait_for(predicate):
    deadline_s = time.monotonic() + WAIT_S
    never = threading.Event()
    while not predicate():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        never.wait(0.01)


@pytest.fixture
def scene(tmp_path):
    made = []

    def make(**options):
        made.append(Scene(str(tmp_path / "engine.sock"), **options))
        return made[-1]

    yield make
    for each in made:
        each.halves.close()
        each.agent.stop()


def test_chunks_are_offered_in_order_and_the_half_ends_at_release(scene):
    world = scene()
    half = world.halves.offer(7, (1,), 0, 4, last=False)
    assert world.halves.offer(7, (2,), 4, 6, last=True, half=half) is half
    world.expect(Offer, 2)
    offers = world.agent.of(Offer)
    assert [(each.caches[0].first_token, each.caches[0].end_token, each.last) for each in offers] == [
        (0, 4, False),
        (4, 6, True),
    ]
    world.agent.say(event(DONE))
    wait_for(lambda: half.done)
    assert not half.ended
    world.agent.say(event(RELEASED))
    wait_for(lambda: half.ended)
    assert (half.failure, world.halves.open_count) == ("", 0)


def test_a_chunk_is_offered_only_after_its_fence(scene):
    world = scene()
    order = []
    world.halves.offer(7, (1,), 0, 4, last=False, fence=lambda: order.append(len(world.agent.of(Offer))))
    world.expect(Offer)
    assert order == [0]


def test_a_claim_that_is_cancelled_ends_only_at_release(scene):
    world = scene()
    half = world.halves.claim(7, ENDPOINT, (3, 4), 0, 6)
    world.expect(Receive)
    wait_for(lambda: world.halves._client.is_open(7, Half.TARGET, ENDPOINT.instance))
    world.halves.cancel(half, "the client has left")
    world.expect(Cancel)
    world.agent.say(event(FAILED, half=Half.TARGET, reason=Reason.CANCELLED))
    world.agent.say(event(DONE, room=1, half=Half.TARGET))  # of no room
    assert not half.ended
    world.agent.say(event(RELEASED, half=Half.TARGET))
    wait_for(lambda: half.ended)
    assert (half.done, half.failure) == (False, "the client has left")


def test_a_half_that_is_cancelled_before_its_call_is_told_to_the_peer_and_ends_at_release(scene):
    world = scene()
    reached, go = [], []

    def fence():
        reached.append(1)
        wait_for(lambda: bool(go))

    half = world.halves.offer(7, (1,), 0, 4, last=False, fence=fence)
    wait_for(lambda: bool(reached))
    world.halves.cancel(half, "no longer needed")
    assert world.halves.offer(7, (2,), 4, 6, last=True, half=half) is half
    go.append(1)
    world.expect(Cancel)
    assert len(world.agent.of(Offer)) == 1 and not half.ended
    world.agent.say(event(FAILED, reason=Reason.CANCELLED))
    world.agent.say(event(RELEASED))
    wait_for(lambda: half.ended)
    assert half.failure == "no longer needed"


def test_a_refused_call_ends_its_half_with_the_agents_reason(scene):
    def refuse(message):
        if isinstance(message, Offer):
            return Refused(message.request, Reason.LAYOUT_MISMATCH, "other pages")
        return accept_all(message)

    world = scene(answer=refuse)
    half = world.halves.offer(7, (1,), 0, 4, last=True)
    wait_for(lambda: half.ended)
    assert "other pages" in half.failure


def test_a_room_is_claimed_once(scene):
    world = scene()
    world.halves.claim(7, ENDPOINT, (3, 4), 0, 6)
    with pytest.raises(ArgumentError, match="room 7"):
        world.halves.claim(7, ENDPOINT, (5, 6), 0, 6)


@pytest.fixture
def silent(tmp_path):
    """A scene whose events the test takes, and an asked half that the agent has accepted."""
    world = Scene.__new__(Scene)
    world.agent = FakeAgent(str(tmp_path / "engine.sock"))
    world.client = client_at(world.agent.path)
    world.halves = Halves(world.client, logging.getLogger("longshore.test"))
    half = world.halves.ask(7, ENDPOINT)
    world.expect(Ask)
    yield world, half
    world.halves.close()
    world.agent.stop()


def of_room(kind):
    return event(kind, half=Half.TARGET)


def test_the_end_of_an_ask_is_not_taken_for_that_of_the_claim_that_followed_it(silent):
    world, half = silent
    world.agent.say(of_room(FAILED))
    world.agent.say(of_room(RELEASED))
    wait_for(lambda: not world.client.is_open(7, Half.TARGET, ENDPOINT.instance))
    # The next worker takes the claim before the engine takes these events.
    assert world.halves.claim(7, ENDPOINT, (3, 4), 0, 6) is half
    world.expect(Receive)
    wait_for(lambda: world.client.is_open(7, Half.TARGET, ENDPOINT.instance) and not half.is_claiming)
    assert world.halves.take() == [] and not half.ended
    world.expect(Cancel)
    world.agent.say(of_room(FAILED))
    world.agent.say(of_room(RELEASED))
    wait_for(lambda: world.halves.take() == [half])
    assert not half.done and half.failure


def test_a_claim_whose_ask_ends_before_the_claim_is_made_is_not_made(silent):
    world, half = silent
    reached, go_on = threading.Event(), threading.Event()

    def fence():
        reached.set()
        assert go_on.wait(WAIT_S)

    world.halves.claim(7, ENDPOINT, (3, 4), 0, 6, fence)
    assert reached.wait(WAIT_S)
    world.agent.say(of_room(FAILED))
    world.agent.say(of_room(RELEASED))
    wait_for(lambda: not world.client.is_open(7, Half.TARGET, ENDPOINT.instance))
    assert world.halves.take() == []
    go_on.set()
    wait_for(lambda: world.halves.take() == [half])
    assert world.agent.of(Receive) == []


def test_a_busy_agent_is_not_asked_again_so_that_claims_behind_it_are_made(scene):
    busy = [True]

    def answer(message):
        if isinstance(message, Ask) and busy:
            return Refused(message.request, Reason.BUSY, "being replaced", 10**9)
        return accept_all(message)

    world = scene(answer=answer)
    asked = world.halves.ask(7, ENDPOINT)
    world.halves.claim(8, ENDPOINT, (3, 4), 0, 6)
    world.expect(Receive)
    wait_for(lambda: asked.ended)
    assert "being replaced" in asked.failure and len(world.agent.of(Ask)) == 1


def test_when_the_connection_is_closed_every_half_has_ended(scene):
    world = scene()
    half = world.halves.offer(7, (1,), 0, 4, last=False)
    world.expect(Offer)
    world.halves.close()
    assert half.ended
    assert "closed" in half.failure


def test_a_cancellation_waits_for_a_place_at_a_busy_client(scene, monkeypatch):
    world = scene()
    half = world.halves.claim(7, ENDPOINT, (3, 4), 0, 6)
    world.expect(Receive)
    refuse_the_first_cancel(monkeypatch, world.halves._client)
    world.halves.cancel(half, "the client has left")
    world.expect(Cancel)


def test_a_call_whose_refusal_comes_after_its_time_ends_its_half(scene, monkeypatch):
    monkeypatch.setattr("longshore_engines.halves.CALL_LIMIT_S", 0.05)
    world = scene(answer=lambda message: None)
    half = world.halves.offer(7, (1,), 0, 4, last=True)
    wait_for(lambda: half.failure)
    assert not half.ended
    (offer,) = world.agent.of(Offer)
    world.agent.say(Refused(offer.request, Reason.UNKNOWN_POOL, "no pool 0"))
    wait_for(lambda: half.ended)


def test_a_half_that_has_ended_is_not_opened_again_by_its_next_chunk(scene):
    world = scene()
    half = world.halves.offer(7, (1,), 0, 4, last=False)
    world.expect(Offer)
    world.agent.say(event(FAILED, reason=Reason.CANCELLED))
    world.agent.say(event(RELEASED))
    wait_for(lambda: half.ended)
    assert world.halves.offer(7, (2,), 4, 6, last=True, half=half) is half
    world.halves.claim(7, ENDPOINT, (3, 4), 0, 6)
    world.expect(Receive)
    assert (len(world.agent.of(Offer)), world.halves.open_count) == (1, 1)


def test_a_half_that_was_done_before_its_cancellation_is_done_although_nobody_has_taken_its_events(tmp_path):
    agent = FakeAgent(str(tmp_path / "engine.sock"))
    client = client_at(str(tmp_path / "engine.sock"))
    halves = Halves(client, logging.getLogger("longshore.test"))
    try:
        half = halves.offer(7, (1,), 0, 4, last=True)
        agent.expect(lambda: agent.of(Offer))
        wait_for(lambda: client.is_open(7, Half.SOURCE, client.instance))
        agent.say(event(DONE))
        agent.say(event(RELEASED))
        wait_for(lambda: not client.is_open(7, Half.SOURCE, client.instance))
        halves.cancel(half, "no longer needed")
        # The thread that makes calls has come to this one.
        halves.claim(8, ENDPOINT, (3, 4), 0, 6)
        agent.expect(lambda: agent.of(Receive))
        assert halves.take() == [half]
        assert half.done
    finally:
        halves.close()
        agent.stop()
