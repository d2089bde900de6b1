"""Tests real agents between engines of every pair of layouts, with every kind of prefix.

Compares each byte of every pool with the test engine's `pages`, and the sent bytes with those that the targets hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from agent_fleet import World
from agent_world import START_LIMIT_S, Engine, Request, wait_for, wait_for_none
from layout_place import (
    BACKENDS,
    BLOB_BYTES,
    ENGINES,
    FIVE_LAYERS,
    FOUR_HEADS,
    LATENT,
    Place,
    every_backend,
    real_backends,
    wanted_by,
)

from longshore_client import Half, HelloRefused, PageOrder, Parallel, connect
from longshore_client.memory import pool_geometry
from longshore_lab.test_engine.pages import held
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import Attention, KVLayout
from longshore_wire.names import room_name

# Enough consecutive rooms for each of four replicas to get one.
ROOMS_IN_A_ROW = 16
LONG_TOKENS = 131_072
BUFFER_SETTINGS = [f"LONGSHORE_{name}" for name in ("RING_BYTES", "RING_EXTENT_BYTES", "LANE_BYTES", "SLAB_BYTES_MIN")]

# (total, prefix): no prefix; a prefix that ends with a page of both sides; within a page; a full hit.
REQUESTS = ((211, 0), (197, 64), (150, 37), (130, 130))
# Further cases: the prefix ends with a page of the smaller size only; all but one token; a full hit of whole pages; one
# token.
PREFIXES = (*REQUESTS, (190, 48), (131, 130), (128, 128), (65, 1))
OPAQUE_REQUESTS = ((211, 0), (197, 64), (150, 16), (130, 128))
PAIRS = [
    ("tp8", "tp4"),
    ("tp16", "tp4"),
    ("tp16", "tp1-16"),
    ("five-pp2", "five-pp3"),
    ("five-given", "five-pp3"),
    ("five-pp2", "five-given"),
    ("many-pp2", "many-pp3"),
    ("tp4", "tp2-64"),
    ("tp2-64", "tp1-1"),
    ("tp1-1", "tp1-64"),
    ("tp1-64", "tp1-16"),
    ("tp2-hnd", "tp2-64"),
    ("tp2-hnd", "tp1-1"),
    ("tp1-16", "tp2-hnd"),
    ("latent-tp4", "latent-tp2"),
]
FURTHER = pytest.mark.rest("layouts")


LARGEST = {"tp16", "tp8", "many-pp2", "many-pp3", "five-given", "tp1-64"}


def but_largest(pairs: Sequence[tuple[str, str]]) -> list[Any]:
    """Return pairs of layouts, of which `make test` takes those without the engines of many workers and their like."""
    return [pytest.param(*pair, marks=FURTHER) if LARGEST & {*pair} else pair for pair in pairs]


BOTH_WAYS = [*but_largest(PAIRS), *(pytest.param(target, source, marks=FURTHER) for source, target in PAIRS)]
# Cases over every transport: TP above the number of heads, pipelines, pages of 16 and 64 tokens, both page orders, MLA.
CHOSEN = [
    ("tp2-64", "tp2-hnd"),
    ("tp2-hnd", "tp2-64"),
    ("tp8", "tp2-64"),
    ("many-pp2", "many-pp3"),
    ("latent-tp2", "latent-tp4"),
]


@pytest.fixture(scope="module")
def place(request, tmp_path_factory) -> Iterator[Place]:
    made = Place(
        tmp_path_factory.mktemp(f"layouts-{request.param}"),
        request.param,
        wanted_by(request.session.items, request.node.nodeid, request.param),
    )
    yield made
    made.close()


def sent_bytes(engine: Engine) -> list[int]:
    """Return the payload bytes that each rank of an engine has sent so far, by its worker's metrics."""
    sent = {
        f"{at.dp_rank}/{at.pp_rank * at.tp + at.tp_rank}": 0 for at in (rank.layout.parallel for rank in engine.ranks)
    }
    # The metrics of a worker that answers late would be old ones.
    engine.agent.status()
    for line in engine.agent.ask("/metrics")[1].decode().splitlines():
        found = re.fullmatch(rf'longshore_lane_bytes_total\{{.*worker="{engine.instance}/([0-9/]+)".*\}} (\S+)', line)
        if found and found[1] in sent:
            sent[found[1]] += int(float(found[2]))
    return list(sent.values())


