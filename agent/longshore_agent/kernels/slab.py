"""What gather and scatter share: checks of their arguments, the slab's arithmetic, and copies of rows on a CPU.

A slab is [planes, tokens, heads, head_dim] without gaps: K of each chosen layer, then V of each; then zeros up to
`aligned(payload)`, then the trailer. With PageOrder.OPAQUE it is [planes, pages, heads, bytes of a blob].
Everywhere below a row is one head of one token (or one blob): the longest piece that every layout keeps whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from longshore_agent.errors import ShapeError
from longshore_agent.memory.pools import KVPool
from longshore_wire.layout import PageOrder

# Rows narrower than this are copied by numpy, which moves a row by one memmove; wider ones by torch, whose vector loop
# costs more to enter and is faster inside. On an EPYC with AVX-512, rows of 256 bytes: 0.86 of a plain copy against
# 0.75; of 1,024 bytes: 0.48 against 0.67 (pages of 16 tokens, 32 layers).
_ROW_BYTES_WIDE = 512
# A copy of one run of pages costs about 4 us to call: below this many bytes a run, one call for all pages is faster.
_RUN_BYTES_MIN = 1 << 20


@dataclass(frozen=True)
class Span:
    """Consecutive planes of a pool and where the first of them lies in the slab."""

    first: int
    end: int
    slab_first: int


@dataclass(frozen=True)
class Edge:
    """A part of one page: tokens [first, end) of it are tokens [slab_token, ...) of the slab."""

    page: int
    first: int
    end: int
    slab_token: int


@dataclass(frozen=True)
class SlabPlan:
    """One checked request.

    Attributes:
        rows: rows of one head in the slab (tokens, or pages with PageOrder.OPAQUE).
        edges: at most two parts of pages.
        whole: [n] int64 ids of pages that are copied whole; they begin at row `whole_row` of the slab.
        payload_bytes: bytes of all rows.
    """

    heads: range
    plane_count: int
    rows: int
    spans: list[Span]
    edges: list[Edge]
    whole: npt.NDArray[np.int64]
    whole_row: int
    payload_bytes: int


def payload_bytes(pool: KVPool, tokens: tuple[int, int], layers: range, heads: range) -> int:
    """Return the bytes of a slab of `pool` without padding and trailer. Raises ShapeError as `plan_slab`."""
    _check_ranges(pool, tokens, layers, heads)
    page_count = pages_of(pool, tokens)[1]
    rows = page_count if pool.layout.order is PageOrder.OPAQUE else tokens[1] - tokens[0]
    return pool.kinds * len(layers) * rows * len(heads) * pool.row_bytes


def pages_of(pool: KVPool, tokens: tuple[int, int]) -> tuple[int, int]:
    """Return (index in the sequence of the first page, count) of the pages that hold tokens [first, end)."""
    page_size = pool.layout.page_size
    first_page = tokens[0] // page_size
    return first_page, -(-tokens[1] // page_size) - first_page


def plan_slab(
    pool: KVPool, pages: npt.NDArray[np.int32], tokens: tuple[int, int], layers: range, heads: range, *, unique: bool
) -> SlabPlan:
    """Check a request against its pool and cut it into whole pages and edges.

    Raises:
        ShapeError: names the argument.
        LongshoreError: a page id is out of range, or repeated where `unique`; names its index.
    """
    payload = payload_bytes(pool, tokens, layers, heads)
    page_count = pages_of(pool, tokens)[1]
    if pages.dtype != np.int32 or pages.shape != (page_count,):
        raise ShapeError(f"pages is {pages.dtype} {pages.shape}: tokens {tokens} need int32 ({page_count},)")
    pool.check_pages(pages, unique=unique)
    size = pool.page_tokens
    if pool.layout.order is PageOrder.OPAQUE:
        first, end = 0, page_count
    else:
        first = tokens[0] % pool.layout.page_size
        end = first + tokens[1] - tokens[0]
    head_pages, tail_pages = int(first > 0), int(end % size > 0)
    edges = []
    if first > 0:
        edges.append(Edge(int(pages[0]), first, min(end, size), 0))
    if end % size > 0 and (page_count > 1 or first == 0):
        edges.append(Edge(int(pages[-1]), 0, end % size, end // size * size - first))
    return SlabPlan(
        heads=heads,
        plane_count=pool.kinds * len(layers),
        rows=end - first,
        spans=_spans(pool, layers),
        edges=edges,
        whole=pages[head_pages : max(head_pages, page_count - tail_pages)].astype(np.int64),
        whole_row=head_pages * size - first,
        payload_bytes=payload,
    )


def check_buffer(name: str, buffer: torch.Tensor, device: torch.device, length_bytes: int) -> None:
    """Raise ShapeError unless `buffer` is contiguous uint8 of at least `length_bytes` on `device`."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device != device:
        raise ShapeError(
            f"{name} is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}: pass contiguous bytes on {device}"
        )
    if buffer.numel() < length_bytes:
        raise ShapeError(f"{name} has {buffer.numel()} bytes: the slab takes {length_bytes}")


