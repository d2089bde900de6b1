"""Tests the scheduler's side of a connector: which requests are handed out, claimed, withdrawn or failed."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import struct
from dataclasses import replace

import msgspec
import pytest
from scene import ENDPOINT

from longshore_client import ArgumentError, Half
from longshore_engines.handover import (
    KEY,
    LIFE,
    RELEASE,
    ROOM,
    Ask,
    Claim,
    Fail,
    Handover,
    Offer,
    Prompt,
    ReportSent,
    TakeBack,
    Withdraw,
    handover_of,
    packed_handover,
)
from longshore_engines.requests import AGENT_AWAY_MAX_S, ENDPOINT_AGE_MAX_S, ROOM_BYTES, PageGroup, RequestBook
from longshore_wire.bindings import Binding
from longshore_wire.engine_messages import RankAddress

BOTH = (Half.SOURCE, Half.TARGET)
PAGE = 32
ONE_GROUP = (PageGroup(PAGE),)


class Book(RequestBook):
    """A book that is given prompts by their lengths. All of its prompts begin in the same way."""

    def allocated(self, request_id, parameters, pages, prompt, external_tokens):
        made = Prompt(prompt, range(prompt)) if isinstance(prompt, int) else prompt
        super().allocated(request_id, parameters, by_group(pages), made, external_tokens)

    def computed(self, request_id, pages, end_token):
        super().computed(request_id, by_group(pages), end_token)


def by_group(pages):
    """Return pages by group; a list of numbers is of the only one."""
    return pages if pages and not isinstance(pages[0], int) else [pages]


def secret(number):
    """Return the capability of the `number`th room."""
    return bytes([number]) * 16


def bound(number, length=70):
    """Return the binding of the `number`th room, of a prompt of this length."""
    return Binding(Prompt(length, range(length)).digest(length), secret(number))


def book(
    roles=BOTH,
    *,
    content="attention float32",
    first_room=9,
    endpoint=ENDPOINT,
    recompute_after_s=math.inf,
    groups=ONE_GROUP,
    held_back=0,
):
    numbers, secrets = itertools.count(first_room), itertools.count(first_room)
    made = Book(
        groups,
        roles,
        lambda length: next(numbers).to_bytes(8, "little") if length == ROOM_BYTES else secret(next(secrets)),
        recompute_after_s,
        held_back,
    )
    made.introduced(BOTH, content)
    made.heard(endpoint, 0.0)
    return made


def computed(prefill, name="p", tokens=70, pages=(7, 3, 5, 6), parameters=None):
    """Let prefill compute a prompt in one step; return what its end returns."""
    parameters = parameters or {"do_remote_decode": True}
    length = tokens if isinstance(tokens, int) else tokens.length
    prefill.allocated(name, parameters, pages, tokens, 0)
    if name in prefill.computing:
        prefill.computed(name, pages, length)
    return prefill.finished(name, parameters, length, complete=True)


def forged(**fields):
    """Return a handover with a changed endpoint, as a client of the API may send it."""
    return packed_handover(Handover(1, 9, 70, msgspec.structs.replace(ENDPOINT, **fields), "attention float32"))


def handed_out(tokens=70, **options):
    """Return prefill's transfer parameters of a prompt."""
    return computed(book(**options), tokens=tokens, pages=list(range(9)))[1]


def test_a_prompt_that_decode_wants_is_offered_and_its_pages_are_kept_until_it_is_reported():
    prefill = book()
    kept, told = computed(prefill)
    assert kept
    assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
    found = handover_of(told)
    assert (found.room, found.tokens, found.endpoint) == (9, 70, ENDPOINT)
    # A fourth page holds the tokens generated after the prompt.
    assert prefill.take_orders() == (Offer("p", 9, (7, 3, 5), 0, 70, True, bound(9)), ReportSent("p", 9))
    assert prefill.take_orders() == ()


