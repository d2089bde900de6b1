"""Invalid requests to real agents: each ends as `fault_table` says, is counted, and harms no other room."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from agent_fleet import Fleet
from agent_world import DEPLOYMENT, EVENT_LIMIT_S, MODEL, Agent, Engine, Request, wait_for, wait_for_none
from fault_judge import WrongJudge, carries
from fault_table import DONE, NOTHING, failed, refused, wrong
from process_ledger import GROWTH_BYTES_MAX, Holdings, holdings, holdings_of

from longshore_agent.control import curve
from longshore_client import HelloRefused, KVLayout, LayoutError, LongshoreError, ModelShape, Parallel, Reason, connect
from longshore_wire.addresses import main_address
from longshore_wire.engine_messages import (
    ENGINE_MESSAGE_BYTES_MAX,
    ENGINE_PROTOCOL_VERSION,
    TO_AGENT,
    TO_ENGINE,
    Half,
    Hello,
    RoomEventKind,
)
from longshore_wire.names import room_name
from longshore_wire.peer_messages import PEER, PROTOCOL_VERSION, Attach, Ping, Refuse

GIB = 1 << 30
# The message is never in memory as a whole: the kernel provides zero pages on demand.
ZEROS = bytes(GIB)
# An answer is waited for this long, and one that must not come.
ANSWER_LIMIT_MS, SILENCE_MS = 60_000, 300
OTHER_MODEL = ModelShape.kv(9, 12, 32, 4)


@pytest.fixture(scope="module")
def fleet(fleet_of) -> Fleet:
    """The fleet whose links are encrypted. At the first agent `two` and `one` offer, and `one` also claims."""
    found = fleet_of("NIXL")
    # Open permanent connections first, so that they do not count as growth.
    for target in (found.same, found.three):
        arrives(found, target)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(fleet) -> Iterator[None]:
    """Check after a test that nothing is open, granted or held, and that no process holds more than before."""
    start = ledger(fleet)
    yield
    wait_for_none(fleet.leftovers)
    wait_for_none(lambda: [grown for pid, held in ledger(fleet).items() if (grown := held.grown_from(start[pid]))])


def ledger(fleet: Fleet) -> dict[int, Holdings]:
    agents = (fleet.prefill, fleet.decode)
    pids = [agent.process.pid for agent in agents]
    pids += [worker["pid"] for agent in agents for worker in agent.status()["workers"]]
    return holdings_of(pids)


def said(call: Callable[[], object]) -> str:
    """Return the reason of a call's refusal; "" if it was accepted."""
    try:
        call()
    except LongshoreError as error:
        return refused(error.reason) if str(error) else "refused without a word"
    return ""


def ends(each: Request) -> list[str]:
    """Return the ends of both halves; all ranks of one half must agree."""
    events = each.ends()
    words = [DONE if event.kind is RoomEventKind.DONE else failed(event.reason) for event in events]
    near, far = set(words[: len(each.source.ranks)]), set(words[len(each.source.ranks) :])
    (prefill,), (decode,) = near, far
    return [prefill, decode]


def plays(judge: WrongJudge, fleet: Fleet, prefill: str = "", decode: str = "", each: Request | None = None) -> None:
    """Compare the refusal, or else the room's end, and the counters."""
    if each is not None:
        near, far = ends(each)
        prefill, decode = prefill or near, decode or far
    assert fleet.one.intact() and fleet.same.intact()
    judge.sees(prefill, decode)
    judge.counts()


# -- rooms and pages ---------------------------------------------------------------------------------------------------


