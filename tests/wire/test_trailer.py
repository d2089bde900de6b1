"""Tests trailers, the 64 bytes after a slab."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore_wire.peer_messages import RegionInfo
from longshore_wire.slabs import (
    ALIGNMENT_BYTES,
    TRAILER_BYTES,
    TRAILER_KEY_BYTES,
    TRAILER_KEY_BYTES_MAX,
    Trailer,
    aligned,
    slab_bytes,
    unseal,
)

WIDE = st.integers(0, 2**64 - 1)
NARROW = st.integers(0, 2**32 - 1)
TRAILERS = st.builds(Trailer, WIDE, NARROW, NARROW, NARROW, NARROW, WIDE, WIDE, WIDE, NARROW)
KEYS = st.binary(min_size=TRAILER_KEY_BYTES, max_size=TRAILER_KEY_BYTES_MAX)


@given(TRAILERS, KEYS)
def test_a_trailer_comes_back_as_it_was_sealed(trailer: Trailer, key: bytes) -> None:
    sealed = trailer.seal(key)
    assert (len(sealed.data), sealed.payload_bytes) == (TRAILER_BYTES, trailer.payload_bytes)
    assert unseal(sealed.data, key) == trailer


@given(TRAILERS, KEYS, st.integers(0, TRAILER_BYTES * 8 - 1))
def test_a_trailer_with_any_bit_changed_is_not_a_trailer(trailer: Trailer, key: bytes, bit: int) -> None:
    sealed = bytearray(trailer.seal(key).data)
    sealed[bit // 8] ^= 1 << bit % 8
    assert unseal(bytes(sealed), key) is None


@given(TRAILERS, KEYS, KEYS)
def test_a_trailer_of_another_key_is_not_a_trailer(trailer: Trailer, key: bytes, other: bytes) -> None:
    for stranger in (b"", key[:-1], bytes(len(key)), other):
        if stranger != key and any(key):
            assert unseal(trailer.seal(stranger).data, key) is None


@given(TRAILERS, TRAILERS, KEYS, st.integers(1, TRAILER_BYTES - 1))
def test_a_trailer_that_has_landed_in_part_over_another_is_neither_unless_the_rest_is_equal(
    older: Trailer, newer: Trailer, key: bytes, landed: int
) -> None:
    mixed = newer.seal(key).data[:landed] + older.seal(key).data[landed:]
    assert unseal(mixed, key) in {None, older, newer}


@given(st.binary(max_size=2 * TRAILER_BYTES), KEYS)
def test_junk_is_not_a_trailer(junk: bytes, key: bytes) -> None:
    assert unseal(junk, key) is None
    assert unseal(bytes(TRAILER_BYTES), key) is None


def test_a_key_is_not_shown_with_the_message_that_carries_it() -> None:
    ring = RegionInfo(1, 2, 3, b"a secret of ours")
    assert "secret" not in repr(ring) + str(ring) + repr(msgspec.structs.replace(ring, address=9))
    assert "1" in repr(ring)


# Workers of other versions read these bytes: they change only with the protocol's version.
def test_the_bytes_of_a_trailer_are_frozen() -> None:
    trailer = Trailer(
        room=1,
        cache=2,
        slab=3,
        source_rank=4,
        target_rank=5,
        source_epoch=6,
        target_epoch=7,
        generation=8,
        payload_bytes=9,
    )
    assert trailer.seal(b"a key of sixteen").data.hex() == (
        "0100000000000000"
        "03000000"
        "04000000"
        "05000000"
        "02000000"
        "0600000000000000"
        "0700000000000000"
        "0800000000000000"
        "09000000"
        "293500925ab20720e214d591"
    )


@pytest.mark.parametrize(
    ("field", "limit"), [("room", 2**64), ("payload_bytes", 2**32), ("slab", 2**32), ("cache", -1)]
)
def test_a_number_that_does_not_fit_is_a_mistake_of_ours_and_names_its_field(field: str, limit: int) -> None:
    trailer = msgspec.structs.replace(Trailer(1, 2, 3, 4, 5, 6, 7, 8, 9), **{field: limit})
    with pytest.raises(AssertionError, match=f"trailer.{field}"):
        trailer.seal(b"")


@given(st.integers(0, 2**40))
def test_a_trailer_begins_at_the_first_aligned_byte_behind_the_payload(payload: int) -> None:
    assert 0 <= aligned(payload) - payload < ALIGNMENT_BYTES
    assert aligned(payload) % ALIGNMENT_BYTES == 0
    assert slab_bytes(payload) == aligned(payload) + TRAILER_BYTES
