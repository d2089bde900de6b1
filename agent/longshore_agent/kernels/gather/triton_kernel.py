"""The gather of a slab on a device: K and V of all layers, the zeroed gap and the trailer in one launch.

Called by `device_launch`, which checks everything; `device_rows` says which bytes a program moves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longshore_agent.kernels.device_rows import locate_tile

# Numbers that differ from call to call must not make a kernel of their own: compiling one takes a second.
_NUMBERS = (
    "layer_first",
    "layer_count",
    "pool_layers",
    "head_first",
    "slot_first",
    "token_count",
    "row_units",
    "tail_bytes",
)


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]  # Triton has no types
def gather_kernel(
    planes: tl.tensor,
    request: tl.tensor,
    slab: tl.tensor,
    layer_first: tl.tensor,
    layer_count: tl.tensor,
    pool_layers: tl.tensor,
    head_first: tl.tensor,
    slot_first: tl.tensor,
    token_count: tl.tensor,
    row_units: tl.tensor,
    tail_bytes: tl.tensor,
    unit_bytes: tl.constexpr,
    word: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    page_tokens: tl.constexpr,
    one_page: tl.constexpr,
    whole_rows: tl.constexpr,
    step: tl.constexpr,
    load_cache: tl.constexpr,
    load_eviction: tl.constexpr,
    store_cache: tl.constexpr,
) -> None:
    """Copy one tile of pages into the slab; the first program also writes what follows the payload.

    Args: as `device_rows.locate_tile`, and
        tail_bytes: the gap and the trailer behind the payload, below 128; 0: nothing is written there.
        load_cache, load_eviction, store_cache: hints to the caches, "" for none.
    """
    source, target, mask = locate_tile(
        planes,
        request,
        slab,
        layer_first,
        layer_count,
        pool_layers,
        head_first,
        slot_first,
        token_count,
        row_units,
        unit_bytes,
        word,
        rows,
        columns,
        page_tokens,
        one_page,
        whole_rows,
        step,
    )
    words = tl.load(source, mask=mask, cache_modifier=load_cache, eviction_policy=load_eviction)
    tl.store(target, words, mask=mask, cache_modifier=store_cache)
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        payload = tl.num_programs(2).to(tl.int64) * token_count * tl.num_programs(1) * row_units * unit_bytes
        place = tl.arange(0, 128)
        in_trailer = place - (tail_bytes - 64)
        trailer = request.to(tl.pointer_type(tl.int8))
        tail = tl.load(trailer + in_trailer, mask=(place < tail_bytes) & (in_trailer >= 0), other=0)
        tl.store(slab.to(tl.pointer_type(tl.int8)) + payload + place, tail, mask=place < tail_bytes)
