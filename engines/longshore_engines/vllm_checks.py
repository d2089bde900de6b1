"""Checks that the connector can serve this vLLM and its configuration, and reads the connector's options. Pure.

Called by `vllm.LongshoreConnector`. It reads attributes of vLLM's configuration and does not import vLLM.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from longshore_client.errors import ArgumentError
from longshore_engines.tensors import PageFormat
from longshore_wire.engine_messages import Half

_log = logging.getLogger("vllm.longshore")

# vLLM calls its connector API experimental and changes it between releases, so each release is tested before it is
# allowed.
VERSION_MIN, VERSION_END = (0, 32), (0, 34)
# A decode engine with a long queue claims late. vLLM's own connectors also wait for minutes.
LIMIT_S, LIMIT_MIN_S, LIMIT_MAX_S = 120.0, 1.0, 86_400.0
CONNECT_S = 120.0


# The meaning of a page's bytes, by the attention backend that writes them and, on CPUs, its instruction set.
PAGE_FORMATS = {
    "CPU_ATTN vec": PageFormat.TRANSPOSED_KEYS,
    "FLASH_ATTN": PageFormat.TOKEN_ROWS,
    "TRITON_ATTN": PageFormat.TOKEN_ROWS,
    # MLA: a latent, then its rotary part.
    "CPU_MLA": PageFormat.TOKEN_ROWS,
    "CUTLASS_MLA": PageFormat.TOKEN_ROWS,
    "FLASHINFER_MLA": PageFormat.TOKEN_ROWS,
    "FLASHMLA": PageFormat.TOKEN_ROWS,
    "FLASH_ATTN_MLA": PageFormat.TOKEN_ROWS,
    "TRITON_MLA": PageFormat.TOKEN_ROWS,
}
OPAQUE, TOKENS = "opaque", "tokens"
# vLLM's types of a cache that were tried. Of others layers of one model have several, or they need other GPUs.
CACHE_TYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})
# With this release and later ones some more was tried.
_LATER = (0, 33)
_LATER_TYPES = frozenset({"fp8_ds_mla", "fp8_per_token_head", "int4_per_token_head", "int8_per_token_head"})
# Ways of speculative decoding: one without layers, a small model, layers of the model itself, and layers that read its states.
NGRAM = "ngram"
SPECULATIVE_METHODS = frozenset({NGRAM, "draft_model", "mtp", "eagle", "eagle3"})


class Setting(NamedTuple):
    """The options in `kv_connector_extra_config`."""

    socket: str | None  # None: where the client finds it
    limit_s: float
    connect_s: float
    pages: str  # OPAQUE or TOKENS
    recompute_after_s: float
    allow_untested_version: bool


def check_version(version: str, *, allow_untested: bool) -> None:
    """Raise ArgumentError if the connector was not tested with this version of vLLM, or log it where that is allowed."""
    found = _release(version)
    if found is not None and VERSION_MIN <= found < VERSION_END:
        return
    low, end = (".".join(map(str, bound)) for bound in (VERSION_MIN, VERSION_END))
    why = f"vLLM {version}: this connector was tested with vLLM >= {low}, < {end}"
    if not allow_untested:
        raise ArgumentError(
            f"{why}; install one of these, or a release of Longshore that names yours, or try yours with "
            "kv_connector_extra_config.allow_untested_version"
        )
    _log.warning("%s: compare its answers with those of one engine alone", why)


def _release(version: str) -> tuple[int, int] | None:
    """Return a version's first two numbers; None: it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def roles_of(transfer_config: Any) -> tuple[Half, ...]:
    """Return the roles that `kv_role` gives this engine."""
    roles = []
    if transfer_config.is_kv_producer:
        roles.append(Half.SOURCE)
    if transfer_config.is_kv_consumer:
        roles.append(Half.TARGET)
    return tuple(roles)


def setting(extra: Mapping[str, Any]) -> Setting:
    """Return the connector's options.

    Raises:
        ArgumentError: an option is unknown or out of range; names it.
    """
    known: dict[str, Any] = {
        "socket": None,
        "transfer_limit_s": LIMIT_S,
        "connect_limit_s": CONNECT_S,
        "pages": OPAQUE,
        "recompute_after_s": None,
        "allow_untested_version": False,
    }
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ArgumentError(f"kv_connector_extra_config has {unknown[0]!r}: known are {', '.join(sorted(known))}")
    values = {**known, **extra}
    socket = values["socket"]
    if socket is not None and (not isinstance(socket, str) or not socket):
        raise ArgumentError("kv_connector_extra_config.socket is no path: give that of the agent's engine socket")
    for name in ("transfer_limit_s", "connect_limit_s", "recompute_after_s"):
        value = values[name]
        if value is None and name == "recompute_after_s":
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not LIMIT_MIN_S <= value <= LIMIT_MAX_S:
            raise ArgumentError(
                f"kv_connector_extra_config.{name} is {value!r}: give seconds from {LIMIT_MIN_S:g} to {LIMIT_MAX_S:g}"
            )
    if values["pages"] not in {OPAQUE, TOKENS}:
        raise ArgumentError(f"kv_connector_extra_config.pages is {values['pages']!r}: give {OPAQUE!r} or {TOKENS!r}")
    if not isinstance(values["allow_untested_version"], bool):
        raise ArgumentError(
            f"kv_connector_extra_config.allow_untested_version is {values['allow_untested_version']!r}: give true or false"
        )
    patience = values["recompute_after_s"]
    return Setting(
        socket,
        float(values["transfer_limit_s"]),
        float(values["connect_limit_s"]),
        values["pages"],
        math.inf if patience is None else float(patience),
        values["allow_untested_version"],
    )


