"""Copy head slices of an engine's pages into one contiguous slab. Called by path.gather."""

from __future__ import annotations

import numpy as np

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.slab import Bytes, Pages, check_buffer, plan_slab
from longshore_agent.memory.pools import KVPool
from longshore_wire.trailer import SealedTrailer, aligned, slab_bytes

# What is larger than this is not in the second-level cache any more when the transport reads it: it is written past it.
_CACHED_BYTES_MAX = 2 << 20


def gather_slices(
    pool: KVPool,
    pages: Pages,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    target: Bytes,
    trailer: SealedTrailer | None,
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
    with pool.in_use():
        plan = plan_slab(pool, pages, tokens, layers, heads, unique=False)
        payload = plan.payload_bytes
        if trailer is not None and trailer.payload_bytes != payload:
            raise ShapeError(f"trailer.payload_bytes is {trailer.payload_bytes}: the payload has {payload} bytes")
        check_buffer("target", target, payload if trailer is None else slab_bytes(payload))
        plan.copy("gather", target.ctypes.data, stream=payload > _CACHED_BYTES_MAX)
        if trailer is not None:
            # The gap is zeroed so that no bytes of an older slab, perhaps of another request, travel with this one.
            end = bytes(aligned(payload) - payload) + trailer.data
            target[payload : payload + len(end)] = np.frombuffer(end, dtype=np.uint8)
    return payload
