"""The 64 bytes behind a slab."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore_wire.trailer import ALIGNMENT_BYTES, TRAILER_BYTES, Trailer, aligned, slab_bytes, unpack

WIDE = st.integers(0, 2**64 - 1)
NARROW = st.integers(0, 2**32 - 1)
TRAILERS = st.builds(Trailer, WIDE, NARROW, NARROW, NARROW, NARROW, WIDE, WIDE, WIDE, NARROW)


@given(TRAILERS)
def test_a_trailer_comes_back_as_it_was_packed(trailer: Trailer) -> None:
    packed = trailer.pack()
    assert len(packed) == TRAILER_BYTES
    assert unpack(packed) == trailer


@given(TRAILERS, st.integers(0, TRAILER_BYTES * 8 - 1))
def test_a_trailer_with_any_bit_changed_is_not_a_trailer(trailer: Trailer, bit: int) -> None:
    packed = bytearray(trailer.pack())
    packed[bit // 8] ^= 1 << bit % 8
    assert unpack(bytes(packed)) is None


@given(TRAILERS, TRAILERS, st.integers(1, TRAILER_BYTES - 1))
def test_a_trailer_that_has_landed_in_part_over_another_is_neither_unless_the_rest_is_equal(
    older: Trailer, newer: Trailer, landed: int
) -> None:
    mixed = newer.pack()[:landed] + older.pack()[landed:]
    assert unpack(mixed) in {None, older, newer}


@given(st.binary(max_size=2 * TRAILER_BYTES))
def test_junk_is_not_a_trailer(junk: bytes) -> None:
    assert unpack(junk) is None
    assert unpack(bytes(TRAILER_BYTES)) is None


# Workers of other versions read these bytes: they change only with the magic.
def test_the_bytes_of_a_trailer_are_frozen() -> None:
    trailer = Trailer(
        room=1,
        pool=2,
        slab=3,
        source_rank=4,
        target_rank=5,
        source_epoch=6,
        target_epoch=7,
        generation=8,
        payload_bytes=9,
    )
    assert trailer.pack().hex() == (
        "4c53484f52453031"
        "0100000000000000"
        "03000000"
        "04000000"
        "05000000"
        "02000000"
        "0600000000000000"
        "0700000000000000"
        "0800000000000000"
        "09000000"
        "fe8e039a"
    )


@pytest.mark.parametrize(("field", "limit"), [("room", 2**64), ("payload_bytes", 2**32), ("slab", 2**32), ("pool", -1)])
def test_a_number_that_does_not_fit_is_a_mistake_of_ours_and_names_its_field(field: str, limit: int) -> None:
    trailer = msgspec.structs.replace(Trailer(1, 2, 3, 4, 5, 6, 7, 8, 9), **{field: limit})
    with pytest.raises(AssertionError, match=f"trailer.{field}"):
        trailer.pack()


@given(st.integers(0, 2**40))
def test_a_trailer_begins_at_the_first_aligned_byte_behind_the_payload(payload: int) -> None:
    assert 0 <= aligned(payload) - payload < ALIGNMENT_BYTES
    assert aligned(payload) % ALIGNMENT_BYTES == 0
    assert slab_bytes(payload) == aligned(payload) + TRAILER_BYTES
