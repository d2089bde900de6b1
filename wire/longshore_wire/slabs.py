"""Cuts a claimed range of tokens into slabs, and lays out one slab in staging memory: payload, padding, trailer. Pure.

Both sides compute the same slabs from a Demand. A trailer is the 64 bytes after every staged slab that prove to the target
which slab lies before them. The source's gather writes it, and the target checks it before its scatter. It ends with a MAC
of its fields. The target makes the key for one life of its own and sends it to attached sources, so others cannot forge a
trailer. The MAC does not cover the slab's payload.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from longshore_wire.errors import RingError
from longshore_wire.names import (
    TEST_GPU_LANE_BYTES_MAX,
    TEST_GPU_RING_BYTES_MAX,
    TEST_LANE_BYTES_MAX,
    TEST_RING_BYTES_MAX,
    room_name,
)

TRAILER_BYTES = 64
# Slabs and trailers begin at multiples of this, so that kernels can use 16-byte accesses and a trailer is one cache line.
ALIGNMENT_BYTES = 64
# The limit of BLAKE2s.
TRAILER_KEY_BYTES_MAX = 32
# The key length that a target uses: 128 bits cannot be guessed.
TRAILER_KEY_BYTES = 16

# Minimum sizes of slabs that are cut to overlap their stages. Control of a slab takes 130 us or more on a GPU.
SLAB_BYTES_MIN = 8 << 20
GPU_SLAB_BYTES_MIN = 96 << 20

_FIELDS = struct.Struct("<QIIIIQQQI")
_WIDE = frozenset({"room", "source_epoch", "target_epoch", "generation"})
_MAC_BYTES = TRAILER_BYTES - _FIELDS.size
# Separates this MAC from other uses of such a key, and from trailers of other formats.
_PURPOSE = b"trailer2"
# A worker uses one key for each of its peers.
_KEYS_MAX = 4096
assert _MAC_BYTES == 12  # noqa: PLR2004 - 96 bits


@dataclass(frozen=True, slots=True)
class SlabGrid:
    """Units [first, end) of `Pair.units_of`, tokens or layers of a slot, in slabs of `slab_tokens`; the last one may be shorter."""

    first_token: int
    end_token: int
    slab_tokens: int

    @property
    def count(self) -> int:
        """Number of slabs; 0 for an empty range."""
        return -(-(self.end_token - self.first_token) // self.slab_tokens)

    def tokens(self, slab: int) -> tuple[int, int]:
        """Return [first, end) of slab `slab`, 0 <= slab < count."""
        first = self.first_token + slab * self.slab_tokens
        return first, min(first + self.slab_tokens, self.end_token)

    def ready(self, contiguous_end: int) -> int:
        """Return the number of leading slabs that end at or before token `contiguous_end`."""
        if contiguous_end >= self.end_token:
            return self.count
        return max(0, contiguous_end - self.first_token) // self.slab_tokens


def slab_limit_bytes(lane_bytes: int, ring_bytes: int, writer_count: int) -> int:
    """Return the largest payload that fits a lane's buffer and of which the ring holds two for each writer.

    Args:
        writer_count: source ranks that write to the target, each counted for each of its caches.
    """
    room_bytes = min(lane_bytes, ring_bytes // (2 * writer_count))
    return (room_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES - TRAILER_BYTES


def slab_units(unit_bytes: int, unit_count: int, limit_bytes: int, minimum_bytes: int, count_min: int) -> int:
    """Return the units of a slab: about `count_min` slabs a claim, so that their stages overlap, within the limits.

    Args:
        unit_bytes: bytes of one unit between this pair of ranks: a token, a page whose content is opaque, or a layer of a slot.
        unit_count: units in the claim.
        limit_bytes: see `slab_limit_bytes`.
        minimum_bytes: smaller slabs would cost more control than they gain by overlap.
        count_min: minimum number of slabs in a claim, if they stay above `minimum_bytes`.
    Raises:
        RingError: not even one unit fits.
    """
    if unit_bytes > limit_bytes:
        raise RingError(
            f"one unit (a token, an opaque page, or a layer of a slot) is {unit_bytes} bytes between these ranks and a slab holds {max(limit_bytes, 0)}: "
            "enlarge staging.bufferSize of prefill and staging.poolSize of decode (two slabs for each source rank and cache)"
        )
    wanted_bytes = max(minimum_bytes, -(-unit_count * unit_bytes // count_min))
    return max(1, min(wanted_bytes, limit_bytes) // unit_bytes)


def even_tokens(count: int, tokens_min: int, tokens_max: int, page: int) -> int:
    """Return the tokens of a slab: whole pages, above `tokens_min`, of equal length if pages allow.

    Slabs that begin at a page have the same shape, for which a GPU launch is prepared once. A short last slab costs as much
    control as any other and overlaps little.

    Args:
        count: tokens of the claim, more than `tokens_min`.
        tokens_min: at least `page`.
        tokens_max: limit of a slab; at least `tokens_min`.
    """
    slab_count = max(count // tokens_min, -(-count // tokens_max))
    share = -(-count // slab_count)
    return min(-(-share // page), tokens_max // page) * page


def staged_tokens(
    count: int, unit: tuple[int, int], *, limit_bytes: int, minimum_bytes: int, lane_count: int, page: int
) -> int:
    """Return the tokens of a staged slab of a claim.

    Args:
        count: tokens of the claim, at least 1.
        unit: bytes and tokens of one unit between this pair of ranks; see `slab_units`.
        limit_bytes, minimum_bytes: see `slab_units`.
        lane_count: transfer threads of the source. Each gets two slabs of the claim, if that keeps them large enough.
        page: tokens of the larger page of both sides.
    Raises:
        RingError: not even one unit fits.
    """
    unit_bytes, unit_tokens = unit
    units = slab_units(unit_bytes, -(-count // unit_tokens), limit_bytes, minimum_bytes, 2 * lane_count)
    tokens = units * unit_tokens
    if page <= tokens < count:
        return even_tokens(count, tokens, limit_bytes // unit_bytes * unit_tokens, page)
    return tokens


def small_slab_bytes(asked_bytes: int, lane_bytes: int, ring_bytes: int) -> int:
    """Return the minimum of a slab of a deployment: small buffers need small slabs, so that each buffer fits several."""
    return min(asked_bytes, lane_bytes // 4, ring_bytes // 8 or lane_bytes)


def staging_of_tests(
    lane_bytes: int, ring_bytes: int, rank_unit_bytes: int, *, on_gpu: bool, cache_count: int = 1
) -> tuple[int, int]:
    """Return the lane's buffer and the ring of a test instance's rank: small ones, which hold whole units nevertheless.

    Args:
        lane_bytes, ring_bytes: those of the deployment, which are not exceeded.
        rank_unit_bytes: of the rank's cache with the largest. The cache's writers share it.
        on_gpu: the staging is GPU memory.
        cache_count: caches of the rank. The ring holds two slabs of each writer of each.
    """
    slab = aligned(rank_unit_bytes + TRAILER_BYTES)
    lane_max, ring_max = TEST_LANE_BYTES_MAX, TEST_RING_BYTES_MAX
    if on_gpu:
        lane_max, ring_max = TEST_GPU_LANE_BYTES_MAX, TEST_GPU_RING_BYTES_MAX
    return min(lane_bytes, max(lane_max, slab)), min(ring_bytes, max(ring_max, (2 * cache_count + 2) * slab))


def gpu_slab_bytes_max(lane_bytes: int, lane_count: int) -> int:
    """Return the maximum of a slab on a GPU, whose lanes are one buffer: two slabs in it keep gather and wire busy."""
    return max(lane_bytes, lane_count * lane_bytes // 2)


def aligned(length_bytes: int) -> int:
    """Return `length_bytes` rounded up to the alignment of slabs."""
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slab_bytes(payload_bytes: int) -> int:
    """Return the bytes of a slab in staging memory: its payload, rounded up, and its trailer."""
    return aligned(payload_bytes) + TRAILER_BYTES


class SealedTrailer(NamedTuple):
    """A trailer's bytes. `payload_bytes` is the length of the slab before it."""

    payload_bytes: int
    data: bytes


class Trailer(msgspec.Struct, frozen=True):
    """The identity of a slab: its room and cache, its place there, the lives of both workers, and its grant's generation."""

    room: int
    cache: int
    slab: int
    source_rank: int
    target_rank: int
    source_epoch: int
    target_epoch: int
    generation: int
    payload_bytes: int

    def __repr__(self) -> str:
        """Name the room, since texts have it."""
        rest = ", ".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__[1:])
        return f"Trailer(room={room_name(self.room)}, {rest})"

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
                self.cache,
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
    room, slab, source_rank, target_rank, cache, source_epoch, target_epoch, generation, payload = _FIELDS.unpack(
        fields
    )
    return Trailer(room, cache, slab, source_rank, target_rank, source_epoch, target_epoch, generation, payload)


def _mac(fields: bytes, key: bytes) -> bytes:
    mac = _keyed(key).copy()
    mac.update(fields)
    return mac.digest()


@functools.lru_cache(_KEYS_MAX)
def _keyed(key: bytes) -> hashlib.blake2s:
    """Return an empty keyed MAC. It is cached and copied, since creating it costs more than the rest of a seal."""
    return hashlib.blake2s(digest_size=_MAC_BYTES, key=key, person=_PURPOSE)
