"""Tests a worker's handling of engine requests: pools, page lists and their parts, allowed wires; in one process."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from worker_side import PAGE_COUNT, Make, claim, endpoint, offer, pages, run, side_maker

from longshore_agent.control import curve
from longshore_agent.errors import DeviceError
from longshore_agent.pipeline.slabs import PageTable
from longshore_agent.worker.engine_requests import PARTIAL_CLAIMS_MAX
from longshore_wire.engine_messages import (
    TOKENS_MAX,
    Accepted,
    CachePages,
    Cancel,
    DeviceRegion,
    Half,
    Hello,
    RankAddress,
    Receive,
    Refused,
    RegisterPool,
    UnregisterPool,
)
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, Plane


@pytest.fixture
def make() -> Iterator[Make]:
    with side_maker() as build:
        yield build


def reason(answer: Accepted | Refused | None) -> Reason:
    assert isinstance(answer, Refused), answer
    return answer.reason


@pytest.mark.shows("argument.connect.roles")
def test_page_lists_are_checked_by_the_worker_itself_whatever_the_client_did(make):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET)
    assert reason(source.say(offer(1, 0, 8, pages(1, 2)))) is Reason.UNKNOWN_POOL
    for side in (source, target):
        assert isinstance(side.register(), Accepted)
        assert reason(side.register()) is Reason.ROOM_REUSED
    assert reason(source.say(offer(1, 0, 8, pages(1)))) is Reason.PAGE_OUT_OF_RANGE
    assert reason(source.say(offer(1, 0, 8, pages(1, PAGE_COUNT)))) is Reason.PAGE_OUT_OF_RANGE
    assert reason(source.say(offer(1, 0, 8, pages(1, -1)))) is Reason.PAGE_OUT_OF_RANGE
    assert reason(target.say(claim(1, 8, pages(1, 1)))) is Reason.TOKENS_OVERLAP
    assert reason(target.say(claim(1, 8, pages(1, 2, 3)))) is Reason.PAGE_OUT_OF_RANGE
    assert reason(target.say(offer(1, 0, 8, pages(1, 2)))) is Reason.UNSUPPORTED
    assert reason(source.say(claim(1, 8, pages(1, 2)))) is Reason.UNSUPPORTED
    assert reason(source.say(Hello(1, "P", source.config.layout, "cpu", (Half.SOURCE,)))) is Reason.MALFORMED_MESSAGE
    assert not source.core.rooms
    assert not target.core.rooms
    assert not source.requests.tables
    assert not target.requests.tables


NAMED = RankAddress(0, "slow.attacker.example:443", 7)
SHARED = tuple(RankAddress(rank, "10.0.0.1:1", 7) for rank in range(2))


@pytest.mark.parametrize(("ranks", "said"), [((NAMED,), "slow.attacker.example"), (SHARED, "rank 1")])
def test_a_claim_at_an_address_that_no_agent_has_is_refused_before_a_socket_is_opened(make, ranks, said):
    target = make("D", Half.TARGET)
    target.register()
    forged = msgspec.structs.replace(endpoint(), ranks=ranks)
    answer = target.say(msgspec.structs.replace(claim(1, 8, pages(1, 2)), endpoint=forged))
    assert reason(answer) is Reason.MALFORMED_MESSAGE
    assert said in answer.text
    assert (target.core.rooms, target.core.peers, target.core.take_effects()) == ({}, {}, [])


def test_a_worker_with_keys_dials_only_the_endpoints_that_agents_of_its_deployment_gave(make):
    target = make("D", Half.TARGET)
    target.register()
    target.requests.keys = curve.KeyRing(curve.generate())
    for given in (endpoint(), curve.KeyRing(curve.generate()).sealed(endpoint())):
        answer = target.say(msgspec.structs.replace(claim(1, 8, pages(1, 2)), endpoint=given))
        assert reason(answer) is Reason.AUTHENTICATION
        assert (target.core.rooms, target.core.peers, target.core.take_effects()) == ({}, {}, [])
    sealed = target.requests.keys.sealed(endpoint())
    assert isinstance(target.say(msgspec.structs.replace(claim(1, 8, pages(1, 2)), endpoint=sealed)), Accepted)


def test_pages_are_prepared_after_the_answer_and_a_failure_of_that_is_left_to_the_copy(make):
    prepared = []

    def prepare(_pool, table, half, _ways):
        prepared.append((half, table.pages.tolist()))
        raise DeviceError("the GPU has no memory left for 2 page ids")

    for name, half, message in (
        ("P", Half.SOURCE, offer(1, 0, 8, pages(1, 2))),
        ("D", Half.TARGET, claim(1, 8, pages(3, 4))),
    ):
        side = make(name, half)
        side.requests.prepare_pages = prepare
        side.register()
        prepared.clear()
        assert isinstance(side.say(message), Accepted)
        assert prepared == []
        assert [key.room for key in side.requests.prepare_new()] == [1]
        assert list(side.requests.prepare_new()) == []
        assert prepared == [(half, [1, 2] if half is Half.SOURCE else [3, 4])]
        assert len(side.core.rooms) == 1


def test_pages_of_a_pool_that_was_unmapped_are_not_prepared(make):
    prepared = []
    side = make("D", Half.TARGET)
    side.requests.prepare_pages = lambda _pool, table, _half, _ways: prepared.append(table.pages.tolist())
    side.register()
    assert isinstance(side.say(claim(1, 8, pages(3, 4))), Accepted)
    side.requests.let_go(0)
    assert list(side.requests.prepare_new()) == prepared == []


def test_copies_of_a_slots_layers_name_the_rooms_own_list_of_pages_in_which_theirs_is_page_0():
    state = KVLayout(ModelShape(8, (Plane(8, 64, 3),), 2), Parallel(), 3, PageOrder.SLOT)
    table = PageTable(0, np.array([5, 9, 2], np.int32))
    named = [table.holding(state, (first, first + 1)) for first in range(8)]
    # A GPU has a list once for each object.
    assert all(pages is table.pages for pages, _ in named)
    assert [pages[-first_page] for pages, first_page in named] == [5, 5, 5, 9, 9, 9, 2, 2]


def test_only_the_newest_pages_of_a_room_that_still_has_them_are_prepared(make):
    """An engine claims and cancels, or offers two chunks, in one turn of its worker's loop."""
    prepared = []
    target, source = make("D", Half.TARGET), make("P", Half.SOURCE)
    for side in (target, source):
        side.requests.prepare_pages = lambda _pool, table, _half, _ways: prepared.append(table.pages.tolist())
        side.register()
    assert isinstance(target.say(claim(1, 8, pages(3, 4))), Accepted)
    assert isinstance(target.say(Cancel(0, Half.TARGET, "P", 1)), Accepted)
    assert isinstance(target.say(claim(2, 8, pages(5, 6))), Accepted)
    assert reason(target.say(claim(2, 8, pages(7, 8)))) is Reason.ROOM_REUSED
    target.turn(source)
    assert target.released == {1}
    assert [key.room for key in target.requests.prepare_new()] == [2]
    assert isinstance(source.say(offer(3, 0, 8, pages(1, 2), last=False)), Accepted)
    assert isinstance(source.say(offer(3, 8, 16, pages(3, 4))), Accepted)
    assert [key.room for key in source.requests.prepare_new()] == [3]
    assert prepared == [[5, 6], [1, 2, 3, 4]]


