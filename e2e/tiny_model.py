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
# Elements of the DeepSeek model's latent, of the part of a key that knows its position, and of the rest of a key. vLLM knows
# no other sizes on CPUs, and prefills these alone on GPUs.
LATENT = 512
POSITIONAL = 64
LATENT_HEAD_DIM = 128
# Heads of recurrent states, their width, and what a state keeps of each channel. vLLM has kernels for no other widths on CPUs.
STATE_HEADS, STATE_HEAD_DIM, STATE = 16, 32, 32
GATED_HEADS, GATED_KEY_HEADS, GATED_HEAD_DIM = 4, 2, 128
# What a Mamba1 state keeps of each channel.
CHANNEL_STATE = 16
EXPERTS, EXPERT = 4, 128
# Layers whose hidden states EAGLE-3 reads.
EAGLE_LAYERS = [1, 2, 3]
ADAPTER_RANK = 8
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Ends of the names of weights that are no matrix of a module.
_BARE = ("bias", ".D", ".sinks", ".experts.gate_up_proj", ".experts.down_proj")
# Tokens that a layer with a state convolves.
CONV = 4
GATED_KINDS = ["linear_attention"] * 3 + ["full_attention"]
# Weights by which a state forgets. With this one it keeps half of what it has for tens of tokens.
DECAYS = frozenset({"mamba.A_log", "linear_attn.A_log", "self_attn.A_log"})
SLOWNESS = 3.0
# Of sparse attention: the heads of its index, the width of a key, and of the query's latent. Kernels know no other sizes.
INDEX_HEADS, INDEX_HEAD_DIM, INDEX_TOP, QUERY_LATENT = 64, 128, 2048, 256
SPARSE_HEADS = 64
# Parts of the usual names of weights, and what models with Mamba states call them.
MAMBA_NAMES = {
    "mlp": "feed_forward",
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm": "model.final_layernorm",
}
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
    return _write(path, kv_heads, _config(kv_heads), _weights(sizes, [_attention(sizes, kv_heads)] * LAYERS))


