"""Tests messages as bytes: fixed type numbers, limits, and typed errors for invalid bytes."""

from __future__ import annotations

import hashlib
import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fuzz_codec import CODECS, check, read_corpus
from hypothesis import given
from hypothesis import strategies as st

from longshore_wire import engine_messages, peer_messages
from longshore_wire.codec import Codec
from longshore_wire.engine_messages import (
    ENGINE_MESSAGE_BYTES_MAX,
    ENGINE_STEPS_MAX,
    PAGES_PER_MESSAGE_MAX,
    TO_AGENT,
    TO_ENGINE,
    CachePages,
    Half,
    Hello,
    Offer,
    Receive,
    RoomEvent,
    RoomEventKind,
)
from longshore_wire.errors import CodecError, Reason
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, PlaneGeometry, PoolGeometry, TargetMemory
from longshore_wire.peer_messages import (
    PEER,
    PEER_MESSAGE_BYTES_MAX,
    TEXT_CHARACTERS_MAX,
    Abort,
    Attach,
    Claim,
    Demand,
    Grant,
    PairKey,
    PoolInfo,
    Refuse,
    RegionInfo,
    RoomKey,
    SlabReady,
)
from longshore_wire.ways import Way

LAYOUT = KVLayout(ModelShape.kv(80, 8, 128, 2), Parallel(4, 3, 2, 1, 8, 7), 64, PageOrder.HND, (40, 80))
PAIR = PairKey(RoomKey("prefill-0", 2**64 - 1), 7, 1, 2**63, 2**63 + 5, "decode-1", 2, cache=3)
POOL = PoolInfo(3, PoolGeometry(9, (1 << 40,), (PlaneGeometry(0, 64, 4096, 512, 128),)), (2**47,))

CANCEL = engine_messages.Cancel(1, Half.TARGET, "p", 1)
UNIONS = {"peer": peer_messages.PeerMessage, "to agent": engine_messages.ToAgent, "to engine": engine_messages.ToEngine}

FROZEN_PEER_NUMBERS = {
    "Attach": 1,
    "Refuse": 2,
    "Ping": 3,
    "Pong": 4,
    "Claim": 5,
    "Demand": 6,
    "Grant": 7,
    "SlabReady": 8,
    "SlabAck": 9,
    "Abort": 11,
    "EndAck": 12,
    "WireFound": 13,
    "Complete": 14,
    "Ask": 15,
    "Offered": 16,
}
FROZEN_ENGINE_NUMBERS = {
    "Hello": 64,
    "Welcome": 65,
    "Refused": 66,
    "Accepted": 67,
    "RegisterPool": 68,
    "UnregisterPool": 69,
    "Offer": 70,
    "Receive": 71,
    "Cancel": 72,
    "Renew": 73,
    "RoomEvent": 74,
    "EndpointUpdate": 75,
    "EngineSteps": 76,
    "Ask": 77,
}


# Digests of all fields of a protocol's messages, by its version. After a release, record a new one only for fields that
# were added at the end with a default; any other change raises the version and adds a line. Before, any may change.
RECORDED_FIELDS = {("peer", 2): "7776fd260a0e86ce", ("engine", 2): "945eb2a86a3c2b4b"}
PROTOCOLS = {
    "peer": (peer_messages.PROTOCOL_VERSION, peer_messages.PeerMessage),
    "engine": (engine_messages.ENGINE_PROTOCOL_VERSION, engine_messages.ToAgent | engine_messages.ToEngine),
}


def _fields_digest(union: object) -> str:
    """Return a digest of names, types and defaults of all fields of the messages, and of what they consist of."""
    schema = json.dumps(msgspec.json.schema(union), sort_keys=True)
    plain = json.loads(schema, object_hook=lambda found: {k: v for k, v in found.items() if k != "description"})
    named = {kind.__name__: kind.__struct_fields__ for kind in _structs(union, set())}
    return hashlib.sha256(json.dumps([plain, named], sort_keys=True).encode()).hexdigest()[:16]


def _structs(kind: object, seen: set[object]) -> Iterator[type[msgspec.Struct]]:
    parts = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind in seen:
            return
        seen.add(kind)
        yield kind
        parts = tuple(typing.get_type_hints(kind).values())
    for part in parts:
        yield from _structs(part, seen)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_fields_of_messages_are_those_that_are_recorded_for_their_version(protocol: str) -> None:
    version, union = PROTOCOLS[protocol]
    assert _fields_digest(union) == RECORDED_FIELDS.get((protocol, version)), "see RECORDED_FIELDS"


