"""Tests a rank's side of a connector against a fake agent: when pages are released to the engine."""

from __future__ import annotations

import threading

import msgspec
import pytest
from fake_agent import WAIT_S, FakeAgent, accept_all
from scene import DONE, ENDPOINT, FAILED, RELEASED, client_at, event, refuse_the_first_cancel

from longshore_client import Half, Reason, RoomEventKind
from longshore_engines.handover import Ask, Claim, Fail, Offer, ReportSent, TakeBack, Withdraw
from longshore_engines.rooms import RankRooms
from longshore_wire.engine_messages import Ask as AskMessage
from longshore_wire.engine_messages import Cancel, Refused
from longshore_wire.engine_messages import Offer as OfferMessage
from longshore_wire.engine_messages import Receive as ReceiveMessage

OFFER = Offer("p", 7, (1, 2), 0, 6, last=True)
REPORT = ReportSent("p", 7)
FIRST, SECOND = Offer("p", 7, (1,), 0, 4, last=False), Offer("p", 7, (2,), 4, 6, last=True, is_next=True)
CLAIM = Claim("d", 7, ENDPOINT, (3, 4), 0, 6)


class Scene:
    """An agent, its client, and the rooms of its rank with a clock that the test moves."""

    def __init__(self, path, *, limit_s=100.0, asks=True, **agent):
        self.now_s = 0.0
        self.agent = FakeAgent(path, **agent)
        self.rooms = RankRooms(client_at(path), limit_s, lambda: self.now_s, asks=asks)
        self.sent, self.received, self.failed, self.answered, self.transfers = set(), set(), set(), set(), []
        self.lost = set()

    def look(self):
        ended = self.rooms.poll()
        self.sent |= ended.sent
        self.received |= ended.received
        self.failed |= ended.failed
        self.lost |= ended.lost
        self.answered |= ended.answered
        self.transfers += ended.transfers

    def look_until(self, predicate):
        """Poll after each event, as an engine does in every step."""
        client = self.rooms._client
        for _ in range(int(WAIT_S / 0.01)):
            self.look()
            if predicate():
                return
            with client._changed:
                client._changed.wait(0.01)
        raise AssertionError("it did not end in time")

    def heard(self, *kinds):
        return self.agent.of(*kinds)

    def expect(self, kind, count=1):
        self.agent.expect(lambda: len([each for each in self.agent.heard if isinstance(each, kind)]) >= count)


@pytest.fixture
def scene(tmp_path):
    made = []

    def make(**options):
        made.append(Scene(str(tmp_path / "engine.sock"), **options))
        return made[-1]

    yield make
    for each in made:
        each.rooms.close()
        each.agent.stop()


def test_an_offer_is_sent_whole_and_its_pages_are_the_engines_again_at_release(scene):
    world = scene()
    world.rooms.carry_out([OFFER, REPORT])
    world.expect(OfferMessage)
    (offer,) = world.heard(OfferMessage)
    assert (offer.room, offer.caches[0].first_token, offer.caches[0].end_token, offer.last) == (7, 0, 6, True)
    world.agent.say(event(DONE))
    world.agent.say(event(RELEASED, room=1))  # of no room
    world.look()
    assert world.sent == set()
    world.agent.say(event(RELEASED))
    world.look_until(lambda: world.sent == {"p"})
    assert (world.received, world.failed, world.rooms.open_count) == (set(), set(), 0)
    assert [(each.half, each.failure) for each in world.transfers] == [(Half.SOURCE, "")]


def test_a_prompt_is_offered_chunk_by_chunk_and_reported_after_both_its_end_and_its_order(scene):
    world = scene()
    world.rooms.carry_out([FIRST])
    world.rooms.carry_out([SECOND])
    world.expect(OfferMessage, 2)
    assert [
        (each.room, each.caches[0].first_token, each.caches[0].end_token, each.last)
        for each in world.heard(OfferMessage)
    ] == [
        (7, 0, 4, False),
        (7, 4, 6, True),
    ]
    # Decode has all of it while prefill still samples its first token.
    world.agent.say(event(DONE))
    world.agent.say(event(RELEASED))
    world.look_until(lambda: world.rooms.open_count == 0)
    assert world.sent == set()
    world.rooms.carry_out([REPORT])
    world.look()
    assert world.sent == {"p"}


