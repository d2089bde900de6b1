"""Cuts the bytes of a write into pieces that are contiguous on both sides, for pages in place and for a staged slab.

Called by `life`; pure arithmetic on addresses. If both sides hold the same heads in the same order, each page is one
piece; otherwise a piece is one head slice of one token, or less. Adjacent pieces are merged, so do not count on one
piece a page.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from longshore_agent.kernels.copier import PlaneRows, View, plane_rows
from longshore_agent.memory.host_memory import StagingPieces
from longshore_agent.transports.base import Pieces
from longshore_wire.peer_messages import RegionInfo

Addresses = npt.NDArray[np.uint64]


def runs(source: View, target: View, tokens: tuple[int, int]) -> Pieces:
    """Return the pieces that bring `tokens` from the source's pages to the target's.

    Args:
        source, target: pages of either side, with equally many layers and heads.
        tokens: (first, end) in the sequence, inside the pages of both sides.
    """
    found = list(map(_pieces_of, plane_rows(source, target, tokens)))
    return Pieces(*_merge(*(np.concatenate(each) for each in zip(*found, strict=True))))


def _pieces_of(rows: PlaneRows) -> tuple[Addresses, Addresses, Addresses]:
    """Return source, target and length of each row in all planes."""
    rows.join_tokens()
    source_at, target_at, counts, lengths = (column[:, None, None] for column in rows.segments.T)
    head = np.arange(rows.heads, dtype=np.int64)[None, :, None]
    token = np.arange(counts.max(initial=1), dtype=np.int64)
    wanted = np.broadcast_to(token < counts, (len(counts), rows.heads, len(token)))
    offsets = [
        (at + head * strides.head + token * strides.token)[wanted]
        for at, strides in ((source_at, rows.source), (target_at, rows.target))
    ]
    sources, targets = (
        (planes[:, None] + offset).astype(np.uint64).ravel()
        for planes, offset in zip((rows.source_planes, rows.target_planes), offsets, strict=True)
    )
    length = np.broadcast_to(lengths, wanted.shape)[wanted].astype(np.uint64)
    return sources, targets, np.tile(length, len(rows.source_planes))


def _merge(sources: Addresses, targets: Addresses, lengths: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Merge pieces that follow each other on both sides."""
    follows = (sources[1:] == sources[:-1] + lengths[:-1]) & (targets[1:] == targets[:-1] + lengths[:-1])
    heads = np.flatnonzero(np.concatenate([[True], ~follows]))
    return sources[heads], targets[heads], np.add.reduceat(lengths, heads)


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
    cuts.update(itertools.accumulate(piece_bytes for _, piece_bytes in pieces))
    edges = np.array(sorted(cuts), dtype=np.uint64)
    starts, lengths = edges[:-1], np.diff(edges)
    sources, targets = starts + np.uint64(buffer.address + begin_bytes), starts + np.uint64(ring.address + offset_bytes)
    return Pieces(sources, targets, lengths)
