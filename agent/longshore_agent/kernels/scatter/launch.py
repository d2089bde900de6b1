"""Copy one contiguous slab into head slices of an engine's pages. Called by path.scatter."""

from __future__ import annotations

from longshore_agent.kernels.slab import Bytes, Pages, check_buffer, plan_slab
from longshore_agent.memory.pools import KVPool


def scatter_slices(
    pool: KVPool, pages: Pages, tokens: tuple[int, int], layers: range, heads: range, source: Bytes
) -> int:
    """Copy a slab into tokens [first, end) of the sequence whose pages are `pages`. Releases the GIL.

    The inverse of `gather_slices`, with its arguments; `pages` may not repeat here. The trailer is checked before, by
    path.scatter. Tokens of the same pages outside [first, end), and other heads and layers, keep their bytes.

    Args:
        source: [payload bytes or more]; what follows the payload is not read.
    Returns:
        The payload's bytes.
    Raises:
        ShapeError: an argument breaks its contract, named in the message; nothing was written.
        LongshoreError: PAGE_OUT_OF_RANGE, or TOKENS_OVERLAP for a repeated page; nothing was written.
        PoolError: the pool is unregistered.
    """
    with pool.in_use():
        plan = plan_slab(pool, pages, tokens, layers, heads, unique=True)
        check_buffer("source", source, plan.payload_bytes)
        # Pages are read by the engine, by another process and later: nothing is gained by having them in our cache.
        plan.copy("scatter", source.ctypes.data, stream=True)
    return plan.payload_bytes
