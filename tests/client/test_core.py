"""Tests the client's core alone: connecting, messages to a new agent, events for the engine, results of calls."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from fake_agent import accept_all
from line import HELLO, PATH, Line
from scene import DONE, ENDPOINT, FAILED, RELEASED, event, told

from longshore_client import (
    AgentLost,
    ArgumentError,
    Busy,
    CallTimeout,
    ClientClosed,
    CodecError,
    ConnectError,
    Half,
    HelloRefused,
    NotPermitted,
    PoolRefused,
    Reason,
    core,
)
from longshore_client.core import (
    FORBIDDEN_DIALS_MAX,
    RECONNECT_WAIT_MAX_S,
    RECONNECT_WAIT_MIN_S,
    WELCOME_WAIT_MAX_S,
    Core,
    State,
)
from longshore_wire.engine_messages import (
    Accepted,
    Cancel,
    EndpointUpdate,
    Hello,
    Offer,
    Receive,
    Refused,
    RegisterPool,
    Renew,
    UnregisterPool,
    Welcome,
)


def silent(*kinds, unless=()):
    """Return an agent's answers that leave messages of these kinds unanswered, except for some rooms."""
    return lambda m: None if isinstance(m, kinds) and m.room not in unless else accept_all(m)


def refusing(*kinds, reason=Reason.STALE_EPOCH, rooms=(1, 2)):
    def answer(message):
        refused = isinstance(message, kinds) and getattr(message, "room", 1) in rooms
        return Refused(message.request, reason, "that prefill worker is gone") if refused else accept_all(message)

    return answer


def ends(client):
    return [(each.room, each.kind, each.reason) for each in client.poll()]


# -- reaching an agent ---------------------------------------------------------------------------------------------


def test_a_refused_engine_gets_the_agents_reason_at_once():
    line = Line(greet=lambda hello: Refused(0, Reason.LAYOUT_MISMATCH, "model.layers is 2 here and 3 there"))
    error = line.core.connect_error(20.0)
    assert isinstance(error, HelloRefused) and "3 there" in str(error)
    assert (error.reason, line.core.state, len(line.of(Hello))) == (Reason.LAYOUT_MISMATCH, State.CLOSED, 1)


def test_a_busy_agent_is_asked_again_after_its_hint():
    answers = [Refused(0, Reason.BUSY, "starting", 100_000_000), Refused(0, Reason.SHUTTING_DOWN, "restarting")]
    line = Line(greet=lambda hello: answers.pop(0) if answers else Welcome(1, 9, "demo", 10**9))
    assert line.client.epoch == 9
    assert line.dials_s[1] - line.dials_s[0] == pytest.approx(0.1)


@pytest.mark.shows("argument.connect.path")
def test_no_agent_is_named_with_its_path_and_one_that_comes_later_is_found():
    line = Line(reached=False)
    line.pass_s(1.0)
    error = line.core.connect_error(1.0)
    assert isinstance(error, ConnectError) and PATH in str(error) and "connection refused" in str(error)
    line.agent(epoch=3)
    assert line.client.epoch == 3


def test_a_socket_that_stays_forbidden_ends_the_attempts_and_one_that_is_forbidden_for_a_moment_does_not():
    def dial(core, now_s, error):
        assert core.should_dial(now_s)
        core.disconnected(error, now_s)

    core, forbidden, absent = (
        Core(HELLO, PATH, deque()),
        PermissionError("group 10001 may use it"),
        FileNotFoundError("no file"),
    )
    for second, error in enumerate([*[forbidden] * (FORBIDDEN_DIALS_MAX - 1), absent, forbidden]):
        dial(core, second, error)
        assert core.state is State.DOWN
    for second in range(20, 19 + FORBIDDEN_DIALS_MAX):
        dial(core, second, forbidden)
    assert core.state is State.CLOSED
    error = core.connect_error(60.0)
    assert isinstance(error, NotPermitted) and "group 10001" in str(error)


def test_a_client_that_was_welcomed_goes_on_trying_although_its_socket_is_forbidden():
    line = Line()
    line.lose()
    for _ in range(2 * FORBIDDEN_DIALS_MAX):
        line.core.disconnected(PermissionError("group 10001 may use it"), line.now_s)
    line.agent(epoch=3)
    assert line.client.epoch == 3


def test_an_agent_that_speaks_another_protocol_is_a_typed_error():
    line = Line(greet=lambda hello: CodecError("protocol version 99 is unknown here"))
    error = line.core.connect_error(1.0)
    assert isinstance(error, CodecError) and "version 99" in str(error)
    assert line.core.state is State.CLOSED


