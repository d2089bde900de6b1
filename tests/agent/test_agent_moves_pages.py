"""Real agents move pages between real engines of unequal layouts: bytes, ways, chunks, prefixes, several rooms at once."""

from __future__ import annotations

import pytest
from agent_fleet import Fleet
from agent_world import EVENT_LIMIT_S, Engine, Request, wait_for, wait_for_none

from longshore_wire.engine_messages import Half

LANES = 4


@pytest.fixture(scope="module", params=["NIXL", "Mooncake", "Loopback"])
def fleet(request, fleet_of) -> Fleet:
    return fleet_of(request.param)


def requests(source: Engine, target: Engine) -> list[Request]:
    """Four requests: many chunks and an odd length; a prefix of whole pages; a prefix within a page; a full hit."""
    return [
        Request(source, target, 397, cuts=(100, 101, 256)),
        Request(source, target, 330, prefix=128, cuts=(160,)),
        Request(source, target, 251, prefix=77),
        Request(source, target, 160, prefix=160, cuts=(80,)),
    ]


@pytest.mark.parametrize(("source", "target"), [("two", "one"), ("one", "two"), ("two", "three"), ("one", "same")])
def test_rooms_of_every_kind_at_once_arrive_byte_for_byte_and_leave_nothing_behind(fleet, source, target):
    source, target = getattr(fleet, source), getattr(fleet, target)
    found = requests(source, target)
    for number, each in enumerate(found):
        if number % 2:
            each.offer()
            each.claim()
        else:
            each.offer_chunk(0)
            each.claim()
            for chunk in range(1, len(each.cuts) + 1):
                each.offer_chunk(chunk)
    for each in found:
        each.arrives()
    assert all(rank.intact() for engine in (source, target) for rank in engine.ranks)
    wait_for_none(fleet.leftovers)


def test_a_decode_that_claims_before_prefill_knows_the_room_is_served(fleet):
    early = Request(fleet.two, fleet.one, 199)
    early.claim()
    wait_for(lambda: fleet.prefill.room(early.room, Half.SOURCE), what="the claim to reach prefill")
    early.offer()
    early.arrives()
    assert fleet.one.ranks[0].intact()


def test_a_prefill_that_has_finished_long_before_the_claim_is_found(fleet):
    late = Request(fleet.two, fleet.three, 199, cuts=(64,))
    late.offer()
    shown = fleet.prefill.room(late.room, Half.SOURCE)
    assert shown is not None
    assert (shown["state"], shown["ended"], shown["tokens_total"]) == ("open", False, 199)
    late.claim()
    late.arrives()
    assert all(rank.intact() for rank in fleet.three.ranks)


def test_the_ring_wraps_again_and_again_under_several_rooms_and_every_byte_is_right(fleet):
    def rounds() -> float:
        return fleet.prefill.metric("longshore_ring_rounds_total", worker="one/0/0")

    before = rounds()
    while rounds() < before + 3:
        found = [Request(fleet.two, fleet.one, 333 + 16 * number) for number in range(4)]
        for each in found:
            each.claim()
        for each in found:
            each.offer()
        for each in found:
            each.arrives()
        assert fleet.one.ranks[0].intact()


@pytest.mark.shows("agent.force_way")
def test_every_way_carries_the_same_bytes_and_is_the_one_that_is_reported(fleet):
    forced = "staged" if fleet.backend == "Loopback" else "slices"
    for source, target, way in (
        (fleet.one, fleet.same, "contiguous"),
        (fleet.one, fleet.other_way, forced),
        (fleet.two, fleet.other_way, forced),
        (fleet.two, fleet.one, "staged"),
    ):
        written = fleet.prefill.metric("longshore_writes_total", way=way)
        each = Request(source, target, 205, prefix=37, cuts=(90,))
        each.claim()
        shown = wait_for(lambda each=each: fleet.prefill.room(each.room, Half.SOURCE))
        assert shown["ways"] == [way]
        each.offer()
        each.arrives()
        assert target.ranks[0].intact()
        assert fleet.prefill.metric("longshore_writes_total", way=way) > written


def test_bytes_and_seconds_of_writes_are_counted_by_way_and_by_the_wire_that_the_status_has(fleet):
    def wire() -> str:
        worker = next(found for found in fleet.prefill.status()["workers"] if found["worker"] == "two/0/0")
        peer = next(found for found in worker["peers"] if found["instance"] == "one" and found["ways"] == ["staged"])
        return "" if peer["wire"] == "Unknown" else peer["wire"]

    def moves() -> None:
        each = Request(fleet.two, fleet.one, 320)
        each.offer()
        each.claim()
        each.arrives()

    moves()
    labels = {"way": "staged", "wire": wait_for(wire), "worker": "two/0/0"}
    names = ("longshore_written_bytes_total", "longshore_written_seconds_total")
    before = [fleet.prefill.metric(name, **labels) for name in names]
    moves()
    written_bytes, seconds = (
        fleet.prefill.metric(name, **labels) - count for name, count in zip(names, before, strict=True)
    )
    model = fleet.two.ranks[0].layout.model
    # This rank has half of the heads.
    assert written_bytes == 320 * model.layers * model.kv_heads * model.head_dim * model.element_bytes
    assert 0 < seconds < EVENT_LIMIT_S * LANES


def test_one_pair_uses_every_lane(fleet):
    def lanes() -> list[float]:
        return [
            fleet.prefill.metric("longshore_lane_bytes_total", worker="two/0/0", lane=str(lane))
            for lane in range(LANES)
        ]

    before = lanes()

    def all_used() -> bool:
        each = Request(fleet.two, fleet.one, 1200)
        each.offer()
        each.claim()
        each.arrives()
        return all(after > earlier for after, earlier in zip(lanes(), before, strict=True))

    wait_for(all_used, what="bytes of every lane")


def test_what_slabs_were_is_counted_once_at_each_end(fleet):
    def slabs(half: str, instance: str) -> float:
        ranks = range(2)
        return sum(
            fleet.prefill.metric("longshore_slabs_total", half=half, worker=f"{instance}/0/{rank}") for rank in ranks
        )

    sent, taken = slabs("source", "two"), slabs("target", "one")
    each = Request(fleet.two, fleet.one, 300)
    each.claim()
    each.offer()
    each.arrives()
    shown = [fleet.prefill.room(each.room, half) for half in (Half.SOURCE, Half.TARGET)]
    assert [(room["state"], room["ended"]) for room in shown] == [("done", True)] * 2
    assert slabs("source", "two") - sent == slabs("target", "one") - taken > 2
