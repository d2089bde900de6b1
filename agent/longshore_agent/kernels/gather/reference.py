"""What a gather means, as a loop over rows. Tests hold `launch` to it; nothing else calls it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longshore_agent.memory.pools import KVPool
from longshore_wire.layout import PageOrder
from longshore_wire.trailer import SealedTrailer, aligned


def gather_slices(
    pool: KVPool,
    pages: npt.NDArray[np.int32],
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    target: npt.NDArray[np.uint8],
    trailer: SealedTrailer | None,
) -> int:
    """See `launch.gather_slices`; arguments are taken as right."""
    page_size = pool.layout.page_size
    opaque = pool.layout.order is PageOrder.OPAQUE
    length = pool.geometry.planes[0].head_stride if opaque else pool.layout.model.head_bytes
    positions = range(tokens[0], tokens[1], page_size if opaque else 1)
    at = 0
    for kind in range(len(pool.geometry.planes) // pool.layer_count):
        for layer in layers:
            plane = pool.geometry.planes[kind * pool.layer_count + layer]
            region = pool.region(plane.region)
            for position in positions:
                page = int(pages[position // page_size - tokens[0] // page_size])
                for head in heads:
                    begin = plane.offset + page * plane.page_stride + head * plane.head_stride
                    begin += position % page_size * plane.token_stride
                    target[at : at + length] = region[begin : begin + length]
                    at += length
    if trailer is not None:
        target[at : aligned(at)] = 0
        target[aligned(at) : aligned(at) + 64] = np.frombuffer(trailer.data, dtype=np.uint8)
    return at
