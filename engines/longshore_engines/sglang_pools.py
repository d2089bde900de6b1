"""Finds SGLang's pools of K and V and of states, and shares them with the agent.

Called by the hooks of `sglang` when a pool is made, and by `sglang_manager` once. It uses attributes of SGLang's pools and
does not import SGLang.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from longshore_client.arguments import CacheTokens
from longshore_client.errors import ArgumentError
from longshore_client.memory import torch_region
from longshore_engines.handover import token_content
from longshore_engines.sglang_checks import check_pool
from longshore_engines.tensors import CONV, SSM, SharedCaches, SlotCache, share_rows, state_slots
from longshore_wire.layout import KVLayout, ModelShape, Parallel

# The pools of this process whose memory was moved before SGLang took pointers. A model may have several.
_recorded: list[weakref.ref[Any]] = []
_told_kv_heads: list[int] = []


def tell_kv_heads(kv_heads: int) -> None:
    """Record the number of KV heads of the whole model."""
    _told_kv_heads.append(kv_heads)


def told_kv_heads() -> int:
    """Return the number of KV heads of the whole model, as last told."""
    return _told_kv_heads[-1]


def record(pool: Any) -> None:
    """Record a pool that `share_early` has prepared."""
    _recorded.append(weakref.ref(pool))


def share_early(pool: Any) -> None:
    """Move the tensors of a pool on a CPU to shared memory in place. Pointers that were taken before are invalid.

    Raises:
        ArgumentError: there is not enough memory.
    """
    for tensor in _tensors(pool):
        if tensor.device.type == "cpu":
            descriptor, _, _ = torch_region(tensor)
            os.close(descriptor)


class Pools(NamedTuple):
    """The pools of a rank.

    Attributes:
        kv: of the layers that attend to all tokens.
        others: those of SGLang's `state_types`, of recurrent states.
    """

    kv: Any
    others: tuple[Any, ...] = ()

    @property
    def tensors(self) -> list[Any]:
        """The tensors of all pools."""
        return [tensor for pool in (self.kv, *self.others) for tensor in _tensors(pool)]

    def state_tokens(self, named: Sequence[Any], end_token: int) -> list[CacheTokens]:
        """Return what the caches beside that of `kv` have of a prompt.

        Args:
            named: of each of `others` the prompt's slot, as SGLang gives it with the last chunk.
            end_token: length of the prompt.
        """
        slots = [int(slot) for indices in named for each in indices for slot in each.reshape(-1)]
        return [
            CacheTokens(1 + 2 * number + part, (slot,), 0, end_token)
            for number, slot in enumerate(slots)
            for part in range(len((CONV, SSM)))
        ]


def found_pools(args: Any) -> Pools:
    """Return the recorded pools that have the addresses which SGLang gives to its transfer backend.

    Raises:
        ArgumentError: there is none, or its layout is not supported.
    """
    return Pools(_found(args.kv_data_ptrs), tuple(map(_found, getattr(args, "state_data_ptrs", ()))))


def _found(pointers: Sequence[int]) -> Any:
    for reference in _recorded:
        pool = reference()
        if pool is not None and [tensor.data_ptr() for tensor in _tensors(pool)] == list(pointers):
            check_pool(pool)
            return pool
    raise ArgumentError(
        "this model's KV pool is of a kind that is not moved: only SGLang's MHATokenToKVPool, MLATokenToKVPool and MambaPool, with "
        "plain data types and without --enable-unified-memory or --enable-hisparse"
    )


def shared_pools(
    pools: Pools, kv_heads: int, layers: Sequence[int], parallel: Parallel, page_size: int
) -> SharedCaches:
    """Share found pools.

    Args:
        kv_heads: of the whole model; not used for MLA.
        layers: number of layers in `pools.kv` of each pipeline stage.
    Raises:
        LayoutError, ArgumentError: as `share_rows`.
    """
    tensors = _tensors(pools.kv)
    width, size = tensors[0].shape[2], tensors[0].element_size()
    model = ModelShape.latent(sum(layers), width, size)
    if hasattr(pools.kv, "k_buffer"):
        model = ModelShape.kv(sum(layers), kv_heads, width, size)
    layout = KVLayout(model, parallel, page_size, stage_layers=tuple(layers) if len(layers) > 1 else None)
    slots: list[SlotCache] = []
    for pool in pools.others:
        conv, states = pool.mamba_cache.conv[0], pool.mamba_cache.temporal
        sections = tuple(zip(_state_heads(pool, parallel.tp), _state_widths(pool), strict=True))
        if [heads * width for heads, width in sections] != list(pool.conv_shard_groups):
            raise ArgumentError(
                f"the model's convolutions have parts of {list(pool.conv_shard_groups)} channels, and its states heads of "
                f"{_state_widths(pool)}: which of them is of which head is not known"
            )
        slots += state_slots(list(conv), list(states), sections, parallel, len(conv), is_dim_first=True)
    return share_rows(tensors, layout, slots)


def _state_widths(pool: Any) -> tuple[int, int, int]:
    """Return the width of a head of q, of k and of v."""
    values, keys = pool.mamba_cache.temporal.shape[-2:]
    return keys, keys, values


def _state_heads(pool: Any, tp: int) -> tuple[int, int, int]:
    """Return the heads of q, of k and of v, of the whole model."""
    keys = pool.conv_shard_groups[0] // _state_widths(pool)[0]
    return keys, keys, pool.mamba_cache.temporal.shape[2] * tp


def content_of(pools: Pools) -> str:
    """Return the meaning of the bytes of all pools, beyond the layout; equal on both sides."""
    pool = pools.kv
    texts = [token_content(pool.dtype) if hasattr(pool, "k_buffer") else f"SGLang's latents of {pool.dtype}"]
    for other in pools.others:
        conv, states = other.mamba_cache.conv[0], other.mamba_cache.temporal
        texts.append(f"SGLang's states of gated delta rules, conv {conv.dtype}, ssm {states.dtype}")
    return "; ".join(texts)


def _is_states(pool: Any) -> bool:
    return hasattr(pool, "mamba_cache")


def _tensors(pool: Any) -> list[Any]:
    """Return K of all layers, then V of all layers; for MLA one tensor a layer; of states conv of all layers, then ssm."""
    if _is_states(pool):
        return [layer for tensor in (*pool.mamba_cache.conv, pool.mamba_cache.temporal) for layer in tensor]
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)
