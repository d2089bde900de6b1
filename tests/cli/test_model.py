"""Tests `longshore model`: the caches of configs with the fields of published ones, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from manifest_cases import changed

from longshore_cli.main import main
from longshore_cli.model import ModelError, model_of
from longshore_spec.agent_config import Cache, Dtype, Unit
from longshore_spec.manifest import read
from longshore_spec.strict_document import parse

Body = dict[str, Any]
# Fields of published configs; what the caches do not depend on is left out.
QWEN_NEXT: Body = {
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN: Body = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        **QWEN_NEXT,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 60,
        "linear_num_value_heads": 64,
        "mamba_ssm_dtype": "float32",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
    },
}
DEEPSEEK: Body = {
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
}
SPARSE = {**DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
GPT: Body = {
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
GEMMA: Body = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "dtype": None,
    },
}
LLAMA_4: Body = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layers": [],
    },
}
NEMOTRON: Body = {
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 8,
    "hybrid_override_pattern": "M-M*M-ME",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32",
}
FALCON: Body = {
    "model_type": "falcon_h1",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
BAMBA = {**FALCON, "model_type": "bamba", "mamba_d_ssm": None, "attn_layer_indices": [9, 18, 27]}
JAMBA: Body = {
    **{key: FALCON[key] for key in ("torch_dtype", "num_attention_heads", "num_key_value_heads", "mamba_d_conv")},
    "model_type": "jamba",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
}
KIMI: Body = {
    **{key: DEEPSEEK[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "num_attention_heads")},
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "num_hidden_layers": 27,
    "linear_attn_config": {
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
LLAMA: Body = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def layer_bytes(cache: Cache) -> int:
    return sum(plane.heads * plane.rows * plane.width for plane in cache.planes) * cache.dtype.element_bytes


# Of each cache: layers, and bytes of one token, or of one state, in one layer of a rank with all heads.
SIZES: dict[str, tuple[Body, Body, dict[str, tuple[int, int]]]] = {
    "Llama 3 70B": (LLAMA, {}, {"kv": (80, 2 * 8 * 128 * 2)}),
    "Llama 3 70B in fp8": (LLAMA, {"kv_dtype": Dtype.FLOAT8_E4M3}, {"kv": (80, 2 * 8 * 128)}),
    # 30,720 bytes a token, and 73,728 and 4,194,304 bytes a layer: 192.1 MB a request.
    "Qwen3.5-397B": (QWEN, {}, {"kv": (15, 2048), "conv": (45, 73_728), "ssm": (45, 4_194_304)}),
    # 77.3 MB a request.
    "Qwen3-Next-80B": (QWEN_NEXT, {}, {"kv": (12, 2048), "conv": (36, 49_152), "ssm": (36, 2_097_152)}),
    "DeepSeek V3": (DEEPSEEK, {}, {"kv": (61, 1152)}),
    "Kimi K2": ({**DEEPSEEK, "model_type": "kimi_k2", "num_attention_heads": 64}, {}, {"kv": (61, 1152)}),
    "DeepSeek V3 with its draft": (DEEPSEEK, {"draft_layers": 1}, {"kv": (61, 1152), "draft": (1, 1152)}),
    "DeepSeek V3.2": (SPARSE, {}, {"kv": (61, 1152), "index": (61, 132)}),
    "DeepSeek V3.2 with its draft": (
        SPARSE,
        {"draft_layers": 1},
        {"kv": (61, 1152), "index": (61, 132), "draft": (1, 1152), "draft-index": (1, 132)},
    ),
    "DeepSeek V3.2 in fp8": (SPARSE, {"kv_dtype": Dtype.FLOAT8_E4M3}, {"kv": (61, 656), "index": (61, 132)}),
    "GLM with shared index keys": (
        {**SPARSE, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"] * 30 + ["full"]},
        {},
        {"kv": (61, 1152), "index": (31, 132)},
    ),
    "gpt-oss-120b": (GPT, {}, {"kv": (18, 2048), "window": (18, 2048)}),
    "Gemma 3 27B": (GEMMA, {}, {"kv": (10, 8192), "window": (52, 8192)}),
    "Llama 4 Scout": (LLAMA_4, {}, {"kv": (12, 4096), "window": (36, 4096)}),
    # Conv states of 128 heads of 64 and of B and C in 8 groups of 128, three rows each.
    "Nemotron-H": (
        NEMOTRON,
        {},
        {"kv": (1, 4096), "conv": (4, (8192 + 2 * 1024) * 3 * 2), "ssm": (4, 128 * 64 * 128 * 4)},
    ),
    "Falcon-H1": (
        FALCON,
        {"ssm_dtype": Dtype.BFLOAT16},
        {"kv": (36, 1024), "conv": (36, (1536 + 2 * 128) * 3 * 2), "ssm": (36, 1536 * 128 * 2)},
    ),
    "Bamba": (BAMBA, {}, {"kv": (3, 1024), "conv": (33, (1536 + 2 * 128) * 3 * 2), "ssm": (33, 1536 * 128 * 4)}),
    "Jamba": (JAMBA, {}, {"kv": (4, 2 * 2 * 512 * 2), "conv": (28, 8192 * 3 * 2), "ssm": (28, 8192 * 16 * 4)}),
    "Kimi-Linear": (
        KIMI,
        {},
        {"kv": (7, 1152), "conv": (20, 3 * 4096 * 3 * 2), "ssm": (20, 32 * 128 * 128 * 4)},
    ),
    # Its published config leaves heads and pattern to the family's code.
    "Gemma 3 4B": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        },
        {},
        {"kv": (5, 4096), "window": (29, 4096)},
    ),
    "gpt-oss without a list": ({**GPT, "layer_types": None}, {}, {"kv": (18, 2048), "window": (18, 2048)}),
    "Qwen 2 without windows": (
        {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28},
        {},
        {"kv": (80, 4096)},
    ),
    "Qwen 2 with windows": (
        {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": True},
        {},
        {"kv": (28, 4096), "window": (52, 4096)},
    ),
    "Falcon-H1 without a size": (
        {**FALCON, "mamba_d_ssm": None},
        {},
        {"kv": (36, 1024), "conv": (36, 10_752), "ssm": (36, 786_432)},
    ),
    "a list that goes on with the draft's layer": (
        {**GPT, "layer_types": GPT["layer_types"] + ["full_attention"]},
        {},
        {"kv": (18, 2048), "window": (18, 2048)},
    ),
    "K and V of unequal width": ({**LLAMA, "head_dim": 192, "v_head_dim": 128}, {}, {"kv": (80, 8 * 320 * 2)}),
    "layers that read an earlier cache": ({**LLAMA, "num_kv_shared_layers": 20}, {}, {"kv": (60, 4096)}),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_caches_of_a_config_have_the_layers_and_bytes_that_follow_from_its_fields(name: str) -> None:
    config, options, wanted = SIZES[name]
    model, notes = model_of(config, **options)
    assert {cache.name: (cache.layers, layer_bytes(cache)) for cache in model.all_caches} == wanted
    assert not any("not tried" in note for note in notes)
    assert any("float32 is assumed" in note for note in notes) == (
        "ssm" in wanted and not options and "float32" not in json.dumps(config)
    ), notes


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("output", ["yaml", "json"])
def test_what_is_printed_is_a_valid_model_of_a_deployment(
    name: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, options, _ = SIZES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [
        word
        for key, value in options.items()
        for word in (f"--{key.replace('_', '-')}", str(getattr(value, "value", value)))
    ]
    # The file, or its directory.
    assert main(["model", str(tmp_path / ("config.json" if output == "yaml" else "")), "-o", output, *words]) == 0
    text = capsys.readouterr().out
    printed = json.loads(text) if output == "json" else parse(text)
    assert isinstance(printed, dict)
    found = read(changed(model=printed["model"], prefill__tensorParallel=2, decode__tensorParallel=2)).agent_config()
    assert found.model == model_of(config, **options)[0]


def test_rows_of_channels_and_channels_of_rows_are_unequal_planes_of_one_size() -> None:
    rows, channels = (model_of(QWEN, conv_order=order)[0].all_caches[1] for order in ("SD", "DS"))
    assert [(plane.heads, plane.width, plane.rows) for plane in rows.planes] == [
        (16, 128, 3),
        (16, 128, 3),
        (64, 128, 3),
    ]
    assert [(plane.heads, plane.width, plane.rows) for plane in channels.planes] == [
        (16, 384, 1),
        (16, 384, 1),
        (64, 384, 1),
    ]
    assert rows.unit is Unit.SLOT
    assert layer_bytes(rows) == layer_bytes(channels)


def test_windows_are_those_of_the_config() -> None:
    windows = {name: {cache.name: cache.window for cache in model_of(SIZES[name][0])[0].all_caches} for name in SIZES}
    assert windows["gpt-oss-120b"] == {"kv": 0, "window": 128}
    assert windows["Gemma 3 27B"] == {"kv": 0, "window": 1024}
    assert windows["Llama 4 Scout"] == {"kv": 0, "window": 8192}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        # As many windows as full layers, or five times as many; a group of Gemma's has 10 layers.
        ("gpt-oss-120b", {"kv": 18, "window": 18}),
        (
            "Gemma 3 27B",
            {"kv": 10, "window": 9, "window-2": 9, "window-3": 9, "window-4": 9, "window-5": 8, "window-6": 8},
        ),
        # A state is one cache, whatever the groups.
        ("Qwen3.5-397B", {"kv": 15, "conv": 45, "ssm": 45}),
    ],
)
def test_for_vllm_windows_are_the_caches_of_its_groups(name: str, layers: dict[str, int]) -> None:
    config = QWEN if name.startswith("Qwen") else SIZES[name][0]
    model, _ = model_of(config, for_vllm=True)
    assert {cache.name: cache.layers for cache in model.all_caches} == layers
    assert all(
        cache.window == 1024 for cache in model.all_caches if name.startswith("Gemma") and "window" in cache.name
    )


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({**LLAMA, "num_hidden_layers": "80"}, "num_hidden_layers is '80': a whole number from 0 to 4096 is needed"),
        ({**LLAMA, "num_hidden_layers": 1 << 30}, "num_hidden_layers is '1073741824': a whole number from 0 to 4096"),
        ({**LLAMA, "num_key_value_heads": 5000}, "the config leads to a model that cannot be: .* <= 4096"),
        ({**LLAMA, "torch_dtype": "float64"}, "dtype is 'float64': known are bfloat16, "),
        ({**LLAMA, "layer_types": ["spiral"]}, "layer_types has spiral: known are full_attention, "),
        ({**LLAMA, "compress_ratios": [4]}, "compress_ratios: "),
        ({**KIMI, "linear_attn_config": {"kda_layers": [1]}}, "num_heads is missing"),
        ({}, "num_hidden_layers is missing"),
        ({**LLAMA, "text_config": [1, 2]}, "text_config is no mapping"),
        ({**LLAMA, "num_kv_shared_layers": 80}, "num_kv_shared_layers is 80: the model has 80 layers"),
        ({**GPT, "layer_types": ["full_attention"]}, "layer_types has 1 entries: num_hidden_layers is 36"),
        ({**GPT, "sliding_window": None}, "sliding_window or attention_chunk_size is missing"),
        ({**LLAMA, "attn_type_list": [0, 1]}, "attn_type_list: which layers keep a state"),
    ],
)
def test_what_the_caches_do_not_follow_from_is_named(config: Body, fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        model_of(config)


ODD: list[Any] = [
    True,
    -1,
    0,
    1 << 40,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [1],
    [[1]],
    ["x"],
    {},
    {"a": 1},
    "LLLG",
]


@pytest.mark.parametrize("name", SIZES)
def test_no_value_of_a_field_ends_in_anything_but_a_model_or_a_named_fault(name: str) -> None:
    config, options, _ = SIZES[name]
    text = config.get("text_config")
    for field in [
        *config,
        *(text or ()),
        "linear_attn_config",
        "attn_layer_indices",
        "full_attention_interval",
        "no_rope_layers",
    ]:
        for value in ODD:
            changed_text = {"text_config": {**text, field: value}} if text and field != "text_config" else {}
            with contextlib.suppress(ModelError):
                model_of({**config, **({} if changed_text else {field: value}), **changed_text}, **options)


def test_a_family_that_was_not_tried_is_told_and_a_file_that_is_no_config_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "model_type": "llama\n9"}))
    assert main(["model", str(file)]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "# model_type is 'llama\\n9', which was not tried: compare with what the engine allocates"
    for text, fault in (("[]", "a mapping"), ("{", "not JSON"), (None, "No such file")):
        file.write_text(text) if text is not None else file.unlink()
        assert main(["model", str(file)]) == 2
        assert fault in capsys.readouterr().err
