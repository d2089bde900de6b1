"""Real agents over HTTP: their answers, their access checks, and their responses to invalid requests."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from agent_fleet import Fleet
from agent_world import (
    DEPLOYMENT,
    EVENT_LIMIT_S,
    MODEL,
    START_LIMIT_S,
    Agent,
    Request,
    is_worker,
    room_ids,
    wait_for,
    wait_for_none,
)

from longshore_agent.control import curve
from longshore_agent.status.metric_table import TABLE
from longshore_client import (
    ArgumentError,
    HelloRefused,
    KVLayout,
    LayoutError,
    LongshoreError,
    ModelShape,
    Parallel,
    Reason,
    RoomError,
    RoomEventKind,
    WaitTimeout,
    connect,
)
from longshore_wire.addresses import main_address
from longshore_wire.engine_messages import Half
from longshore_wire.names import room_name
from longshore_wire.peer_messages import (
    PEER,
    PEER_MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Claim,
    EndAck,
    Grant,
    PairKey,
    Ping,
    PoolInfo,
    Refuse,
    RegionInfo,
    RoomKey,
    SlabAck,
)
from longshore_wire.ways import Way

# An answer is waited for this long, and one that must not come.
ANSWER_LIMIT_MS, SILENCE_MS = 60_000, 300


@pytest.fixture(scope="module")
def fleet(fleet_of) -> Fleet:
    """The fleet whose links are encrypted."""
    return fleet_of("NIXL")


@pytest.fixture
def keys(fleet) -> curve.CurveKeys:
    return curve.read(fleet.prefill.directory.parent)


# -- HTTP --------------------------------------------------------------------------------------------------------------


def test_health_readiness_and_the_self_test_are_real(fleet):
    verdict = wait_for(lambda: fleet.prefill.ask("/readyz")[0] == 200 and fleet.prefill.get("/readyz"), START_LIMIT_S)
    assert verdict["ok"]
    assert {check["name"] for check in verdict["checks"]} >= {"SelfTest", "Workers", "Accepting"}
    assert fleet.prefill.get("/healthz")["ok"]
    test = fleet.prefill.status()["self_test"]
    assert (test["backend"], test["bytes_moved"], test["error"]) == ("NIXL", 1 << 20, "")


def test_bootstrap_lists_instances_with_every_ranks_address_and_plan_answers_by_their_names(fleet):
    found = {entry["instance"]: entry for entry in fleet.prefill.get("/v1/bootstrap")["instances"]}
    assert found.keys() == {"two", "one"}
    assert [rank["rank"] for rank in found["two"]["ranks"]] == [0, 1]
    assert found["two"]["complete"]
    assert {str(rank.epoch) for rank in fleet.two.endpoint().ranks} == {rank["epoch"] for rank in found["two"]["ranks"]}
    plan = fleet.prefill.get("/v1/plan?source=two&target=one")
    assert plan["pairs"]


def test_status_metrics_and_openapi_show_what_is_there(fleet):
    worker = fleet.prefill.worker("one")
    assert (worker["state"], worker["epoch"]) == ("ready", str(fleet.one.client.epoch))
    assert worker["engines"][0]["pid"] == os.getpid()
    assert worker["engines"][0]["pools"][0]["total_bytes"] == fleet.one.ranks[0].geometry.region_bytes[0]
    each = Request(fleet.two, fleet.one, 200)
    each.claim()
    each.offer()
    each.arrives()
    fleet.prefill.status()
    text = fleet.prefill.ask("/metrics")[1].decode()
    missing = {row.name for row in TABLE if f"# TYPE {row.name} " not in text}
    assert missing <= {"longshore_stale_messages_total", "longshore_refused_messages_total"}
    assert 'longshore_rooms_total{worker="one/0/0",half="target",outcome="done",reason="none"}' in text
    paths = fleet.prefill.get("/openapi.json")["paths"]
    assert paths.keys() >= {"/healthz", "/readyz", "/metrics", "/v1/status", "/v1/rooms", "/v1/bootstrap", "/v1/plan"}
    assert "/v1/rooms/{room}" in paths


def test_a_room_is_shown_with_its_pairs_and_spans_and_an_unknown_one_is_not(fleet):
    each = Request(fleet.two, fleet.one, 200)
    each.claim()
    each.offer()
    each.arrives()
    shown = fleet.prefill.room_page(each.room)
    assert shown["room"] == room_name(each.room) and each.room >= 2**63
    assert {entry["worker"] for entry in shown["halves"]} == {"two/0/0", "two/0/1", "one/0/0"}
    stages = [span for span in shown["spans"] if span["kind"] == "stage"]
    assert {span["stage"] for span in stages} == {"gather", "write", "scatter"}
    assert {span["source_rank"] for span in stages} == {0, 1}
    assert all(span["start_ns"] <= span["end_ns"] for span in shown["spans"])
    assert any(
        entry["room"]["room"] == room_name(each.room) for entry in fleet.prefill.get("/v1/rooms?limit=1000")["rooms"]
    )
    assert fleet.prefill.ask("/v1/rooms/12345")[0] == 404


# -- admission ---------------------------------------------------------------------------------------------------------


class Dialer:
    """A client without the deployment's keys at a worker's port."""

    def __init__(self, address: str, server: str = "", public: str = "", secret: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.ROUTING_ID, os.urandom(8))
        if server:
            self.socket.curve_serverkey = server.encode()
            self.socket.curve_publickey, self.socket.curve_secretkey = public.encode(), secret.encode()
        self.socket.connect(f"tcp://{address}")

    def ask(self, data: bytes, limit_ms: int = ANSWER_LIMIT_MS) -> bytes | None:
        self.socket.send(data)
        return self.socket.recv() if self.socket.poll(limit_ms) else None

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def address(fleet) -> str:
    return main_address(fleet.one.endpoint().ranks[0].address)


@pytest.fixture
def friend(address, keys) -> Iterator[Dialer]:
    """A client with the deployment's keys."""
    dialer = Dialer(address, keys.server_public, keys.client_public, keys.client_secret)
    yield dialer
    dialer.close()


