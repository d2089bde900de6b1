"""Tests the client's calls and the resulting messages to the agent, without a socket between the two."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import msgspec
import pytest
from fake_agent import accept_all
from line import Line, agent_and_client
from scene import DONE, ENDPOINT, FAILED, LAYOUT, RELEASED, event, told

from longshore_client import (
    ArgumentError,
    Busy,
    CallTimeout,
    ClientClosed,
    Half,
    Parallel,
    Reason,
    RoomError,
    RoomEvent,
    RoomEventKind,
    TargetMemory,
    WaitTimeout,
    pool_geometry,
)
from longshore_client.ledger import Call, HalfKey, Ledger, Resume
from longshore_client.pages import split_claim
from longshore_wire.bindings import Binding
from longshore_wire.engine_messages import (
    ENGINE_MESSAGE_BYTES_MAX,
    PAGES_PER_MESSAGE_MAX,
    TO_AGENT,
    Ask,
    CachePages,
    Cancel,
    Endpoint,
    EndpointUpdate,
    Offer,
    RankAddress,
    Receive,
    Refused,
    RegisterPool,
)


def test_importing_the_client_loads_of_wire_what_the_engine_link_needs_and_no_planner():
    code = "import longshore_client, sys; print(*(name for name in sys.modules if name.startswith('longshore_wire.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("longshore_wire.") for name in done.stdout.split()}
    assert loaded == {"addresses", "bindings", "codec", "engine_messages", "errors", "layout", "names"}


# -- offers and claims ---------------------------------------------------------------------------------------------


@pytest.mark.shows("argument.send.{room,pages,first_token,end_token}", "argument.receive.{room,endpoint,pages}")
def test_an_offer_and_a_claim_arrive_as_they_were_made():
    agent, client = agent_and_client()
    client.send(2**64 - 1, [5, 6, 7], 2, 11, last=True)
    client.receive(9, ENDPOINT, b"\x01\0\0\0\x02\0\0\0", 4, 12)
    packed = b"\x05\0\0\0\x06\0\0\0\x07\0\0\0"
    assert told(agent, Offer) == [Offer(0, 2**64 - 1, (CachePages(0, 2, 11, len(packed) // 4, packed),), True)]
    (claim,) = told(agent, Receive)
    assert (claim.room, claim.endpoint, claim.caches[0].first_token, claim.caches[0].end_token) == (9, ENDPOINT, 4, 12)
    assert (claim.caches[0].page_count, claim.digest) == (2, False)
    assert client.open_count == 2


@pytest.mark.shows("argument.ask.{room,endpoint,capability}")
def test_an_ask_arrives_as_it_was_made_and_its_answer_is_an_event_once():
    agent, client = agent_and_client()
    client.ask(9, ENDPOINT, capability=b"secret")
    (ask,) = told(agent, Ask)
    assert (ask.room, ask.endpoint, ask.binding) == (9, ENDPOINT, Binding(b"", b"secret"))
    assert client.open_count == 1
    offered = RoomEvent(Half.TARGET, ENDPOINT.instance, 9, RoomEventKind.OFFERED)
    agent.say(offered, offered)
    assert client.poll() == [offered]
    with pytest.raises(RoomError, match="claimed already"):
        client.ask(9, ENDPOINT)


def test_a_claim_takes_the_place_of_its_ask_also_at_the_next_agent():
    agent, client = agent_and_client()
    client.ask(9, ENDPOINT)
    agent.lose()
    agent.agent(epoch=2)
    assert len(told(agent, Ask)) == 1
    client.receive(9, ENDPOINT, [1, 2], 4, 12)
    with pytest.raises(RoomError, match="claimed already"):
        client.receive(9, ENDPOINT, [1, 2], 4, 12)
    agent.lose()
    agent.agent(epoch=3)
    assert (len(told(agent, Ask)), len(told(agent, Receive)), client.open_count) == (0, 1, 1)
    # What an earlier agent said of the ask is late now.
    agent.say(RoomEvent(Half.TARGET, ENDPOINT.instance, 9, RoomEventKind.OFFERED))
    assert client.poll() == []


def test_a_cancelled_ask_is_not_told_that_its_room_is_offered():
    agent, client = agent_and_client()
    client.ask(9, ENDPOINT)
    client.cancel(9, Half.TARGET)
    failed = RoomEvent(Half.TARGET, ENDPOINT.instance, 9, RoomEventKind.FAILED, Reason.CANCELLED)
    agent.say(RoomEvent(Half.TARGET, ENDPOINT.instance, 9, RoomEventKind.OFFERED), failed)
    assert client.poll() == [failed]


def test_a_refused_claim_leaves_its_ask_open_until_it_is_claimed_or_cancelled():
    refused = []

    def answer(message):
        if isinstance(message, Receive) and refused:
            return Refused(message.request, Reason.PAGE_OUT_OF_RANGE, "page 99")
        return accept_all(message)

    line = Line(answer=answer)
    line.client.ask(9, ENDPOINT)
    refused.append(True)
    with pytest.raises(RoomError, match="page 99"):
        line.client.receive(9, ENDPOINT, [99, 2], 4, 12)
    assert line.client.open_count == 1
    refused.clear()
    line.client.receive(9, ENDPOINT, [1, 2], 4, 12)
    assert line.client.open_count == 1


def test_a_claim_that_asks_for_digests_says_so():
    agent, client = agent_and_client()
    client.receive(9, ENDPOINT, [1, 2], 4, 12, digest=True)
    assert [claim.digest for claim in agent.of(Receive)] == [True]


def test_host_memory_without_a_host_layout_is_refused_by_name_before_anything_is_sent():
    agent, client = agent_and_client()
    with pytest.raises(ArgumentError, match="memory is HOST: give connect the host_layout"):
        client.register_pool(0, pool_geometry(LAYOUT, 2), [0], memory=TargetMemory.HOST)
    with pytest.raises(ArgumentError, match="memory is HOST: give connect the host_layout"):
        client.receive(9, ENDPOINT, [1, 2], 4, 12, memory=TargetMemory.HOST)
    assert (len(agent.of(RegisterPool)), len(agent.of(Receive)), client.open_count) == (0, 0, 0)


def test_long_lists_are_cut_at_pages_and_only_the_final_part_is_last():
    count = 2 * PAGES_PER_MESSAGE_MAX + 5
    pages = list(range(count, 0, -1))
    agent, client = agent_and_client()
    client.send(7, pages, 3, 4 * count - 1, last=True)
    offers = agent.of(Offer)
    bounds = [3, 4 * PAGES_PER_MESSAGE_MAX, 8 * PAGES_PER_MESSAGE_MAX, 4 * count - 1]
    assert [(o.caches[0].first_token, o.caches[0].end_token) for o in offers] == list(pairwise(bounds))
    assert [o.last for o in offers] == [False, False, True]
    assert b"".join(o.caches[0].pages for o in offers) == b"".join(page.to_bytes(4, "little") for page in pages)
    client.receive(8, ENDPOINT, pages, 3, 4 * count - 1)
    claims = agent.of(Receive)
    assert len({claim.request for claim in claims}) == 1
    assert {claim.caches[0].page_count for claim in claims} == {count}
    assert [claim.caches[0].page_offset for claim in claims] == [0, PAGES_PER_MESSAGE_MAX, 2 * PAGES_PER_MESSAGE_MAX]
    assert b"".join(claim.caches[0].pages for claim in claims) == b"".join(o.caches[0].pages for o in offers)


@pytest.mark.parametrize(
    "counts", [(8192, 1), (8192, 8192), (8191, 8192), (16384, 5), (0, 8192), (8192, 0), (1, 0, 20_000)]
)
def test_lists_of_several_caches_are_cut_in_order_and_no_part_of_a_list_is_empty(counts):
    whole = Receive(1, 9, ENDPOINT, ())
    lists = [CachePages(at, 0, 4 * count, count, bytes(4 * count)) for at, count in enumerate(counts)]
    parts = [part for message in split_claim(whole, lists) for part in message.caches]
    assert all(len(TO_AGENT.encode(message)) <= ENGINE_MESSAGE_BYTES_MAX for message in split_claim(whole, lists))
    for each in lists:
        own = [part for part in parts if part.cache == each.cache]
        assert b"".join(part.pages for part in own) == each.pages
        assert [part.page_offset for part in own] == [sum(len(p.pages) // 4 for p in own[:n]) for n in range(len(own))]
        assert all(part.pages for part in own) or len(own) == 1
    assert [part.cache for part in parts] == sorted(part.cache for part in parts)


def test_a_send_of_other_tokens_resumes_no_earlier_one():
    ledger, key = Ledger(), HalfKey(Half.SOURCE, "p", 1)
    offer = Offer(1, 1, (CachePages(0, 0, 4, 1, bytes(4)),), False)
    ledger.sent(key, Call((offer,), key=key))
    for ranges, count in ((((0, 0, 8), (1, 0, 4)), 0), (((0, 0, 8), (1, 0, 8)), 3)):
        ledger.stopped(key, Resume(((0, 0, 8), (1, 0, 8)), False, 3))
        assert ledger.resumed(key, ranges, last=False) == count


def test_a_claim_with_a_thousand_ranks_still_fits_its_messages():
    layout = msgspec.structs.replace(LAYOUT, parallel=Parallel(tp=1024))
    ranks = tuple(RankAddress(n, f"100.100.{100 + n // 100}.{100 + n % 100}:30000", 2**63, 2**56) for n in range(1024))
    pages = list(range(20_000))
    agent, client = agent_and_client()
    client.receive(1, Endpoint("prefill-0", layout, ranks), pages, 0, 80_000)
    claims = agent.of(Receive)
    assert len(claims) > 3
    assert b"".join(c.caches[0].pages for c in claims) == b"".join(page.to_bytes(4, "little") for page in pages)


def test_an_empty_last_chunk_and_a_full_hit_may_be_empty():
    agent, client = agent_and_client()
    client.send(1, [], 8, 8, last=True)
    client.receive(2, ENDPOINT, [], 8, 8)
    assert told(agent, Offer) == [Offer(0, 1, (CachePages(0, 8, 8, 0, b""),), True)]
    assert [(c.caches[0].page_count, c.caches[0].pages) for c in agent.of(Receive)] == [(0, b"")]


def test_pages_and_tokens_that_do_not_fit_are_refused_before_anything_is_sent():
    agent, client = agent_and_client()
    for pages, first, end, text in [
        ([1, 2], 0, 9, "2 pages for tokens"),
        ([1], 5, 4, "not a range"),
        ([], 4, 4, "only `last`"),
        ([2**31], 0, 4, "int32"),
        (["a"], 0, 4, "int32"),
        (b"abc", 0, 4, "3 bytes"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            client.send(1, pages, first, end, last=False)
    with pytest.raises(ArgumentError, match="room is"):
        client.send(2**64, [1], 0, 4, last=False)
    assert agent.of(Offer) == []
    assert client.open_count == 0


def test_a_refused_offer_is_a_typed_error_with_the_agents_reason():
    def answer(message):
        return Refused(message.request, Reason.TOKENS_OVERLAP, "the next begins at 8")

    _agent, client = agent_and_client(answer=answer)
    with pytest.raises(RoomError, match="the next begins at 8") as caught:
        client.send(1, [1], 0, 4, last=False)
    assert caught.value.reason is Reason.TOKENS_OVERLAP
    assert client.open_count == 0


def test_busy_carries_a_hint_and_the_same_call_again_sends_no_part_twice():
    count, refused = 2 * PAGES_PER_MESSAGE_MAX, []

    def answer(message):
        if isinstance(message, Offer) and message.last and not refused:
            refused.append(message)
            return Refused(message.request, Reason.BUSY, "64 offers wait", 250_000_000)
        return accept_all(message)

    agent, client = agent_and_client(answer=answer)
    with pytest.raises(Busy, match="64 offers wait") as caught:
        client.send(1, list(range(count)), 0, 4 * count, last=True)
    assert caught.value.retry_after_s == 0.25
    assert client.open_count == 1
    client.send(1, list(range(count)), 0, 4 * count, last=True)
    half = 4 * PAGES_PER_MESSAGE_MAX
    assert [(o.caches[0].first_token, o.last) for o in agent.of(Offer)] == [(0, False), (half, True), (half, True)]


# -- events --------------------------------------------------------------------------------------------------------


def test_an_event_goes_to_the_wait_for_its_half_and_others_stay():
    agent, client = agent_and_client()
    client.send(7, [1], 0, 4, last=True)
    client.receive(7, ENDPOINT, [1], 0, 4)
    agent.say(event(DONE), event(FAILED, half=Half.TARGET, reason=Reason.PEER_LOST))
    assert client.wait(7, Half.TARGET, timeout_s=0) == event(FAILED, half=Half.TARGET, reason=Reason.PEER_LOST)
    assert client.wait(7, Half.SOURCE, "prefill-0", timeout_s=0) == event(DONE)
    assert client.poll() == []
    assert client.open_count == 2
    agent.say(event(RELEASED))
    assert client.wait(7, Half.SOURCE, kinds={RELEASED}, timeout_s=0) == event(RELEASED)
    assert client.open_count == 1
    with pytest.raises(RoomError, match="has failed") as caught:
        client.receive(7, ENDPOINT, [1], 0, 4)
    assert caught.value.reason is Reason.PEER_LOST


def test_poll_returns_events_in_order_and_none_twice():
    agent, client = agent_and_client()
    client.send(7, [1], 0, 4, last=True)
    agent.say(event(DONE), event(DONE), event(DONE, room=8), event(RELEASED), event(RELEASED), event(FAILED))
    client.send(9, [1], 0, 4, last=True)  # its answer comes behind the events
    assert client.poll() == [event(DONE), event(RELEASED)]
    assert client.poll() == []


@pytest.mark.shows("argument.wait.timeout_s")
def test_a_wait_that_gets_nothing_is_a_typed_error():
    _, client = agent_and_client()
    with pytest.raises(WaitTimeout, match="room 7: none of DONE, FAILED"):
        client.wait(7, Half.SOURCE, timeout_s=0.01)


def test_cancel_only_asks_and_a_claim_that_is_not_open_needs_none():
    agent, client = agent_and_client()
    client.cancel(5, Half.TARGET)
    client.receive(7, ENDPOINT, [1], 0, 4)
    client.cancel(7, Half.TARGET)
    assert told(agent, Cancel) == [Cancel(0, Half.TARGET, "prefill-0", 7)]
    assert client.open_count == 1
    assert client.poll() == []
    agent.say(event(FAILED, half=Half.TARGET, reason=Reason.CANCELLED), event(RELEASED, half=Half.TARGET))
    client.wait(7, Half.TARGET, kinds={RELEASED}, timeout_s=0)
    assert client.open_count == 0


def test_cancel_of_a_room_that_was_never_sent_is_told_and_no_event_follows():
    agent, client = agent_and_client()
    client.cancel(5, Half.SOURCE)
    assert told(agent, Cancel) == [Cancel(0, Half.SOURCE, "prefill-0", 5)]
    assert (client.open_count, client.poll()) == (0, [])


@pytest.mark.shows("argument.endpoint.timeout_s")
def test_the_endpoint_is_returned_once_every_rank_is_there():
    agent, client = agent_and_client()
    agent.say(EndpointUpdate(msgspec.structs.replace(ENDPOINT, ranks=ENDPOINT.ranks[:1])))
    client.send(7, [1], 0, 4, last=True)
    with pytest.raises(WaitTimeout, match="1 of 2 ranks"):
        client.endpoint(0.01)
    agent.say(EndpointUpdate(ENDPOINT))
    assert client.endpoint(0) == ENDPOINT
    client.close()
    with pytest.raises(ClientClosed, match="endpoint"):
        client.endpoint(0)


def test_a_half_is_open_from_its_offer_to_its_release():
    agent, client = agent_and_client()
    assert not client.is_open(7, Half.SOURCE, "prefill-0")
    client.send(7, [1], 0, 4, last=True)
    assert client.is_open(7, Half.SOURCE, "prefill-0")
    assert not client.is_open(7, Half.TARGET, "prefill-0")
    agent.say(event(DONE), event(RELEASED))
    assert not client.is_open(7, Half.SOURCE, "prefill-0")


def test_a_half_that_the_agent_refuses_after_its_caller_gave_up_is_not_open():
    agent, client = agent_and_client(answer=lambda message: None)
    with pytest.raises(CallTimeout):
        client.send(7, [1], 0, 4, last=True, timeout_s=0.05)
    assert client.is_open(7, Half.SOURCE, "prefill-0")
    (offer,) = agent.of(Offer)
    agent.say(Refused(offer.request, Reason.UNKNOWN_POOL, "no pool"))
    assert not client.is_open(7, Half.SOURCE, "prefill-0")