def test_whole_pages_are_offered_in_the_step_that_computes_them_and_the_rest_with_the_last():
    prefill = book()
    prefill.allocated("p", {"do_remote_decode": True}, [7, 3, 5], 90, 0)
    for end, offered in ((20, ()), (50, (Offer("p", 9, (7,), 0, 32, False, bound(9, 90)),)), (63, ())):
        prefill.computed("p", [7, 3], end)
        assert prefill.take_orders() == offered
    assert prefill.computing == ["p"]
    prefill.computed("p", [7, 3, 5], 90)
    assert prefill.take_orders() == (Offer("p", 9, (3, 5), 32, 90, True, bound(9, 90), is_next=True),)
    assert prefill.computing == []


def test_no_two_requests_get_the_same_room():
    prefill = book()
    rooms = {handover_of(computed(prefill, f"p{n}", 4, [n])[1]).room for n in range(5)}
    assert len(rooms) == 5


def test_a_router_names_the_room_and_decode_claims_it_by_the_handover_of_an_earlier_prompt():
    prefill, decode, earlier = book(), book(), handed_out(33)
    _, told = computed(prefill, parameters={"do_remote_decode": True, ROOM: 2**63 + 5})
    assert handover_of(told).room == 2**63 + 5
    assert prefill.take_orders()[0].room == 2**63 + 5
    assert told[LIFE] == earlier[LIFE]
    parameters = {**earlier, ROOM: 2**63 + 5}
    assert decode.matched("d", parameters, 70, 32, 0.0) is None
    assert decode.take_orders() == (Ask("d", 2**63 + 5, ENDPOINT),)
    decode.answered({"d"})
    assert decode.matched("d", parameters, 70, 32, 1.0) == 38
    decode.allocated("d", parameters, [11, 12, 13], 70, 38)
    assert decode.take_orders() == (Claim("d", 2**63 + 5, ENDPOINT, (12, 13), 32, 70, Binding(bound(9).prompt)),)


def test_a_prompt_whose_offer_a_rank_has_lost_is_not_handed_out_and_its_other_ranks_give_it_up():
    prefill = book()
    prefill.allocated("p", {"do_remote_decode": True}, [7, 3, 5], 70, 0)
    prefill.computed("p", [7, 3, 5], 40)
    prefill.lost({8})
    prefill.lost({9})
    prefill.computed("p", [7, 3, 5], 70)
    prefill.take_orders()
    assert prefill.finished("p", {"do_remote_decode": True}, 70, complete=True) == (True, None)
    assert prefill.take_orders() == (Withdraw("p"), ReportSent("p", 9))


def released(prefill, handover, name="r"):
    """Give prefill a request whose router gives a prompt back; return the orders that follow."""
    prefill.take_orders()
    prefill.arrived(name, {RELEASE: handover})
    return prefill.take_orders()


def test_a_router_that_shows_a_prompts_handover_gives_the_prompt_back_once():
    prefill = book()
    _, told = computed(prefill)
    assert released(prefill, told[KEY]) == (Withdraw("p"),)
    prefill.sent({"p"})
    assert released(prefill, told[KEY]) == ()


@pytest.mark.parametrize("what", ["another capability", "another room", "no handover", None])
def test_a_router_that_does_not_show_the_handover_of_a_lent_prompt_gives_nothing_back(what, caplog):
    prefill = book()
    found = handover_of(computed(prefill)[1])
    changes = {"another capability": {"binding": Binding(b"", bytes(16))}, "another room": {"room": 8}}
    handover = packed_handover(msgspec.structs.replace(found, **changes[what])) if what in changes else what
    assert released(prefill, handover) == ()
    assert "request r releases nothing" in caplog.text


@pytest.mark.parametrize("is_lent", [True, False])
def test_a_second_prompt_does_not_get_the_room_of_the_first_which_can_be_given_back(is_lent, caplog):
    prefill, named = book(), {"do_remote_decode": True, ROOM: 5}
    if is_lent:
        _, first = computed(prefill, "first", parameters=dict(named))
    else:
        prefill.allocated("first", dict(named), [7, 3, 5], 70, 0)
    _, second = computed(prefill, "second", parameters=dict(named))
    assert f"request second: kv_transfer_params.{ROOM} is that of another prompt" in caplog.text
    assert handover_of(second).room == 9
    if not is_lent:
        prefill.computed("first", [7, 3, 5], 70)
        _, first = prefill.finished("first", None, 70, complete=True)
    assert handover_of(first).room == 5
    prefill.sent({"second"})
    assert released(prefill, first[KEY]) == (Withdraw("first"),)
    # The number is free when its prompt's pages are the engine's again.
    prefill.sent({"first"})
    assert handover_of(computed(prefill, "third", parameters=dict(named))[1]).room == 5


