"""Pages to pages: the runs of bytes that lie contiguous on both sides, for ways that write in place.

Pure arithmetic on addresses; called by `deliver`. Whole pages become one run each where both sides hold the same
heads in the same order; otherwise a run is one head slice of one token, or less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longshore_agent.kernels.segments import PageList, between
from longshore_wire.layout import KVLayout, PageOrder, PoolGeometry

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Side:
    """One side's pages: `pages[i]` holds page number `first_page + i`."""

    layout: KVLayout
    geometry: PoolGeometry
    region_addresses: tuple[int, ...]
    pages: npt.NDArray[np.int32]
    first_page: int
    layers: range  # local
    heads: range  # local


def runs(source: Side, target: Side, tokens: tuple[int, int]) -> tuple[Addresses, Addresses, Addresses]:
    """Return (source addresses, target addresses, lengths in bytes), [n] each, of all that must be copied.

    Args:
        source, target: both sides; as many layers and heads on each.
        tokens: global [first, end), inside the pages of both.
    """
    segments = between(_page_list(source), _page_list(target), tokens)
    parts = [
        _plane_runs(source, target, source_plane, target_plane, segments)
        for source_plane, target_plane in zip(_planes(source), _planes(target), strict=True)
    ]
    return _merge(*(np.concatenate([part[index] for part in parts]) for index in range(3)))


def _page_list(side: Side) -> PageList:
    return PageList(side.layout.page_size, side.pages, side.first_page)


def _planes(side: Side) -> list[int]:
    kinds = len(side.geometry.planes) // len(side.layout.layers)
    return [kind * len(side.layout.layers) + layer for kind in range(kinds) for layer in side.layers]


def _plane_runs(
    source: Side, target: Side, source_plane: int, target_plane: int, segments: npt.NDArray[np.int64]
) -> tuple[Addresses, Addresses, Addresses]:
    near, far = source.geometry.planes[source_plane], target.geometry.planes[target_plane]
    opaque = source.layout.order is PageOrder.OPAQUE
    model = source.layout.model
    row = near.head_stride if opaque else model.head_dim * model.element_bytes
    base_near = source.region_addresses[near.region] + near.offset + source.heads.start * near.head_stride
    base_far = target.region_addresses[far.region] + far.offset + target.heads.start * far.head_stride
    heads = len(source.heads)
    if near.head_stride == far.head_stride == row:
        # All heads of a token lie side by side on both sides: they are one row.
        row, heads = row * heads, 1
    head_steps = np.arange(heads, dtype=np.int64)
    count = 1 if opaque else int(segments[:, 4].max(initial=1))
    lengths = np.full(len(segments), row, dtype=np.int64)
    if near.token_stride == far.token_stride == row and not opaque:
        # Tokens of a page lie side by side on both sides: a segment is one row.
        lengths, count = segments[:, 4] * row, 1
    token_steps = np.arange(count, dtype=np.int64)
    shape = (len(segments), heads, count)
    slot_near = segments[:, 1, None, None] + token_steps
    slot_far = segments[:, 3, None, None] + token_steps
    begin_near = segments[:, 0, None, None] * near.page_stride + slot_near * near.token_stride
    begin_far = segments[:, 2, None, None] * far.page_stride + slot_far * far.token_stride
    address_near = base_near + begin_near + head_steps[None, :, None] * near.head_stride
    address_far = base_far + begin_far + head_steps[None, :, None] * far.head_stride
    length = np.broadcast_to(lengths[:, None, None], shape)
    if count == 1:
        wanted = np.ones(shape, dtype=bool)
    else:
        wanted = np.broadcast_to(token_steps < segments[:, 4, None, None], shape)
    return (
        address_near[wanted].astype(np.uint64),
        address_far[wanted].astype(np.uint64),
        length[wanted].astype(np.uint64),
    )


def _merge(near: Addresses, far: Addresses, lengths: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Join neighbours that follow each other on both sides."""
    if not len(near):
        return near, far, lengths
    follows = (near[1:] == near[:-1] + lengths[:-1]) & (far[1:] == far[:-1] + lengths[:-1])
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    return near[heads], far[heads], np.add.reduceat(lengths, heads)
