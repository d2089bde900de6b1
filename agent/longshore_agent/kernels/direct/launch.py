"""Copy head slices from one rank's pages straight into another's, both mapped into this process. Called by path.deliver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import ShapeError
from longshore_agent.kernels import rows
from longshore_agent.kernels.segments import PageList, between
from longshore_agent.kernels.slab import planes_of
from longshore_agent.memory.pools import KVPool, PlaneRun
from longshore_wire.layout import PageOrder


@dataclass(frozen=True)
class Side:
    """One rank's pages: `pages[i]` holds page number `first_page` + i of the sequence; layers and heads are local."""

    pool: KVPool
    pages: npt.NDArray[np.int32]
    first_page: int
    layers: range
    heads: range

    @property
    def page_list(self) -> PageList:
        """The pages alone."""
        return PageList(self.pool.layout.page_size, self.pages, self.first_page)

    def planes(self, run: PlaneRun, first: int, end: int) -> npt.NDArray[np.int64]:
        """Return the addresses of the chosen heads in planes [first, end) of a run."""
        return run.addresses[first - run.first : end - run.first] + self.heads.start * run.head_stride


def copy_pages(source: Side, target: Side, tokens: tuple[int, int]) -> None:
    """Copy tokens [first, end) of a sequence. Releases the GIL.

    Page sizes and orders may differ; opaque pages are copied whole, and both sides must have them alike.

    Args:
        source, target: as many layers and heads on both, of one model; pages of all the tokens. Target pages may not repeat.
        tokens: (first, end), first < end.
    Raises:
        ShapeError: the two sides do not fit each other; nothing was written.
        LongshoreError: a page is out of range or repeated; names the index; nothing was written.
        PoolError: a pool is unregistered.
    """
    with source.pool.in_use(), target.pool.in_use():
        check_sides(source, target, tokens)
        for side, unique in ((source, False), (target, True)):
            side.pool.check_pages(side.pages, unique=unique)
        segments = between(source.page_list, target.page_list, tokens)
        for near in planes_of(source.pool, source.layers):
            for far in planes_of(target.pool, target.layers):
                _copy_planes(source, target, near, far, segments)


def check_sides(source: Side, target: Side, tokens: tuple[int, int]) -> None:
    """Raise ShapeError unless two sides have as many layers and heads, of one model, and pages of all tokens."""
    if len(source.layers) != len(target.layers) or len(source.heads) != len(target.heads):
        raise ShapeError(
            f"layers {source.layers} and heads {source.heads} at the source, {target.layers} and {target.heads} at the "
            "target: give as many on both sides"
        )
    if source.pool.row_bytes != target.pool.row_bytes or source.pool.kinds != target.pool.kinds:
        raise ShapeError(
            f"rows of {source.pool.row_bytes} and {target.pool.row_bytes} bytes: both sides hold one model"
        )
    if not 0 <= tokens[0] < tokens[1]:
        raise ShapeError(f"tokens is {tokens}: give 0 <= first < end")
    for name, side in (("source", source), ("target", target)):
        size = side.pool.layout.page_size
        last_page = (tokens[1] - 1) // size - side.first_page
        if tokens[0] // size < side.first_page or last_page >= len(side.pages):
            raise ShapeError(f"{name}.pages has {len(side.pages)} pages from {side.first_page} on: {tokens} need more")


def _copy_planes(source: Side, target: Side, near: PlaneRun, far: PlaneRun, found: npt.NDArray[np.int64]) -> None:
    """Copy the planes that both runs have."""
    first = max(near.first, far.first)
    end = min(near.first + len(near.addresses), far.first + len(far.addresses))
    if first >= end:
        return
    target_planes = target.planes(far, first, end)
    heads, row = len(source.heads), source.pool.row_bytes
    if near.head_stride == far.head_stride == row:
        heads, row = 1, row * heads
    source_page, source_slot, target_page, target_slot, counts = found.T
    segments = np.empty((len(found), 4), dtype=np.int64)
    segments[:, 0] = source_page * near.page_stride + source_slot * near.token_stride
    segments[:, 1] = target_page * far.page_stride + target_slot * far.token_stride
    segments[:, 2], segments[:, 3] = counts, row
    if source.pool.layout.order is PageOrder.OPAQUE:
        segments[:, 2] = 1
    elif heads == 1 and near.token_stride == far.token_stride == row:
        segments[:, 2], segments[:, 3] = 1, counts * row
    bits = int(np.bitwise_or.reduce(target_planes)) | int(np.bitwise_or.reduce(segments[:, 1]))
    bits |= int(np.bitwise_or.reduce(segments[:, 3])) | far.token_stride | (far.head_stride if heads > 1 else 0)
    rows.copy(
        source.planes(near, first, end),
        target_planes,
        segments,
        rows.Strides(near.token_stride, near.head_stride),
        rows.Strides(far.token_stride, far.head_stride),
        heads,
        stream=bits % rows.LINE_BYTES == 0,
    )