def test_a_refused_offer_is_reported_before_the_engine_hands_its_prompt_out(scene):
    world = scene(
        answer=lambda message: (
            Refused(message.request, Reason.UNSUPPORTED, "no")
            if isinstance(message, OfferMessage)
            else accept_all(message)
        )
    )
    world.rooms.carry_out([FIRST])
    world.look_until(lambda: world.lost == {7})
    assert (world.sent, world.rooms.open_count) == (set(), 0)
    world.rooms.carry_out([REPORT])
    world.look()
    assert world.sent == {"p"}


ASK = Ask("d", 7, ENDPOINT)
OFFERED = event(RoomEventKind.OFFERED, half=Half.TARGET)


def test_an_ask_is_answered_by_prefills_offer_and_its_claim_goes_on_with_the_room(scene):
    world = scene()
    world.rooms.carry_out([ASK])
    world.expect(AskMessage)
    world.look()
    assert world.answered == set()
    world.agent.say(OFFERED)
    world.look_until(lambda: world.answered == {"d"})
    world.rooms.carry_out([CLAIM])
    world.expect(ReceiveMessage)
    for kind in (DONE, RELEASED):
        world.agent.say(event(kind, half=Half.TARGET))
    world.look_until(lambda: world.received == {"d"})
    assert (world.failed, world.rooms.open_count, len(world.heard(AskMessage))) == (set(), 0, 1)
    assert [(each.half, each.failure) for each in world.transfers] == [(Half.TARGET, "")]


def test_an_ask_for_a_room_that_fails_is_answered_so_that_its_claim_can_say_why(scene):
    world = scene()
    world.rooms.carry_out([ASK])
    world.expect(AskMessage)
    world.agent.say(event(FAILED, half=Half.TARGET, reason=Reason.PEER_LOST))
    world.agent.say(event(RELEASED, half=Half.TARGET))
    world.look_until(lambda: world.answered == {"d"})
    assert (world.received, world.failed, world.transfers, world.rooms.open_count) == (set(), set(), [], 0)


def test_a_request_that_asks_and_is_no_longer_wanted_claims_nothing_of_its_room(scene):
    world = scene()
    world.rooms.carry_out([ASK])
    world.rooms.carry_out([Claim("d", 7, ENDPOINT, (), 6, 6)])
    world.expect(ReceiveMessage)
    for kind in (DONE, RELEASED):
        world.agent.say(event(kind, half=Half.TARGET))
    world.look_until(lambda: world.rooms.open_count == 0)
    assert (world.received, world.failed, world.transfers) == (set(), set(), [])


def test_an_ask_without_an_answer_is_given_up_after_the_limit(scene):
    world = scene(limit_s=10.0)
    world.rooms.carry_out([ASK])
    world.expect(AskMessage)
    world.now_s = 11.0
    world.look()
    world.expect(Cancel)


def test_of_an_engines_ranks_one_asks(scene):
    world = scene(asks=False)
    world.rooms.carry_out([ASK, CLAIM])
    world.expect(ReceiveMessage)
    assert world.heard(AskMessage) == []


def test_chunks_of_a_room_that_has_ended_are_not_offered(scene):
    world = scene()
    world.rooms.carry_out([FIRST])
    world.expect(OfferMessage)
    world.agent.say(event(FAILED, reason=Reason.CANCELLED))
    world.agent.say(event(RELEASED))
    world.look_until(lambda: world.rooms.open_count == 0)
    world.rooms.carry_out([SECOND, REPORT])
    world.look()
    assert (world.sent, world.rooms.open_count, len(world.heard(OfferMessage))) == ({"p"}, 0, 1)


