"""Copy head slices of an engine's pages into one contiguous slab. Called by path.gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.slab import Bytes, Pages, SlabPlan, check_buffer, plan_slab
from longshore_agent.memory.pools import KVPool
from longshore_wire.trailer import Trailer, aligned, slab_bytes

# A piece that is larger than this is not in the cache any more when somebody reads it: it is written past the cache.
_CACHED_BYTES_MAX = 2 << 20


@dataclass(frozen=True)
class Gathering:
    """A checked gather, to be carried out whole or piece by piece; see `gather_slices`."""

    pool: KVPool
    plan: SlabPlan
    target: Bytes
    trailer: Trailer | None

    @property
    def length_bytes(self) -> int:
        """Payload, padding and trailer."""
        payload = self.plan.payload_bytes
        return payload if self.trailer is None else slab_bytes(payload)

    def pieces(self, piece_bytes: int) -> Iterator[tuple[int, int]]:
        """Gather about `piece_bytes` (at least one plane) a step, each step to the beginning of `target`.

        Yields:
            (offset in the slab, bytes) of what lies at the beginning of `target` now; the trailer comes with the last.
        Raises:
            PoolError: the pool is unregistered.
        """
        plan, at = self.plan, self.target.ctypes.data
        step = max(1, piece_bytes // plan.plane_bytes)
        for first in range(0, plan.plane_count, step):
            end = min(first + step, plan.plane_count)
            length_bytes = (end - first) * plan.plane_bytes
            with self.pool.in_use():
                plan.copy("gather", at, first, end, stream=length_bytes > _CACHED_BYTES_MAX)
            if end == plan.plane_count and self.trailer is not None:
                length_bytes += self._write_end(length_bytes)
            yield first * plan.plane_bytes, length_bytes

    def _write_end(self, at: int) -> int:
        """Write padding and trailer at `at`; return their bytes."""
        assert self.trailer is not None
        # The gap is zeroed so that no bytes of an older slab, perhaps of another request, travel with this one.
        payload = self.plan.payload_bytes
        end = bytes(aligned(payload) - payload) + self.trailer.pack()
        self.target[at : at + len(end)] = np.frombuffer(end, dtype=np.uint8)
        return len(end)


def prepare_gather(
    pool: KVPool,
    pages: Pages,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    target: Bytes,
    trailer: Trailer | None,
) -> Gathering:
    """Check a gather; arguments and errors as of `gather_slices`."""
    with pool.in_use():
        plan = plan_slab(pool, pages, tokens, layers, heads, unique=False)
        payload = plan.payload_bytes
        if trailer is not None and trailer.payload_bytes != payload:
            raise ShapeError(f"trailer.payload_bytes is {trailer.payload_bytes}: the payload has {payload} bytes")
        gathering = Gathering(pool, plan, target, trailer)
        check_buffer("target", target, gathering.length_bytes)
        return gathering


def gather_slices(
    pool: KVPool,
    pages: Pages,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    target: Bytes,
    trailer: Trailer | None,
) -> int:
    """Copy tokens [first, end) of a sequence from `pages` into `target`, packed, then its trailer. Releases the GIL.

    Args:
        pool: see `memory.pools.KVPool`; held in use meanwhile.
        pages: [n] int32, the pages of the sequence from number first // page_size on that hold the tokens, each in
            [0, pool.page_count); repeats allowed.
        tokens: (first, end) in the sequence, unaligned at both ends; with PageOrder.OPAQUE the first is aligned and
            the page of the last token is copied whole.
        layers: local layers, a range of step 1, not empty.
        heads: local heads, a range of step 1, not empty.
        target: [slab bytes or more]; see `kernels.slab` for the order. Nothing behind the slab is touched.
        trailer: written at the aligned end of the payload; None: nothing is written behind the payload.
    Returns:
        The payload's bytes.
    Raises:
        ShapeError: an argument breaks the above, named in the message; nothing was written.
        LongshoreError: PAGE_OUT_OF_RANGE, names the index; nothing was written.
        PoolError: the pool is unregistered.
    """
    gathering = prepare_gather(pool, pages, tokens, layers, heads, target, trailer)
    for _ in gathering.pieces(gathering.length_bytes):
        pass
    return gathering.plan.payload_bytes
