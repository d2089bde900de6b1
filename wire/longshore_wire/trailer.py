"""Seals and checks trailers: 64 bytes after every staged slab that prove to the target which slab lies before them.

The source's gather writes it, and the target checks it before its scatter. Pure bytes. A trailer ends with a MAC of its
fields. The target makes the key for one life of its own and sends it to attached sources, so others cannot forge a trailer.
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
# Slabs and trailers begin at multiples of this, so that kernels can use 16-byte accesses and a trailer is one cache line.
ALIGNMENT_BYTES = 64
# The limit of BLAKE2s.
TRAILER_KEY_BYTES_MAX = 32
# The key length that a target uses: 128 bits cannot be guessed.
TRAILER_KEY_BYTES = 16

_FIELDS = struct.Struct("<QIIIIQQQI")
_WIDE = frozenset({"room", "source_epoch", "target_epoch", "generation"})
_MAC_BYTES = TRAILER_BYTES - _FIELDS.size
# Separates this MAC from other uses of such a key, and from trailers of other formats.
_PURPOSE = b"trailer2"
# A worker uses one key for each of its peers.
_KEYS_MAX = 4096
assert _MAC_BYTES == 12  # noqa: PLR2004 - 96 bits


class SealedTrailer(NamedTuple):
    """A trailer's bytes. `payload_bytes` is the length of the slab before it."""

    payload_bytes: int
    data: bytes


class Trailer(msgspec.Struct, frozen=True):
    """The identity of a slab: its room, its place there, the lives of both workers, and its grant's generation."""

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
        """Return the 64 bytes. Asserts that room, epochs and generation are below 2**64, and all others below 2**32.

        Args:
            key: the key of the target's life, at most TRAILER_KEY_BYTES_MAX bytes.
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
    """Return the trailer in `data` (64 bytes), or None if the bytes are no complete trailer of this key (yet)."""
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
    """Return an empty keyed MAC. It is cached and copied, since creating it costs more than the rest of a seal."""
    return hashlib.blake2s(digest_size=_MAC_BYTES, key=key, person=_PURPOSE)


def aligned(length_bytes: int) -> int:
    """Return `length_bytes` rounded up to the alignment of slabs."""
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slab_bytes(payload_bytes: int) -> int:
    """Return the bytes of a slab in staging memory: its payload, rounded up, and its trailer."""
    return aligned(payload_bytes) + TRAILER_BYTES
