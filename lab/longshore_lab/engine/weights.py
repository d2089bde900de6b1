"""Makes the model's weights from a seed, and one rank's share of them. The weights do not depend on TP.

Called by the decoder at its start, and by tests that check the decoder against a plain forward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longshore_lab.engine.config import ModelConfig

# Standard deviation of attention scores. Near 0, attention is an average and ignores the context. Far above 3, it
# selects single tokens and amplifies rounding errors. At 2, it still weighs several tokens of a long prompt.
SCORE_DEVIATION = 2.0
# Size of the sums of attention and the MLP in the residual stream, per layer, relative to the embedding. Attention
# dominates, so that the next token depends more on the prompt's KV than on the last token.
ATTENTION_GAIN = 1.5
MLP_GAIN = 0.7
# Standard deviation of the logits. Greedy decoding depends only on their order.
LOGIT_DEVIATION = 4.0
# Random streams of one seed. Each tensor has its own, so that a further layer changes no other tensor.
STREAMS_PER_LAYER = 16
LAYER_STREAMS_FIRST = 16


class LayerWeights(NamedTuple):
    """One layer, applied as `rows @ weight`.

    Shapes, with q and k the width of all query and KV heads, or of one rank's: attention_norm and mlp_norm
    [hidden]; query [hidden, q]; key, value [hidden, k]; attention_out [q, hidden]; gate, up [hidden, mlp];
    down [mlp, hidden].
    """

    attention_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attention_out: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class EdgeWeights(NamedTuple):
    """Weights that every rank has in full: embedding [vocabulary, hidden], final_norm [hidden], head [hidden, vocabulary]."""

    embedding: Tensor
    final_norm: Tensor
    head: Tensor


def full_layer(config: ModelConfig, seed: int, layer: int) -> LayerWeights:
    """Return all heads and columns of one layer."""
    hidden, mlp = config.hidden, config.mlp
    query, key = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    stream = LAYER_STREAMS_FIRST + layer * STREAMS_PER_LAYER
    score = SCORE_DEVIATION**0.5
    return LayerWeights(
        attention_norm=_norm(seed, stream, hidden),
        query=_matrix(seed, stream + 1, hidden, query, score),
        key=_matrix(seed, stream + 2, hidden, key, score),
        value=_matrix(seed, stream + 3, hidden, key, 1.0),
        attention_out=_matrix(seed, stream + 4, query, hidden, ATTENTION_GAIN),
        mlp_norm=_norm(seed, stream + 5, hidden),
        gate=_matrix(seed, stream + 6, hidden, mlp, 1.0),
        up=_matrix(seed, stream + 7, hidden, mlp, 1.0),
        down=_matrix(seed, stream + 8, mlp, hidden, MLP_GAIN),
    )


def rank_layer(config: ModelConfig, seed: int, layer: int, tp: int, tp_rank: int) -> LayerWeights:
    """Return one rank's heads and columns of one layer: a contiguous slice of the full layer."""
    full = full_layer(config, seed, layer)
    key = _share(config.kv_heads * config.head_dim, tp, tp_rank)
    query = _share(config.query_heads * config.head_dim, tp, tp_rank)
    mlp = _share(config.mlp, tp, tp_rank)
    return LayerWeights(
        attention_norm=full.attention_norm,
        query=full.query[:, query].contiguous(),
        key=full.key[:, key].contiguous(),
        value=full.value[:, key].contiguous(),
        attention_out=full.attention_out[query].contiguous(),
        mlp_norm=full.mlp_norm,
        gate=full.gate[:, mlp].contiguous(),
        up=full.up[:, mlp].contiguous(),
        down=full.down[mlp].contiguous(),
    )


def edge_weights(config: ModelConfig, seed: int) -> EdgeWeights:
    """Return the embedding, the last norm and the output head."""
    return EdgeWeights(
        embedding=torch.randn(config.vocabulary, config.hidden, generator=_generator(seed, 0)),
        final_norm=_norm(seed, 1, config.hidden),
        head=_matrix(seed, 2, config.hidden, config.vocabulary, LOGIT_DEVIATION),
    )


def _share(width: int, tp: int, tp_rank: int) -> slice:
    return slice(width // tp * tp_rank, width // tp * (tp_rank + 1))


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + stream)


def _matrix(seed: int, stream: int, rows: int, columns: int, gain: float) -> Tensor:
    """Return a matrix that maps rows of standard deviation 1 to rows of standard deviation `gain`."""
    scaled: Tensor = torch.randn(rows, columns, generator=_generator(seed, stream)) * (gain / rows**0.5)
    return scaled


def _norm(seed: int, stream: int, width: int) -> Tensor:
    scaled: Tensor = torch.randn(width, generator=_generator(seed, stream)) * 0.1
    return scaled.add(1.0)