def counted(agent: Agent, name: str, **labels: str) -> float:
    return agent.metric(name, worker="one/0/0", **labels)


def attach(fleet: Fleet, **changes: object) -> Attach:
    right = Attach(
        version=PROTOCOL_VERSION,
        deployment=DEPLOYMENT,
        instance="stranger",
        epoch=1,
        layout=KVLayout(MODEL, Parallel(), 16),
        backend=fleet.backend,
        metadata=b"",
        ring=None,
        pools=(),
        slab_bytes_max=1 << 20,
    )
    return msgspec.structs.replace(right, **changes)


@pytest.mark.shows("agent.keys_directory")
@pytest.mark.parametrize("kind", ["unknown client key", "no keys at all"])
def test_who_has_no_key_of_the_deployment_gets_nothing_in(fleet, keys, address, kind):
    names = ("longshore_refused_messages_total", "longshore_stale_messages_total", "longshore_peers")
    before = [counted(fleet.prefill, name) for name in names]
    failures = counted(fleet.prefill, "longshore_authentication_failures_total")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    known = kind == "unknown client key"
    stranger = Dialer(address, keys.server_public, public, secret) if known else Dialer(address)
    assert stranger.ask(PEER.encode(attach(fleet)), SILENCE_MS) is None
    if known:
        wait_for(lambda: counted(fleet.prefill, "longshore_authentication_failures_total") > failures)
    stranger.close()
    assert [counted(fleet.prefill, name) for name in names] == before


@pytest.mark.shows("agent.deployment")
def test_who_has_a_key_is_answered_and_one_of_another_deployment_is_refused_by_name(fleet, friend):
    answer = PEER.decode(friend.ask(PEER.encode(attach(fleet, deployment="else/where"))))
    assert isinstance(answer, Refuse)
    assert answer.reason is Reason.LAYOUT_MISMATCH
    assert "else/where" in answer.text and DEPLOYMENT in answer.text
    other = attach(fleet, layout=KVLayout(ModelShape.kv(3, 12, 32, 4), Parallel(), 16))
    answer = PEER.decode(friend.ask(PEER.encode(other)))
    assert isinstance(answer, Refuse) and "model" in answer.text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes([PROTOCOL_VERSION]) + b"\xc1\xff junk", "malformed_message"),
        (b"\x63" + PEER.encode(Ping(1, 1))[1:], "unknown_version"),
        (bytes([PROTOCOL_VERSION]) + bytes(PEER_MESSAGE_BYTES_MAX), "malformed_message"),
        (b"", "malformed_message"),
    ],
    ids=["junk", "another version", "too long", "empty"],
)
def test_bytes_that_are_no_message_are_counted_and_harm_nothing(fleet, friend, data, reason):
    before = counted(fleet.prefill, "longshore_refused_messages_total", reason=reason)
    friend.socket.send(data)
    wait_for(lambda: counted(fleet.prefill, "longshore_refused_messages_total", reason=reason) == before + 1)
    each = Request(fleet.two, fleet.one, 60)
    each.offer()
    each.claim()
    each.arrives()