def at_once():
    """Return the parameters of a prompt that both sides get at once."""
    return {**handed_out(33), ROOM: 2**63 + 5}


def test_a_prompt_that_prefill_may_not_have_begun_gets_no_pages_until_the_one_ask_for_it_is_answered():
    decode, parameters = book(), at_once()
    for now_s in range(5):
        assert decode.matched("d", parameters, 70, 32, now_s) is None
    decode.answered({"another"})
    assert decode.matched("d", parameters, 70, 32, 5.0) is None
    assert decode.take_orders() == (Ask("d", 2**63 + 5, ENDPOINT),)
    decode.answered({"d"})
    # The engine asks in each step until it has pages.
    assert [decode.matched("d", parameters, 70, 32, 6.0 + step) for step in range(3)] == [38, 38, 38]
    assert decode.take_orders() == ()


def test_a_prompt_whose_prefix_is_all_here_is_not_asked_for():
    decode, parameters = book(), at_once()
    assert decode.matched("d", parameters, 64, 64, 0.0) == 0
    assert decode.take_orders() == ()


def test_a_request_that_ends_while_it_asks_lets_prefill_release_its_pages():
    decode, parameters = book(), at_once()
    assert decode.matched("d", parameters, 70, 0, 0.0) is None
    assert decode.finished("d", parameters, 70, complete=False) == (False, None)
    assert decode.take_orders() == (
        Ask("d", 2**63 + 5, ENDPOINT),
        Claim("d", 2**63 + 5, ENDPOINT, (), 70, 70),
    )
    assert decode.matched("d", parameters, 70, 0, 1.0) == 0


@pytest.mark.shows("option.recompute_after_s")
def test_a_prompt_that_prefill_does_not_begin_in_time_is_computed_at_decode_if_that_is_wanted():
    decode, parameters = book(recompute_after_s=5.0), at_once()
    assert [decode.matched("d", parameters, 70, 0, now_s) for now_s in (1.0, 5.9, 6.1)] == [None, None, 0]
    assert decode.take_orders()[1:] == (Claim("d", 2**63 + 5, ENDPOINT, (), 70, 70),)
    decode.allocated("d", parameters, [11, 12, 13], 70, 0)
    decode.answered({"d"})
    assert decode.matched("d", parameters, 70, 0, 7.0) == 0
    assert decode.finished("d", parameters, 70, complete=True) == (False, None)
    assert decode.take_orders() == ()


def test_the_handover_of_an_earlier_prompt_is_recognised_as_of_another_life():
    other = ENDPOINT.__class__("prefill-0", ENDPOINT.layout, ENDPOINT.ranks[:1])
    # Decode finds a worker that was restarted at the same address.
    restarted = [msgspec.structs.replace(each, epoch=each.epoch + 1) for each in ENDPOINT.ranks]
    assert handed_out(endpoint=msgspec.structs.replace(ENDPOINT, ranks=tuple(restarted)))[LIFE] == handed_out()[LIFE]
    assert len({handed_out()[LIFE], handed_out(endpoint=other)[LIFE], handed_out(content="bfloat16")[LIFE]}) == 3


@pytest.mark.parametrize("room", ["7", -1, 2**64, True, 1.5])
def test_a_number_that_is_no_room_fails_the_load_and_prefill_chooses_its_own(room, caplog):
    prefill, decode, earlier = book(), book(), handed_out()
    computed(prefill, parameters={"do_remote_decode": True, ROOM: room})
    assert prefill.take_orders()[0].room == 9
    assert f"kv_transfer_params.{ROOM} is {room!r}" in caplog.text
    parameters = {**earlier, ROOM: room}
    assert decode.matched("d", parameters, 70, 0, 0.0) == 70
    decode.allocated("d", parameters, [11, 12, 13], 70, 70)
    (order,) = decode.take_orders()
    assert f"kv_transfer_params.{ROOM} is {room!r}" in order.text