def held_bytes(engine: Engine, tokens: int) -> int:
    """Return the bytes of `tokens` tokens over all ranks of an engine."""
    model = engine.ranks[0].layout.model
    kinds = 1 if model.attention is Attention.LATENT else 2
    entries = sum(len(layers) * len(heads) for layers, heads in (held(rank.layout) for rank in engine.ranks))
    return entries * kinds * tokens * model.head_dim * model.element_bytes


def exchange(source: Engine, target: Engine, requests: Sequence[tuple[int, int]] = REQUESTS) -> int:
    """Move requests of (total, prefix) tokens, all at once; return the tokens that moved.

    Every byte of both sides' pools is compared, also those that nothing was to touch.
    """
    cuts = (50, 101)
    found = [
        Request(source, target, total, prefix=prefix, cuts=[cut for cut in cuts if cut < total])
        for total, prefix in requests
    ]
    for number, each in enumerate(found):
        if number % 2:
            each.offer()
            each.claim()
        else:
            each.claim()
            each.offer()
    for each in found:
        each.arrives()
    assert source.intact()
    assert target.intact()
    return sum(total - prefix for total, prefix in requests)


def check_every_byte(source: Engine, target: Engine) -> None:
    """Move requests with every kind of prefix; check that each byte that the target lacks is sent once."""
    before = sum(sent_bytes(source))
    tokens = exchange(source, target)
    assert sum(sent_bytes(source)) - before == held_bytes(target, tokens)
    wait_for_none(source.agent.leftovers)


def way_between(source: Engine, target: Engine) -> str:
    """Move one request; return the mode that its rooms report."""
    each = Request(source, target, 80)
    each.claim()

    def ways() -> set[str]:
        status, body = source.agent.ask(f"/v1/rooms/{room_name(each.room)}")
        halves = json.loads(body)["halves"] if status == 200 else []
        return {way for half in halves for way in half["room"]["ways"] if half["room"]["half"] == "source"}

    found = wait_for(ways)
    each.offer()
    each.arrives()
    assert target.intact()
    return "/".join(found)


@pytest.mark.shows(
    "argument.connect.layout",
    "argument.send.{pages,first_token,end_token}",
    "argument.receive.{room,endpoint,pages,end_token}",
    "argument.register_pool.geometry",
)
@every_backend
@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_every_byte_arrives_once_between_any_two_layouts_and_with_any_prefix(place, source, target):
    check_every_byte(place.engine(source), place.engine(target))


@pytest.mark.shows("argument.receive.first_token")
@pytest.mark.parametrize(("total", "prefix"), PREFIXES)
@every_backend
@pytest.mark.parametrize(
    ("source", "target"), [("tp4", "tp2-64"), ("tp2-64", "tp4"), ("tp2-hnd", "tp1-1"), ("tp1-1", "tp2-hnd")]
)
def test_only_what_the_target_lacks_is_sent_wherever_its_prefix_ends(place, source, target, total, prefix):
    source, target = place.engine(source), place.engine(target)
    before = sum(sent_bytes(source))
    exchange(source, target, [(total, prefix)])
    assert sum(sent_bytes(source)) - before == held_bytes(target, total - prefix)


@every_backend
@pytest.mark.parametrize(
    ("source", "target"), but_largest([("tp8", "tp4"), ("tp16", "tp4"), ("latent-tp4", "latent-tp2")])
)
def test_ranks_that_hold_the_same_heads_share_the_work_of_rooms_that_follow_each_other(place, source, target):
    source, target = place.engine(source), place.engine(target)
    before = sent_bytes(source)
    found = [Request(source, target, 40) for _ in range(ROOMS_IN_A_ROW)]
    for each in found:
        each.claim()
        each.offer()
    for each in found:
        each.arrives()
    shares = [after - earlier for after, earlier in zip(sent_bytes(source), before, strict=True)]
    mean = held_bytes(target, 40) * ROOMS_IN_A_ROW / len(shares)
    assert all(0.5 * mean <= share <= 1.5 * mean for share in shares), shares