def test_a_chunk_behind_a_cancellation_is_not_offered(scene):
    world = scene()
    world.rooms.carry_out([FIRST])
    world.rooms.carry_out([Withdraw("p"), SECOND])
    world.expect(Cancel)
    world.agent.say(event(FAILED, reason=Reason.CANCELLED))
    world.agent.say(event(RELEASED))
    world.look_until(lambda: world.rooms.open_count == 0)
    assert len(world.heard(OfferMessage)) == 1


def test_a_chunk_that_waits_for_the_device_does_not_open_its_room_again(scene):
    world, computed = scene(), threading.Event()
    world.rooms.carry_out([FIRST])
    world.expect(OfferMessage)
    world.rooms.carry_out([SECOND], computed.wait)
    world.agent.say(event(FAILED, reason=Reason.CANCELLED))
    world.agent.say(event(RELEASED))
    world.look_until(lambda: world.rooms.open_count == 0)
    computed.set()
    world.rooms.carry_out([CLAIM])
    world.expect(ReceiveMessage)
    assert len(world.heard(OfferMessage)) == 1


def test_a_cancellation_waits_for_a_place_at_a_busy_client(scene, monkeypatch):
    world = scene()
    world.rooms.carry_out([CLAIM])
    world.expect(ReceiveMessage)
    refuse_the_first_cancel(monkeypatch, world.rooms._client)
    world.rooms.carry_out([Withdraw("d")])
    world.expect(Cancel)


def test_after_a_refused_chunk_no_other_is_offered(scene):
    def refuse(message):
        if isinstance(message, OfferMessage):
            return Refused(message.request, Reason.UNKNOWN_POOL, "no pool 0")
        return accept_all(message)

    world = scene(answer=refuse)
    world.rooms.carry_out([FIRST, SECOND, REPORT])
    world.look_until(lambda: world.sent)
    assert len(world.heard(OfferMessage)) == 1


def test_a_rooms_limit_counts_from_its_last_chunk(scene):
    world = scene(limit_s=100.0)
    world.rooms.carry_out([FIRST])
    world.now_s = 90.0
    world.rooms.carry_out([SECOND, REPORT])
    world.expect(OfferMessage, 2)
    world.now_s = 180.0
    world.look()
    assert world.heard(Cancel) == []
    world.now_s = 190.0
    world.look()
    world.expect(Cancel)


def test_pages_are_taken_back_only_when_no_process_uses_them(scene):
    def end_if_cancelled(message):
        if isinstance(message, Cancel):
            world.agent.say(event(FAILED, reason=Reason.CANCELLED))
            world.agent.say(event(RELEASED))
        return accept_all(message)

    world = scene(answer=end_if_cancelled)
    world.rooms.carry_out([FIRST])
    world.rooms.take_back([OFFER, TakeBack("somebody else")])
    assert world.rooms.open_count == 1
    world.rooms.take_back([TakeBack("p")])
    assert world.rooms.open_count == 0
    world.look()
    # The engine computes the prompt again, and has not ended.
    assert (world.sent, world.transfers) == (set(), [])


def test_a_room_that_a_router_names_twice_is_the_first_prompts_alone(scene, caplog):
    world = scene()
    world.rooms.carry_out([FIRST, Offer("twin", 7, (8,), 0, 4, last=True), ReportSent("twin", 7)])
    world.look()
    assert (world.sent, world.received) == ({"twin"}, set())
    assert "request twin: room 7 is open" in caplog.text
    world.expect(OfferMessage)
    assert len(world.heard(OfferMessage)) == 1


def test_a_claim_is_received_at_release_and_not_before(scene):
    world = scene()
    world.rooms.carry_out([CLAIM])
    world.expect(ReceiveMessage)
    done = msgspec.structs.replace(event(DONE, half=Half.TARGET), bytes_moved=4096)
    world.agent.say(done)
    world.look_until(lambda: next(iter(world.rooms._open.values())).half.done)
    assert world.received == set()
    world.agent.say(event(RELEASED, half=Half.TARGET))
    world.look_until(lambda: world.received == {"d"})
    assert world.failed == set()
    assert world.transfers[0].bytes_moved == 4096


