"""What gather and scatter share: checks of their arguments, the slab's arithmetic, and the call of the copying loop.

A slab is [planes, tokens, heads, head_dim] without gaps: K of each chosen layer, then V of each; then zeros up to
`aligned(payload)`, then the trailer. With PageOrder.OPAQUE it is [planes, pages, heads, bytes of a blob].
Everywhere below a row is one head of one token (or one blob): the longest piece that every layout keeps whole. Rows
that lie side by side in the pages as well are copied as one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import ShapeError
from longshore_agent.kernels import rows
from longshore_agent.memory.pools import KVPool, PlaneRun
from longshore_wire.layout import PageOrder

Bytes = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Part:
    """Planes of a slab that one call copies, `first` being the number in the slab of the first of them; see `rows.copy`.

    In `segments` the pages are the source.
    """

    first: int
    planes: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    pages: rows.Strides
    slab: rows.Strides
    heads: int
    page_bits: int  # bitwise or of all addresses in the pages, and of their steps
    slab_bits: int  # the same in a plane's part of the slab


@dataclass(frozen=True)
class SlabPlan:
    """One checked request.

    Attributes:
        plane_count: planes of the slab.
        plane_bytes: of one plane's part of the slab.
    """

    plane_count: int
    plane_bytes: int
    _parts: tuple[_Part, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all rows."""
        return self.plane_count * self.plane_bytes

    def copy(self, operation: str, slab: int, *, stream: bool) -> None:
        """Copy every row; see `rows.copy`.

        Args:
            operation: `gather` or `scatter`.
            slab: its address.
            stream: use streaming stores where addresses allow it: for bytes that nobody reads soon.
        """
        for part in self._parts:
            at = slab + part.first * self.plane_bytes
            slab_planes = at + np.arange(len(part.planes), dtype=np.int64) * self.plane_bytes
            if operation == "gather":
                bits = part.slab_bits | at | self.plane_bytes
                sides = (part.planes, slab_planes, part.segments, part.pages, part.slab)
            else:
                bits = part.page_bits
                sides = (
                    slab_planes,
                    part.planes,
                    np.ascontiguousarray(part.segments[:, [1, 0, 2, 3]]),
                    part.slab,
                    part.pages,
                )
            rows.copy(*sides, part.heads, stream=stream and bits % rows.LINE_BYTES == 0)


def payload_bytes(pool: KVPool, tokens: tuple[int, int], layers: range, heads: range) -> int:
    """Return the bytes of a slab of `pool` without padding and trailer. Raises ShapeError as `plan_slab`."""
    _check_ranges(pool, tokens, layers, heads)
    return pool.kinds * len(layers) * _row_count(pool, tokens) * len(heads) * pool.row_bytes


def check_request(
    pool: KVPool, pages: Pages, tokens: tuple[int, int], layers: range, heads: range, *, unique: bool
) -> int:
    """Check a request against its pool; return the bytes of one plane's part of the slab.

    Raises:
        ShapeError: names the argument.
        LongshoreError: a page id is out of range, or repeated where `unique`; names its index.
    """
    _check_ranges(pool, tokens, layers, heads)
    page_count = _pages_of(pool, tokens)
    if pages.dtype != np.int32 or pages.shape != (page_count,):
        raise ShapeError(f"pages is {pages.dtype} {pages.shape}: tokens {tokens} need int32 ({page_count},)")
    pool.check_pages(pages, unique=unique)
    return _row_count(pool, tokens) * len(heads) * pool.row_bytes


def plan_slab(
    pool: KVPool, pages: Pages, tokens: tuple[int, int], layers: range, heads: range, *, unique: bool
) -> SlabPlan:
    """Check a request and find the rows that it means. Raises as `check_request`."""
    plane_bytes = check_request(pool, pages, tokens, layers, heads, unique=unique)
    segments = _segments(pool, pages, tokens)
    parts = tuple(_part(pool, run, heads, segments) for run in planes_of(pool, layers))
    return SlabPlan(pool.kinds * len(layers), plane_bytes, parts)


def planes_of(pool: KVPool, layers: range) -> list[PlaneRun]:
    """Return the planes of local layers in their order; `first` of each run counts from the first of them."""
    found = []
    for first, end, number in _spans(pool, layers):
        for run in pool.plane_runs:
            begin, stop = max(first, run.first), min(end, run.first + len(run.addresses))
            if begin < stop:
                addresses = run.addresses[begin - run.first : stop - run.first]
                found.append(run._replace(first=number + begin - first, addresses=addresses))
    return found


