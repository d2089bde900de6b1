"""Cuts the bytes of a write into pieces that are contiguous on both sides, for pages in place and for a staged slab.

Called by `life`; pure arithmetic on addresses. If both sides hold the same heads in the same order, each page is one
piece; otherwise a piece is one head slice of one token, or less. Adjacent pieces are merged, so do not count on one
piece a page.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longshore_agent.kernels.copier import Numbers, View, segments
from longshore_agent.memory.host_memory import StagingPieces
from longshore_agent.memory.pools import PlaneRun
from longshore_agent.transports.base import Pieces
from longshore_wire.peer_messages import RegionInfo

Addresses = npt.NDArray[np.uint64]


def runs(source: View, target: View, tokens: tuple[int, int]) -> Pieces:
    """Return the pieces that bring `tokens` from the source's pages to the target's.

    Args:
        source, target: pages of either side, with equally many layers and heads.
        tokens: (first, end) in the sequence, inside the pages of both sides.
    """
    found = segments(source, target, source.rows(tokens))
    parts = [
        part
        for near in source.planes
        for far in target.planes
        for part in _plane_runs(source, target, near, far, found)
    ]
    return Pieces(*_merge(*(np.concatenate([part[index] for part in parts]) for index in range(3))))


def _plane_runs(
    source: View, target: View, near: PlaneRun, far: PlaneRun, found: Numbers
) -> list[tuple[Addresses, Addresses, Addresses]]:
    """Return the runs of each plane that both sides have."""
    first = max(near.first, far.first)
    end = min(near.first + len(near.addresses), far.first + len(far.addresses))
    if first >= end:
        return []
    row, heads = source.row_bytes, len(source.heads)
    if near.head_stride == far.head_stride == row:
        # All heads of a token lie side by side on both sides: they are one row.
        row, heads = row * heads, 1
    head_steps = np.arange(heads, dtype=np.int64)
    count = int(found[:, 4].max(initial=1))
    lengths = np.full(len(found), row, dtype=np.int64)
    if near.token_stride == far.token_stride == row:
        # Tokens of a page lie side by side on both sides: a segment is one row.
        lengths, count = found[:, 4] * row, 1
    row_steps = np.arange(count, dtype=np.int64)
    shape = (len(found), heads, count)
    slot_near = found[:, 1, None, None] + row_steps
    slot_far = found[:, 3, None, None] + row_steps
    at_near = found[:, 0, None, None] * near.page_stride + slot_near * near.token_stride
    at_far = found[:, 2, None, None] * far.page_stride + slot_far * far.token_stride
    at_near = at_near + (source.heads.start + head_steps[None, :, None]) * near.head_stride
    at_far = at_far + (target.heads.start + head_steps[None, :, None]) * far.head_stride
    length = np.broadcast_to(lengths[:, None, None], shape)
    wanted = np.broadcast_to(row_steps < found[:, 4, None, None], shape)
    return [
        (
            (near.addresses[plane - near.first] + at_near)[wanted].astype(np.uint64),
            (far.addresses[plane - far.first] + at_far)[wanted].astype(np.uint64),
            length[wanted].astype(np.uint64),
        )
        for plane in range(first, end)
    ]


def _merge(near: Addresses, far: Addresses, lengths: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Merge runs that follow each other on both sides."""
    if not len(near):
        return near, far, lengths
    follows = (near[1:] == near[:-1] + lengths[:-1]) & (far[1:] == far[:-1] + lengths[:-1])
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    return near[heads], far[heads], np.add.reduceat(lengths, heads)


def cut(buffer: StagingPieces, begin_bytes: int, ring: RegionInfo, offset_bytes: int, length_bytes: int) -> Pieces:
    """Cut the write of a staged slab where a registration of either side ends. Mostly returns one piece.

    Args:
        buffer: staging memory of the source.
        begin_bytes: offset of the slab in `buffer`.
        offset_bytes: offset of the slab in the target's ring.
        length_bytes: of payload and trailer.
    """
    pieces = buffer.pieces(begin_bytes, length_bytes)
    if len(pieces) == 1 and not ring.extent_bytes:
        return Pieces.one(buffer.address + begin_bytes, ring.address + offset_bytes, length_bytes)
    extent = ring.extent_bytes or ring.length_bytes
    cuts = {0, length_bytes}
    cuts.update(range(extent - offset_bytes % extent, length_bytes, extent))
    near = 0
    for _, piece_bytes in pieces:
        near += piece_bytes
        cuts.add(near)
    edges = np.array(sorted(cuts), dtype=np.uint64)
    starts, lengths = edges[:-1], np.diff(edges)
    sources, targets = starts + np.uint64(buffer.address + begin_bytes), starts + np.uint64(ring.address + offset_bytes)
    return Pieces(sources, targets, lengths)