def pairs(pool: KVPool, plan: SlabPlan, slab: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (pool view, slab view) of each block of planes, in words as wide as both allow.

    Shapes: [planes, pages, page_tokens, heads, words] and [planes, rows, heads, words]. Where heads, or whole tokens,
    lie without gaps on both sides, they are one longer row: [..., 1, heads * words], see `_merge_heads`.
    """
    word_bytes = pool.word_bytes
    while slab.data_ptr() % word_bytes or slab.storage_offset() % word_bytes:
        word_bytes //= 2
    blocks = pool.blocks(word_bytes)
    dtype = blocks[0].words.dtype
    row = pool.row_bytes // word_bytes
    packed = slab[: plan.payload_bytes].view(dtype).view(plan.plane_count, plan.rows, len(plan.heads), row)
    for span in plan.spans:
        for block in blocks:
            first, end = max(span.first, block.first), min(span.end, block.first + block.words.shape[0])
            if first < end:
                words = block.words[first - block.first : end - block.first]
                words = words[:, :, :, plan.heads.start : plan.heads.stop]
                begin = span.slab_first + first - span.first
                yield _merge_heads(words, packed[begin : begin + end - first])


def merge_tokens(pool_pages: torch.Tensor, slab_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make whole pages one row each, [planes, pages, 1, 1, words], where their rows lie without gaps on both sides."""
    planes, pages, tokens, heads, words = pool_pages.shape
    if tokens > 1 and heads == 1 and pool_pages.stride(2) == words:
        pool_pages = pool_pages.as_strided(
            (planes, pages, 1, 1, tokens * words),
            (pool_pages.stride(0), pool_pages.stride(1), tokens * words, tokens * words, 1),
        )
        slab_pages = slab_pages.reshape(planes, slab_pages.shape[1], 1, 1, tokens * words)
    return pool_pages, slab_pages


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy equal shapes of rows [..., words] between any strides; releases the GIL."""
    if target.shape[-1] * target.element_size() < _ROW_BYTES_WIDE:
        np.copyto(void_rows(target), void_rows(source))
    else:
        target.copy_(source)


def void_rows(words: torch.Tensor) -> npt.NDArray[np.void]:
    """Return a view of [..., words] as [...] of one item a row, which numpy moves with one memmove."""
    length_bytes = words.shape[-1] * words.element_size()
    return words.numpy().view(f"V{length_bytes}")[..., 0]


def page_runs(pages: npt.NDArray[np.int64], length_bytes: int) -> list[tuple[int, int, int]] | None:
    """Return (index in `pages`, first page, count) of runs of consecutive pages; None where runs are too short to pay.

    Args:
        length_bytes: of all pages together in the planes that one call copies.
    """
    breaks = (np.flatnonzero(np.diff(pages) != 1) + 1).tolist()
    if breaks and length_bytes < _RUN_BYTES_MIN * (len(breaks) + 1):
        return None
    begins, ends = [0, *breaks], [*breaks, len(pages)]
    return [(begin, int(pages[begin]), end - begin) for begin, end in zip(begins, ends, strict=True)]


def _merge_heads(words: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    planes, pages, tokens, heads, row = words.shape
    if heads > 1 and words.stride(3) == row:
        words = words.as_strided(
            (planes, pages, tokens, 1, heads * row),
            (words.stride(0), words.stride(1), words.stride(2), heads * row, 1),
        )
        packed = packed.view(planes, packed.shape[1], 1, heads * row)
    return words, packed


def _spans(pool: KVPool, layers: range) -> list[Span]:
    if len(layers) == pool.layer_count:
        return [Span(0, pool.kinds * pool.layer_count, 0)]
    return [
        Span(kind * pool.layer_count + layers.start, kind * pool.layer_count + layers.stop, kind * len(layers))
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
