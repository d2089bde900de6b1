"""Computes one rank's share of a forward pass over a chunk of tokens, with KV in a paged pool.

Called by `rank.EngineRank`. Uses grouped-query attention, RMSNorm, rotary positions and SwiGLU, as in Llama
(arXiv 2302.13971 and 2307.09288), split over ranks as Megatron does (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from longshore_lab.engine.attention import causal_attention, rotary_table, rotate
from longshore_lab.engine.cache import PagePool
from longshore_lab.engine.config import RankOptions
from longshore_lab.engine.tensor_parallel import RankGroup
from longshore_lab.engine.weights import LayerWeights, edge_weights, rank_layer

NORM_EPSILON = 1e-6


class Decoder:
    """One rank's weights and the forward pass over them, float32."""

    def __init__(self, options: RankOptions, group: RankGroup) -> None:
        config = options.model
        self.config = config
        self._group = group
        self._edge = edge_weights(config, options.seed)
        self._layers = [
            rank_layer(config, options.seed, layer, options.tp, options.tp_rank) for layer in range(config.layers)
        ]
        self._rotary = rotary_table(config.positions_max, config.head_dim, config.rope_base)

    @torch.inference_mode()
    def last_logits(self, tokens: Sequence[int], first: int, pool: PagePool, pages: Sequence[int]) -> Tensor:
        """Run `tokens`, whose positions begin at `first`, and store their KV.

        Args:
            tokens: at least one, each in [0, vocabulary); positions stay below positions_max.
            first: number of tokens before these; `pages` must hold their KV.
            pool: this rank's pages.
            pages: the sequence's page ids, in order, with room for all tokens.
        Returns:
            [vocabulary] logits after the last token, bit-identical on every rank.
        """
        hidden = self._edge.embedding[torch.tensor(tokens)]
        for index, layer in enumerate(self._layers):
            mixed = self._attend(hidden, index, layer, first, pool, pages)
            hidden = hidden + self._group.add(mixed @ layer.attention_out)
            rows = rms_norm(hidden, layer.mlp_norm)
            gated = functional.silu(rows @ layer.gate) * (rows @ layer.up)
            hidden = hidden + self._group.add(gated @ layer.down)
        # Rank 0 decides for all, so that ranks cannot continue with different tokens.
        return self._group.from_first(rms_norm(hidden[-1], self._edge.final_norm) @ self._edge.head)

    def _attend(
        self, hidden: Tensor, index: int, layer: LayerWeights, first: int, pool: PagePool, pages: Sequence[int]
    ) -> Tensor:
        """Store this chunk's K and V, then read the whole context back through the pages."""
        head_dim, tokens = self.config.head_dim, hidden.shape[0]
        rows = rms_norm(hidden, layer.attention_norm)
        queries = rotate((rows @ layer.query).view(tokens, -1, head_dim), self._rotary, first)
        keys = rotate((rows @ layer.key).view(tokens, -1, head_dim), self._rotary, first)
        pool.write(index, pages, first, keys, (rows @ layer.value).view(tokens, -1, head_dim))
        context_keys, context_values = pool.read(index, pages, first + tokens)
        return causal_attention(queries, context_keys, context_values, first)


def rms_norm(rows: Tensor, weight: Tensor) -> Tensor:
    """Scale each row to a mean square of 1, then by `weight` (arXiv 1910.07467)."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + NORM_EPSILON) * weight
