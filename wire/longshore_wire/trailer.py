"""The 64 bytes behind every staged slab, by which the target knows that the bytes before it are the ones it granted.

Written by the source's gather, checked by the target before its scatter. Pure bytes. A trailer ends with a MAC of its fields, whose key the
target makes for one life of its own and gives to its sources when they attach: others cannot write a trailer that it takes for one.
The MAC does not cover the slab's payload.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import struct
from typing import NamedTuple

import msgspec

TRAILER_BYTES = 64
# Slabs and their trailers begin at multiples of this, so that kernels may use 16-byte accesses and trailers never straddle a cache line.
ALIGNMENT_BYTES = 64
# What BLAKE2s takes.
TRAILER_KEY_BYTES_MAX = 32
# What a target makes: nobody guesses so many.
TRAILER_KEY_BYTES = 16

_FIELDS = struct.Struct("<QIIIIQQQI")
_WIDE = frozenset({"room", "source_epoch", "target_epoch", "generation"})
_MAC_BYTES = TRAILER_BYTES - _FIELDS.size
# Keeps this MAC apart from any other use of such a key, and from trailers of other forms.
_PURPOSE = b"trailer2"
# A worker has a key for each of its peers at a time.
_KEYS_MAX = 4096
assert _MAC_BYTES == 12  # noqa: PLR2004 - 96 bits


class SealedTrailer(NamedTuple):
    """A trailer as it lies in memory. `payload_bytes` is the length of the slab before it."""

    payload_bytes: int
    data: bytes


class Trailer(msgspec.Struct, frozen=True):
    """What a slab is: its room, its place in the room, the lives of both workers, and its grant's generation."""

    room: int
    pool: int
    slab: int
    source_rank: int
    target_rank: int
    source_epoch: int
    target_epoch: int
    generation: int
    payload_bytes: int

    def seal(self, key: bytes) -> SealedTrailer:
        """Return the 64 bytes. Room, epochs and generation are below 2**64, all others below 2**32; ours to keep.

        Args:
            key: of the target's life, at most TRAILER_KEY_BYTES_MAX.
        """
        try:
            fields = _FIELDS.pack(
                self.room,
                self.slab,
                self.source_rank,
                self.target_rank,
                self.pool,
                self.source_epoch,
                self.target_epoch,
                self.generation,
                self.payload_bytes,
            )
        except struct.error:
            for name, value in msgspec.structs.asdict(self).items():
                assert 0 <= value < (2**64 if name in _WIDE else 2**32), f"trailer.{name} is {value}"
            raise
        return SealedTrailer(self.payload_bytes, fields + _mac(fields, key))


def unseal(data: bytes, key: bytes) -> Trailer | None:
    """Return the trailer in `data` (64 bytes), or None if these bytes are not a whole trailer (yet), or one of another key."""
    fields, mac = data[: _FIELDS.size], data[_FIELDS.size :]
    if len(data) != TRAILER_BYTES or not hmac.compare_digest(mac, _mac(fields, key)):
        return None
    room, slab, source_rank, target_rank, pool, source_epoch, target_epoch, generation, payload = _FIELDS.unpack(fields)
    return Trailer(room, pool, slab, source_rank, target_rank, source_epoch, target_epoch, generation, payload)


def _mac(fields: bytes, key: bytes) -> bytes:
    mac = _keyed(key).copy()
    mac.update(fields)
    return mac.digest()


@functools.lru_cache(_KEYS_MAX)
def _keyed(key: bytes) -> hashlib.blake2s:
    """Return the MAC of nothing, which is copied for each trailer: making it costs more than all the rest."""
    return hashlib.blake2s(digest_size=_MAC_BYTES, key=key, person=_PURPOSE)


def aligned(length_bytes: int) -> int:
    """Return `length_bytes` rounded up to the alignment of slabs."""
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slab_bytes(payload_bytes: int) -> int:
    """Return what a slab takes in staging memory: its payload, rounded up, and its trailer."""
    return aligned(payload_bytes) + TRAILER_BYTES