def page_format(pages: str, written_by: str) -> PageFormat:
    """Return the format in which pages are shared.

    Args:
        pages: the option.
        written_by: the attention backend and its instruction set, as in PAGE_FORMATS.
    Raises:
        ArgumentError: tokens are wanted, and the place of a token is not known for this backend.
    """
    if pages == OPAQUE:
        return PageFormat.BLOB
    found = PAGE_FORMATS.get(written_by)
    if found is None:
        raise ArgumentError(
            f"kv_connector_extra_config.pages is {TOKENS!r}: where {written_by} keeps a token is not known, only for "
            f"{', '.join(sorted(PAGE_FORMATS))}; leave the option out for two engines with this backend"
        )
    return found


def is_index(spec: Any) -> bool:
    """Return whether a layer keeps keys by which another selects tokens, which every rank has whole, as it has a latent."""
    return getattr(getattr(spec, "cache_role", None), "name", "") == "INDEXER"


def specs_of(group: Any) -> Mapping[str, Any]:
    """Return the spec of each layer of a group."""
    spec = group.kv_cache_spec
    found: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    return dict.fromkeys(group.layer_names, spec) if found is None else found


def is_pooled(vllm_config: Any) -> bool:
    """Return whether vLLM would allocate the cache in a pool that no other process can map, as for sleep mode."""
    return bool(vllm_config.model_config.enable_cumem_allocator) and vllm_config.device_config.device_type != "cpu"


def check_engine(vllm_config: Any, kv_cache_config: Any, version: str) -> None:
    """Raise ArgumentError if the connector cannot move this kind of cache; names the kind."""
    specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
    states = [spec for spec in specs if hasattr(spec, "mamba_type")]
    parallel = vllm_config.parallel_config
    if states and parallel.pipeline_parallel_size > 1:
        raise ArgumentError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, and the model's layers keep recurrent states: vLLM deals these "
            "layers to groups in turn, so that a stage has a part of each group; use 1"
        )
    aligned = [spec for spec in states if spec.mamba_cache_mode == "align"]
    # As vLLM chooses it.
    unit = vllm_config.cache_config.prefix_match_unit or math.gcd(*(spec.block_size for spec in specs))
    if any(spec.block_size > unit for spec in aligned):
        raise ArgumentError(
            f"prefixes may end after each {unit} tokens, within a block of states, which was not tried: leave prefix_match_unit out if "
            "it is given, or start with --no-enable-prefix-caching"
        )
    if (cache_type := vllm_config.cache_config.cache_dtype) not in (tried := CACHE_TYPES | _LATER_TYPES):
        raise ArgumentError(f"kv_cache_dtype is {cache_type!r}: only {', '.join(sorted(tried))} were tried")
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        raise ArgumentError("hisparse_config is given: a cache in the host's memory was not tried; leave it out")
    release = _release(version)
    if release is not None and release < _LATER:
        later = {
            "enable_cumem_allocator or enable_sleep_mode": is_pooled(vllm_config),
            f"kv_cache_dtype {cache_type!r}": cache_type in _LATER_TYPES,
            "index keys of sparse attention": any(
                is_index(spec) for group in kv_cache_config.transfer_groups for spec in specs_of(group).values()
            ),
            "speculative decoding with states in a prefix cache": any(spec.num_speculative_blocks for spec in aligned),
        }
        if tried_later := next((what for what, is_meant in later.items() if is_meant), None):
            raise ArgumentError(f"vLLM {version} with {tried_later} was not tried: use vLLM {_LATER[0]}.{_LATER[1]}")
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise ArgumentError(
            f"decode_context_parallel_size is {parallel.decode_context_parallel_size}: tokens of a sequence would lie "
            "on several ranks; use 1"
        )
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method not in SPECULATIVE_METHODS:
        raise ArgumentError(
            f"speculative_config.method is {speculative.method!r}: only {', '.join(sorted(SPECULATIVE_METHODS))} were tried"
        )
    lookahead = vllm_config.num_prefill_lookahead_tokens
    if lookahead > 1:
        raise ArgumentError(
            f"the draft reads {lookahead} tokens ahead, in modules of which only one was tried: use num_speculative_tokens 1, or "
            "a model with one module"
        )
    draft_tp = getattr(speculative, "draft_tensor_parallel_size", None) or parallel.tensor_parallel_size
    if speculative.method != NGRAM and (draft_tp, parallel.pipeline_parallel_size) != (
        parallel.tensor_parallel_size,
        1,
    ):
        raise ArgumentError(
            f"draft_tensor_parallel_size is {draft_tp} and pipeline_parallel_size {parallel.pipeline_parallel_size}: the draft's layers "
            f"are moved if the one is tensor_parallel_size, {parallel.tensor_parallel_size}, and the other 1"
        )