def test_the_next_life_of_a_decode_worker_is_answered_at_its_first_word(fleet, friend):
    for epoch in range(100, 120):
        answer = PEER.decode(friend.ask(PEER.encode(attach(fleet, epoch=epoch))))
        assert isinstance(answer, Attach | Refuse)


def test_a_message_beyond_every_limit_costs_its_sender_the_connection_and_nobody_else_anything(fleet, friend):
    friend.socket.send(b"\x01" + bytes(8 * PEER_MESSAGE_BYTES_MAX))
    each = Request(fleet.two, fleet.one, 60)
    each.offer()
    each.claim()
    each.arrives()


def test_messages_of_the_right_form_with_any_numbers_in_them_end_no_worker(fleet, friend):
    epoch = fleet.one.client.epoch
    pid = fleet.prefill.worker("one")["pid"]
    answer = PEER.decode(friend.ask(PEER.encode(attach(fleet))))
    assert isinstance(answer, Attach | Refuse)
    chosen = random.Random(1)
    open_room = Request(fleet.one, fleet.same, 64)
    open_room.offer()
    numbers = [-1, 0, 1, 16, 64, 2**31, 2**62, -(2**62)]

    pools = (PoolInfo(0, fleet.one.ranks[0].geometry, (4096,)),)

    def number() -> int:
        return chosen.choice(numbers)

    def pair() -> PairKey:
        room = chosen.choice([open_room.room, 5, 2**64 - 1])
        key = RoomKey(chosen.choice(["one", "two", ""]), room)
        return PairKey(key, chosen.choice([0, number()]), chosen.choice([0, number()]), epoch, 1, "stranger")

    for turn in range(400):
        message = chosen.choice(
            [
                Claim(pair(), number(), number(), chosen.choice(list(Way)), number(), number(), os.urandom(8)),
                Claim(pair(), 0, 64, chosen.choice(list(Way)), 0, 4, bytes(16)),
                Grant(pair(), number(), number(), number(), number()),
                SlabAck(pair(), number(), number()),
                Abort(pair(), Reason.CANCELLED, "x" * 1000) if turn > 200 else Ping(number(), 1),
                EndAck(pair()),
                attach(fleet, generation=turn, metadata=os.urandom(50), ring=RegionInfo(4096, 1 << 22)),
                attach(fleet, generation=turn, ring=RegionInfo(number(), number(), number()), pools=pools),
                attach(fleet, generation=turn, slab_bytes_max=number(), epoch=chosen.choice([1, 2])),
            ]
        )
        friend.socket.send(PEER.encode(message))
    friend.socket.send(PEER.encode(attach(fleet, deployment="the/end")))
    wait_for(lambda: friend.socket.poll(1000) and b"the/end" in friend.socket.recv(), what="the last answer")
    assert fleet.prefill.worker("one")["pid"] == pid
    assert is_worker(pid)
    assert fleet.one.client.epoch == epoch
    if fleet.one.client.open_count:
        fleet.one.client.cancel(open_room.room, Half.SOURCE)
    fleet.one.client.wait(open_room.room, Half.SOURCE, None, [RoomEventKind.RELEASED], EVENT_LIMIT_S)
    fleet.one.free += open_room.source_pages
    fleet.same.free += open_room.target_pages
    each = Request(fleet.one, fleet.same, 60)
    each.offer()
    each.claim()
    each.arrives()


# -- invalid requests --------------------------------------------------------------------------------------------------


def refusal(call, *arguments, **named) -> LongshoreError:
    with pytest.raises(LongshoreError) as caught:
        call(*arguments, **named)
    return caught.value


