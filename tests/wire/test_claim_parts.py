"""Tests claims whose page lists take several messages: accepted as a whole or refused, within the announced size."""

from __future__ import annotations

import random

import pytest

from longshore_wire.claims import PARTS_BYTES_MAX, PageParts
from longshore_wire.engine_messages import PAGES_PER_MESSAGE_MAX
from longshore_wire.errors import Reason, RoomError

STEP = PAGES_PER_MESSAGE_MAX


def _pages(count: int) -> bytes:
    return b"".join(page.to_bytes(4, "little") for page in range(count))


@pytest.mark.parametrize("count", [1, STEP - 1, STEP, STEP + 1, 3 * STEP, 3 * STEP + 7])
@pytest.mark.parametrize("seed", range(3))
def test_a_list_is_whole_once_each_part_has_come_in_any_order_and_any_number_of_times(count: int, seed: int) -> None:
    chosen, whole, parts = random.Random(seed), _pages(count), PageParts[str]()
    offsets = list(range(0, count, STEP))
    last = offsets.pop(chosen.randrange(len(offsets)))
    for offset in [chosen.choice(offsets) for _ in range(9 if offsets else 0)] + offsets:
        assert parts.add("a", offset, count, whole[4 * offset : 4 * (offset + STEP)]) is None
    assert parts.add("a", last, count, whole[4 * last : 4 * (last + STEP)]) == whole
    assert (len(parts), parts.bytes_kept) == (0, 0)


@pytest.mark.parametrize(
    ("offset", "count", "length"),
    [
        (0, 3 * STEP, 0),
        (0, 3 * STEP, 4),
        (1, 3 * STEP, STEP),
        (STEP, 3 * STEP, STEP + 1),
        (-STEP, 3 * STEP, STEP),
        (3 * STEP, 3 * STEP, STEP),
        (0, -1, 0),
        (2 * STEP, 3 * STEP - 1, STEP),
        (2**62, 2**63, STEP),
    ],
)
def test_a_part_that_is_empty_or_out_of_place_is_refused_and_nothing_of_its_list_is_kept(
    offset: int, count: int, length: int
) -> None:
    parts = PageParts[str]()
    if count == 3 * STEP:
        assert parts.add("a", 2 * STEP, count, bytes(4 * STEP)) is None
    with pytest.raises(RoomError) as caught:
        parts.add("a", offset, count, bytes(4 * length))
    assert caught.value.reason in (Reason.MALFORMED_MESSAGE, Reason.BUSY)
    assert (len(parts), parts.bytes_kept) == (0, 0)


def test_a_list_that_changes_its_length_is_refused() -> None:
    parts = PageParts[str]()
    assert parts.add("a", 0, 3 * STEP, bytes(4 * STEP)) is None
    with pytest.raises(RoomError, match="not part of"):
        parts.add("a", STEP, 4 * STEP, bytes(4 * STEP))
    assert parts.bytes_kept == 0


def test_lists_that_lack_parts_take_what_they_announce_and_no_more_than_the_limit_together() -> None:
    parts = PageParts[int]()
    announced = PARTS_BYTES_MAX // 8 // 4
    for name in range(8):
        assert parts.add(name, 0, announced, bytes(4 * STEP)) is None
    assert parts.bytes_kept == PARTS_BYTES_MAX
    with pytest.raises(RoomError) as caught:
        parts.add(8, 0, 2 * STEP, bytes(4 * STEP))
    assert caught.value.reason is Reason.BUSY
    parts.forget(lambda name: name < 4)
    assert parts.bytes_kept == PARTS_BYTES_MAX // 2
    assert parts.add(8, 0, 2 * STEP, bytes(4 * STEP)) is None


def test_a_part_that_comes_again_takes_nothing_more() -> None:
    parts, part = PageParts[str](), bytes(4 * STEP)
    for _ in range(1000):
        assert parts.add("a", 0, 2 * STEP, part) is None
    assert parts.bytes_kept == 8 * STEP
