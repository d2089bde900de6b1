"""The 64 bytes behind every staged slab, by which the target knows that the bytes before it are the ones it granted.

Written by the source's gather, checked by the target before its scatter. Pure bytes.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

TRAILER_BYTES = 64
# Slabs and their trailers begin at multiples of this, so that kernels may use 16-byte accesses and trailers never straddle a cache line.
ALIGNMENT_BYTES = 64

_MAGIC = b"LSHORE01"
_HEAD = struct.Struct("<8sQIIIIQQQI")
_CHECKSUM = struct.Struct("<I")
_FIELDS = struct.Struct(f"{_HEAD.format}4x")
_WIDE = frozenset({"room", "source_epoch", "target_epoch", "generation"})
assert _FIELDS.size == TRAILER_BYTES


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

    def pack(self) -> bytes:
        """Return the 64 bytes. Room, epochs and generation are below 2**64, all others below 2**32; ours to keep."""
        try:
            head = _HEAD.pack(
                _MAGIC,
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
        return head + _CHECKSUM.pack(zlib.crc32(head))


def unpack(data: bytes) -> Trailer | None:
    """Return the trailer in `data` (64 bytes), or None if these bytes are not a whole trailer (yet)."""
    if len(data) != TRAILER_BYTES or data[:8] != _MAGIC:
        return None
    if struct.unpack("<I", data[-4:])[0] != zlib.crc32(data[:-4]):
        return None
    _, room, slab, source_rank, target_rank, pool, source_epoch, target_epoch, generation, payload = _FIELDS.unpack(
        data
    )
    return Trailer(room, pool, slab, source_rank, target_rank, source_epoch, target_epoch, generation, payload)


def aligned(length_bytes: int) -> int:
    """Return `length_bytes` rounded up to the alignment of slabs."""
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slab_bytes(payload_bytes: int) -> int:
    """Return what a slab takes in staging memory: its payload, rounded up, and its trailer."""
    return aligned(payload_bytes) + TRAILER_BYTES