def test_a_claim_that_failed_is_reported_only_when_nobody_writes_its_pages_any_more(scene):
    world = scene()
    world.rooms.carry_out([CLAIM])
    world.expect(ReceiveMessage)
    world.agent.say(event(FAILED, half=Half.TARGET, reason=Reason.PEER_LOST))
    world.look_until(lambda: next(iter(world.rooms._open.values())).half.failure)
    assert (world.received, world.failed) == (set(), set())
    world.agent.say(event(RELEASED, half=Half.TARGET))
    world.look_until(lambda: world.failed == {"d"})
    assert world.received == {"d"}
    assert "PEER_LOST" in world.transfers[0].failure


def test_an_offer_that_failed_gives_its_pages_back_at_release(scene):
    world = scene()
    world.rooms.carry_out([OFFER, REPORT])
    world.expect(OfferMessage)
    world.agent.say(event(FAILED, reason=Reason.CANCELLED))
    world.look()
    assert world.sent == set()
    world.agent.say(event(RELEASED))
    world.look_until(lambda: world.sent == {"p"})
    assert "CANCELLED" in world.transfers[0].failure


def test_a_withdrawn_claim_is_cancelled_and_reported_at_release(scene):
    world = scene()
    world.rooms.carry_out([CLAIM])
    world.rooms.carry_out([Withdraw("d"), Withdraw("d"), Withdraw("somebody else")])
    world.expect(Cancel)
    assert [(each.half, each.room) for each in world.heard(Cancel)] == [(Half.TARGET, 7)]
    world.look()
    assert world.received == set()
    world.agent.say(event(FAILED, half=Half.TARGET, reason=Reason.CANCELLED))
    world.agent.say(event(RELEASED, half=Half.TARGET))
    world.look_until(lambda: world.received == {"d"})
    assert world.rooms.open_count == 0
    assert world.transfers == []  # a client that leaves is no failure of ours


def test_a_claim_of_nothing_is_made_and_reported_to_nobody(scene):
    world = scene()
    world.rooms.carry_out([Claim("d", 7, ENDPOINT, (), 6, 6)])
    world.expect(ReceiveMessage)
    world.agent.say(event(DONE, half=Half.TARGET))
    world.agent.say(event(RELEASED, half=Half.TARGET))
    world.look_until(lambda: world.rooms.open_count == 0)
    assert (world.received, world.failed, world.transfers) == (set(), set(), [])


def test_a_claim_of_nothing_of_a_room_that_was_claimed_is_no_failure(scene, caplog):
    def refuse(message):
        if isinstance(message, ReceiveMessage):
            return Refused(message.request, Reason.ROOM_REUSED, "it was claimed before")
        return accept_all(message)

    world = scene(answer=refuse)
    world.rooms.carry_out([Claim("d", 7, ENDPOINT, (), 6, 6)])
    world.look_until(lambda: world.rooms.open_count == 0)
    assert (world.received, world.failed, world.transfers) == (set(), set(), [])
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_a_claim_that_cannot_be_made_is_reported_as_failed(scene):
    world = scene()
    world.rooms.carry_out([Fail("d", "no handover")])
    world.look()
    assert (world.received, world.failed) == ({"d"}, {"d"})
    assert world.transfers[0].failure == "no handover"


@pytest.mark.parametrize("orders", [[OFFER, REPORT], [CLAIM]])
def test_what_the_agent_refuses_is_over_at_once(scene, orders):
    def refuse(message):
        if isinstance(message, OfferMessage | ReceiveMessage):
            return Refused(message.request, Reason.LAYOUT_MISMATCH, "pages of 64 tokens")
        return accept_all(message)

    world = scene(answer=refuse)
    world.rooms.carry_out(orders)
    world.look_until(lambda: world.sent | world.received)
    assert world.failed == world.received
    assert "pages of 64 tokens" in world.transfers[0].failure
    assert world.rooms.open_count == 0