def test_a_page_that_an_open_room_writes_is_refused_to_every_other_room_until_it_is_released(make):
    target = make("D", Half.TARGET)
    target.register()
    assert isinstance(target.say(claim(1, 12, pages(1, 2, 3))), Accepted)
    answer = target.say(claim(2, 12, pages(7, 3, 8)))
    assert reason(answer) is Reason.TOKENS_OVERLAP
    assert "pages[1] is 3, which room 1 of P writes" in answer.text
    assert [key.room for _, key in target.requests.tables] == [key.room for key in target.core.rooms] == [1]
    # Adjacent pages, and those of the refused claim may be used.
    assert isinstance(target.say(claim(3, 8, pages(7, 8))), Accepted)
    assert isinstance(target.say(Cancel(0, Half.TARGET, "P", 1)), Accepted)
    target.turn(make("P", Half.SOURCE))
    assert target.released == {1}
    assert isinstance(target.say(claim(5, 12, pages(3, 2, 1))), Accepted)


@pytest.mark.parametrize(("first", "end"), [(0, TOKENS_MAX + 1), (-1, 3), (4, 3), (2**62, 2**63)])
def test_tokens_that_could_never_be_claimed_are_offered_to_nobody(make, first, end):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET)
    source.register()
    target.register()
    refused = source.say(offer(1, first, end, pages(1)))
    assert reason(refused) is Reason.TOKENS_MISSING
    assert f"give 0 <= first <= end <= {TOKENS_MAX}" in refused.text
    assert (
        reason(target.say(Receive(0, 1, endpoint(), (CachePages(0, first, end, 1, pages(1), 0),))))
        is Reason.TOKENS_MISSING
    )
    assert (source.core.rooms, source.requests.tables, target.core.rooms, target.requests.tables) == ({}, {}, {}, {})