def check_buffer(name: str, buffer: Bytes, length_bytes: int) -> None:
    """Raise ShapeError unless `buffer` is contiguous uint8 of at least `length_bytes`."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ShapeError(f"{name} is {buffer.dtype} {buffer.shape}: pass contiguous bytes (uint8, one dimension)")
    if buffer.size < length_bytes:
        raise ShapeError(f"{name} has {buffer.size} bytes: the slab takes {length_bytes}")


def _segments(pool: KVPool, pages: Pages, tokens: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Return [pages, 4]: page, first slot in it, row of the slab, rows; rows of one head."""
    size = pool.page_tokens
    end = _row_count(pool, tokens)
    skipped = 0 if pool.layout.order is PageOrder.OPAQUE else tokens[0] % size
    edges = np.arange(len(pages) + 1, dtype=np.int64) * size - skipped
    edges[0], edges[-1] = 0, end
    segments = np.zeros((len(pages), 4), dtype=np.int64)
    segments[:, 0] = pages
    segments[0, 1] = skipped
    segments[:, 2] = edges[:-1]
    segments[:, 3] = np.diff(edges)
    return segments


def _part(pool: KVPool, run: PlaneRun, heads: range, found: npt.NDArray[np.int64]) -> _Part:
    """Turn rows of pages into addresses; join what lies side by side on both sides."""
    planes = run.addresses + heads.start * run.head_stride
    head_count, row = len(heads), pool.row_bytes
    if run.head_stride == row:
        head_count, row = 1, row * head_count
    pages, slots, packed, tokens = found.T
    segments = np.empty((len(found), 4), dtype=np.int64)
    segments[:, 0] = pages * run.page_stride + slots * run.token_stride
    segments[:, 1] = packed * (head_count * row)
    if head_count == 1 and run.token_stride == row:
        segments[:, 2], segments[:, 3] = 1, tokens * row
    else:
        segments[:, 2], segments[:, 3] = tokens, row
    lengths = int(np.bitwise_or.reduce(segments[:, 3]))
    page_bits = int(np.bitwise_or.reduce(planes)) | int(np.bitwise_or.reduce(segments[:, 0])) | lengths
    page_bits |= run.token_stride | (run.head_stride if head_count > 1 else 0)
    slab_bits = int(np.bitwise_or.reduce(segments[:, 1])) | lengths
    return _Part(
        run.first,
        planes,
        segments,
        rows.Strides(run.token_stride, run.head_stride),
        rows.Strides(head_count * row, row),
        head_count,
        page_bits,
        slab_bits,
    )


def _pages_of(pool: KVPool, tokens: tuple[int, int]) -> int:
    size = pool.layout.page_size
    return -(-tokens[1] // size) - tokens[0] // size


def _row_count(pool: KVPool, tokens: tuple[int, int]) -> int:
    """Return the rows of one head: tokens, or pages with PageOrder.OPAQUE."""
    return _pages_of(pool, tokens) if pool.layout.order is PageOrder.OPAQUE else tokens[1] - tokens[0]


def _spans(pool: KVPool, layers: range) -> list[tuple[int, int, int]]:
    """Return (first plane, end, number of the first in the slab) of consecutive planes of the pool."""
    if len(layers) == pool.layer_count:
        return [(0, pool.kinds * pool.layer_count, 0)]
    return [
        (kind * pool.layer_count + layers.start, kind * pool.layer_count + layers.stop, kind * len(layers))
        for kind in range(pool.kinds)
    ]


def _check_ranges(pool: KVPool, tokens: tuple[int, int], layers: range, heads: range) -> None:
    for name, chosen, count in (("layers", layers, pool.layer_count), ("heads", heads, pool.head_count)):
        if chosen.step != 1 or not 0 <= chosen.start < chosen.stop <= count:
            raise ShapeError(f"{name} is {chosen}: give a range within [0, {count}), not empty, of step 1")
    if not 0 <= tokens[0] < tokens[1]:
        raise ShapeError(f"tokens is {tokens}: give 0 <= first < end")
    if pool.layout.order is PageOrder.OPAQUE and tokens[0] % pool.layout.page_size:
        raise ShapeError(
            f"tokens is {tokens}: opaque pages cannot be split, begin at a multiple of {pool.layout.page_size}"
        )
