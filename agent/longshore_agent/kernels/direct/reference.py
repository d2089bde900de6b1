"""What a direct copy means, as a loop over rows. Tests hold both launchers to it; nothing else calls it."""

from __future__ import annotations

from longshore_agent.kernels.direct.launch import Side
from longshore_wire.layout import PageOrder


def copy_pages(source: Side, target: Side, tokens: tuple[int, int]) -> int:
    """See `launch.copy_pages`; arguments are taken as right. Returns the copied bytes."""
    opaque = source.pool.layout.order is PageOrder.OPAQUE
    length = source.pool.row_bytes
    copied = 0
    for kind in range(source.pool.kinds):
        for layers in zip(source.layers, target.layers, strict=True):
            for heads in zip(source.heads, target.heads, strict=True):
                for token in range(tokens[0], tokens[1], source.pool.layout.page_size if opaque else 1):
                    places = []
                    for side, layer, head in zip((source, target), layers, heads, strict=True):
                        size = side.pool.layout.page_size
                        plane = side.pool.geometry.planes[kind * side.pool.layer_count + layer]
                        page = int(side.pages[token // size - side.first_page])
                        begin = plane.offset + page * plane.page_stride + head * plane.head_stride
                        begin += 0 if opaque else token % size * plane.token_stride
                        places.append(side.pool.region(plane.region)[begin : begin + length])
                    places[1][:] = places[0]
                    copied += length
    return copied