@pytest.mark.parametrize("change", ["left out", "swapped", "renamed", "another type", "in another struct"])
def test_a_change_of_a_field_is_one_of_the_digest(change: str) -> None:
    fields = [(each.name, each.type, each.default) for each in msgspec.structs.fields(Receive)]
    fields = [field[:2] if field[2] is msgspec.NODEFAULT else field for field in fields]
    assert _fields_digest(_receive(fields)) == (before := _fields_digest(_receive(list(fields))))
    if change == "left out":
        del fields[1]
    elif change == "swapped":
        fields[0], fields[1] = fields[1], fields[0]
    elif change == "renamed":
        fields[1] = ("number", int)
    elif change == "another type":
        fields[1] = ("room", str)
    else:
        fields[2] = ("endpoint", msgspec.defstruct("Endpoint", [("instance", str)], array_like=True))
    assert _fields_digest(_receive(fields)) != before


def _receive(fields: list[Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct("Receive", fields, array_like=True, tag=71)


def _numbers(union: object) -> dict[str, int]:
    return {kind.__name__: kind.__struct_config__.tag for kind in typing.get_args(union)}


def test_no_message_ever_changes_its_number() -> None:
    assert _numbers(peer_messages.PeerMessage) == FROZEN_PEER_NUMBERS
    assert _numbers(engine_messages.ToAgent | engine_messages.ToEngine) == FROZEN_ENGINE_NUMBERS


@pytest.mark.parametrize(
    "message",
    [
        Attach(
            2, "ns/d", "i", 2**63, LAYOUT, "NIXL", b"\x00\xff" * 99, RegionInfo(2**47, 1 << 32, 1 << 26), (POOL,), 1
        ),
        Claim(PAIR, 17, 131072, Way.SLICES, 8192, 9000, b"\x01\x00\x00\x00"),
        Demand(PAIR, 819, 11, 3, 8192),
        Grant(PAIR, 10, (1 << 44) - 64, 1 << 26, 2**62),
        SlabReady(PAIR, 10, 2**62, 1 << 26, 8192),
        Abort(PAIR, Reason.TOTAL_MISMATCH, "prefill says 3 tokens, decode 4"),
    ],
)
def test_a_peer_message_comes_out_as_it_went_in(message: peer_messages.PeerMessage) -> None:
    assert PEER.decode(PEER.encode(message)) == message


def test_a_hello_of_a_release_without_the_engines_pid_is_understood_and_later_fields_are_ignored() -> None:
    hello = Hello(1, "prefill-0", LAYOUT, "cpu", (Half.SOURCE,), 7, 77, TargetMemory.DEVICE, "")
    fields = msgspec.msgpack.decode(TO_AGENT.encode(hello)[1:])
    earlier = b"\x02" + msgspec.msgpack.encode(fields[:-3])
    later = b"\x02" + msgspec.msgpack.encode([*fields, "later"])
    assert TO_AGENT.decode(earlier) == msgspec.structs.replace(hello, pid=0)
    assert TO_AGENT.decode(later) == hello


def test_a_welcome_of_a_release_that_asks_for_no_steps_is_understood_and_later_fields_are_ignored() -> None:
    welcome = engine_messages.Welcome(1, 7, "demo", 60, TargetMemory.HOST, True, (b"key",))
    fields = msgspec.msgpack.decode(TO_ENGINE.encode(welcome)[1:])
    earlier = b"\x02" + msgspec.msgpack.encode(fields[:-2])
    later = b"\x02" + msgspec.msgpack.encode([*fields, "later"])
    assert TO_ENGINE.decode(earlier) == msgspec.structs.replace(welcome, steps=False, engine_keys=())
    assert TO_ENGINE.decode(later) == welcome


def test_the_most_steps_of_a_half_fit_into_a_datagram_and_more_are_refused() -> None:
    step = engine_messages.EngineStep("n" * 32, 2**63, 2**64 - 1, True)
    most = engine_messages.EngineSteps(Half.TARGET, "p" * 200, 2**64 - 1, (step,) * ENGINE_STEPS_MAX)
    assert TO_AGENT.decode(TO_AGENT.encode(most)) == most
    with pytest.raises(CodecError):
        TO_AGENT.decode(TO_AGENT.encode(msgspec.structs.replace(most, steps=(*most.steps, step))))


def test_a_notice_fits_into_the_kilobyte_that_transports_carry() -> None:
    key = RoomKey("p" * 100, 2**64 - 1)
    pair = PairKey(key, 4095, 4095, 2**63 - 1, 2**63 - 1, "d" * 100, 1023, cache=15)

    assert len(PEER.encode(SlabReady(pair, 2**31, 2**63, 2**32 - 1, 2**31))) <= 1024


def test_the_longest_page_lists_fit_into_a_datagram() -> None:
    pages = b"\xff\xff\xff\x7f" * PAGES_PER_MESSAGE_MAX
    ranks = tuple(engine_messages.RankAddress(rank, "255.255.255.255:65535", 2**63) for rank in range(256))
    endpoint = engine_messages.Endpoint("p" * 100, LAYOUT, ranks)

    assert (
        len(TO_AGENT.encode(Offer(2**31, 2**64 - 1, (CachePages(0, 0, 2**31, len(pages) // 4, pages),), True)))
        <= ENGINE_MESSAGE_BYTES_MAX
    )
    assert (
        len(TO_AGENT.encode(Receive(1, 2**64 - 1, endpoint, (CachePages(0, 0, 2**31, 2**31, pages, 0),))))
        <= ENGINE_MESSAGE_BYTES_MAX
    )


@pytest.mark.parametrize("message", [Abort(PAIR, Reason.CANCELLED), Refuse(Reason.UNSUPPORTED, "", 1, 2)])
def test_a_reason_in_half_a_megabyte_of_words_is_cut_at_both_ends(message: Abort | Refuse) -> None:
    long = msgspec.structs.replace(message, text="why " * 100)
    assert PEER.decode(PEER.encode(long)) == long
    sent = msgspec.structs.replace(message, text="why " * 125_000)
    assert len(sent.text) == TEXT_CHARACTERS_MAX
    # A sender that does not split its message.
    msgspec.structs.force_setattr(sent, "text", "why " * 125_000)
    received = PEER.decode(PEER.encode(sent))
    assert isinstance(received, Abort | Refuse)
    assert (len(received.text), received.text[-1]) == (TEXT_CHARACTERS_MAX, "…")


def test_bytes_on_the_wire_are_those_of_the_first_release() -> None:
    data = TO_ENGINE.encode(RoomEvent(Half.TARGET, "p", 5, RoomEventKind.DONE, Reason.NONE, "", 12))

    assert data.hex() == "02984a01a1700501" + "00a00c"


@pytest.mark.parametrize(
    ("codec", "limit_bytes"), [(PEER, PEER_MESSAGE_BYTES_MAX), (TO_AGENT, ENGINE_MESSAGE_BYTES_MAX)]
)
def test_a_message_above_its_limit_is_refused_before_it_is_parsed(codec: Codec[object], limit_bytes: int) -> None:
    with pytest.raises(CodecError, match=str(limit_bytes)):
        codec.decode(b"\x02" + b"\xc1" * limit_bytes)
    with pytest.raises(CodecError, match="at most"):
        codec.encode(Hello(1, "x" * limit_bytes, LAYOUT, "cpu", ()))


def test_an_unknown_version_is_named() -> None:
    with pytest.raises(CodecError, match="version 9") as caught:
        PEER.decode(b"\x09" + PEER.encode(peer_messages.Ping(1, 1))[1:])
    assert caught.value.reason is Reason.UNKNOWN_VERSION


def test_an_unknown_number_and_a_wrong_type_are_malformed() -> None:
    for body in ([99, 1], [3, "not a number"], [3], {}, 3):
        with pytest.raises(CodecError) as caught:
            PEER.decode(b"\x02" + msgspec.msgpack.encode(body))
        assert caught.value.reason is Reason.MALFORMED_MESSAGE


@given(st.binary(max_size=300))
def test_junk_is_refused_by_type_and_never_crashes(junk: bytes) -> None:
    for codec in (PEER, TO_AGENT, TO_ENGINE):
        for data in (junk, b"\x02" + junk):
            try:
                codec.decode(data)
            except CodecError:
                continue


@given(st.data())
def test_a_damaged_message_is_refused_by_type_or_still_a_message(data: st.DataObject) -> None:
    whole = bytearray(PEER.encode(Claim(PAIR, 17, 131072, Way.STAGED)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        PEER.decode(bytes(whole))
    except CodecError:
        return


def test_a_message_nested_without_end_is_refused() -> None:
    with pytest.raises(CodecError):
        PEER.decode(b"\x02" + b"\x91" * 100_000)


def test_every_input_that_the_fuzz_has_found_is_refused_by_type_or_comes_out_as_it_went_in() -> None:
    outcomes = {outcome for data in read_corpus() for outcome in check(data)}

    taken = {f"{name} {kind}" for name, union in UNIONS.items() for kind in _numbers(union)}
    assert taken < outcomes  # every message is among them
    assert len(outcomes) > 500


class _Faulty:
    """A codec with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def decode(self, data: bytes) -> object:
        try:
            return TO_AGENT.decode(data)
        except CodecError as error:
            if self.fault == "another error":
                raise TypeError from error
            raise CodecError(str(error) * (100 if self.fault == "a long text" else 1)) from error

    def encode(self, message: engine_messages.ToAgent) -> bytes:
        return TO_AGENT.encode(engine_messages.Renew() if message == CANCEL else message)


@pytest.mark.parametrize("fault", ["another error", "a long text", "another message"])
def test_the_fuzz_notices_what_a_decoder_must_not_do(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = [*read_corpus(), TO_AGENT.encode(CANCEL)]
    monkeypatch.setitem(CODECS, "to agent", _Faulty(fault))

    with pytest.raises(AssertionError, match="to agent"):
        list(map(check, corpus))