def test_what_is_wrong_with_an_offer_is_named_and_its_room_goes_on(fleet):
    each = Request(fleet.two, fleet.one, 100, cuts=(48,))
    send = fleet.two.client.send
    pages, count = each.source_pages, fleet.two.ranks[0].geometry.page_count
    wrong = [pages[0], count, pages[2]]
    error = refusal(send, each.room, wrong, 0, 48, last=False)
    assert (error.reason, f"pages[1] is {count}" in str(error)) == (Reason.PAGE_OUT_OF_RANGE, True)
    error = refusal(send, each.room, pages[:2], 0, 48, last=False)
    assert isinstance(error, ArgumentError) and "2 pages for tokens [0, 48)" in str(error)
    each.claim()
    each.offer_chunk(0)
    error = refusal(send, each.room, pages[1:4], 16, 60, last=False)
    assert (error.reason, "the next begins at 48" in str(error)) == (Reason.TOKENS_OVERLAP, True)
    error = refusal(send, each.room, pages[4:7], 64, 100, last=True)
    assert (error.reason, "the next begins at 48" in str(error)) == (Reason.TOKENS_MISSING, True)
    each.offer_chunk(1)
    each.arrives()
    assert fleet.one.intact()
    error = refusal(send, each.room, pages[6:7], 100, 101, last=True)
    assert error.reason is Reason.ROOM_REUSED


@pytest.mark.shows("argument.send.last")
def test_a_chunk_after_the_last_is_refused_and_the_room_still_arrives(fleet):
    each = Request(fleet.two, fleet.one, 50)
    each.offer()
    error = refusal(fleet.two.client.send, each.room, each.source_pages[3:4], 50, 60, last=True)
    assert (error.reason, "after `last` at 50" in str(error)) == (Reason.OFFER_AFTER_LAST, True)
    each.claim()
    each.arrives()


def test_what_is_wrong_with_a_claim_is_named(fleet):
    each = Request(fleet.two, fleet.one, 40)
    each.offer()
    endpoint, receive = fleet.two.endpoint(), fleet.one.client.receive
    pages = each.target_pages
    error = refusal(receive, each.room, endpoint, [pages[0], -1, pages[2]], 0, 40)
    assert (error.reason, "pages[1] is -1" in str(error)) == (Reason.PAGE_OUT_OF_RANGE, True)
    error = refusal(receive, each.room, endpoint, [pages[0], pages[1], pages[0]], 0, 40)
    assert (error.reason, "pages[0] and pages[2]" in str(error)) == (Reason.TOKENS_OVERLAP, True)
    part = msgspec.structs.replace(endpoint, ranks=endpoint.ranks[:1])
    error = refusal(receive, each.room, part, pages, 0, 40)
    assert (error.reason, "no agent of this deployment gave" in str(error)) == (Reason.AUTHENTICATION, True)
    each.claim()
    error = refusal(receive, each.room, endpoint, pages, 0, 40)
    assert error.reason is Reason.ROOM_REUSED
    each.arrives()
    error = refusal(receive, each.room, endpoint, pages, 0, 40)
    assert error.reason is Reason.ROOM_REUSED
    assert fleet.one.intact()


SECRET = {"prompt": b"a prompt", "capability": b"0123456789abcdef"}


@pytest.mark.shows("argument.send.capability", "argument.receive.capability")
def test_a_claim_without_the_capability_fails_alone_and_the_room_goes_to_its_own_request(fleet):
    owner = Request(fleet.one, fleet.same, 40, binding=SECRET)
    owner.offer()
    (thief,) = fleet.other_way.ranks
    pages = fleet.other_way.take_pages(0, 40)
    for rank in fleet.one.ranks:
        assert rank.client.open_count == 1
    thief.client.receive(owner.room, fleet.one.endpoint(), pages, 0, 40, capability=b"fedcba9876543210")
    event = thief.client.wait(owner.room, Half.TARGET, "one", timeout_s=EVENT_LIMIT_S)
    assert (event.kind, event.reason) == (RoomEventKind.FAILED, Reason.AUTHENTICATION)
    thief.client.wait(owner.room, Half.TARGET, "one", [RoomEventKind.RELEASED], EVENT_LIMIT_S)
    fleet.other_way.free += pages
    owner.claim()
    owner.arrives()
    assert fleet.same.intact()
    assert fleet.other_way.intact()


