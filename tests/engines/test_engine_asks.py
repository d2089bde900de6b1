"""Tests what a prefill rank answers decode ranks that ask for a prompt: before it knows it, while it has it, and after."""

from __future__ import annotations

import pytest
from scene import ENDPOINT

from longshore_client import ArgumentError
from longshore_engines import asks
from longshore_engines.asks import (
    Ask,
    Asker,
    Asks,
    Decline,
    FirstToken,
    Grant,
    Left,
    ToGrant,
    ToTell,
    frames_of,
    message_of,
)

ROWS = (b"token", b"logprob")
FIRST, SECOND = Asker("10.0.0.2", 7000, 1), Asker("10.0.0.3", 7000, 9)


def ask(asker, prompt=5, version=asks.VERSION):
    return Ask(version, asker.ask, prompt, asker.host, asker.port)


def test_who_asks_before_prefill_knows_the_prompt_is_answered_when_it_does():
    book = Asks()
    assert book.asked(ask(FIRST)) == []
    assert book.opened(5) == (5, [ToGrant(FIRST, 5)])
    assert book.asked(ask(SECOND)) == [ToGrant(SECOND, 5)]
    assert book.sampled(5, ROWS) == [ToTell(FIRST, FirstToken(1, ROWS)), ToTell(SECOND, FirstToken(9, ROWS))]


def test_who_asks_after_the_first_token_gets_both():
    book = Asks()
    book.opened(5)
    book.sampled(5, ROWS)
    assert book.asked(ask(FIRST)) == [ToGrant(FIRST, 5), ToTell(FIRST, FirstToken(1, ROWS))]


def test_an_ask_that_is_repeated_is_answered_again_and_counts_once():
    book = Asks()
    assert book.asked(ask(FIRST)) == book.asked(ask(FIRST)) == []
    assert book.opened(5) == (5, [ToGrant(FIRST, 5)])
    assert book.asked(ask(FIRST)) == [ToGrant(FIRST, 5)]
    assert book.sampled(5, ROWS) == [ToTell(FIRST, FirstToken(1, ROWS))]
    assert book.asked(ask(FIRST)) == [ToGrant(FIRST, 5), ToTell(FIRST, FirstToken(1, ROWS))]


def test_a_number_that_is_used_again_gets_another_room_which_every_rank_finds():
    ranks = Asks(), Asks()
    rooms = []
    for _ in range(3):
        found = {book.opened(5)[0] for book in ranks}
        assert len(found) == 1
        rooms += found
        for book in ranks:
            book.closed(5, rooms[-1], "")
    assert rooms[0] == 5
    assert len(set(rooms)) == 3


def test_the_end_of_an_earlier_prompt_of_the_same_number_does_not_end_the_later_one():
    book = Asks()
    earlier, _ = book.opened(5)
    later, _ = book.opened(5)
    assert book.closed(5, earlier, "it failed") == []
    assert book.asked(ask(FIRST)) == [ToGrant(FIRST, later)]


def test_a_failure_is_told_to_who_has_asked_and_to_who_asks_later():
    book = Asks()
    room, _ = book.opened(5)
    book.asked(ask(FIRST))
    assert book.closed(5, room, "out of memory") == [ToTell(FIRST, Decline(1, "out of memory"))]
    assert book.asked(ask(SECOND)) == [ToTell(SECOND, Decline(9, "out of memory"))]


def test_after_a_success_an_ask_waits_for_the_next_prompt_of_the_number():
    book = Asks()
    room, _ = book.opened(5)
    book.closed(5, room, "")
    assert book.asked(ask(FIRST)) == []
    again, replies = book.opened(5)
    assert replies == [ToGrant(FIRST, again)]


def test_who_leaves_names_the_room_to_cancel_only_if_it_has_asked_for_it():
    book = Asks()
    room, _ = book.opened(5)
    book.asked(ask(FIRST))
    assert book.left(Left(5, SECOND.host, SECOND.port, "aborted")) is None
    assert book.left(Left(5, FIRST.host, FIRST.port, "aborted")) == room


def test_who_leaves_before_prefill_knows_the_prompt_is_not_answered():
    book = Asks()
    book.asked(ask(FIRST))
    book.asked(ask(SECOND))
    assert book.left(Left(5, FIRST.host, FIRST.port, "aborted")) is None
    assert book.opened(5) == (5, [ToGrant(SECOND, 5)])


def test_another_version_is_declined_by_name():
    ((asker, message),) = Asks().asked(ask(FIRST, version=asks.VERSION + 1))
    assert asker == FIRST
    assert f"version {asks.VERSION + 1}" in message.text


def test_the_oldest_ask_is_declined_when_too_many_wait(monkeypatch):
    monkeypatch.setattr(asks, "WAITING_MAX", 1)
    book = Asks()
    book.asked(ask(FIRST, prompt=5))
    ((asker, message),) = book.asked(ask(SECOND, prompt=6))
    assert asker == FIRST
    assert "check the router" in message.text
    assert book.opened(6) == (6, [ToGrant(SECOND, 6)])


def test_failures_and_uses_are_forgotten_after_a_limit(monkeypatch):
    monkeypatch.setattr(asks, "REMEMBERED_MAX", 1)
    book = Asks()
    for prompt in (5, 6):
        room, _ = book.opened(prompt)
        book.closed(prompt, room, "it failed")
    assert book.asked(ask(FIRST, prompt=5)) == []
    assert (len(book._failures), len(book._uses)) == (1, 1)


@pytest.mark.parametrize(
    "message",
    [
        ask(FIRST),
        Left(5, "10.0.0.2", 7000, "aborted"),
        Grant(1, 5, "NHD", ENDPOINT),
        FirstToken(1, ROWS),
        Decline(1, "no"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive_their_bytes(message):
    assert message_of(frames_of(message, ()), ()) == message


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", frames_of(ask(FIRST), ())[1][:-1], b"\x00" * (asks.MESSAGE_BYTES_MAX + 1)]
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(ArgumentError, match="a peer's message"):
        message_of([asks.TAG, data], ())


@pytest.mark.parametrize("frames", [[], [asks.TAG], [b"other", b"message"]])
def test_frames_of_the_engine_are_left_to_it(frames):
    assert message_of(frames, [OLD_KEY]) is None


OLD_KEY, NEW_KEY = b"o" * 32, b"n" * 32


@pytest.mark.parametrize(
    ("theirs", "ours", "is_taken"),
    [
        ([OLD_KEY], [OLD_KEY], True),
        # While keys are replaced, one side has only those of the revision before.
        ([OLD_KEY], [NEW_KEY, OLD_KEY], True),
        ([NEW_KEY, OLD_KEY], [OLD_KEY], True),
        ([NEW_KEY], [OLD_KEY], False),
        ([], [OLD_KEY], False),
        ([OLD_KEY], [], True),
    ],
)
def test_only_an_engine_of_the_deployment_is_heard(theirs, ours, is_taken):
    frames = frames_of(ask(FIRST), theirs)
    if is_taken:
        assert message_of(frames, ours) == ask(FIRST)
    else:
        with pytest.raises(ArgumentError, match="no seal of this deployment"):
            message_of(frames, ours)


def test_a_seal_is_of_one_message():
    (_, _, seal), (tag, data) = frames_of(ask(FIRST), [OLD_KEY]), frames_of(ask(SECOND), ())
    with pytest.raises(ArgumentError, match="no seal"):
        message_of([tag, data, seal], [OLD_KEY])


def test_the_processes_of_one_engine_have_one_key():
    environment, other = {}, {}
    assert asks.own_key(environment) == asks.own_key(environment) != asks.own_key(other)
