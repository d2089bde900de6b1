"""Writes models small enough for two cores, with random weights from a fixed seed, as files for vLLM and SGLang.

Called by the tests of both engines and their benchmarks. Needs only numpy. Its weights are unusually large: with smaller
ones the most likely next token would not depend on the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

LAYERS = 4
HIDDEN = 256
HEADS = 8
HEAD_DIM = 32
INNER = 512
VOCABULARY = 1024
POSITIONS_MAX = 2048
SEED = 0
WEIGHT_DEVIATION = 0.2
ELEMENT_BYTES = 4
# Elements of the DeepSeek model's latent, and of the part of a key that knows its position. vLLM knows no other sizes on CPUs.
LATENT = 512
POSITIONAL = 64
# Tokens that the windowed layers of the Gemma model see; every third layer sees all.
WINDOW = 64


@dataclass(frozen=True)
class TinyModel:
    """The path of the model, and the part of its shape that determines the KV cache."""

    path: Path
    kv_heads: int


class _Sizes(NamedTuple):
    heads: int
    inner: int
    vocabulary: int


def _sizes(kv_heads: int) -> _Sizes:
    """Return sizes that the number of KV heads divides, so that engines can split them over as many ranks."""
    if HEADS % kv_heads == 0:
        return _Sizes(HEADS, INNER, VOCABULARY)
    # Engines round the vocabulary up to a multiple of 64 and divide it among the ranks.
    return _Sizes(kv_heads, 64 * kv_heads, VOCABULARY - VOCABULARY % (32 * kv_heads))


def make(directory: Path, kv_heads: int) -> TinyModel:
    """Write the model with `kv_heads` KV heads below `directory` and return it."""
    path = directory / f"qwen3-{kv_heads}-kv-heads"
    sizes = _sizes(kv_heads)
    return _write(path, kv_heads, _config(kv_heads), _weights(sizes, _attention(sizes, kv_heads)))


def make_latent(directory: Path, *, has_yarn: bool = True) -> TinyModel:
    """Write a DeepSeek model with MLA and without experts below `directory` and return it.

    Args:
        has_yarn: the only kind of positions that SGLang has for MLA on CPUs. vLLM refuses the config in which SGLang finds it.
    """
    weights = _weights(_sizes(HEADS), _latent_attention())
    config = (
        _latent_config()
        if has_yarn
        else {key: _latent_config()[key] for key in _latent_config().keys() - {"rope_scaling"}}
    )
    return _write(directory / "deepseek", 1, config, weights)


def make_windowed(directory: Path, kv_heads: int) -> TinyModel:
    """Write a Gemma model, most of whose layers see a window, below `directory` and return it."""
    sizes = _sizes(kv_heads)
    weights = _weights(sizes, _attention(sizes, kv_heads), ("pre_feedforward_layernorm", "post_feedforward_layernorm"))
    return _write(directory / "gemma", kv_heads, _windowed_config(kv_heads), weights)


def _write(path: Path, kv_heads: int, config: dict[str, object], weights: dict[str, np.ndarray]) -> TinyModel:
    path.mkdir(parents=True)
    _write_json(path / "config.json", config)
    _write_weights(path / "model.safetensors", weights)
    _write_json(path / "tokenizer.json", _tokenizer())
    _write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    return TinyModel(path, kv_heads)


def _config(kv_heads: int) -> dict[str, object]:
    sizes = _sizes(kv_heads)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": POSITIONS_MAX,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _latent_config() -> dict[str, object]:
    return _config(HEADS) | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": LATENT,
        "q_lora_rank": None,
        "qk_rope_head_dim": POSITIONAL,
        "qk_nope_head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
        # All layers come before the first one with experts.
        "first_k_dense_replace": LAYERS,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "moe_layer_freq": 1,
        # SGLang has no other kind for MLA on CPUs.
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "deepseek_yarn",
            "factor": 2.0,
            "original_max_position_embeddings": POSITIONS_MAX // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def _windowed_config(kv_heads: int) -> dict[str, object]:
    kinds = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(LAYERS)]
    return _config(kv_heads) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": WINDOW,
        "layer_types": kinds,
        "rope_local_base_freq": 10000.0,
    }


def _attention(sizes: _Sizes, kv_heads: int) -> dict[str, tuple[int, ...]]:
    return {
        "q_proj": (sizes.heads * HEAD_DIM, HIDDEN),
        "k_proj": (kv_heads * HEAD_DIM, HIDDEN),
        "v_proj": (kv_heads * HEAD_DIM, HIDDEN),
        "o_proj": (HIDDEN, sizes.heads * HEAD_DIM),
        "q_norm": (HEAD_DIM,),
        "k_norm": (HEAD_DIM,),
    }


def _latent_attention() -> dict[str, tuple[int, ...]]:
    return {
        "q_proj": (HEADS * (HEAD_DIM + POSITIONAL), HIDDEN),
        "kv_a_proj_with_mqa": (LATENT + POSITIONAL, HIDDEN),
        "kv_a_layernorm": (LATENT,),
        "kv_b_proj": (HEADS * 2 * HEAD_DIM, LATENT),
        "o_proj": (HIDDEN, HEADS * HEAD_DIM),
    }


def _weights(
    sizes: _Sizes, attention: Mapping[str, tuple[int, ...]], norms: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return random matrices, and norms of ones.

    Args:
        attention: the shapes of a layer's weights for attention.
        norms: of a layer, beyond the usual ones.
    """
    generator = np.random.default_rng(SEED)

    def made(*shape: int) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return (generator.standard_normal(shape) * WEIGHT_DEVIATION).astype(np.float32)

    weights = {"model.embed_tokens.weight": made(sizes.vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {f"{name}.self_attn.{part}.weight": made(*shape) for part, shape in attention.items()}
        weights |= {
            f"{name}.input_layernorm.weight": made(HIDDEN),
            f"{name}.post_attention_layernorm.weight": made(HIDDEN),
            f"{name}.mlp.gate_proj.weight": made(sizes.inner, HIDDEN),
            f"{name}.mlp.up_proj.weight": made(sizes.inner, HIDDEN),
            f"{name}.mlp.down_proj.weight": made(HIDDEN, sizes.inner),
        }
        weights |= {f"{name}.{norm}.weight": made(HIDDEN) for norm in norms}
    return weights | {"model.norm.weight": made(HIDDEN), "lm_head.weight": made(sizes.vocabulary, HIDDEN)}


def _write_weights(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Write the format of safetensors: the header's length, the header, the arrays."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in weights.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in weights.values():
            file.write(array.tobytes())


def _tokenizer() -> dict[str, object]:
    """Write a word for each token. Tests send prompts as numbers, but a server must be able to show words."""
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