def test_a_busy_agent_is_asked_again(scene):
    answers = []

    def busy_once(message):
        if isinstance(message, OfferMessage):
            answers.append(message)
            if len(answers) == 1:
                return Refused(message.request, Reason.BUSY, "full", 1_000_000)
        return accept_all(message)

    world = scene(answer=busy_once)
    world.rooms.carry_out([OFFER, REPORT])
    world.expect(OfferMessage, 2)
    world.agent.say(event(RELEASED))
    world.look_until(lambda: world.sent == {"p"})


def test_a_room_that_is_not_done_within_its_limit_is_given_up_and_lent_until_release(scene):
    world = scene(limit_s=100.0)
    world.rooms.carry_out([OFFER, REPORT])
    world.now_s = 50.0
    world.rooms.carry_out([Offer("later", 8, (5,), 0, 4, last=True)])
    world.expect(OfferMessage, 2)
    world.now_s = 100.0
    world.look()
    world.expect(Cancel)
    assert [each.room for each in world.heard(Cancel)] == [7]
    assert world.sent == set()
    world.agent.say(event(FAILED, reason=Reason.CANCELLED))
    world.agent.say(event(RELEASED))
    world.look_until(lambda: world.sent == {"p"})
    assert "within 100 s" in world.transfers[0].failure


def test_the_models_thread_goes_on_while_an_agent_does_not_answer(scene):
    world = scene(answer=lambda message: None)
    world.rooms.carry_out([OFFER, CLAIM])
    world.look()
    assert world.rooms.open_count == 2
    assert (world.sent, world.received) == (set(), set())


def test_an_order_is_carried_out_after_the_device_has_come_to_its_fence(scene):
    world, order = scene(), []

    def fence():
        order.append(len(world.heard(OfferMessage)))

    world.rooms.carry_out([OFFER], fence)
    world.expect(OfferMessage)
    assert order == [0]


def test_a_handover_that_is_used_twice_fails_the_second_request_alone(scene):
    world = scene()
    world.rooms.carry_out([CLAIM, Claim("twin", 7, ENDPOINT, (8, 9), 0, 6)])
    world.look()
    assert (world.received, world.failed) == ({"twin"}, {"twin"})
    world.expect(ReceiveMessage)
    world.agent.say(event(DONE, half=Half.TARGET))
    world.agent.say(event(RELEASED, half=Half.TARGET))
    world.look_until(lambda: world.received == {"twin", "d"})
    assert world.failed == {"twin"}


def test_what_is_open_when_the_client_is_closed_is_over_and_not_taken_for_success(scene):
    world = scene()
    world.rooms.carry_out([OFFER, REPORT, CLAIM])
    world.expect(ReceiveMessage)
    world.rooms.close()
    world.look()
    assert (world.sent, world.received, world.failed) == ({"p"}, {"d"}, {"d"})


@pytest.mark.parametrize("answer_late", [True, False])
def test_pages_of_a_call_without_an_answer_are_lent_until_it_is_known_that_nobody_has_them(
    scene, monkeypatch, answer_late
):
    monkeypatch.setattr("longshore_engines.halves.CALL_LIMIT_S", 0.05)
    world = scene(answer=lambda message: None)
    world.rooms.carry_out([OFFER, REPORT])
    world.look_until(lambda: next(iter(world.rooms._open.values())).half.refused)
    assert world.sent == set()
    world.expect(OfferMessage)
    (offer,) = world.heard(OfferMessage)
    if answer_late:
        world.agent.say(Refused(offer.request, Reason.UNKNOWN_POOL, "no pool 0"))
    else:
        world.agent.say(event(FAILED, reason=Reason.CANCELLED))
        world.agent.say(event(RELEASED))
    world.look_until(lambda: world.sent == {"p"})
    world.expect(Cancel)