def make_eagle(directory: Path, kv_heads: int, version: int) -> TinyModel:
    """Write a layer that drafts for the model of `make` by its hidden states, by EAGLE or EAGLE-3, and return it."""
    sizes, inputs = _sizes(kv_heads), {1: 1, 3: 2}[version]
    layer = {
        name: (shape[0], inputs * shape[1]) if name in _PROJECTIONS else shape
        for name, shape in _attention(sizes, kv_heads).items()
        if len(shape) > 1
    }
    layer |= {"hidden_norm": (HIDDEN,)} if version > 1 else {}
    weights = _weights(sizes, [layer], {"model.layers.0.": "midlayer." if version > 1 else "layers.0.", "model.": ""})
    own = {"embed_tokens.weight"} if version > 1 else {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    weights = {name: value for name, value in weights.items() if name not in own | {"layers.0.input_layernorm.weight"}}
    generator = np.random.default_rng(SEED)
    features = {1: 2, 3: len(EAGLE_LAYERS)}[version] * HIDDEN
    weights["fc.weight"] = (generator.standard_normal((HIDDEN, features)) * WEIGHT_DEVIATION).astype(np.float32)
    config = _config(kv_heads) | {
        "architectures": ["LlamaForCausalLMEagle3" if version > 1 else "LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": sizes.vocabulary,
        "eagle_aux_hidden_state_layer_ids": EAGLE_LAYERS,
    }
    return _write(directory / f"eagle-{version}", kv_heads, config, weights)


def make_adapter(directory: Path, kv_heads: int) -> Path:
    """Write a LoRA adapter for the model of `make` below `directory`, as PEFT does, and return its folder."""
    sizes, generator = _sizes(kv_heads), np.random.default_rng(SEED + 1)
    modules = {name: _attention(sizes, kv_heads)[name] for name in _PROJECTIONS}
    weights: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in modules.items():
            stem = f"base_model.model.model.layers.{layer}.{name}.lora_"
            for part, shape in (("A", (ADAPTER_RANK, inputs)), ("B", (outputs, ADAPTER_RANK))):
                matrix = generator.standard_normal(shape) * WEIGHT_DEVIATION
                weights[f"{stem}{part}.weight"] = matrix.astype(np.float32)
    path = directory / "adapter"
    path.mkdir(parents=True)
    names = [name.rpartition(".")[2] for name in modules]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "bias": "none",
    }
    _write_json(path / "adapter_config.json", config | {"target_modules": names})
    _write_weights(path / "adapter_model.safetensors", weights)
    return path


def make_latent(directory: Path, *, has_yarn: bool = True) -> TinyModel:
    """Write a DeepSeek model with MLA and without experts below `directory` and return it.

    Args:
        has_yarn: the only kind of positions that SGLang has for MLA on CPUs. vLLM refuses the config in which SGLang finds it.
    """
    weights = _weights(_sizes(HEADS), [_latent_attention()] * LAYERS)
    config = _latent_config()
    if not has_yarn:
        del config["rope_scaling"]
    return _write(directory / "deepseek", 1, config, weights)


def make_latent_drafting(directory: Path, *, is_sparse: bool) -> TinyModel:
    """Write a DeepSeek-V3 or V3.2 model without experts and with a layer for drafts below `directory` and return it.

    Args:
        is_sparse: layers select tokens by index keys.
    """
    config = _latent_config() | {
        "architectures": ["DeepseekV32ForCausalLM" if is_sparse else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v32" if is_sparse else "deepseek_v3",
        "first_k_dense_replace": LAYERS + 1,
        "num_nextn_predict_layers": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    del config["rope_scaling"], config["rope_theta"]
    layer = _latent_attention()
    if is_sparse:
        config |= {
            "num_attention_heads": SPARSE_HEADS,
            "num_key_value_heads": SPARSE_HEADS,
            "q_lora_rank": QUERY_LATENT,
            "index_n_heads": INDEX_HEADS,
            "index_head_dim": INDEX_HEAD_DIM,
            "index_topk": INDEX_TOP,
        }
        layer = _indexed_attention()
    weights = _weights(_sizes(HEADS), [layer] * (LAYERS + 1))
    draft, norm, matrix = f"model.layers.{LAYERS}", weights["model.norm.weight"], weights["lm_head.weight"]
    weights |= {f"{draft}.{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
    weights |= {f"{draft}.{name}.weight": matrix for name in ("embed_tokens", "shared_head.head")}
    weights[f"{draft}.eh_proj.weight"] = np.ascontiguousarray(matrix[: 2 * HIDDEN].T)
    return _write(directory / str(config["model_type"]), 1, config, weights)


def make_delta(directory: Path) -> TinyModel:
    """Write a Kimi Linear model without experts, with MLA in one layer and KDA in the others, below `directory` and return it."""
    config = _latent_config() | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "mla_use_nope": True,
        "num_experts": None,
        "linear_attn_config": {
            # Counted from 1.
            "kda_layers": list(range(1, LAYERS)),
            "full_attn_layers": [LAYERS],
            "num_heads": GATED_HEADS,
            "head_dim": GATED_HEAD_DIM,
            "short_conv_kernel_size": CONV,
        },
    }
    del config["rope_scaling"]
    layers = [*[_delta()] * (LAYERS - 1), _latent_attention()]
    return _write(directory / "kimi-linear", 1, config, _weights(_sizes(HEADS), layers))


def make_mamba1(directory: Path, kv_heads: int) -> TinyModel:
    """Write a Jamba model without experts, with attention in one layer and Mamba1 states in the others, and return it."""
    sizes = _sizes(kv_heads)
    config = _config(kv_heads) | {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "attn_layer_period": LAYERS,
        "attn_layer_offset": LAYERS - 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": CHANNEL_STATE,
        "mamba_d_conv": CONV,
        "mamba_expand": 2,
        "mamba_dt_rank": CHANNEL_STATE,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
    full = {name: shape for name, shape in _attention(sizes, kv_heads).items() if "norm" not in name}
    weights = _weights(sizes, [*[_mamba1()] * (LAYERS - 1), full], MAMBA_NAMES)
    return _write(directory / "jamba", kv_heads, config, weights)


def make_windowed(directory: Path, kv_heads: int) -> TinyModel:
    """Write a Gemma model, most of whose layers see a window, below `directory` and return it."""
    sizes = _sizes(kv_heads)
    layer = _attention(sizes, kv_heads) | dict.fromkeys(
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"), (HIDDEN,)
    )
    return _write(directory / "gemma", kv_heads, _windowed_config(kv_heads), _weights(sizes, [layer] * LAYERS))


def make_chunked(directory: Path, kv_heads: int) -> TinyModel:
    """Write a Llama 4 model without experts, most of whose layers see one piece of a sequence, below `directory` and return it."""
    sizes = _sizes(kv_heads)
    kinds = ["chunked_attention"] * (LAYERS - 1) + ["full_attention"]
    config = _config(kv_heads) | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": sizes.inner,
        "layer_types": kinds,
        "no_rope_layers": [int(kind != "full_attention") for kind in kinds],
        "attention_chunk_size": WINDOW,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    layer = {name: shape for name, shape in _attention(sizes, kv_heads).items() if "norm" not in name}
    weights = _weights(sizes, [layer] * LAYERS, {"mlp": "feed_forward"})
    return _write(directory / "llama-4", kv_heads, config, weights)


def make_alternating(directory: Path, kv_heads: int) -> TinyModel:
    """Write a Laguna model without gates and experts, every other layer of which sees a window, below `directory` and return it."""
    sizes, rope = _sizes(kv_heads), {"rope_type": "default", "rope_theta": 10000.0}
    kinds = ["sliding_attention", "full_attention"]
    config = _config(kv_heads) | {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "gating": False,
        "sliding_window": WINDOW,
        "layer_types": kinds * (LAYERS // 2),
        "mlp_layer_types": ["dense"] * LAYERS,
        "rope_parameters": dict.fromkeys(kinds, rope),
    }
    return _write(directory / "laguna", kv_heads, config, _weights(sizes, [_attention(sizes, kv_heads)] * LAYERS))


def make_sinks(directory: Path, kv_heads: int) -> TinyModel:
    """Write a gpt-oss model, every other layer of which sees a window, below `directory` and return it."""
    sizes = _sizes(kv_heads)
    layer = {name: shape for name, shape in _attention(sizes, kv_heads).items() if "norm" not in name}
    layer |= {f"{name}.bias": shape[:1] for name, shape in layer.items()} | _experts(sizes)
    weights = _weights(sizes, [layer] * LAYERS)
    # It has experts instead.
    usual = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    weights = {name: value for name, value in weights.items() if not any(part in name for part in usual)}
    return _write(directory / "gpt-oss", kv_heads, _sinks_config(kv_heads), weights)


def make_mamba(directory: Path, kv_heads: int) -> TinyModel:
    """Write a Falcon-H1 model, whose layers have attention and a Mamba2 state, below `directory` and return it."""
    sizes = _sizes(kv_heads)
    layer = {name: shape for name, shape in _attention(sizes, kv_heads).items() if "norm" not in name} | _mamba()
    weights = _weights(sizes, [layer] * LAYERS, MAMBA_NAMES)
    return _write(directory / "falcon-h1", kv_heads, _mamba_config(kv_heads), weights)


def make_gated(directory: Path, kv_heads: int) -> TinyModel:
    """Write a Qwen3.5 model, most of whose layers keep a state of gated delta rules, below `directory` and return it."""
    sizes = _sizes(kv_heads)
    # The query has a gate of its own size.
    full = _attention(sizes, kv_heads) | {"self_attn.q_proj": (2 * sizes.heads * HEAD_DIM, HIDDEN)}
    layers = [full if kind == "full_attention" else _gated() for kind in GATED_KINDS]
    weights = _weights(sizes, [*layers, full])
    # The last layer is that of its module for drafts.
    own = f"model.layers.{len(layers)}."
    weights = {key.replace(own, "mtp.layers.0."): value for key, value in weights.items()}
    norm, matrix = weights["model.norm.weight"], weights["lm_head.weight"]
    weights |= {f"mtp.{name}.weight": norm for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    weights["mtp.fc.weight"] = np.ascontiguousarray(matrix[: 2 * HIDDEN].T)
    return _write(directory / "qwen3.5", kv_heads, _gated_config(kv_heads), weights)


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
        "qk_nope_head_dim": LATENT_HEAD_DIM,
        "v_head_dim": LATENT_HEAD_DIM,
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


def _sinks_config(kv_heads: int) -> dict[str, object]:
    return _config(kv_heads) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": EXPERT,
        "attention_bias": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        # vLLM knows no other kind for this model.
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": POSITIONS_MAX // 2,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
    }


def _mamba_config(kv_heads: int) -> dict[str, object]:
    return _config(kv_heads) | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": STATE_HEADS * STATE_HEAD_DIM,
        "mamba_n_heads": STATE_HEADS,
        "mamba_d_head": STATE_HEAD_DIM,
        "mamba_n_groups": 1,
        "mamba_d_state": STATE,
        "mamba_d_conv": CONV,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_rms_norm": False,
    }


def _gated_config(kv_heads: int) -> dict[str, object]:
    return _config(kv_heads) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": GATED_KINDS,
        "full_attention_interval": len(GATED_KINDS),
        "linear_num_key_heads": GATED_KEY_HEADS,
        "linear_num_value_heads": GATED_HEADS,
        "linear_key_head_dim": GATED_HEAD_DIM,
        "linear_value_head_dim": GATED_HEAD_DIM,
        "linear_conv_kernel_dim": CONV,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
    }


def _attention(sizes: _Sizes, kv_heads: int) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj": (sizes.heads * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (kv_heads * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (kv_heads * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, sizes.heads * HEAD_DIM),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
    }


def _experts(sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.sinks": (sizes.heads,),
        "mlp.router": (EXPERTS, HIDDEN),
        "mlp.router.bias": (EXPERTS,),
        "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * EXPERT),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * EXPERT),
        "mlp.experts.down_proj": (EXPERTS, EXPERT, HIDDEN),
        "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
    }


def _latent_attention(heads: int = HEADS) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj": (heads * (LATENT_HEAD_DIM + POSITIONAL), HIDDEN),
        "self_attn.kv_a_proj_with_mqa": (LATENT + POSITIONAL, HIDDEN),
        "self_attn.kv_a_layernorm": (LATENT,),
        "self_attn.kv_b_proj": (heads * 2 * LATENT_HEAD_DIM, LATENT),
        "self_attn.o_proj": (HIDDEN, heads * LATENT_HEAD_DIM),
    }


def _indexed_attention() -> dict[str, tuple[int, ...]]:
    layer = _latent_attention(SPARSE_HEADS)
    query, _ = layer.pop("self_attn.q_proj")
    return layer | {
        "self_attn.q_a_proj": (QUERY_LATENT, HIDDEN),
        "self_attn.q_a_layernorm": (QUERY_LATENT,),
        "self_attn.q_b_proj": (query, QUERY_LATENT),
        "self_attn.indexer.wq_b": (INDEX_HEADS * INDEX_HEAD_DIM, QUERY_LATENT),
        "self_attn.indexer.wk": (INDEX_HEAD_DIM, HIDDEN),
        "self_attn.indexer.k_norm": (INDEX_HEAD_DIM,),
        "self_attn.indexer.k_norm.bias": (INDEX_HEAD_DIM,),
        "self_attn.indexer.weights_proj": (INDEX_HEADS, HIDDEN),
    }


def _delta() -> dict[str, tuple[int, ...]]:
    inner = GATED_HEADS * GATED_HEAD_DIM
    return {
        **{f"self_attn.{name}_proj": (inner, HIDDEN) for name in "qkv"},
        **{f"self_attn.{name}_conv1d": (inner, 1, CONV) for name in "qkv"},
        **{f"self_attn.{name}_a_proj": (GATED_HEAD_DIM, HIDDEN) for name in "fg"},
        **{f"self_attn.{name}_b_proj": (inner, GATED_HEAD_DIM) for name in "fg"},
        "self_attn.b_proj": (GATED_HEADS, HIDDEN),
        "self_attn.A_log": (GATED_HEADS,),
        "self_attn.dt_bias": (inner,),
        "self_attn.o_norm": (GATED_HEAD_DIM,),
        "self_attn.o_proj": (HIDDEN, inner),
    }


def _mamba1() -> dict[str, tuple[int, ...]]:
    inner = 2 * HIDDEN
    return {
        "mamba.in_proj": (2 * inner, HIDDEN),
        "mamba.conv1d": (inner, 1, CONV),
        "mamba.conv1d.bias": (inner,),
        "mamba.x_proj": (3 * CHANNEL_STATE, inner),
        "mamba.dt_proj": (inner, CHANNEL_STATE),
        "mamba.dt_proj.bias": (inner,),
        "mamba.A_log": (inner, CHANNEL_STATE),
        "mamba.D": (inner,),
        "mamba.out_proj": (HIDDEN, inner),
        "mamba.dt_layernorm": (CHANNEL_STATE,),
        "mamba.b_layernorm": (CHANNEL_STATE,),
        "mamba.c_layernorm": (CHANNEL_STATE,),
    }


def _mamba() -> dict[str, tuple[int, ...]]:
    inner = STATE_HEADS * STATE_HEAD_DIM
    channels = inner + 2 * STATE
    return {
        "mamba.in_proj": (inner + channels + STATE_HEADS, HIDDEN),
        "mamba.conv1d": (channels, 1, CONV),
        "mamba.conv1d.bias": (channels,),
        "mamba.dt_bias": (STATE_HEADS,),
        "mamba.A_log": (STATE_HEADS,),
        "mamba.D": (STATE_HEADS,),
        "mamba.out_proj": (HIDDEN, inner),
    }


def _gated() -> dict[str, tuple[int, ...]]:
    keys, values = GATED_KEY_HEADS * GATED_HEAD_DIM, GATED_HEADS * GATED_HEAD_DIM
    return {
        "linear_attn.in_proj_qkv": (2 * keys + values, HIDDEN),
        "linear_attn.in_proj_z": (values, HIDDEN),
        "linear_attn.in_proj_a": (GATED_HEADS, HIDDEN),
        "linear_attn.in_proj_b": (GATED_HEADS, HIDDEN),
        "linear_attn.conv1d": (2 * keys + values, 1, CONV),
        "linear_attn.dt_bias": (GATED_HEADS,),
        "linear_attn.A_log": (GATED_HEADS,),
        "linear_attn.norm": (GATED_HEAD_DIM,),
        "linear_attn.out_proj": (HIDDEN, values),
    }


def _weights(
    sizes: _Sizes, layers: Sequence[Mapping[str, tuple[int, ...]]], names: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Return random matrices, and norms of ones.

    Args:
        layers: of each, the shapes of its weights beyond those that all layers have.
        names: parts of the usual names, and what the model calls them.
    """
    generator = np.random.default_rng(SEED)

    def made(*shape: int) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return (generator.standard_normal(shape) * WEIGHT_DEVIATION).astype(np.float32)

    weights = {"model.embed_tokens.weight": made(sizes.vocabulary, HIDDEN)}
    for layer, more in enumerate(layers):
        name = f"model.layers.{layer}"
        weights |= {f"{name}.{_weight(part)}": made(*shape) for part, shape in more.items() if part not in DECAYS}
        weights |= {
            f"{name}.{part}": np.full(shape, -SLOWNESS, np.float32) for part, shape in more.items() if part in DECAYS
        }
        weights |= {
            f"{name}.input_layernorm.weight": made(HIDDEN),
            f"{name}.post_attention_layernorm.weight": made(HIDDEN),
            f"{name}.mlp.gate_proj.weight": made(sizes.inner, HIDDEN),
            f"{name}.mlp.up_proj.weight": made(sizes.inner, HIDDEN),
            f"{name}.mlp.down_proj.weight": made(HIDDEN, sizes.inner),
        }
    weights |= {"model.norm.weight": made(HIDDEN), "lm_head.weight": made(sizes.vocabulary, HIDDEN)}
    for usual, own in (names or {}).items():
        weights = {key.replace(usual, own): value for key, value in weights.items()}
    return weights


def _weight(part: str) -> str:
    """Return the name of a part's weight."""
    return part if part.endswith(_BARE) else f"{part}.weight"


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
