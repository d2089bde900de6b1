"""Computes rotary positions and causal attention of a chunk of queries over its whole context.

Called by the decoder with K and V already gathered through the page table. Plain functions on tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Queries in one block. A block skips the keys after its last query, so smaller blocks compute fewer masked keys,
# while larger ones make the matrix products efficient.
QUERY_BLOCK_TOKENS = 256


def rotary_table(positions_max: int, head_dim: int, base: float) -> Tensor:
    """Return cosines and sines of every position, [2, positions_max, head_dim // 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(positions_max, dtype=torch.float64)[:, None] * base**-exponents
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(rows: Tensor, table: Tensor, first: int) -> Tensor:
    """Rotate `rows` [tokens, heads, head_dim] by their positions, which begin at `first`; halves form the pairs."""
    cosine, sine = table[:, first : first + rows.shape[0], None]
    low, high = rows.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """Attend from tokens [first, first + tokens) to tokens [0, own position].

    Args:
        queries: [tokens, query_heads, head_dim]; query head i reads KV head i // (query_heads // kv_heads).
        keys: [kv_heads, first + tokens, head_dim].
        values: [kv_heads, first + tokens, head_dim].
        first: position of the first query.
    Returns:
        [tokens, query_heads * head_dim].
    """
    tokens, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    group = query_heads // kv_heads
    blocks = []
    for begin in range(0, tokens, QUERY_BLOCK_TOKENS):
        block = queries[begin : begin + QUERY_BLOCK_TOKENS]
        rows = block.shape[0]
        end = first + begin + rows
        # The query heads of a group become rows of one product, so that K and V are not copied for each head.
        stacked = block.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        mask = None
        if rows > 1:
            positions = torch.arange(first + begin, end)
            mask = (torch.arange(end) <= positions[:, None]).repeat(group, 1)[None, None]
        mixed = functional.scaled_dot_product_attention(
            stacked[None], keys[None, :, :end], values[None, :, :end], attn_mask=mask
        )[0]
        blocks.append(mixed.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, -1))
    return torch.cat(blocks)