def test_a_preempted_prompt_loses_its_room_and_is_offered_as_another():
    prefill, parameters = book(), {"do_remote_decode": True, ROOM: 5}
    prefill.allocated("p", parameters, [7, 3, 5], 70, 0)
    prefill.preempted("p")  # Nothing of it was offered: the room that decode waits for stays.
    prefill.allocated("p", parameters, [7, 3, 5], 70, 0)
    prefill.computed("p", [7, 3, 5], 64)
    prefill.preempted("p")
    assert prefill.take_orders() == (Offer("p", 5, (7, 3), 0, 64, False, Binding(bound(9).prompt)), TakeBack("p"))
    prefill.allocated("p", parameters, [1, 2, 4], 70, 0)
    prefill.computed("p", [1, 2, 4], 70)
    kept, told = prefill.finished("p", parameters, 70, complete=True)
    assert (kept, handover_of(told).room) == (True, 9)
    assert prefill.take_orders() == (Offer("p", 9, (1, 2, 4), 0, 70, True, bound(9)), ReportSent("p", 9))


def test_pages_of_a_prompt_that_ended_after_it_was_preempted_are_taken_back_too():
    prefill, parameters = book(), {"do_remote_decode": True}
    prefill.allocated("p", parameters, [7, 3, 5], 70, 0)
    prefill.computed("p", [7, 3, 5], 70)
    prefill.take_orders()
    assert prefill.finished("p", parameters, 70, complete=False) == (True, None)
    prefill.preempted("p")
    assert prefill.take_orders() == (Withdraw("p"), ReportSent("p", 9), TakeBack("p"))


