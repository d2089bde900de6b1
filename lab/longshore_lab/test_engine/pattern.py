"""Makes the content of test rooms. Both sides derive it from layer, K or V, head and token alone. Pure.

Each row (one head of one token in K or V of a layer; of opaque pages a blob) is a piece of a random stream, at an offset
that depends on all of its coordinates. A row in a wrong place therefore differs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from longshore_wire.layout import KVLayout, PageOrder

_SEED = 20261201
_STREAM_BITS = 20
# Multiplying by 2**64 divided by the golden ratio and taking the upper bits spreads numbers evenly: all bits count there.
_SPREAD, _MASK_64 = 0x9E3779B97F4A7C15, (1 << 64) - 1
_UPPER = 64 - _STREAM_BITS


def planes(layout: KVLayout, page_count: int) -> list[bytes]:
    """Return the first `page_count` pages of a sequence in each plane of a rank's pool, the last page first.

    The planes are in the order of `layout.PoolGeometry`.
    """
    model = layout.model
    opaque = layout.order is PageOrder.OPAQUE
    row_bytes = layout.opaque_bytes if opaque else model.head_bytes
    stream = random.Random(_SEED).randbytes((1 << _STREAM_BITS) + row_bytes)
    pages = range(page_count - 1, -1, -1)
    found = []
    for kind in range(1 if opaque else model.kinds):
        for layer in layout.layers:
            plane = (kind * model.layers + layer) << 44
            rows = (plane | unit << 14 | head for page in pages for unit, head in _page(layout, page))
            offsets = (((row * _SPREAD) & _MASK_64) >> _UPPER for row in rows)
            found.append(b"".join([stream[offset : offset + row_bytes] for offset in offsets]))
    return found


def _page(layout: KVLayout, page: int) -> Iterator[tuple[int, int]]:
    """Yield (token, or page if opaque; head) of the rows of a page, in their order in memory."""
    tokens = range(page * layout.page_size, (page + 1) * layout.page_size)
    if layout.order is PageOrder.OPAQUE:
        tokens = range(page, page + 1)
    if layout.order is PageOrder.NHD:
        return ((token, head) for token in tokens for head in layout.heads)
    return ((token, head) for head in layout.heads for token in tokens)
