"""The command `longshore model`: reads a model's `config.json` of Hugging Face and prints `spec.model` of a DisaggDeployment.

The caches follow from fields of the config, not from the name of its family: each kind of layer is read where configs
have it. What a config leaves to the engine is an argument, or is assumed and told in a comment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from longshore_cli.arguments import ArgumentsError, whole
from longshore_cli.words import as_json, plain_lines
from longshore_spec.agent_config import Attention, Cache, Dtype, Model, Plane, Unit
from longshore_spec.strict_document import plain
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import LAYERS_MAX, ROW_BYTES_MAX

_FILE_BYTES_MAX = 8 << 20
# Each cache is one line.
_LINE_MAX = 1 << 20
# One index key has a scale of four bytes for each 128 elements, of one byte each.
_SCALED_ELEMENTS, _SCALE_BYTES = 128, 4
# A row of a sparse model's latent in fp8: 512 elements, 4 scales, and the rotary part in bfloat16.
_SCALED_LATENT_BYTES = 656
# vLLM pads its smaller groups, and forms no more of them, if the largest kind has less than this many times the layers of the smallest.
_PADDED = 1.5
# Mamba 1 splits channels, which have no heads of their own.
_CHANNELS = 64
_FULL, _WINDOW, _STATE, _BOTH, _NONE = "full", "window", "state", "both", "none"
_KINDS = {
    "full_attention": _FULL,
    "indexed_attention": _FULL,
    "attention": _FULL,
    "*": _FULL,
    "sliding_attention": _WINDOW,
    "chunked_attention": _WINDOW,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "M": _STATE,
    "moe": _NONE,
    "mlp": _NONE,
    "-": _NONE,
    "E": _NONE,
}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_attention_groups")
# What published configs of a family leave to its code.
_UNSAID: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window_pattern": 6},
    "gemma2": {"sliding_window_pattern": 2},
    "gpt_oss": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4},
}
_REFUSED = {
    "compress_ratios": "compressed caches of several page sizes are not supported",
    "attn_type_list": "which layers keep a state is said in a way that is not read",
    "hybrid_layer_pattern": "which layers are windowed is said in a way that is not read",
    "mamba_step": "which layers keep a state is said in a way that is not read",
    "block_configs": "layers with attention of their own are not read",
}
# Families with whose configs this was tried.
# fmt: off
KNOWN = frozenset({
    "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "minimax_m2", "glm4_moe", "gpt_oss", "gemma3", "gemma3_text", "llama4",
    "llama4_text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear", "nemotron_h",
    "granitemoehybrid", "bamba", "falcon_h1", "jamba",
})
# fmt: on


class ModelError(LongshoreError):
    """The caches do not follow from a config; names the field."""

    reason = Reason.UNSUPPORTED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Print spec.model of a DisaggDeployment from a model's config.json of Hugging Face."
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the file, or the model's directory")
    dtypes = [each.value for each in Dtype]
    parser.add_argument(
        "--kv-dtype",
        choices=dtypes,
        help="of K and V, or of latents, as the engine is started (the model's)",
    )
    parser.add_argument(
        "--ssm-dtype",
        choices=dtypes,
        help="of recurrent states, as the engine is started (that of the config, else float32)",
    )
    parser.add_argument(
        "--conv-order",
        choices=("SD", "DS"),
        default="SD",
        help="of conv states: SD, rows of channels, is vLLM's default; DS, channels of rows, is SGLang's but for KDA (SD)",
    )
    parser.add_argument("--draft-layers", type=whole(0), default=0, help="draft layers with a cache of their own (0)")
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="as vLLM registers them: layers of one kind in as many caches as it forms groups of them",
    )
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml")


def run(arguments: argparse.Namespace) -> int:
    """Print the model; return 0. Raises ArgumentsError or ModelError."""
    model, notes = model_of(
        _config(arguments.config),
        kv_dtype=Dtype(arguments.kv_dtype) if arguments.kv_dtype else None,
        ssm_dtype=Dtype(arguments.ssm_dtype) if arguments.ssm_dtype else None,
        conv_order=arguments.conv_order,
        draft_layers=arguments.draft_layers,
        for_vllm=arguments.vllm,
    )
    if arguments.output == "json":
        print(as_json({"model": plain(model), "notes": notes}))
    else:
        print("\n".join([*(plain_lines(f"# {note}") for note in notes), *_yaml(model)]))
    return 0


def _config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            data = opened.read(_FILE_BYTES_MAX + 1)
        found = json.loads(data)
    except OSError as error:
        raise ArgumentsError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentsError(f"{file}: not JSON: {error}") from error
    if len(data) > _FILE_BYTES_MAX or not isinstance(found, dict):
        raise ArgumentsError(f"{file}: give the config.json of a model, a mapping of at most {_FILE_BYTES_MAX} bytes")
    return found


def _yaml(model: Model) -> Iterator[str]:
    fields = plain(model)
    caches = fields.pop("caches", None)
    if not isinstance(caches, list):
        yield f"model: {_flow(fields)}"
        return
    yield "model:"
    yield "  caches:"
    yield from (f"  - {_flow(each)}" for each in caches)


def _flow(value: object) -> str:
    # Imported here, since other commands run without it.
    import yaml  # type: ignore[import-untyped, unused-ignore]

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=_LINE_MAX)
    return text.strip()


def model_of(
    config: Mapping[str, Any],
    *,
    kv_dtype: Dtype | None = None,
    ssm_dtype: Dtype | None = None,
    conv_order: str = "SD",
    draft_layers: int = 0,
    for_vllm: bool = False,
) -> tuple[Model, list[str]]:
    """Return the model of a config, and what is assumed.

    Args:
        config: the content of `config.json`.
        kv_dtype, ssm_dtype: of the engine; None: as the config says.
        conv_order: SD or DS; see `add_arguments`.
        draft_layers: layers of a draft, shaped as those of the model.
        for_vllm: see `add_arguments`.
    Raises:
        ModelError: a field is missing or has a value that is not known; names it.
    """
    reader = _Reader(config, kv_dtype, ssm_dtype, conv_order)
    found = list(reader.caches(draft_layers))
    if for_vllm:
        found = list(_groups_of_vllm(found))
    short = _short(found[0]) if len(found) == 1 else None
    model = short or Model(caches=tuple(found))
    try:
        return msgspec.convert(msgspec.to_builtins(model), Model), reader.notes
    except msgspec.ValidationError as error:
        raise ModelError(f"the config leads to a model that cannot be: {error}") from error


def _short(cache: Cache) -> Model | None:
    """Return the short form of a cache; None: it has none."""
    planes = cache.planes
    if cache.unit is not Unit.TOKEN or cache.window or len(set(planes)) > 1:
        return None
    attention = Attention.MLA if len(planes) == 1 else Attention.GQA
    heads, width = planes[0].heads, planes[0].width
    return Model(attention=attention, layers=cache.layers, kv_heads=heads, head_dim=width, dtype=cache.dtype)


def _groups_of_vllm(caches: Sequence[Cache]) -> Iterator[Cache]:
    """Yield the caches with tokens by the groups in which vLLM allots their pages, and the others."""
    counts = {
        "state" if cache.unit is Unit.SLOT else cache.name: cache.layers
        for cache in caches
        if cache.unit is not Unit.PAGE
    }
    # A draft's layers are in the group of the model's.
    counts["kv"] = counts.get("kv", 0) + counts.pop("draft", 0)
    least, most = min(filter(None, counts.values())), max(counts.values())
    size = most if most < _PADDED * least else least
    if counts["kv"] > size and any(cache.name == "draft" for cache in caches):
        raise ModelError(
            "draft_layers: vLLM has several groups of full layers, and which of them have the draft's is not known"
        )
    for cache in caches:
        groups = -(-cache.layers // size) if cache.name in {"kv", "window"} else 1
        for index in range(groups):
            name = f"{cache.name}-{index + 1}" if index else cache.name
            yield msgspec.structs.replace(cache, name=name, layers=len(range(index, cache.layers, groups)))


class _Reader:
    """Reads the fields of one config, and keeps what it assumes."""

    def __init__(
        self, config: Mapping[str, Any], kv_dtype: Dtype | None, ssm_dtype: Dtype | None, conv_order: str
    ) -> None:
        text = config.get("text_config") or config.get("llm_config") or {}
        if not isinstance(text, dict):
            raise ModelError("text_config is no mapping")
        outer, inner = ({key: value for key, value in part.items() if value is not None} for part in (config, text))
        name = str(inner.get("model_type") or outer.get("model_type"))
        family = next((fields for prefix, fields in _UNSAID.items() if name.startswith(prefix)), {})
        self._fields: dict[str, Any] = {**family, **outer, **inner}
        self._kv_dtype, self._ssm_dtype, self._is_sd = kv_dtype, ssm_dtype, conv_order == "SD"
        self.notes: list[str] = []
        if name not in KNOWN:
            self.notes.append(f"model_type is {name!r}, which was not tried: compare with what the engine allocates")
        for field, why in _REFUSED.items():
            if self._fields.get(field):
                raise ModelError(f"{field}: {why}")
        quantized = self._fields.get("quantization_config")
        if kv_dtype is None and isinstance(quantized, dict) and quantized.get("kv_cache_scheme"):
            self.notes.append("quantization_config.kv_cache_scheme: engines may keep K and V in fp8: give --kv-dtype")

    def caches(self, draft_layers: int) -> Iterator[Cache]:
        """Yield all caches: what has tokens first."""
        kinds = self._kinds()
        # The last layers of some models read the cache of earlier ones.
        shared = self._number("num_kv_shared_layers", default=0)
        if shared >= len(kinds):
            raise ModelError(f"num_kv_shared_layers is {shared}: the model has {len(kinds)} layers")
        kinds = kinds[: len(kinds) - shared]
        full = sum(kind in (_FULL, _BOTH) for kind in kinds)
        windows, states = kinds.count(_WINDOW), sum(kind in (_STATE, _BOTH) for kind in kinds)
        if full:
            yield self._tokens("kv", full, is_full=True)
        if full and self._fields.get("index_topk"):
            yield self._index("index", full)
        if windows:
            window = self._number("sliding_window", "attention_chunk_size")
            yield self._tokens("window" if full else "kv", windows, is_full=False, window=window)
        if states:
            conv, ssm = self._state()
            width, rows = self._dtype(), self._conv_rows()
            planes = [
                Plane(heads=heads, width=each, rows=rows) if self._is_sd else Plane(heads=heads, width=each * rows)
                for heads, each in conv
            ]
            yield Cache(name="conv", layers=states, unit=Unit.SLOT, dtype=width, planes=tuple(planes))
            yield Cache(name="ssm", layers=states, unit=Unit.SLOT, dtype=self._state_dtype(), planes=(ssm,))
        if draft_layers:
            yield self._tokens("draft", draft_layers, is_full=True)
            if self._fields.get("index_topk"):
                yield self._index("draft-index", draft_layers)

    def _kinds(self) -> list[str]:
        """Return the kind of each layer."""
        fields = self._fields
        for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
            if listed := self._list(name):
                return self._listed(name, listed)
        count = self._number("num_hidden_layers", most=LAYERS_MAX)
        if isinstance(linear := fields.get("linear_attn_config"), dict):
            # They are counted from 1.
            states = self._list("kda_layers", linear)
            return [_STATE if layer + 1 in states else _FULL for layer in range(count)]
        indices = self._list("attn_layer_indices")
        if indices or fields.get("model_type") == "bamba":
            return [_FULL if layer in indices else _STATE for layer in range(count)]
        if "attn_layer_period" in fields:
            period, offset = self._number("attn_layer_period", least=1), self._number("attn_layer_offset")
            return [_FULL if layer % period == offset else _STATE for layer in range(count)]
        if "linear_num_value_heads" in fields:
            interval = self._number("full_attention_interval", default=4, least=1)
            return [_STATE if (layer + 1) % interval else _FULL for layer in range(count)]
        if fields.get("mamba_d_ssm") or fields.get("model_type") == "falcon_h1":
            return [_BOTH] * count
        return self._windows(count)

    def _listed(self, name: str, listed: Sequence[object]) -> list[str]:
        unknown = sorted({str(kind)[:60] for kind in listed if not isinstance(kind, str) or kind not in _KINDS})
        if unknown:
            raise ModelError(f"{name} has {', '.join(unknown[:4])}: known are {', '.join(_KINDS)}")
        count = self._number("num_hidden_layers", default=len(listed))
        if len(listed) < count:
            raise ModelError(f"{name} has {len(listed)} entries: num_hidden_layers is {count}")
        # Some lists go on with the layers of a draft.
        return [_KINDS[str(kind)] for kind in listed[:count]]

    def _windows(self, count: int) -> list[str]:
        fields = self._fields
        if fields.get("attention_chunk_size"):
            interval = self._number("no_rope_layer_interval", default=4, least=1)
            rope = self._list("no_rope_layers") or [(layer + 1) % interval for layer in range(count)]
            return [_WINDOW if each else _FULL for each in rope[:count]]
        if not fields.get("sliding_window") or fields.get("use_sliding_window") is False:
            return [_FULL] * count
        if "max_window_layers" in fields:
            # Those from this one on, and none unless it is said.
            first = self._number("max_window_layers") if fields.get("use_sliding_window") is True else count
            return [_WINDOW if layer >= first else _FULL for layer in range(count)]
        pattern = self._number("sliding_window_pattern", "_sliding_window_pattern", default=0)
        return [_FULL if pattern and (layer + 1) % pattern == 0 else _WINDOW for layer in range(count)]

    def _tokens(self, name: str, layers: int, *, is_full: bool, window: int = 0) -> Cache:
        """Return K and V, or a latent."""
        fields, dtype = self._fields, self._kv_dtype or self._dtype()
        if fields.get("kv_lora_rank"):
            width = self._number("kv_lora_rank") + self._number("qk_rope_head_dim")
            if fields.get("index_topk") and dtype.element_bytes == 1:
                width, dtype = _SCALED_LATENT_BYTES, Dtype.UINT8
            return Cache(name=name, layers=layers, dtype=dtype, planes=(Plane(heads=1, width=width),))
        heads = self._number(*_KV_HEADS, "num_attention_heads")
        if not any(fields.get(field) for field in _KV_HEADS) and not any("num_key" in note for note in self.notes):
            self.notes.append("num_key_value_heads: the config has none, num_attention_heads is taken")
        width = self._number("head_dim", "attention_head_dim", default=0)
        width = width or self._number("hidden_size") // self._number("num_attention_heads", least=1)
        if is_full:
            # The full layers of some models have heads of their own.
            heads = self._number("num_global_key_value_heads", default=heads)
            width = self._number("global_head_dim", default=width)
        values = self._number("v_head_dim", default=width)
        planes = (Plane(heads=heads, width=width), Plane(heads=heads, width=values))
        return Cache(name=name, layers=layers, dtype=dtype, planes=planes, window=window)

    def _index(self, name: str, layers: int) -> Cache:
        """Return the index keys of sparse attention. Layers may read those of an earlier one, but not those of a draft."""
        width = self._number("index_head_dim")
        types = self._list("indexer_types") if name == "index" else None
        own = sum(kind == "full" for kind in types) if types else layers
        scaled = width + _SCALE_BYTES * -(-width // _SCALED_ELEMENTS)
        planes = (Plane(heads=1, width=scaled),)
        return Cache(name=name, layers=own, unit=Unit.PAGE, dtype=Dtype.UINT8, planes=planes)

    def _state(self) -> tuple[list[tuple[int, int]], Plane]:
        """Return the sections of a conv state, as (heads, channels of each), and the recurrent state."""
        fields = self._fields
        if isinstance(linear := fields.get("linear_attn_config"), dict):
            heads, width = (self._number(name, within=linear) for name in ("num_heads", "head_dim"))
            return [(heads, width)] * 3, Plane(heads=heads, width=width * width)
        if "linear_num_heads" in fields:
            heads, width = self._number("linear_num_heads"), self._number("linear_head_dim")
            return [(heads, width)] * 3, Plane(heads=heads, width=width * width)
        if "linear_num_value_heads" in fields:
            keys, key = self._number("linear_num_key_heads"), self._number("linear_key_head_dim")
            heads, width = self._number("linear_num_value_heads"), self._number("linear_value_head_dim")
            return [(keys, key), (keys, key), (heads, width)], Plane(heads=heads, width=key * width)
        state = self._number("ssm_state_size", "mamba_d_state", "state_size")
        if "mamba_dt_rank" in fields:
            heads = self._number("mamba_expand") * self._number("hidden_size") // _CHANNELS
            return [(heads, _CHANNELS)], Plane(heads=heads, width=_CHANNELS * state)
        heads = self._number("mamba_num_heads", "mamba_n_heads")
        width = self._number("mamba_head_dim", "mamba_d_head")
        groups = self._number("mamba_n_groups", "n_groups")
        return [(heads, width), (groups, state), (groups, state)], Plane(heads=heads, width=width * state)

    def _conv_rows(self) -> int:
        linear = self._fields.get("linear_attn_config")
        if isinstance(linear, dict) and "short_conv_kernel_size" in linear:
            return self._number("short_conv_kernel_size", within=linear, least=2) - 1
        return self._number("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", least=2) - 1

    def _dtype(self) -> Dtype:
        name = self._fields.get("dtype") or self._fields.get("torch_dtype")
        if name is None and not any("dtype" in note for note in self.notes):
            self.notes.append("dtype: the config has none, bfloat16 is assumed")
        return self._as_dtype("dtype", name or "bfloat16")

    def _state_dtype(self) -> Dtype:
        name = self._fields.get("mamba_ssm_dtype") or self._fields.get("mamba_ssm_cache_dtype")
        if self._ssm_dtype is None and name is None:
            self.notes.append(
                "ssm: the config has no dtype of states, float32 is assumed as by SGLang; vLLM takes the model's: give --ssm-dtype"
            )
        return self._ssm_dtype or self._as_dtype("mamba_ssm_dtype", name or "float32")

    @staticmethod
    def _as_dtype(field: str, name: object) -> Dtype:
        try:
            return Dtype(str(name).removeprefix("torch."))
        except ValueError as error:
            known = ", ".join(each.value for each in Dtype)
            raise ModelError(f"{field} is {str(name)[:60]!r}: known are {known}") from error

    def _number(
        self,
        *names: str,
        default: int | None = None,
        least: int = 0,
        most: int = ROW_BYTES_MAX,
        within: Mapping[str, Any] | None = None,
    ) -> int:
        """Return the first of these fields that is given, of the config or of `within`. Raises ModelError if it is no such number."""
        for name in names:
            value = (self._fields if within is None else within).get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ModelError(f"{name} is {str(value)[:60]!r}: a whole number from {least} to {most} is needed")
            return value
        if default is None:
            raise ModelError(f"{' or '.join(names)} is missing")
        return default

    def _list(self, name: str, within: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """Return a list, or a text of one letter for each layer; empty if it is not given. Raises ModelError for others."""
        value = (self._fields if within is None else within).get(name)
        if value is None:
            return ()
        if not isinstance(value, list | str) or len(value) > LAYERS_MAX:
            raise ModelError(f"{name} is {str(value)[:60]!r}: a list of at most {LAYERS_MAX} is needed")
        return list(value)