@pytest.mark.parametrize("parameters", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": False}])
def test_a_request_without_a_wish_is_left_alone(parameters):
    alone = book()
    assert alone.matched("d", parameters, 70, 0, 0.0) == 0
    alone.allocated("r", parameters, [1, 2, 3], 70, 0)
    assert alone.finished("r", parameters, 70, complete=True) == (False, None)
    assert alone.take_orders() == ()


@pytest.mark.parametrize("computed_tokens", [0, 64, 70])
def test_an_aborted_prompt_is_not_handed_out_and_keeps_what_is_offered_until_it_is_reported(computed_tokens):
    prefill, parameters = book(), {"do_remote_decode": True}
    prefill.allocated("p", parameters, [1, 2, 3], 70, 0)
    if computed_tokens:
        prefill.computed("p", [1, 2, 3], computed_tokens)
    kept = computed_tokens > 0
    assert prefill.finished("p", parameters, 70, complete=False) == (kept, None)
    assert prefill.take_orders()[1:] == ((Withdraw("p"), ReportSent("p", 9)) if kept else ())
    assert prefill.computing == []


def test_a_prompt_that_is_aborted_before_it_got_pages_has_no_room():
    prefill = book()
    assert prefill.finished("p", {"do_remote_decode": True}, 70, complete=False) == (False, None)
    assert prefill.take_orders() == ()


def test_an_engine_that_only_consumes_hands_nothing_out():
    consumer = book((Half.TARGET,))
    assert consumer.matched("d", {"do_remote_decode": True}, 70, 0, 0.0) == 0
    assert computed(consumer) == (False, None)


def test_all_tokens_that_are_not_here_are_claimed_into_the_pages_behind_the_prefix():
    decode, parameters = book(), handed_out(70)
    assert decode.matched("d", parameters, 70, 32, 0.0) == 38
    decode.allocated("d", parameters, [11, 12, 13, 14], 70, 38)
    assert decode.take_orders() == (Claim("d", 9, ENDPOINT, (12, 13), 32, 70, bound(9)),)


def test_a_request_is_claimed_once_however_often_it_gets_pages():
    decode, parameters = book(), handed_out(70)
    decode.allocated("d", parameters, [11, 12, 13], 70, 70)
    decode.take_orders()
    decode.received({"d"})
    # The load is complete. Later the request is preempted and computes its prompt itself.
    assert decode.matched("d", parameters, 70, 0, 0.0) == 0
    decode.allocated("d", parameters, [11, 12, 13], 70, 0)
    assert decode.finished("d", parameters, 70, complete=True) == (False, None)
    assert decode.take_orders() == ()


def test_a_prompt_longer_than_what_prefill_computed_takes_what_there_is():
    decode, parameters = book(), handed_out(64)
    assert decode.matched("d", parameters, 90, 0, 0.0) == 64
    decode.allocated("d", parameters, [11, 12, 13], 90, 64)
    assert decode.take_orders() == (Claim("d", 9, ENDPOINT, (11, 12), 0, 64, bound(9, 64)),)


def test_a_request_that_needs_nothing_frees_the_pages_of_prefill():
    decode, parameters = book(), handed_out(70)
    decode.allocated("d", parameters, [11, 12, 13], 70, 0)
    assert decode.take_orders() == (Claim("d", 9, ENDPOINT, (), 70, 70, bound(9)),)


def test_a_request_that_ends_before_it_got_pages_frees_those_of_prefill():
    decode, parameters = book(), handed_out(70)
    assert decode.finished("d", parameters, 70, complete=False) == (False, None)
    assert decode.take_orders() == (Claim("d", 9, ENDPOINT, (), 70, 70, Binding(b"", secret(9))),)


def test_a_request_that_ends_while_it_loads_is_withdrawn_and_one_that_has_loaded_is_not():
    decode, first, second = book(), handed_out(70), handed_out(70)
    decode.allocated("d1", first, [11, 12, 13], 70, 70)
    decode.allocated("d2", second, [14, 15, 16], 70, 70)
    decode.take_orders()
    decode.received({"d2"})
    decode.finished("d1", first, 70, complete=False)
    decode.finished("d2", second, 70, complete=False)
    assert decode.take_orders() == (Withdraw("d1"),)


@pytest.mark.parametrize(
    "text",
    [
        None,
        5,
        "",
        "no base64!",
        base64.b64encode(b"no message").decode(),
        forged(ranks=(RankAddress(0, "slow.attacker.example:443", 5),)),
        forged(instance="prefill\x1b]0;owned\x07"),
        "A" * (2 << 20),
    ],
)
def test_what_is_no_handover_becomes_a_load_that_fails_and_no_error_in_the_scheduler(text):
    decode, parameters = book(), {"do_remote_prefill": True, KEY: text}
    assert decode.matched("d", parameters, 70, 0, 0.0) == 70
    decode.allocated("d", parameters, [11, 12, 13], 70, 70)
    (order,) = decode.take_orders()
    assert isinstance(order, Fail)
    assert f"kv_transfer_params.{KEY}" in order.text
    with pytest.raises(ArgumentError, match=KEY):
        handover_of(parameters)


def test_pages_that_would_mean_something_else_are_not_loaded_and_prefill_is_told():
    decode, parameters = book(), handed_out(content="attention bfloat16")
    decode.allocated("d", parameters, [11, 12, 13], 70, 70)
    order, freed = decode.take_orders()
    assert isinstance(order, Fail)
    assert "attention bfloat16" in order.text
    # Prefill must not wait for a claim that never comes.
    assert freed == Claim("d", 9, ENDPOINT, (), 70, 70, Binding(b"", secret(9)))


@pytest.mark.parametrize("prompt", [69, Prompt(70, range(1, 71)), Prompt(70, range(70), salt="of another user")])
def test_a_handover_of_another_prompt_is_not_loaded_and_its_room_is_left_to_its_own_request(prompt):
    decode, parameters = book(), handed_out()
    decode.allocated("d", parameters, [11, 12, 13], prompt, 70)
    (order,) = decode.take_orders()
    assert isinstance(order, Fail)
    assert "prompt" in order.text
    # vLLM reports the failed request again, as one that ended before it got pages.
    assert decode.finished("rejected", handed_out(), 1, complete=False) == (False, None)
    assert decode.take_orders() == ()


def test_a_prompt_without_token_ids_is_neither_handed_out_nor_loaded(caplog):
    embedded = Prompt(70, None)
    assert computed(book(), tokens=embedded) == (False, None)
    assert "the prompt has no token ids" in caplog.text
    decode, parameters = book(), handed_out()
    decode.allocated("d", parameters, [11, 12, 13], embedded, 70)
    assert "the prompt has no token ids" in decode.take_orders()[0].text


WHOLE = Prompt(5, [1, 2, 3, 2**32 - 1, 0], "adapter", "salt", ("image-1", "image-2"))


@pytest.mark.parametrize(
    "other",
    [
        replace(WHOLE, tokens=[1, 2, 3, 2**32 - 1, 1]),
        replace(WHOLE, tokens=[2, 1, 3, 2**32 - 1, 0]),
        replace(WHOLE, lora=""),
        replace(WHOLE, lora="adaptersalt", salt=""),
        replace(WHOLE, salt="salt2"),
        replace(WHOLE, multimodal=("image-2", "image-1")),
        replace(WHOLE, multimodal=("image-1",)),
        replace(WHOLE, multimodal=("image-1image-2",)),
    ],
)
def test_prompts_with_other_kv_have_other_digests(other):
    assert len(WHOLE.digest(5)) == 16
    assert other.digest(5) != WHOLE.digest(5)


def test_the_digest_is_of_the_first_tokens_and_of_their_number_whatever_holds_them():
    assert replace(WHOLE, length=6, tokens=(1, 2, 3, 2**32 - 1, 0, 7)).digest(5) == WHOLE.digest(5)
    assert WHOLE.digest(4) != WHOLE.digest(5)
    # Both engines, also of other releases and on other processors, must have the same.
    assert (
        Prompt(3, [1, 2, 70000]).digest(3).hex()
        == hashlib.sha256(b"longshore prompt 1\0" + struct.pack("<QIIIQQ", 3, 1, 2, 70000, 0, 0)).hexdigest()[:32]
    )
    with pytest.raises(ArgumentError, match="no uint32"):
        Prompt(1, [-1]).digest(1)


def test_an_engine_that_only_produces_fails_a_load():
    producer, parameters = book((Half.SOURCE,)), handed_out(70)
    assert producer.matched("d", parameters, 70, 0, 0.0) == 70
    producer.allocated("d", parameters, [1, 2, 3], 70, 70)
    (order,) = producer.take_orders()
    assert "kv_role" in order.text


def test_a_prompt_waits_until_the_ranks_have_spoken_of_their_agent_lately():
    prefill, parameters = book(), {"do_remote_decode": True}
    late_s = ENDPOINT_AGE_MAX_S + 0.1
    assert prefill.matched("d", parameters, 70, 0, late_s) is None
    prefill.heard(None, late_s)
    assert prefill.matched("d", parameters, 70, 0, late_s) == 0


def test_a_prompt_waits_for_an_agent_that_is_away_and_is_handed_out_by_the_one_that_comes():
    prefill, parameters = book(), {"do_remote_decode": True}
    prefill.heard(None, 10.0, away=True)
    assert prefill.matched("d", parameters, 70, 0, 10.0) is None
    other = ENDPOINT.__class__("prefill-0", ENDPOINT.layout, ENDPOINT.ranks[:1])
    prefill.heard(other, 12.0)
    assert prefill.matched("d", parameters, 70, 0, 12.0) == 0
    assert handover_of(computed(prefill, parameters=parameters)[1]).endpoint == other


def test_a_prompt_whose_agent_stays_away_is_computed_and_not_handed_out():
    prefill, parameters = book(), {"do_remote_decode": True}
    prefill.heard(None, 10.0, away=True)
    late_s = 10.0 + AGENT_AWAY_MAX_S + 1
    prefill.heard(None, late_s, away=True)
    assert prefill.matched("d", parameters, 70, 0, late_s) == 0
    assert computed(prefill, parameters=parameters) == (False, None)
    assert prefill.take_orders() == ()


def test_a_prompt_whose_agent_goes_away_while_it_is_computed_is_withdrawn():
    prefill, parameters = book(), {"do_remote_decode": True}
    prefill.allocated("p", parameters, [1, 2, 3], 70, 0)
    prefill.computed("p", [1, 2, 3], 70)
    prefill.heard(None, 10.0, away=True)
    assert prefill.finished("p", parameters, 70, complete=True) == (True, None)
    assert prefill.take_orders()[1:] == (Withdraw("p"), ReportSent("p", 9))


# -- engines with several groups of layers ------------------------------------------------------------------------------


WINDOW, SPARES = 40, 2
HYBRID = (PageGroup(PAGE), PageGroup(16, window=WINDOW), PageGroup(PAGE, is_state=True, spares=SPARES))


def hybrid(**options):
    return book(groups=HYBRID, held_back=1, **options)


def test_each_group_offers_its_own_pages_a_window_its_end_and_a_state_its_one_page_with_the_last_chunk():
    prefill = hybrid()
    # 100 tokens without the last one: the next token's window begins with token 99 - 40 + 1.
    prefill.allocated("p", {"do_remote_decode": True}, ((1, 2, 3, 4), (), (9,)), 99, 0)
    chunks = []
    for end, pages in (
        (40, ((1, 2), (11, 12, 13), (9, 8, 7))),
        (70, ((1, 2, 3), (0, 12, 13, 14, 15), (9, 8, 7))),
        (99, ((1, 2, 3, 4), (0, 0, 0, 14, 15, 16, 17), (9, 8, 7))),
    ):
        prefill.computed("p", pages, end)
        chunks += prefill.take_orders()
    assert [(chunk.groups, chunk.last, chunk.is_next) for chunk in chunks] == [
        ((((1,), 0, 32), ((), 60, 60), ((), 32, 32)), False, False),
        ((((2,), 32, 64), ((14,), 60, 64), ((), 64, 64)), False, True),
        ((((3, 4), 64, 99), ((15, 16, 17), 64, 99), ((9,), 0, 99)), True, True),
    ]


def test_a_window_of_pages_that_cannot_be_cut_begins_with_a_page():
    assert PageGroup(16, window=40, unit_tokens=16).held(range(7), 0, 99, 99) == ((3, 4, 5, 6), 48, 99)


def test_of_a_sequence_that_is_cut_into_chunks_the_next_tokens_chunk_is_held_which_may_have_no_token_yet():
    group = PageGroup(16, chunk=64)
    assert group.held(range(7), 0, 99, 99) == ((4, 5, 6), 64, 99)
    assert group.held(range(7), 80, 99, 99) == ((5, 6), 80, 99)
    assert group.held(range(8), 0, 128, 128) == ((), 128, 128)
    # Of an earlier chunk of prefill nothing.
    assert group.held(range(4), 0, 64, 99) == ((), 64, 64)


def test_decode_claims_all_but_the_last_token_in_every_group_and_each_state_whole():
    told = computed_hybrid()
    decode = hybrid()
    parameters = dict(told)
    assert decode.matched("d", parameters, 100, 32, 0.0) == 67
    pages = ((1, 2, 3, 4), (0, 0, 0, 14, 15, 16, 17), (9, 8, 7))
    decode.allocated("d", parameters, pages, 100, 67)
    (claim,) = decode.take_orders()
    assert claim.groups == (((2, 3, 4), 32, 99), ((14, 15, 16, 17), 60, 99), ((9,), 0, 99))


def computed_hybrid():
    """Return prefill's transfer parameters of a prompt of 100 tokens, of which it has computed 99."""
    return computed(hybrid(), tokens=99, pages=((1, 2, 3, 4), (0, 0, 0, 14, 15, 16, 17), (9, 8, 7)))[1]


def test_a_prompt_that_decode_needs_nothing_of_is_claimed_for_no_group():
    decode = hybrid()
    parameters = dict(computed_hybrid())
    assert decode.matched("d", parameters, 100, 99, 0.0) == 0
    decode.allocated("d", parameters, ((1,), (2,), (3,)), 100, 0)
    (claim,) = decode.take_orders()
    assert claim.groups == (((), 99, 99),) * 3


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_prompt_of_one_token_is_neither_asked_for_nor_claimed_by_an_engine_that_computes_the_last_one(tokens):
    decode = hybrid()
    parameters = dict(computed_hybrid()) | {ROOM: 5}
    assert decode.matched("d", parameters, tokens, 0, 0.0) == 0
    decode.allocated("d", parameters, ((1,), (2,), (3,)), tokens, 0)
    assert decode.take_orders() == ()


def test_a_prompt_of_which_prefill_has_computed_every_token_is_refused_where_its_state_would_have_taken_in_the_last():
    decode = hybrid()
    parameters = dict(computed(hybrid(), tokens=100, pages=((1, 2, 3, 4), range(7), (9, 8, 7)))[1])
    assert decode.matched("d", parameters, 100, 0, 0.0) == 99
    decode.allocated("d", parameters, ((1, 2, 3, 4), range(7), (9, 8, 7)), 100, 99)
    (refused,) = decode.take_orders()
    assert "of 100 tokens, and this one has 99" in refused.text


def test_prefill_shortens_prompts_for_decode_alone_and_only_where_a_state_or_window_moves():
    assert hybrid().shortened({"do_remote_decode": True, "longshore_whole": True}) == 0
    assert hybrid().shortened({"do_remote_decode": True}) == 1
    assert hybrid().shortened({"do_remote_prefill": True}) == 0
    assert hybrid().shortened(None) == 0
    assert hybrid(roles=(Half.TARGET,)).shortened({"do_remote_decode": True}) == 0
    assert book().shortened({"do_remote_decode": True}) == 0


def test_a_prompt_that_is_preempted_before_its_window_begins_is_offered_from_its_first_page_again():
    groups = (PageGroup(16, window=20),)
    prefill = book(groups=groups, held_back=1)
    prefill.allocated("p", {"do_remote_decode": True}, ((1,),), 99, 0)
    prefill.computed("p", ((1, 2, 3, 4),), 64)
    assert prefill.take_orders() == ()
    prefill.preempted("p")
    prefill.computed("p", (range(20, 27),), 99)
    (offer,) = prefill.take_orders()
    assert (offer.groups, offer.is_next) == ((((25, 26), 80, 99),), False)


def test_a_window_that_begins_after_the_first_chunk_may_be_the_first_group():
    prefill = book(groups=(PageGroup(16, window=20), PageGroup(16)), held_back=1)
    prefill.allocated("p", {"do_remote_decode": True}, ((1,), (1,)), 99, 0)
    for end in (48, 99):
        prefill.computed("p", (range(1, 8), range(11, 18)), end)
    first, last = prefill.take_orders()
    # Each offer goes on where the one before it ended.
    assert (first.groups, last.groups) == (
        (((), 80, 80), ((11, 12, 13), 0, 48)),
        (((6, 7), 80, 99), ((14, 15, 16, 17), 48, 99)),
    )


def test_a_prompt_after_which_a_chunk_begins_offers_the_chunks_last_page_which_decode_does_not_claim():
    groups = (PageGroup(16), PageGroup(16, chunk=64, unit_tokens=16))
    prefill, decode = book(groups=groups, held_back=1), book(groups=groups, held_back=1)
    prefill.allocated("p", {"do_remote_decode": True}, ((1,), (1,)), 128, 0)
    for end in (64, 128):
        prefill.computed("p", (range(1, 9), range(11, 19)), end)
    _, told = prefill.finished("p", {"do_remote_decode": True}, 128, complete=True)
    first, last, *_ = prefill.take_orders()
    assert (first.groups[1], last.groups[1]) == (((), 128, 128), ((18,), 112, 128))
    # Decode computes the token after these.
    assert decode.matched("d", told, 129, 0, 0.0) == 128
    decode.allocated("d", told, (range(21, 30), [0] * 8 + [39]), 129, 128)
    (claim,) = decode.take_orders()
    assert claim.groups == ((tuple(range(21, 29)), 0, 128), ((), 128, 128))


def test_a_prompt_without_ids_is_computed_here_at_once_also_if_its_router_has_named_the_room():
    decode = book()
    parameters = dict(handed_out()) | {ROOM: 5}
    assert decode.matched("d", parameters, 70, 0, 0.0, has_ids=False) == 0
    (claim,) = decode.take_orders()
    assert (claim.room, claim.pages, parameters["do_remote_prefill"]) == (5, (), False)