def test_rooms_may_offer_the_same_pages_at_once(make):
    source = make("P", Half.SOURCE)
    source.register()
    for room in (1, 2):
        assert isinstance(source.say(offer(room, 0, 8, pages(1, 2))), Accepted)
    assert len(source.core.rooms) == 2


@pytest.mark.parametrize("listed", [b"\x01\x02\x03", b"\x01\x00\x00\x00\x02"])
def test_page_lists_that_are_no_numbers_are_refused_and_end_nobody(make, listed):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET)
    source.register()
    target.register()
    assert reason(source.say(offer(1, 0, 4, listed))) is Reason.MALFORMED_MESSAGE
    assert reason(target.say(claim(1, 4, listed, count=1))) is Reason.MALFORMED_MESSAGE


def test_cuda_handles_are_refused_by_a_worker_on_a_cpu_and_nothing_is_mapped(make):
    side = make("P", Half.SOURCE)
    for descriptors in ((), (side.descriptor,)):
        answer = side.say(RegisterPool(0, 0, side.geometry, device_regions=(DeviceRegion(bytes(64), 0),)), descriptors)
        assert reason(answer) is Reason.LAYOUT_MISMATCH
        assert "1 CUDA handles for 1 regions" in answer.text
    assert not side.requests.pools
    assert isinstance(side.register(), Accepted)


def test_each_request_renews_the_lease_as_a_client_sends_no_renewal_beside_it(make):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET)
    for side in (source, target):
        side.register()
        side.now_ns += 2 * side.config.settings.lease_ns  # the engine was stopped, with no room open
    source.say(offer(1, 0, 8, pages(1, 2)))
    target.say(claim(1, 8, pages(1, 2)))
    for side in (source, target):
        side.core.tick(side.now_ns)
        assert [room.failed for room in side.core.rooms.values()] == [False]


def test_a_claim_in_parts_is_answered_by_its_last_part(make):
    target = make("D", Half.TARGET)
    target.register()
    assert target.say(claim(1, 24, pages(9, 9), offset=0, count=6)) is None
    # The engine starts over.
    assert target.say(claim(1, 24, pages(1, 2), offset=0, count=6)) is None
    assert target.say(claim(1, 24, pages(3, 4), offset=2, count=6)) is None
    assert isinstance(target.say(claim(1, 24, pages(5, 6), offset=4, count=6)), Accepted)
    ((_, table),) = target.requests.tables.items()
    assert table[0].pages.tolist() == [1, 2, 3, 4, 5, 6]


def test_parts_that_do_not_make_a_list_are_refused_and_forgotten(make):
    target = make("D", Half.TARGET)
    target.register()
    assert target.say(claim(1, 12, pages(1, 2), count=3)) is None
    assert reason(target.say(claim(1, 12, pages(2, 3), offset=1, count=3))) is Reason.MALFORMED_MESSAGE
    assert target.say(claim(1, 24, pages(1, 2), count=6)) is None
    out_of_order = target.say(claim(1, 24, pages(5, 6), offset=4, count=6))
    assert reason(out_of_order) is Reason.MALFORMED_MESSAGE
    assert "2 pages at 4, after 2 of 6 pages" in out_of_order.text
    assert target.say(claim(1, 12, pages(1, 2), count=3)) is None
    assert reason(target.say(claim(1, 12, b"", offset=2, count=3))) is Reason.MALFORMED_MESSAGE
    assert (
        reason(target.say(claim(1, 12, bytes(4 * (PAGE_COUNT + 1)), count=2 * PAGE_COUNT))) is Reason.MALFORMED_MESSAGE
    )
    assert reason(target.say(claim(1, 12, pages(1), offset=-1, count=3))) is Reason.MALFORMED_MESSAGE
    assert isinstance(target.say(claim(1, 12, pages(1, 2, 3))), Accepted)
    for room in range(2, PARTIAL_CLAIMS_MAX + 2):
        assert target.say(claim(room, 12, pages(1, 2), count=3)) is None
    assert reason(target.say(claim(99_999, 12, pages(1, 2), count=3))) is Reason.BUSY