@every_backend
@pytest.mark.parametrize("peer", ["tp4", pytest.param("tp1-64", marks=FURTHER)])
def test_each_replica_of_data_parallel_attention_is_reached_and_serves_as_itself(place, peer):
    other = place.engine(peer)
    replicas = [place.engine(f"dp-{rank}") for rank in range(2)]
    for rank, replica in enumerate(replicas):
        twin = replicas[1 - rank]
        before = sent_bytes(twin)
        exchange(other, replica)
        assert twin.intact()
        exchange(replica, other)
        assert sent_bytes(twin) == before
    exchange(replicas[0], replicas[1])


@every_backend
@pytest.mark.parametrize(("source", "target"), [("opaque-tp1", "opaque-tp2"), ("opaque-tp2", "opaque-tp1")])
def test_content_that_is_opaque_per_page_and_head_moves_in_whole_pages(place, source, target):
    source, target = place.engine(source), place.engine(target)
    before = sum(sent_bytes(source))
    exchange(source, target, OPAQUE_REQUESTS)
    pages = -(-211 // 16) + -(-(197 - 64) // 16) + -(-(150 - 16) // 16) + 1
    blobs = pages * FOUR_HEADS.layers * FOUR_HEADS.kv_heads
    assert sum(sent_bytes(source)) - before == blobs * BLOB_BYTES
    wait_for_none(source.agent.leftovers)


@every_backend
def test_a_prefix_that_ends_within_an_opaque_page_is_refused_and_the_error_says_where_to_begin(place):
    source, target = place.engine("opaque-tp1"), place.engine("opaque-tp2")
    room = Request(source, target, 60, prefix=37)
    with pytest.raises(LongshoreError, match=r"37.*multiple of 16") as caught:
        room.claim()
    assert caught.value.reason is Reason.UNSUPPORTED


@every_backend
def test_blobs_of_another_size_are_refused_with_both_sizes(place):
    layout = place.engine("opaque-tp1").ranks[0].layout
    assert pool_geometry(layout, 3).planes[1].offset == 3 * 4 * BLOB_BYTES
    source = place.engine("opaque-tp1")
    endpoint = source.endpoint()
    other = type(layout)(layout.model, layout.parallel, 16, PageOrder.OPAQUE, blob_bytes=999)
    wrong = type(endpoint)(endpoint.instance, other, endpoint.ranks)
    with pytest.raises(LongshoreError, match=r"999.*1000") as caught:
        place.engine("opaque-tp2").client.receive(2**63, wrong, [0], 0, 16)
    assert caught.value.reason is Reason.LAYOUT_MISMATCH


@pytest.mark.shows("field.model.attention")
@every_backend
def test_a_latent_travels_in_whole_pages_from_one_writer_to_each_reader(place):
    source, target = place.engine("latent-tp4"), place.engine("latent-tp2")
    assert way_between(source, target) == "contiguous"
    before = sent_bytes(source)
    each = Request(source, target, 100)
    each.offer()
    each.claim()
    each.arrives()
    shares = [after - earlier for after, earlier in zip(sent_bytes(source), before, strict=True)]
    whole = 100 * LATENT.layers * LATENT.head_dim * LATENT.element_bytes
    assert sorted(shares) == [0, 0, whole, whole]


@every_backend
def test_a_latent_is_staged_where_that_is_asked_for(place):
    source, target = place.engine("latent-tp2"), place.engine("always-latent")
    assert way_between(source, target) == "staged"
    each = Request(source, target, 60)
    each.offer()
    each.claim()
    each.arrives()


@pytest.mark.shows("agent.staging", "field.transfer.staging")
@every_backend
@pytest.mark.parametrize(
    ("source", "target"),
    but_largest([("tp16", "never"), ("tp2-64", "never"), ("tp2-hnd", "never"), ("tp1-1", "never")]),
)
def test_without_staging_the_same_bytes_travel_slice_by_slice(place, source, target):
    source, target = place.engine(source), place.engine(target)
    exchange(source, target)
    assert way_between(source, target) == "slices"


@every_backend
def test_without_staging_opaque_pages_travel_blob_by_blob(place):
    source, target = place.engine("opaque-tp2"), place.engine("never-opaque")
    exchange(source, target, OPAQUE_REQUESTS)
    assert way_between(source, target) == "slices"


@every_backend
@pytest.mark.parametrize("widest", ["tp1-16", *(pytest.param(name, marks=FURTHER) for name in ("tp8", "tp16"))])
def test_several_prefill_layouts_feed_one_decode_pool_at_once(place, widest):
    target = place.engine("tp4")
    sources = [place.engine(name) for name in (widest, "tp2-64", "tp1-1", "tp2-hnd", "dp-1")]
    found = [
        Request(source, target, 120 + number, prefix=number % 3 * 15, cuts=(33,))
        for number, source in enumerate(sources)
    ]
    for each in found:
        each.claim()
    for each in found:
        each.offer_chunk(0)
    for each in reversed(found):
        each.offer_chunk(1)
    for each in found:
        each.arrives()
    assert target.intact()
    wait_for_none(target.agent.leftovers)


@every_backend
def test_the_engines_hold_what_their_layouts_say(place):
    for name in ENGINES:
        for rank in place.engine(name).ranks:
            layers, heads = held(rank.layout)
            assert (list(rank.layout.layers), list(rank.layout.heads)) == (layers, heads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": Parallel(pp=2, pp_rank=1), "stage_layers": None}, r"parallel\.pp is 2 at rank 1 and 3 at rank 0"),
        ({"parallel": Parallel(2, 1, 3, 0)}, r"parallel\.tp is 2 at rank 1 and 1 at rank 0"),
        ({"stage_layers": (1, 2, 2)}, r"stage_layers is \(1, 2, 2\) at rank 1 and \(1, 1, 3\) at rank 0"),
        ({"page_size": 64}, "page_size is 64 at rank 1 and 16 at rank 0"),
        ({"order": PageOrder.HND}, "order is HND at rank 1 and NHD at rank 0"),
    ],
)
def test_a_rank_that_contradicts_those_of_its_instance_is_refused_by_field(lone_rank, changes, message):
    agent, first = lone_rank
    wrong = msgspec.structs.replace(first.at(1), **changes)
    with pytest.raises(HelloRefused, match=f"^.*lone: {message}") as caught:
        connect(agent.socket, instance="lone", layout=wrong, timeout_s=START_LIMIT_S)
    assert caught.value.reason is Reason.LAYOUT_MISMATCH


