"""Copy head slices of an engine's pages into one contiguous slab. Called by path.gather and by the self-test."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.slab import SlabPlan, check_buffer, copy_rows, merge_tokens, page_runs, pairs, plan_slab
from longshore_agent.memory.pools import KVPool
from longshore_wire.trailer import Trailer, aligned, slab_bytes

# Plane by plane the slab is written front to back, up to a quarter faster than page by page; a call costs about 5 us,
# which only a plane of this size makes up for.
_PLANE_BYTES_MIN = 256 << 10


def gather_slices(
    pool: KVPool,
    pages: npt.NDArray[np.int32],
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    target: torch.Tensor,
    trailer: Trailer | None,
) -> int:
    """Copy tokens [first, end) of a sequence from `pages` into `target`, packed, then its trailer. Releases the GIL.

    Args:
        pool: see `memory.pools.KVPool`; held in use meanwhile.
        pages: [n] int32, the pages of the sequence from number first // page_size on that hold the tokens, each in
            [0, pool.page_count); repeats allowed.
        tokens: (first, end) in the sequence, unaligned at both ends; with PageOrder.OPAQUE the first is aligned and
            the page of the last token is copied whole.
        layers: local layers, a range of step 1, not empty.
        heads: local heads, a range of step 1, not empty.
        target: [slab bytes or more] uint8; see `kernels.slab` for the order. Nothing behind the slab is touched.
        trailer: written at the aligned end of the payload; None: nothing is written behind the payload.
    Returns:
        The payload's bytes.
    Raises:
        ShapeError: an argument breaks the above, named in the message; nothing was written.
        LongshoreError: PAGE_OUT_OF_RANGE, names the index; nothing was written.
        PoolError: the pool is unregistered.
    """
    with pool.in_use():
        plan = plan_slab(pool, pages, tokens, layers, heads, unique=False)
        payload = plan.payload_bytes
        if trailer is not None and trailer.payload_bytes != payload:
            raise ShapeError(f"trailer.payload_bytes is {trailer.payload_bytes}: the payload has {payload} bytes")
        check_buffer("target", target, pool.device, payload if trailer is None else slab_bytes(payload))
        for words, packed in pairs(pool, plan, target):
            _gather_planes(plan, words, packed)
        if trailer is not None:
            _write_end(target, payload, trailer)
    return payload


def _gather_planes(plan: SlabPlan, words: torch.Tensor, packed: torch.Tensor) -> None:
    for edge in plan.edges:
        length = edge.end - edge.first
        copy_rows(packed[:, edge.slab_token : edge.slab_token + length], words[:, edge.page, edge.first : edge.end])
    count = len(plan.whole)
    if count == 0:
        return
    size = words.shape[2]
    target = packed[:, plan.whole_row : plan.whole_row + count * size].view(-1, count, *words.shape[2:])
    words, target = merge_tokens(words, target)
    runs = page_runs(plan.whole, target.numel() * target.element_size())
    if runs is None:
        _gather_scattered(words, torch.from_numpy(plan.whole), target)
        return
    for begin, page, length in runs:
        copy_rows(target[:, begin : begin + length], words[:, page : page + length])


def _gather_scattered(words: torch.Tensor, pages: torch.Tensor, target: torch.Tensor) -> None:
    if target[0].numel() * target.element_size() >= _PLANE_BYTES_MIN:
        for plane in range(target.shape[0]):
            torch.index_select(words[plane], 0, pages, out=target[plane])
    else:
        # Pages come first in both views: the call visits each page once, for all planes.
        torch.index_select(words.transpose(0, 1), 0, pages, out=target.transpose(0, 1))


def _write_end(target: torch.Tensor, payload: int, trailer: Trailer) -> None:
    # The gap is zeroed so that no bytes of an older slab, perhaps of another request, travel with this one.
    end = bytes(aligned(payload) - payload) + trailer.pack()
    target[payload : payload + len(end)].copy_(torch.frombuffer(bytearray(end), dtype=torch.uint8))