def test_a_cancelled_claim_forgets_the_parts_that_have_come(make):
    target = make("D", Half.TARGET)
    target.register()
    assert target.say(claim(1, 12, pages(1, 2), count=3)) is None
    assert isinstance(target.say(Cancel(0, Half.TARGET, "P", 1)), Accepted)
    assert reason(target.say(claim(1, 12, pages(3), offset=2, count=3))) is Reason.MALFORMED_MESSAGE


def test_chunks_extend_a_rooms_pages_and_a_sequence_keeps_those_it_has(make):
    source = make("P", Half.SOURCE)
    source.register()
    assert isinstance(source.say(offer(1, 0, 6, pages(3, 9), last=False)), Accepted)
    assert reason(source.say(offer(1, 6, 12, pages(8, 4)))) is Reason.TOKENS_OVERLAP
    assert isinstance(source.say(offer(1, 6, 12, pages(9, 4))), Accepted)
    ((_, table),) = source.requests.tables.items()
    assert table[0].pages.tolist() == [3, 9, 4]


def test_a_pool_is_answered_for_only_when_its_rooms_are_released(make):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET, page_size=8)
    source.register()
    target.register()
    source.bytes[:] = np.arange(len(source.bytes)) % 251
    assert isinstance(target.say(claim(1, 24, pages(7, 3, 5))), Accepted)
    assert target.say(UnregisterPool(0, 0)) is None
    assert reason(target.say(claim(2, 24, pages(7, 3, 5)))) is Reason.UNKNOWN_POOL
    assert not target.requests.take_left()
    for _ in range(10):
        target.turn(source)
        source.turn(target)
    assert target.ended[1].reason is Reason.CANCELLED
    (answer,) = target.requests.take_left()
    assert isinstance(answer, Accepted)
    assert not target.requests.pools


def test_a_room_is_not_opened_by_one_cache_while_the_pool_of_another_leaves_or_is_not_there(make):
    source = make("P", Half.SOURCE)
    source.register()
    requests = source.requests
    requests.caches = (*requests.caches, msgspec.structs.replace(requests.caches[0], name="draft"))
    # A room would wait for its second cache without end, and so would whoever unregisters that cache's pool.
    answer = source.say(offer(1, 0, 6, pages(3, 9), last=False))
    assert isinstance(answer, Refused)
    assert (answer.reason, requests.tables) == (Reason.UNKNOWN_POOL, {})


def test_a_pool_that_a_neighbour_was_given_is_answered_for_only_when_nobody_has_it_mapped(make):
    target = make("D", Half.TARGET, page_size=8)
    target.register()
    target.requests.pools[0].shown = True
    assert target.say(UnregisterPool(0, 0)) is None
    assert target.requests.take_left() == []
    assert not target.requests.pools
    assert target.requests.unmapped == [0]
    # Its number is not free either: messages about the old pool must not apply to the new one.
    assert reason(target.register()) is Reason.ROOM_REUSED
    assert target.requests.free(1) == []
    (answer,) = target.requests.free(0)
    assert isinstance(answer, Accepted)
    assert target.requests.free(0) == []
    assert isinstance(target.register(), Accepted)


def test_bytes_move_between_two_workers_without_their_sockets(make):
    source, target = make("P", Half.SOURCE), make("D", Half.TARGET, page_size=8)
    source.register()
    target.register()
    run(source, target, 1)
    assert (source.ended[1].reason, target.ended[1].reason) == (Reason.NONE, Reason.NONE)
    near = source.bytes.reshape(4, PAGE_COUNT * 4, -1)
    far = target.bytes.reshape(4, PAGE_COUNT * 8, -1)
    tokens = np.arange(24)
    there = np.array([7, 3, 5])[tokens // 8] * 8 + tokens % 8
    assert np.array_equal(far[:, there], near[:, 4 + tokens])


def test_no_byte_travels_over_a_wire_that_is_not_allowed_in_the_first_room_or_in_a_later_one(make):
    source = make("P", Half.SOURCE, LONGSHORE_WIRES="SharedMemory,NVLink")
    target = make("D", Half.TARGET, page_size=8)
    source.register()
    target.register()
    for room in (1, 2):
        run(source, target, room)
        assert source.ended[room].reason is Reason.WIRE_NOT_ALLOWED
        assert target.ended[room].reason is Reason.WIRE_NOT_ALLOWED
        assert "prefill P rank 0 reaches decode D rank 0 over Loopback" in target.ended[room].text
        assert "NVLink, SharedMemory" in target.ended[room].text
    assert not target.bytes.any()
    assert source.metrics.snapshot().value("longshore_writes_total") == 0
