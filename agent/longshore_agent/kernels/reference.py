"""Defines copies and digests as loops over rows: the reference for all copiers. Only tests and benchmarks call it."""

from __future__ import annotations

import numpy as np

from longshore_agent.kernels.copier import Bytes, View
from longshore_agent.kernels.digest import BLOCK_BYTES, BLOCK_WORDS, LINE_BYTES, MIX, Words, blocks_of, expanded
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


def digests(view: View, tokens: tuple[int, int], key: bytes) -> Words:
    """Return the digests of a view's rows as `digest` defines them, [planes, heads] uint64. See `copy` for the view."""
    found = np.zeros((view.plane_count, len(view.heads)), dtype=np.uint64)
    first, end = view.rows(tokens)
    for plane in range(view.plane_count):
        for head in range(len(view.heads)):
            total = sum(_digest(_row(view, plane, row, head).tobytes(), row, key) for row in range(first, end))
            found[plane, head] = total % 2**64
    return found


def _digest(row: bytes, number: int, key: bytes) -> int:
    """Return the digest of row `number` of a sequence."""
    words = expanded(key).tolist()
    seed, step = words[BLOCK_WORDS:]
    low = 2**32 - 1
    total = 0
    for index in range(blocks_of(len(row))):
        block = row[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        block += bytes(-len(block) % LINE_BYTES)
        value = seed + (number * blocks_of(len(row)) + index) * step
        for word, secret in zip(np.frombuffer(block, "<u8").tolist(), words, strict=False):
            value += ((word + secret) & low) * (((word >> 32) + (secret >> 32)) & low)
        value %= 2**64
        for _ in range(2):
            value = (value ^ value >> 32) * MIX % 2**64
        total += value ^ value >> 32
    return total


def _row(view: View, plane: int, row: int, head: int) -> Bytes:
    """Return the bytes of one row, [elements, bytes of one], by the definition of a slab or of a pool's geometry."""
    if view.slab is not None:
        at = ((plane * view.page_rows + row - view.first_row) * len(view.heads) + head) * view.row_bytes
        return view.slab[at : at + view.row_bytes].reshape(-1, view.element_bytes)
    assert view.pool is not None
    kind, layer = divmod(plane, len(view.layers))
    place = view.pool.sections[view.section].planes[kind * view.pool.layer_count + view.layers[layer]]
    page, slot = divmod(row - view.first_row, view.page_rows)
    at = place.offset + int(view.pages[page]) * place.page_stride + slot * place.token_stride
    at += view.heads[head] * place.head_stride
    shape = (view.row_bytes // view.element_bytes, view.element_bytes)
    strides = (place.element_stride or view.element_bytes, 1)
    return np.lib.stride_tricks.as_strided(view.pool.region(place.region)[at:], shape, strides)