@carries(wrong("a room offered again after it was done"))
def test_a_room_that_is_done_is_not_offered_again(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    each = Request(fleet.one, fleet.same, 40)
    each.offer()
    each.claim()
    near, far = ends(each)
    assert near == DONE
    again = said(lambda: fleet.one.client.send(each.room, each.source_pages, 0, 40, last=True))
    plays(judge, fleet, again, far)


@carries(wrong("a room claimed again after it was done"))
def test_a_room_that_is_done_is_not_claimed_again(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    each = Request(fleet.one, fleet.same, 40)
    each.offer()
    each.claim()
    near, far = ends(each)
    assert far == DONE
    again = said(lambda: fleet.same.client.receive(each.room, fleet.one.endpoint(), each.target_pages, 0, 40))
    plays(judge, fleet, near, again)


@carries(wrong("a room claimed twice at once"))
def test_a_room_is_claimed_once_by_an_engine(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    each = Request(fleet.one, fleet.same, 40)
    each.claim()
    again = said(lambda: fleet.same.client.receive(each.room, fleet.one.endpoint(), each.target_pages, 0, 40))
    each.offer()
    plays(judge, fleet, decode=again, each=each)


@carries(wrong("a room claimed by a second engine"))
def test_a_room_has_one_target_and_the_second_is_told_so(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    each = Request(fleet.one, fleet.same, 40, cuts=(16,))
    each.offer_chunk(0)
    each.claim()
    wait_for(lambda: fleet.prefill.room(each.room, Half.SOURCE)["pairs"])
    second, pages = fleet.three, fleet.three.take_pages(0, 40)
    second.client.receive(each.room, fleet.one.endpoint(), pages, 0, 40)
    end = second.client.wait(each.room, Half.TARGET, timeout_s=EVENT_LIMIT_S)
    second.client.wait(each.room, Half.TARGET, None, [RoomEventKind.RELEASED], EVENT_LIMIT_S)
    second.accept(pages)
    each.offer_chunk(1)
    near, far = ends(each)
    plays(judge, fleet, near, f"the first {far}, the second {failed(end.reason)}")


def offers_wrongly(fleet: Fleet, change: Callable[[Request], Callable[[], object]]) -> tuple[str, Request]:
    """Offer the first of two chunks, make an invalid call, then the valid one; return the invalid call's refusal."""
    each = Request(fleet.one, fleet.same, 100, cuts=(48,))
    each.claim()
    each.offer_chunk(0)
    answer = said(change(each))
    each.offer_chunk(1)
    return answer, each


@carries(wrong("overlapping chunks"))
def test_a_chunk_that_begins_before_the_last_one_ended_is_refused(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    send = fleet.one.client.send
    answer, each = offers_wrongly(fleet, lambda r: lambda: send(r.room, r.source_pages[1:4], 16, 60, last=False))
    plays(judge, fleet, answer, each=each)


@carries(wrong("a chunk that is missing"))
def test_a_chunk_that_leaves_a_gap_is_refused(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    send = fleet.one.client.send
    answer, each = offers_wrongly(fleet, lambda r: lambda: send(r.room, r.source_pages[4:7], 64, 100, last=True))
    plays(judge, fleet, answer, each=each)


@carries(wrong("a chunk after last"))
def test_nothing_is_offered_after_the_last_chunk(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    each = Request(fleet.one, fleet.same, 50)
    each.offer()
    answer = said(lambda: fleet.one.client.send(each.room, each.source_pages[3:4], 50, 60, last=True))
    each.claim()
    plays(judge, fleet, answer, each=each)


@carries(wrong("a page id out of range in an offer"))
def test_an_offer_of_pages_that_are_not_there_is_refused(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    count = fleet.one.ranks[0].geometry.page_count
    send = fleet.one.client.send
    answer, each = offers_wrongly(fleet, lambda r: lambda: send(r.room, [count, 2, 0, 1], 48, 100, last=True))
    plays(judge, fleet, answer, each=each)


@carries(wrong("a page id out of range in a claim"), wrong("one page twice in a claim"))
def test_a_claim_into_pages_that_cannot_be_is_refused(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    each = Request(fleet.one, fleet.same, 40)
    pages = each.target_pages
    count = fleet.same.ranks[0].geometry.page_count
    listed = [pages[0], count, pages[2]] if "range" in judge.wrong.fault else [pages[0], pages[1], pages[0]]
    each.offer()
    answer = said(lambda: fleet.same.client.receive(each.room, fleet.one.endpoint(), listed, 0, 40))
    each.claim()
    plays(judge, fleet, decode=answer, each=each)


@carries(wrong("halves that state different totals"))
def test_halves_that_state_different_totals_fail_on_both_sides(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    each = Request(fleet.one, fleet.same, 60)
    each.offer()
    fleet.same.client.receive(each.room, fleet.one.endpoint(), each.target_pages, 0, 61)
    plays(judge, fleet, each=each)


def test_an_engine_hears_no_end_of_a_room_with_which_it_has_not_come_and_is_refused_when_it_comes(fleet):
    ledger_of = fleet.one.client._core.ledger
    each, heard = Request(fleet.one, fleet.same, 40), ledger_of.stale_event_count
    each.claim()
    wait_for(lambda: fleet.prefill.room(each.room, Half.SOURCE))
    fleet.same.client.cancel(each.room, Half.TARGET)
    fleet.same.client.wait(each.room, Half.TARGET, None, [RoomEventKind.RELEASED], EVENT_LIMIT_S)
    fleet.same.accept(each.target_pages)
    wait_for(lambda: fleet.prefill.room(each.room, Half.SOURCE)["ended"])
    answer = said(lambda: fleet.one.client.send(each.room, each.source_pages, 0, 40, last=True))
    fleet.one.free += each.source_pages
    assert (answer, ledger_of.stale_event_count) == (refused(Reason.CANCELLED), heard)


@pytest.mark.parametrize("claimed", ["before", "after"])
def test_decode_is_told_at_once_of_a_room_that_prefill_cancels_without_an_offer(fleet, claimed):
    ledger_of = fleet.one.client._core.ledger
    each, heard = Request(fleet.one, fleet.same, 40), ledger_of.stale_event_count
    if claimed == "before":
        each.claim()
        wait_for(lambda: fleet.prefill.room(each.room, Half.SOURCE))
    fleet.one.client.cancel(each.room, Half.SOURCE)
    if claimed == "after":
        each.claim()
    ended = fleet.same.client.wait(each.room, Half.TARGET, None, [RoomEventKind.FAILED], EVENT_LIMIT_S)
    fleet.same.client.wait(each.room, Half.TARGET, None, [RoomEventKind.RELEASED], EVENT_LIMIT_S)
    fleet.same.accept(each.target_pages)
    answer = said(lambda: fleet.one.client.send(each.room, each.source_pages, 0, 40, last=True))
    fleet.one.free += each.source_pages
    assert (answer, ended.reason, ledger_of.stale_event_count) == (
        refused(Reason.CANCELLED),
        Reason.CANCELLED,
        heard,
    )


# -- layouts, versions, keys, sizes ------------------------------------------------------------------------------------


@carries(wrong("wrong layout of a claimed instance"))
def test_a_claim_from_an_instance_of_another_model_is_refused(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    each = Request(fleet.one, fleet.same, 40)
    each.offer()
    layout = KVLayout(OTHER_MODEL, Parallel(), 16)
    with connect(fleet.prefill.socket, instance="other", layout=layout, roles=[Half.SOURCE]) as other:
        endpoint = other.endpoint(EVENT_LIMIT_S)
        answer = said(lambda: fleet.same.client.receive(each.room, endpoint, each.target_pages, 0, 40))
    each.claim()
    plays(judge, fleet, decode=answer, each=each)


@carries(wrong("wrong layout of an engine rank"))
def test_a_rank_whose_layout_contradicts_its_siblings_is_turned_away(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    layout = KVLayout(OTHER_MODEL, Parallel(tp=2, tp_rank=1), 16)
    lone = Engine(fleet.prefill, "lone", 1, roles=[Half.SOURCE])
    try:
        with pytest.raises((LayoutError, HelloRefused)) as caught:
            connect(fleet.prefill.socket, instance="lone", layout=layout)
    finally:
        lone.close()
    wait_for(lambda: fleet.prefill.worker("lone") is None)
    plays(judge, fleet, refused(caught.value.reason), NOTHING)


class Stranger:
    """A peer at the port of `one`, with the given keys."""

    def __init__(self, fleet: Fleet, public: bytes = b"", secret: bytes = b"") -> None:
        keys = curve.read(fleet.prefill.directory.parent)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_serverkey = keys.server_public.encode()
        self.socket.curve_publickey = public or keys.client_public.encode()
        self.socket.curve_secretkey = secret or keys.client_secret.encode()
        self.events = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(f"tcp://{main_address(fleet.one.endpoint().ranks[0].address)}")

    def ask(self, data: bytes, limit_ms: int) -> bytes | None:
        self.socket.send(data)
        return self.socket.recv() if self.socket.poll(limit_ms) else None

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close(linger=0)
        self.socket.close()
        self.context.term()


@pytest.fixture
def friend(fleet) -> Iterator[Stranger]:
    """A peer with the deployment's keys."""
    stranger = Stranger(fleet)
    yield stranger
    stranger.close()


def attach(fleet: Fleet, **changes: object) -> Attach:
    layout = KVLayout(MODEL, Parallel(), 16)
    right = Attach(PROTOCOL_VERSION, DEPLOYMENT, "stranger", 1, layout, fleet.backend, b"", None, (), 1 << 20)
    return msgspec.structs.replace(right, **changes)


def arrives(fleet: Fleet, target: Engine | None = None) -> None:
    each = Request(fleet.one, target or fleet.same, 60)
    each.offer()
    each.claim()
    each.arrives()


@carries(wrong("wrong layout of a peer"))
def test_a_peer_of_another_model_is_refused_by_name(fleet, judge, friend):
    judge.begin(fleet.prefill, fleet.decode)
    other = attach(fleet, layout=KVLayout(OTHER_MODEL, Parallel(), 16))
    answer = PEER.decode(friend.ask(PEER.encode(other), ANSWER_LIMIT_MS))
    assert isinstance(answer, Refuse) and "model" in answer.text
    arrives(fleet)
    plays(judge, fleet, refused(answer.reason), NOTHING)


@carries(wrong("unknown version of a peer"))
def test_a_message_of_another_version_is_dropped_and_counted(fleet, judge, friend):
    judge.begin(fleet.prefill, fleet.decode)
    data = bytes([PROTOCOL_VERSION + 1]) + PEER.encode(Ping(1, 1))[1:]
    assert friend.ask(data, SILENCE_MS) is None
    arrives(fleet)
    plays(judge, fleet, NOTHING, NOTHING)


@carries(wrong("unknown client key"))
def test_who_has_no_key_of_the_deployment_is_not_heard(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    stranger = Stranger(fleet, *zmq.curve_keypair())
    assert stranger.ask(PEER.encode(attach(fleet)), SILENCE_MS) is None
    stranger.close()
    arrives(fleet)
    plays(judge, fleet, NOTHING, NOTHING)


@pytest.mark.rest("storms")
@carries(wrong("a message of 1 GiB from a peer"))
def test_a_peers_message_of_a_gibibyte_costs_it_the_connection_and_the_worker_no_memory(fleet, judge, friend):
    judge.begin(fleet.prefill, fleet.decode)
    pid = fleet.prefill.worker("one")["pid"]
    start = holdings(pid).own_bytes
    friend.socket.send(ZEROS, copy=False)
    assert friend.events.poll(ANSWER_LIMIT_MS), "the connection is still there"
    assert holdings(pid).own_bytes < start + GROWTH_BYTES_MAX
    arrives(fleet)
    assert fleet.prefill.worker("one")["pid"] == pid
    plays(judge, fleet, "its connection is closed", NOTHING)


def greet(agent: Agent, data: bytes) -> bytes:
    """Send an agent the first message of an engine; return its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(EVENT_LIMIT_S)
        link.connect(agent.socket)
        link.send(data)
        return link.recv(ENGINE_MESSAGE_BYTES_MAX)


@carries(wrong("unknown version of an engine"), wrong("a message above 64 KiB from an engine"))
def test_an_engine_whose_first_word_cannot_be_is_told_why(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    hello = TO_AGENT.encode(Hello(ENGINE_PROTOCOL_VERSION, "x", KVLayout(MODEL, Parallel(), 16), "cpu", (Half.SOURCE,)))
    version = "version" in judge.wrong.fault
    data = bytes([ENGINE_PROTOCOL_VERSION + 1]) + hello[1:] if version else bytes(ENGINE_MESSAGE_BYTES_MAX + 1)
    answer = TO_ENGINE.decode(greet(fleet.prefill, data))
    assert answer.text
    arrives(fleet)
    plays(judge, fleet, refused(answer.reason), NOTHING)


@carries(wrong("a message of 1 GiB from an engine"))
def test_an_engine_cannot_send_a_gibibyte(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    with pytest.raises(OSError, match="Message too long"):
        greet(fleet.prefill, ZEROS)
    arrives(fleet)
    plays(judge, fleet, "the kernel refuses to send it", NOTHING)


# -- what must pass ----------------------------------------------------------------------------------------------------


@carries(wrong("the room ids 2^63 and 2^64 - 1"))
def test_room_ids_may_use_all_64_bits(fleet, judge):
    judge.begin(fleet.prefill, fleet.decode)
    words = set()
    for number in (2**63, 2**64 - 1):
        each = Request(fleet.one, fleet.same, 60, room=number)
        each.claim()
        each.offer()
        words.add(tuple(ends(each)))
        assert fleet.prefill.get(f"/v1/rooms/{room_name(number)}")["room"] == room_name(number)
    assert fleet.same.intact()
    ((prefill, decode),) = words
    judge.sees(prefill, decode)
    judge.counts(2)
