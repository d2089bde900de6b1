"""Cuts a claimed range of tokens into slabs. Both sides compute the same from a Demand. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from longshore_wire.errors import RingError
from longshore_wire.trailer import ALIGNMENT_BYTES, TRAILER_BYTES


@dataclass(frozen=True, slots=True)
class SlabGrid:
    """Tokens [first, end) in slabs of `slab_tokens`; the last one may be shorter."""

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


def slab_limit_bytes(lane_bytes: int, ring_bytes: int, source_count: int) -> int:
    """Return the largest payload that fits a lane's buffer and of which the ring holds two for each source rank."""
    room_bytes = min(lane_bytes, ring_bytes // (2 * source_count))
    return (room_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES - TRAILER_BYTES


def slab_units(unit_bytes: int, unit_count: int, limit_bytes: int, minimum_bytes: int, pieces: int) -> int:
    """Return the units of a slab: about `pieces` slabs a claim, so that their stages overlap, within the limits.

    Args:
        unit_bytes: bytes of one unit between this pair of ranks: a token, or a page whose content is opaque.
        unit_count: units in the claim.
        limit_bytes: see `slab_limit_bytes`.
        minimum_bytes: smaller slabs would cost more control than they gain by overlap.
        pieces: minimum number of slabs in a claim, if they stay above `minimum_bytes`.
    Raises:
        RingError: not even one unit fits.
    """
    if unit_bytes > limit_bytes:
        raise RingError(
            f"one token (one page, where it is opaque) is {unit_bytes} bytes between these ranks and a slab holds {max(limit_bytes, 0)}: "
            "enlarge staging.bufferSize of prefill and staging.poolSize of decode (two slabs for each source rank)"
        )
    wanted_bytes = max(minimum_bytes, -(-unit_count * unit_bytes // pieces))
    return max(1, min(wanted_bytes, limit_bytes) // unit_bytes)