@pytest.mark.shows("agent.backend", "field.transfer.backend")
@real_backends
@pytest.mark.parametrize(
    ("source", "target"), [CHOSEN[0], *(pytest.param(*pair, marks=FURTHER) for pair in CHOSEN[1:])]
)
def test_every_byte_arrives_once_between_layouts_of_each_kind_over_every_transport(place, source, target):
    check_every_byte(place.engine(source), place.engine(target))


@pytest.fixture(scope="module", params=BACKENDS)
def lone_rank(request, tmp_path_factory):
    """An agent, and the layout of the first of three ranks, the only registered one."""
    world = World(tmp_path_factory.mktemp("lone"), LONGSHORE_BACKEND=request.param)
    agent = world.agent("agent")
    assert agent.http
    first = KVLayout(FIVE_LAYERS, Parallel(pp=3), 16, stage_layers=(1, 1, 3))
    with connect(agent.socket, instance="lone", layout=first, timeout_s=START_LIMIT_S):
        yield agent, first
    world.close()


@pytest.fixture(scope="module", params=BACKENDS)
def long_place(request, tmp_path_factory):
    """One agent with default buffers, and engines with pages for one long prompt."""
    world = World(tmp_path_factory.mktemp("long"), LONGSHORE_BACKEND=request.param)
    agent = world.agent("default", **dict.fromkeys(BUFFER_SETTINGS, ""))
    pages = {"model": FOUR_HEADS, "page_count": LONG_TOKENS // 16}
    target = world.engine(agent, "long-decode", page_size=1, roles=[Half.TARGET], **pages)
    source = world.engine(agent, "long-prefill", 2, roles=[Half.SOURCE], **pages)
    yield SimpleNamespace(source=source.result(), target=target.result())
    world.close()


@FURTHER
def test_a_prompt_of_131072_tokens_moves_with_the_buffers_and_sockets_that_one_has_by_default(long_place):
    chunk = 8192
    source, target = long_place.source, long_place.target
    long = Request(source, target, LONG_TOKENS, cuts=tuple(range(chunk, LONG_TOKENS, chunk)))
    assert len(long.target_pages) == LONG_TOKENS
    long.claim()
    long.offer()
    long.arrives()
    assert target.intact()
    assert sum(sent_bytes(source)) == held_bytes(target, LONG_TOKENS)