def test_an_engine_that_is_turned_away_until_its_time_is_over_is_told_by_whom_and_why():
    refusal = Refused(0, Reason.BUSY, "prefill-0 rank 0 is registered", 1_000_000)
    line = Line(greet=lambda hello: refusal)
    error = line.core.connect_error(0.3)
    assert isinstance(error, HelloRefused) and "prefill-0 rank 0 is registered" in str(error)
    assert error.reason is Reason.BUSY
    assert len(line.of(Hello)) > 1


def test_a_refusal_of_an_agent_that_is_gone_is_not_the_reason():
    line = Line(greet=lambda hello: Refused(0, Reason.SHUTTING_DOWN, "the agent stops"))
    line.lose()
    line.pass_s(1.0)
    error = line.core.connect_error(3.0)
    assert isinstance(error, ConnectError) and "refused" in str(error)


def test_an_agent_that_says_nothing_to_hello_is_left_after_a_while():
    line = Line(greet=lambda hello: None)
    line.pass_s(WELCOME_WAIT_MAX_S)
    assert "may still start a worker" in str(line.core.connect_error(200.0))
    assert len(line.of(Hello)) == 2
    line.lose()
    line.agent(epoch=5)
    assert line.client.epoch == 5


@pytest.mark.parametrize("said", [Accepted(1), event(DONE)])
def test_what_is_no_greeting_is_no_agent_of_ours(said):
    line = Line(greet=lambda hello: said)
    assert isinstance(line.core.connect_error(1.0), CodecError)


def test_a_second_welcome_ends_the_connection_and_another_one_is_made():
    line = Line()
    line.say(Welcome(1, 2, "demo", 10**9))
    assert (line.client.connected, line.client.epoch, len(line.of(Hello))) == (True, 1, 2)
    assert "second Welcome" in line.core.last_error


def test_a_client_without_an_agent_tries_ever_less_often_and_sleeps_between():
    line = Line()
    line.pass_s(10.0)  # a connection that worked
    line.lose()
    steps = line.steps
    line.pass_s(3.0)
    waits = [later - sooner for sooner, later in pairwise(line.dials_s[1:])]
    assert waits[0] == pytest.approx(RECONNECT_WAIT_MIN_S)
    assert waits[-1] == pytest.approx(RECONNECT_WAIT_MAX_S)
    assert all(later <= 2 * sooner + 1e-6 for sooner, later in pairwise(waits))
    assert line.steps - steps <= 2 * len(line.dials_s)


def test_the_lease_is_renewed_several_times_within_it():
    line = Line(lease_ns=60_000_000_000)
    line.pass_s(60.0)
    assert len(line.of(Renew)) >= 3


def test_a_lease_is_not_renewed_beside_what_the_agent_has_not_read_and_a_full_outbox_is_busy(monkeypatch):
    line = Line()
    line.reads = False
    line.offer(1)
    line.pass_s(120.0)
    assert len(line.core.outbox) == 1
    monkeypatch.setattr(core, "OUTBOX_MESSAGES_MAX", 1)
    with pytest.raises(Busy, match="reads slowly"):
        line.offer(2)
    assert line.client.open_count == 1


# -- messages to a new agent ---------------------------------------------------------------------------------------


def test_a_new_agent_hears_of_pools_and_open_halves_exactly_once_and_of_nothing_that_ended():
    line = Line()
    client = line.client
    line.register(0, 71)
    client.send(1, [1], 0, 4, last=True)  # done and released
    client.send(2, [2], 0, 4, last=False)  # open, two chunks
    client.send(2, [3], 4, 8, last=True)
    client.send(3, [4], 0, 4, last=True)  # failed, not released
    client.receive(4, ENDPOINT, [5], 0, 4)  # open
    client.receive(5, ENDPOINT, [6], 0, 4)  # cancelled, no answer yet
    client.cancel(5, Half.TARGET)
    line.say(event(DONE, 1), event(RELEASED, 1), event(FAILED, 3, reason=Reason.PEER_LOST))
    assert client.wait(3, Half.SOURCE, timeout_s=0).kind is FAILED
    assert client.poll() == [event(DONE, 1), event(RELEASED, 1)]
    told_before = told(line, RegisterPool, Offer, Receive)
    line.descriptors.clear()
    line.lose()
    line.agent(epoch=2)
    assert (client.connected, client.epoch) == (True, 2)
    assert told(line, RegisterPool, Offer, Receive, Cancel) == [
        message for message in told_before if isinstance(message, RegisterPool) or message.room in (2, 4)
    ]
    assert (list(line.descriptors.values()), line.given_back) == ([(71,)], [])
    assert ends(client) == [(3, RELEASED, Reason.NONE), (5, FAILED, Reason.CANCELLED), (5, RELEASED, Reason.NONE)]
    line.say(event(DONE, 2))
    assert client.wait(2, Half.SOURCE, timeout_s=0).kind is DONE


