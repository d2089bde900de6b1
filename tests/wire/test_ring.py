"""Compares the ring with a map of its bytes, with held regions, and tests each of its guarantees."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longshore_wire.errors import Reason, RingError
from longshore_wire.ring import Region, Ring

UNIT_BYTES = 64


class RingAgainstByteMap(RuleBasedStateMachine):
    """Every unit of the ring is owned by at most one region; the ring's numbers are those of the map."""

    @initialize(units=st.integers(1, 24))
    def begin(self, units: int) -> None:
        self.ring = Ring(units * UNIT_BYTES)
        self.owner: list[int] = [0] * units
        self.live: dict[int, Region] = {}
        self.held: dict[int, Region] = {}
        self.last_place = (0, 0)
        self.last_generation = 0

    def longest_gap_units(self) -> int:
        longest = run = 0
        for owner in self.owner:
            run = run + 1 if owner == 0 else 0
            longest = max(longest, run)
        return longest

    @rule(length_bytes=st.integers(1, 10 * UNIT_BYTES))
    def allocate(self, length_bytes: int) -> None:
        units = -(-length_bytes // UNIT_BYTES)
        if units > len(self.owner):
            with pytest.raises(RingError):
                self.ring.allocate(length_bytes)
            return
        region = self.ring.allocate(length_bytes)
        assert (region is not None) == (units <= self.longest_gap_units())
        if region is None:
            return
        assert region.offset_bytes % UNIT_BYTES == 0 and region.length_bytes == units * UNIT_BYTES
        rounds = self.ring.rounds
        place = (rounds, region.offset_bytes)
        assert place >= self.last_place, "regions are cut in first-in-first-out order"
        assert region.generation > self.last_generation
        if rounds == self.last_place[0]:
            skipped = range(self.last_place[1] // UNIT_BYTES, region.offset_bytes // UNIT_BYTES)
            assert not self.fits_within(skipped, units), "the first gap behind the head that fits is taken"
        else:
            assert rounds == self.last_place[0] + 1
            behind_head = range(self.last_place[1] // UNIT_BYTES, len(self.owner))
            assert not self.fits_within(behind_head, units), "the head wraps only where nothing behind it fits"
        first = region.offset_bytes // UNIT_BYTES
        for unit in range(first, first + units):
            assert self.owner[unit] == 0, "two regions overlap"
            self.owner[unit] = region.generation
        self.last_place = (rounds, region.offset_bytes + region.length_bytes)
        self.last_generation = region.generation
        self.live[region.generation] = region

    def fits_within(self, span: range, units: int) -> bool:
        run = 0
        for unit in span:
            run = run + 1 if self.owner[unit] == 0 else 0
            if run == units:
                return True
        return False

    def erase(self, region: Region) -> None:
        first = region.offset_bytes // UNIT_BYTES
        for unit in range(first, first + region.length_bytes // UNIT_BYTES):
            assert self.owner[unit] == region.generation
            self.owner[unit] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        region = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.ring.free(region)
        self.erase(region)
        with pytest.raises(RingError):
            self.ring.free(region)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        region = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.ring.hold(region)
        self.held[region.generation] = region
        with pytest.raises(RingError):
            self.ring.free(region)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_held(self, data: st.DataObject) -> None:
        region = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.ring.release_held(region)
        self.erase(region)
        with pytest.raises(RingError):
            self.ring.release_held(region)

    @invariant()
    def numbers_are_those_of_the_map(self) -> None:
        assert self.ring.used_bytes == sum(region.length_bytes for region in self.live.values())
        assert self.ring.held_bytes == sum(region.length_bytes for region in self.held.values())
        assert self.ring.free_bytes == self.owner.count(0) * UNIT_BYTES
        assert self.ring.largest_free_bytes == self.longest_gap_units() * UNIT_BYTES
        assert self.ring.region_count == len(self.live) + len(self.held)


# Alone at the end of a run it would keep the other processes waiting.
TestRingAgainstByteMap = pytest.mark.slow(RingAgainstByteMap.TestCase)
TestRingAgainstByteMap.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)


def cut(ring: Ring, length_bytes: int) -> Region:
    region = ring.allocate(length_bytes)
    assert region is not None
    return region


@pytest.mark.parametrize("stuck", ["held", "stalled"])
def test_with_one_percent_of_the_ring_stuck_sixty_of_sixty_chunks_proceed(stuck: str) -> None:
    ring = Ring(100 * UNIT_BYTES)
    in_flight = deque(cut(ring, 10 * UNIT_BYTES) for _ in range(4))
    stone = cut(ring, UNIT_BYTES)
    if stuck == "held":
        ring.hold(stone)
    done = 0
    for _ in range(60):
        ring.free(in_flight.popleft())
        chunk = ring.allocate(10 * UNIT_BYTES)
        if chunk is not None:
            in_flight.append(chunk)
            done += 1
    assert done == 60
    assert ring.rounds >= 5
    stone_span = range(stone.offset_bytes, stone.offset_bytes + stone.length_bytes)
    assert all(
        region.offset_bytes >= stone_span.stop or region.offset_bytes + region.length_bytes <= stone_span.start
        for region in in_flight
    )


def test_an_empty_ring_goes_on_from_its_head_and_wraps_only_when_the_rest_is_too_short() -> None:
    ring = Ring(8 * UNIT_BYTES)
    ring.free(cut(ring, 5 * UNIT_BYTES))
    fitting = cut(ring, 3 * UNIT_BYTES)
    assert (ring.rounds, fitting.offset_bytes) == (0, 5 * UNIT_BYTES)
    ring.free(fitting)
    ring.free(cut(ring, 5 * UNIT_BYTES))
    wrapped = cut(ring, 8 * UNIT_BYTES)
    assert (ring.rounds, wrapped.offset_bytes) == (2, 0)


def test_a_full_ring_returns_none_and_changes_nothing() -> None:
    ring = Ring(4 * UNIT_BYTES)
    cut(ring, 3 * UNIT_BYTES)
    before = (ring.free_bytes, ring.largest_free_bytes, ring.rounds)
    assert ring.allocate(2 * UNIT_BYTES) is None
    assert (ring.free_bytes, ring.largest_free_bytes, ring.rounds) == before


def test_what_could_never_fit_is_refused_with_both_sizes() -> None:
    ring = Ring(1000)
    assert ring.capacity_bytes == 960
    with pytest.raises(RingError, match=r"1024 bytes .* 960 bytes") as caught:
        ring.allocate(961)
    assert caught.value.reason is Reason.RING_TOO_SMALL
    with pytest.raises(RingError, match="63 bytes"):
        Ring(63)


def test_a_region_of_another_ring_or_another_life_is_refused() -> None:
    ring, other = Ring(4 * UNIT_BYTES), Ring(4 * UNIT_BYTES)
    cut(other, UNIT_BYTES)
    stranger = cut(other, UNIT_BYTES)
    with pytest.raises(RingError, match="not live"):
        ring.free(stranger)
    region = cut(ring, UNIT_BYTES)
    forged = Region(region.offset_bytes, 2 * UNIT_BYTES, region.generation)
    with pytest.raises(RingError, match="not live") as caught:
        ring.free(forged)
    assert caught.value.reason is Reason.INTERNAL
    assert ring.used_bytes == UNIT_BYTES


def test_thousands_of_regions_of_random_lives_never_lose_a_byte() -> None:
    choose = random.Random(7)
    ring = Ring(1 << 20)
    live: list[Region] = []
    for _ in range(20_000):
        region = ring.allocate(choose.randrange(1, 300))
        if region is not None:
            live.append(region)
        if region is None or choose.random() < 0.3:
            ring.free(live.pop(choose.randrange(len(live))))
    assert len(live) > 2000
    spans = sorted((region.offset_bytes, region.offset_bytes + region.length_bytes) for region in live)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for region in live:
        ring.free(region)
    assert ring.free_bytes == ring.largest_free_bytes == ring.capacity_bytes