def test_who_asks_for_a_room_is_told_with_its_first_chunk_and_then_claims_it(fleet):
    each = Request(fleet.one, fleet.same, 60, binding=SECRET)
    client = fleet.same.client
    client.ask(each.room, fleet.one.endpoint(), capability=SECRET["capability"])
    with pytest.raises(WaitTimeout):
        client.wait(each.room, Half.TARGET, "one", [RoomEventKind.OFFERED], timeout_s=0.2)
    each.offer()
    event = client.wait(each.room, Half.TARGET, "one", [RoomEventKind.OFFERED], timeout_s=EVENT_LIMIT_S)
    assert event.reason is Reason.NONE
    each.claim()
    each.arrives()
    assert fleet.same.intact()


def test_an_asked_room_ends_with_its_cancellation_its_pool_or_a_claim_that_cannot_be(fleet):
    client, endpoint = fleet.same.client, fleet.one.endpoint()
    for end in ("cancel", "claim"):
        room = next(room_ids)
        client.ask(room, endpoint)
        (half,) = [
            each["room"] for each in fleet.same.agent.room_page(room)["halves"] if each["room"]["half"] == "target"
        ]
        assert (half["tokens_wanted"], half["tokens_done"], half["tokens_total"]) == (0, 0, -1)
        if end == "claim":
            with pytest.raises(RoomError, match="pages\\[0\\]"):
                client.receive(room, endpoint, [10**6], 0, 4)
        client.cancel(room, Half.TARGET)
        event = client.wait(room, Half.TARGET, "one", timeout_s=EVENT_LIMIT_S)
        assert (event.kind, event.reason) == (RoomEventKind.FAILED, Reason.CANCELLED)
        client.wait(room, Half.TARGET, "one", [RoomEventKind.RELEASED], EVENT_LIMIT_S)
    wait_for_none(fleet.leftovers)


@pytest.mark.shows("argument.send.prompt", "argument.receive.prompt")
def test_a_claim_of_another_prompt_gets_no_byte_and_both_halves_say_so(fleet):
    each = Request(fleet.one, fleet.same, 40, binding=SECRET)
    each.offer()
    each.binding = SECRET | {"prompt": b"another prompt"}
    each.claim()
    ends = each.ends()
    assert {(end.kind, end.reason) for end in ends} == {(RoomEventKind.FAILED, Reason.PROMPT_MISMATCH)}, ends
    assert not any(
        "a prompt" in end.text or "another prompt" in end.text.replace("another prompt than", "") for end in ends
    )
    wait_for_none(fleet.leftovers)


@pytest.mark.shows("argument.send.last", "argument.receive.end_token")
@pytest.mark.parametrize("first", [Half.SOURCE, Half.TARGET])
def test_halves_that_state_different_totals_fail_on_both_sides_and_name_both(fleet, first):
    each = Request(fleet.one, fleet.same, 60)
    endpoint = fleet.one.endpoint()
    if first is Half.SOURCE:
        each.offer()
    fleet.same.client.receive(each.room, endpoint, each.target_pages, 0, 61)
    if first is Half.TARGET:
        each.offer()
    ends = each.ends()
    assert {(end.kind, end.reason) for end in ends} == {(RoomEventKind.FAILED, Reason.TOTAL_MISMATCH)}, ends
    assert all("60" in end.text and "61" in end.text for end in ends)
    wait_for_none(fleet.leftovers)


def test_engines_that_cannot_be_served_are_told_why_before_a_worker_is_started(fleet):
    layout = KVLayout(MODEL, Parallel(), 16)
    path = fleet.prefill.socket
    with pytest.raises(HelloRefused, match="instance is 'a/b'"):
        connect(path, instance="a/b", layout=layout)
    with pytest.raises(HelloRefused, match="GPU-1"):
        connect(path, instance="a", layout=layout, device="GPU-1")
    if not Path("/dev/nvidiactl").exists():
        with pytest.raises(HelloRefused, match="sees no NVIDIA driver"):
            connect(path, instance="a", layout=layout, device="GPU-7e375b68-5e7c-3244-17df-0d90019d4b71")
    with pytest.raises(LayoutError, match=r"parallel\.tp is 5"):
        connect(path, instance="a", layout=KVLayout(MODEL, Parallel(tp=5), 16))
    with pytest.raises(HelloRefused, match="one rank 0 is registered") as twin:
        connect(path, instance="one", layout=layout, timeout_s=5.0)
    assert twin.value.reason is Reason.BUSY
    assert {worker["worker"] for worker in fleet.prefill.status()["workers"]} == {"two/0/0", "two/0/1", "one/0/0"}