def test_a_call_in_flight_when_the_agent_is_lost_is_made_again_after_what_came_before():
    line = Line(answer=silent(Offer, unless=[1]))
    line.client.send(1, [1], 0, 4, last=True)
    call = line.offer(2)
    assert [offer.room for offer in line.of(Offer)] == [1, 2]
    line.lose()
    line.agent(epoch=2)
    assert isinstance(call.answer, Accepted)
    assert [offer.room for offer in line.of(Offer)] == [1, 2]


def test_what_an_agent_did_not_read_before_it_was_lost_is_said_once_to_the_next_one():
    line = Line()
    line.say(EndpointUpdate(ENDPOINT))
    line.reads = False
    line.offer(1)
    line.lose()
    assert line.core.endpoint is None
    line.reads = True
    line.agent(epoch=2)
    assert [type(message) for message in line.heard] == [Hello, Offer]


def test_a_call_in_flight_of_a_room_that_the_next_agent_refuses_is_refused_as_well():
    line = Line(answer=lambda m: None if isinstance(m, Offer) and m.caches[0].first_token else accept_all(m))
    line.client.send(1, [1], 0, 4, last=False)
    call = line.offer(1, 4, 8)
    line.lose()
    line.agent(epoch=2, answer=refusing(Offer))
    assert (call.answer.reason, [offer.caches[0].first_token for offer in line.of(Offer)]) == (Reason.STALE_EPOCH, [0])
    assert [each[:2] for each in ends(line.client)] == [(1, FAILED), (1, RELEASED)]


def test_a_call_in_flight_of_a_room_that_ended_is_settled_and_not_made_again():
    line = Line(answer=silent(Offer))
    done, failed, cancelled = line.offer(1), line.offer(2), line.offer(3)
    line.say(event(DONE, 1), event(RELEASED, 1), event(FAILED, 2, reason=Reason.PEER_LOST))
    line.core.ledger.cancel(Half.SOURCE, None, 3)
    line.lose()
    line.agent(epoch=2)
    assert line.of(Offer) == []
    assert isinstance(done.answer, Accepted)
    assert (failed.answer.reason, cancelled.answer.reason) == (Reason.WORKER_LOST, Reason.CANCELLED)
    assert line.client.open_count == 0


def test_a_call_without_an_agent_fails_with_the_way_out_and_leaves_nothing_open():
    line = Line()
    line.lose()
    with pytest.raises(AgentLost, match="make this call again"):
        line.client.send(2, [2], 0, 4, last=True, timeout_s=0.01)
    assert line.client.open_count == 0
    line.agent(epoch=2)
    line.client.send(3, [2], 0, 4, last=True)
    assert [offer.room for offer in line.of(Offer)] == [3]


def test_a_call_that_an_agent_leaves_unanswered_stays_open_so_that_it_can_be_cancelled():
    line = Line(answer=silent(Offer))
    client = line.client
    with pytest.raises(CallTimeout, match="cancel the room"):
        client.send(2, [2], 0, 4, last=True, timeout_s=0.01)
    client.cancel(2, Half.SOURCE)
    assert [cancel.room for cancel in line.of(Cancel)] == [2]
    line.lose()
    line.agent(epoch=2)
    assert line.of(Offer, Cancel) == []
    assert [each[:2] for each in ends(client)] == [(2, FAILED), (2, RELEASED)]


def test_a_room_that_a_new_agent_refuses_fails_with_its_reason_and_is_released():
    line = Line()
    client = line.client
    client.receive(1, ENDPOINT, [1], 0, 4)
    client.send(2, [1], 0, 4, last=False)
    client.send(2, [2], 4, 8, last=True)
    client.send(3, [1], 0, 4, last=True)
    line.lose()
    line.agent(epoch=2, answer=refusing(Receive, Offer))
    assert ends(client) == [
        (1, FAILED, Reason.STALE_EPOCH),
        (1, RELEASED, Reason.NONE),
        (2, FAILED, Reason.STALE_EPOCH),
        (2, RELEASED, Reason.NONE),
    ]
    # A room that the agent has refused once is not offered partially.
    assert [(offer.room, offer.caches[0].first_token) for offer in line.of(Offer)] == [(2, 0), (3, 0)]
    assert (client.connected, client.open_count) == (True, 1)


def test_a_pool_that_a_new_agent_refuses_is_given_back_and_its_rooms_fail():
    line = Line()
    line.register(0, 71)
    line.client.send(1, [1], 0, 4, last=True)
    line.lose()
    line.agent(epoch=2, answer=refusing(RegisterPool, reason=Reason.UNSUPPORTED))
    assert (line.given_back, line.of(Offer)) == ([71], [])
    assert ends(line.client) == [(1, FAILED, Reason.UNSUPPORTED), (1, RELEASED, Reason.NONE)]
    assert line.client.connected


