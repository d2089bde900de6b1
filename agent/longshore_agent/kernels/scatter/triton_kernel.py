"""The scatter of a slab on a device: K and V of all layers in one launch.

Called by `device_launch`, which checks everything; `device_rows` says which bytes a program moves.
"""

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
)


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]  # Triton has no types
def scatter_kernel(
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
    """Copy tiles of the slab into pages. Args: see `device_rows`."""
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
        to_slab=False,
    )
