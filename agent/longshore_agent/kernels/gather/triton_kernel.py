"""The gather of a slab on a device: K and V of all layers, the zeroed gap and the trailer in one launch.

Called by `device_launch`, which checks everything; `device_rows` says which bytes a program moves.
"""

# ruff: noqa: PLR2004 - the numbers are places in the trailer: a kernel reads no constants of this module

from __future__ import annotations

import triton
import triton.language as tl

from longshore_agent.kernels.device_rows import copy_tiles

# Numbers that differ from call to call must not make a kernel of their own: compiling one takes a second.
_NUMBERS = (
    "layer_first",
    "layer_count",
    "pool_layers",
    "head_first",
    "slot_first",
    "token_count",
    "row_units",
    "page_first",
    "tile_count",
    "own_heads",
    "plane_count",
    "tail_bytes",
    "word_0",
    "word_1",
    "word_2",
    "word_3",
    "word_4",
    "word_5",
    "word_6",
    "word_7",
)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _write_tail(
    end: tl.tensor,
    tail_bytes: tl.tensor,
    word_0: tl.tensor,
    word_1: tl.tensor,
    word_2: tl.tensor,
    word_3: tl.tensor,
    word_4: tl.tensor,
    word_5: tl.tensor,
    word_6: tl.tensor,
    word_7: tl.tensor,
) -> None:
    """Write the zeros and the trailer behind the payload.

    Args:
        end: of the payload, a pointer to bytes.
        tail_bytes: the gap and the trailer, below 128; 0: nothing is written.
        word_0 to word_7: the trailer, 64-bit numbers in its order.
    """
    place = tl.arange(0, 128)
    at = place - (tail_bytes.to(tl.int64) - 64)
    # Bytes of the gap have a negative place in the trailer, and are zero.
    number = word_0.to(tl.int64)
    number = tl.where(at >= 8, word_1.to(tl.int64), number)
    number = tl.where(at >= 16, word_2.to(tl.int64), number)
    number = tl.where(at >= 24, word_3.to(tl.int64), number)
    number = tl.where(at >= 32, word_4.to(tl.int64), number)
    number = tl.where(at >= 40, word_5.to(tl.int64), number)
    number = tl.where(at >= 48, word_6.to(tl.int64), number)
    number = tl.where(at >= 56, word_7.to(tl.int64), number)
    tail = tl.where(at >= 0, number >> (at & 7) * 8, 0).to(tl.int8)
    tl.store(end.to(tl.pointer_type(tl.int8)) + place, tail, mask=place < tail_bytes)


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]  # Triton has no types
def gather_kernel(
    planes: tl.tensor,
    pages: tl.tensor,
    slab: tl.tensor,
    layer_first: tl.tensor,
    layer_count: tl.tensor,
    pool_layers: tl.tensor,
    head_first: tl.tensor,
    slot_first: tl.tensor,
    token_count: tl.tensor,
    row_units: tl.tensor,
    page_first: tl.tensor,
    tile_count: tl.tensor,
    own_heads: tl.tensor,
    plane_count: tl.tensor,
    tail_bytes: tl.tensor,
    word_0: tl.tensor,
    word_1: tl.tensor,
    word_2: tl.tensor,
    word_3: tl.tensor,
    word_4: tl.tensor,
    word_5: tl.tensor,
    word_6: tl.tensor,
    word_7: tl.tensor,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    whole_rows: tl.constexpr,
    step: tl.constexpr,
    persistent: tl.constexpr,
) -> None:
    """Copy tiles of pages into the slab; the first program also writes what follows the payload. Args: see `device_rows`."""
    copy_tiles(
        planes,
        pages,
        slab,
        layer_first,
        layer_count,
        pool_layers,
        head_first,
        slot_first,
        token_count,
        row_units,
        page_first,
        tile_count,
        own_heads,
        plane_count,
        unit_bytes,
        word,
        rows,
        columns,
        page_tokens,
        one_page,
        whole_rows,
        step,
        persistent,
        to_slab=True,
    )
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        end = slab + plane_count.to(tl.int64) * token_count * own_heads * row_units * unit_bytes
        _write_tail(end, tail_bytes, word_0, word_1, word_2, word_3, word_4, word_5, word_6, word_7)
