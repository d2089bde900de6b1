"""Checks that the connector can serve this SGLang and its configuration. Pure.

Called by `sglang.register` and `sglang_manager`. It reads attributes of SGLang's objects and does not import SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from longshore_client.errors import ArgumentError

BACKEND = "longshore"
# Transfer backends are no stable interface of SGLang, so each release is tested before it is allowed.
V0_5_16, V0_5_23 = VERSIONS = ("0.5.16", "0.5.23")
# The functions of SGLang that `sglang.register` hooks, in the order of its hooks.
HOOKED = (
    "sglang.srt.disaggregation.utils:get_kv_class",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal",
    "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool._create_buffers",
    "sglang.srt.disaggregation.decode:DecodePreallocQueue._init_kv_manager",
    "sglang.srt.disaggregation.prefill:PrefillBootstrapQueue._init_kv_manager",
    "sglang.srt.disaggregation.decode:DecodePreallocQueue._create_receiver_and_enqueue",
    "sglang.srt.disaggregation.prefill:PrefillBootstrapQueue.create_sender",
)
# And more of each version. 0.5.16 does not tell senders that their waiting prompt was aborted.
HOOKED_BY_VERSION = {
    V0_5_23: (
        "sglang.srt.disaggregation.decode:DecodeTransferQueue.__init__",
        "sglang.srt.mem_cache.memory_pool:MambaPool.__init__",
    ),
    V0_5_16: ("sglang.srt.managers.scheduler:Scheduler.abort_request",),
}
# SGLang's names of what a model keeps beside K and V of all tokens, which is moved: recurrent states, and K and V of windows.
STATE_KINDS = {V0_5_23: ("mamba", "swa"), V0_5_16: ()}
_FLAG = "--disaggregation-transfer-backend"
# SGLang allocates its metadata on the GPU if this is set.
_METADATA_VARIABLE = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"


def check_version(version: str) -> None:
    """Raise ArgumentError if the connector was not tested with this version of SGLang."""
    if version not in VERSIONS:
        raise ArgumentError(
            f"SGLang {version} is not supported: this connector was tested with SGLang {', '.join(VERSIONS)}; install "
            "that, or a release of Longshore that names yours"
        )


def is_chosen(arguments: Sequence[str]) -> bool:
    """Return whether a command line chooses this backend."""
    return f"{_FLAG}={BACKEND}" in arguments or (_FLAG, BACKEND) in pairwise(arguments)


def check_hooks(targets: Mapping[str, Any]) -> None:
    """Raise ArgumentError if a hooked function of SGLang, by its path, is not wrapped."""
    for path, function in targets.items():
        if not hasattr(function, "__wrapped__"):
            raise ArgumentError(
                f"the hook on {path} did not take: SGLang's log says why; if SGLANG_PLUGINS is set, it must name "
                f"{BACKEND!r}"
            )


def check_engine(kv_args: Any, server_args: Any, parallel: Any, environment: Mapping[str, str], version: str) -> None:
    """Raise ArgumentError if the connector cannot move this kind of cache; names the kind and the remedy."""
    kinds = [getattr(kind, "value", str(kind)) for kind in kv_args.state_types]
    if unknown := [kind for kind in kinds if kind not in STATE_KINDS[version]]:
        moved = " and ".join(STATE_KINDS[version]) or "none"
        raise ArgumentError(
            f"the model keeps state of the kind {', '.join(unknown)} beside its KV: with SGLang {version} {moved} is moved"
        )
    if "mamba" in kinds and parallel.pp_size > 1:
        raise ArgumentError(
            f"the pipeline parallel size is {parallel.pp_size}, and the model keeps recurrent states, which are moved only without "
            "stages; use 1"
        )
    # 0.5.16 has neither draft entries nor the two options below that are read in this way.
    if getattr(kv_args, "num_draft_entries", 0) or server_args.speculative_algorithm is not None:
        raise ArgumentError(
            "speculative decoding is on: its draft layers have a cache of their own that is not moved; start without "
            "--speculative-algorithm"
        )
    for name, value in (
        ("attention context parallel size", parallel.attn_cp_size),
        ("decode context parallel size", parallel.attn_dcp_size),
    ):
        if value > 1:
            raise ArgumentError(f"the {name} is {value}: tokens of a prompt would lie on several ranks; use 1")
    if getattr(parallel, "enable_kv_cache_sharding", False):
        raise ArgumentError(
            "--enable-kv-cache-sharding is on: pages of a prompt would lie on several ranks; leave it out"
        )
    policy = getattr(server_args, "disaggregation_decode_allocation_policy", "early")
    if policy != "early":
        raise ArgumentError(
            f"--disaggregation-decode-allocation-policy is {policy}: "
            "chunks are moved while later ones are computed, which needs 'early' on both sides"
        )
    if server_args.enable_memory_saver:
        raise ArgumentError(
            "--enable-memory-saver is on: SGLang would give away cache memory that the agent has mapped; leave it out"
        )
    if server_args.enable_hierarchical_cache:
        raise ArgumentError("--enable-hierarchical-cache was not tested with this connector: leave it out")
    if environment.get(_METADATA_VARIABLE):
        raise ArgumentError(f"{_METADATA_VARIABLE} is set: a prompt's first token would lie in GPU memory; unset it")


def check_pool(pool: Any) -> None:
    """Raise ArgumentError if a pool's pages are not [token, head, element] with K and V alike, MLA's latents, or known states."""
    if hasattr(pool, "mamba_cache"):
        _check_states(pool)
        return
    if not hasattr(pool, "k_buffer"):
        return
    if pool.kv_cache_layout != "nhd":
        raise ArgumentError(
            f"the KV pool's layout is {pool.kv_cache_layout!r}: only NHD is moved; unset SGLANG_USE_HND_KVCACHE and "
            "SGLANG_AITER_KV_CACHE_LAYOUT"
        )
    if pool.head_dim != pool.v_head_dim:
        raise ArgumentError(
            f"a head has {pool.head_dim} elements in K and {pool.v_head_dim} in V: only models with as many in both are "
            "moved"
        )


def _check_states(pool: Any) -> None:
    cache = pool.mamba_cache
    known = {"conv", "temporal"}
    more = [name for name, value in vars(cache).items() if value is not None and name not in known]
    if more or pool._slot_siblings:  # noqa: SLF001 -- as SGLang's own backends
        raise ArgumentError(
            f"recurrent states have further parts ({', '.join(more) or 'siblings'}), which are not moved: start without "
            "--enable-linear-replayssm"
        )
    if pool.conv_shard_groups is None or pool.conv_slice_axis != 0 or len(cache.conv) != 1 or cache.temporal.ndim != 5:  # noqa: PLR2004
        raise ArgumentError(
            "the model's recurrent states are not those of gated delta rules (as in Qwen3-Next and Qwen3.5): others are not moved"
        )