def test_a_new_agent_that_is_busy_is_told_again_after_its_hint_in_the_same_order():
    turns = []

    def answer(message):
        if isinstance(message, Offer):
            turns.append(message)
            if len(turns) % 2:
                return Refused(message.request, Reason.BUSY, "later", 10_000_000_000)
        return accept_all(message)

    line = Line()
    for chunk in range(3):
        line.client.send(1, [chunk], 4 * chunk, 4 * chunk + 4, last=chunk == 2)
    line.lose()
    line.agent(epoch=2, answer=answer)
    assert len(line.of(Offer)) == 1
    line.pass_s(30.0)
    assert line.client.connected
    assert [offer.caches[0].first_token for offer in line.of(Offer)] == [0, 0, 4, 4, 8, 8]


def test_an_agent_that_is_lost_while_it_hears_what_is_open_leaves_it_to_the_next_one():
    line = Line()
    for room in (1, 2, 3):
        line.client.send(room, [room], 0, 4, last=True)
    line.lose()
    line.agent(epoch=2, answer=silent(Offer, unless=[1]))
    assert ([offer.room for offer in line.of(Offer)], line.client.connected) == ([1, 2], False)
    line.lose()
    line.agent(epoch=3)
    assert [offer.room for offer in line.of(Offer)] == [1, 2, 3]
    assert (line.client.connected, line.client.open_count, line.client.poll()) == (True, 3, [])


def test_no_pages_are_kept_of_what_has_ended_and_nothing_of_what_was_released():
    line = Line(answer=silent(Offer))
    call = line.offer(1)
    line.say(event(DONE, 1), Accepted(call.number))  # the end comes before the answer
    ledger = line.core.ledger
    assert (ledger.replay(), len(ledger)) == ([], 1)
    line.say(event(FAILED, 1), event(RELEASED, 1), event(RELEASED, 1))
    assert [each[:2] for each in ends(line.client)] == [(1, DONE), (1, RELEASED)]
    assert (len(ledger), ledger.stale_event_count) == (0, 2)


def test_events_that_nobody_takes_are_limited_and_the_oldest_are_dropped(monkeypatch):
    monkeypatch.setattr(core, "EVENTS_MAX", 2)
    line = Line()
    for room in (1, 2, 3):
        line.client.send(room, [room], 0, 4, last=True)
        line.say(event(DONE, room))
    assert (line.client.poll(), line.client.dropped_event_count) == ([event(DONE, 2), event(DONE, 3)], 1)


# -- pools and the end ---------------------------------------------------------------------------------------------


def test_a_pool_is_taken_back_only_when_the_agent_says_so():
    line = Line(answer=lambda m: None if isinstance(m, UnregisterPool) else accept_all(m))
    line.register(1, 71)
    with pytest.raises(ArgumentError, match="registered already"):
        line.register(1, 72)
    call = line.begin(UnregisterPool(line.core.next_number(), 1))
    assert (call.settled, line.given_back) == (False, [])
    line.say(Accepted(call.number))
    assert (call.settled, line.given_back) == (True, [71])
    with pytest.raises(PoolRefused, match="cache 1"):
        line.client.unregister_pool(1)
    assert isinstance(line.register(1, 73).answer, Accepted)


def test_a_pool_on_its_way_out_when_the_agent_is_lost_is_free_once_a_new_one_is_there():
    line = Line(answer=lambda m: None if isinstance(m, UnregisterPool) else accept_all(m))
    line.register(0, 71)
    line.client.send(1, [1], 0, 4, last=True)
    call = line.begin(UnregisterPool(line.core.next_number(), 0))
    line.lose()
    assert (call.settled, line.given_back) == (False, [])
    line.agent(epoch=2)
    assert (isinstance(call.answer, Accepted), line.given_back) == (True, [71])
    assert (line.client.connected, line.of(RegisterPool, Offer, UnregisterPool)) == (True, [])
    assert [each[:2] for each in ends(line.client)] == [(1, FAILED), (1, RELEASED)]


def test_a_closed_client_gives_its_pools_back_answers_no_call_and_dials_no_more():
    line = Line(answer=silent(Offer))
    line.register(0, 71)
    call = line.offer(1)
    line.client.close()
    dials = len(line.dials_s)
    line.pass_s(10.0)
    assert (call.settled, call.answer, line.given_back, len(line.dials_s)) == (True, None, [71], dials)
    for late in (lambda: line.offer(2), lambda: line.client.unregister_pool(0), line.client.poll):
        with pytest.raises(ClientClosed):
            late()
