"""Defines a copy as a loop over rows: the reference for all copiers. Only tests and benchmarks call it."""

from __future__ import annotations

import numpy as np

from longshore_agent.kernels.copier import Bytes, View
from longshore_wire.slabs import SealedTrailer, aligned


def copy(source: View, target: View, tokens: tuple[int, int], trailer: SealedTrailer | None = None) -> int:
    """See `cpu_copy.copy_rows`. Checks no argument; both sides must be pools or slabs of this process."""
    first, end = source.rows(tokens)
    for plane in range(source.plane_count):
        for row in range(first, end):
            for head in range(len(source.heads)):
                _row(target, plane, row, head)[:] = _row(source, plane, row, head)
    payload = source.payload_bytes(tokens)
    if trailer is not None:
        assert target.slab is not None
        target.slab[payload : aligned(payload)] = 0
        target.slab[aligned(payload) : aligned(payload) + 64] = np.frombuffer(trailer.data, dtype=np.uint8)
    return payload


def _row(view: View, plane: int, row: int, head: int) -> Bytes:
    """Return the bytes of one row, [elements, bytes of one], by the definition of a slab or of a pool's geometry."""
    if view.slab is not None:
        at = ((plane * view.page_rows + row - view.first_row) * len(view.heads) + head) * view.row_bytes
        return view.slab[at : at + view.row_bytes].reshape(-1, view.element_bytes)
    assert view.pool is not None
    kind, layer = divmod(plane, len(view.layers))
    place = view.pool.geometry.planes[kind * view.pool.layer_count + view.layers[layer]]
    page, slot = divmod(row - view.first_row, view.page_rows)
    at = place.offset + int(view.pages[page]) * place.page_stride + slot * place.token_stride
    at += view.heads[head] * place.head_stride
    shape = (view.row_bytes // view.element_bytes, view.element_bytes)
    strides = (place.element_stride or view.element_bytes, 1)
    return np.lib.stride_tricks.as_strided(view.pool.region(place.region)[at:], shape, strides)
