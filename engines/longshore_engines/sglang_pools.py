"""Finds SGLang's pools of K and V, of windows and of states, and shares them with the agent.

Called by the hooks of `sglang` when a pool is made, and by `sglang_manager` once. It uses attributes of SGLang's pools and
does not import SGLang.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from longshore_client.arguments import CacheTokens
from longshore_client.errors import ArgumentError
from longshore_client.memory import torch_region
from longshore_engines.handover import token_content
from longshore_engines.sglang_checks import check_pool
from longshore_engines.tensors import (
    CONV,
    SSM,
    RowCache,
    SharedCaches,
    SlotCache,
    share_rows,
    state_slots,
    whole_heads,
)
from longshore_wire.layout import KVLayout, ModelShape, Parallel

# The pools of this process whose memory was moved before SGLang took pointers. A model may have several.
_recorded: list[weakref.ref[Any]] = []
_told: list[Model] = []


class Model(NamedTuple):
    """What SGLang does not tell its transfer backends of a model.

    Attributes:
        kv_heads: of the whole model.
        config: the fields of its config.
        window_tokens: tokens before the next one that windowed layers read; 0: none has a window.
    """

    kv_heads: int
    config: Mapping[str, object] = {}
    window_tokens: int = 0


def tell(model: Model) -> None:
    """Record the model, before SGLang makes its transfer backend."""
    _told.append(model)


def told() -> Model:
    """Return the model, as last told."""
    return _told[-1]


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
        others: those of SGLang's `state_types`: of layers with a window, and of recurrent states.
        page_size: tokens of a page of pools of K and V.
        window_tokens: see `Model`.
    """

    kv: Any
    others: tuple[Any, ...] = ()
    page_size: int = 1
    window_tokens: int = 0

    @property
    def tensors(self) -> list[Any]:
        """The tensors of all pools."""
        return [tensor for pool in (self.kv, *self.others) for tensor in _tensors(pool)]

    @property
    def layer_counts(self) -> list[int]:
        """The layers of this rank in `kv` and in each of `windows`."""
        return [int(pool.layer_num) for pool in (self.kv, *self.windows)]

    @property
    def windows(self) -> list[Any]:
        """The pools of layers with a window, whose caches follow the first one."""
        return [pool for pool in self.others if not _is_states(pool)]

    @property
    def states(self) -> list[Any]:
        """The pools of recurrent states, whose caches follow those of windows."""
        return [pool for pool in self.others if _is_states(pool)]

    def state_tokens(self, named: Sequence[Any], end_token: int) -> list[CacheTokens]:
        """Return what the caches beside that of `kv` have of a prompt.

        Args:
            named: of each of `others` what SGLang gives with the last chunk: the prompt's slot of states, and the pages from the
                window's first token on, which both sides round down to pages of their own size.
            end_token: length of the prompt.
        """
        windows: list[tuple[Sequence[int], int]] = []
        states: list[tuple[Sequence[int], int]] = []
        for pool, indices in zip(self.others, named, strict=False):
            if _is_states(pool):
                slots = [int(slot) for each in indices for slot in each.reshape(-1)]
                states += [((slot,), 0) for slot in slots for _ in (CONV, SSM)]
            else:
                first_page = -(-end_token // self.page_size) - len(indices)
                first_token = max(first_page * self.page_size, end_token - self.window_tokens)
                windows.append((indices.tolist()[first_token // self.page_size - first_page :], first_token))
        return [
            CacheTokens(cache, pages, first_token, end_token)
            for cache, (pages, first_token) in enumerate((*windows, *states), 1)
        ]


def found_pools(args: Any, window_tokens: int) -> Pools:
    """Return the recorded pools that have the addresses which SGLang gives to its transfer backend.

    Args:
        window_tokens: see `Model`.
    Raises:
        ArgumentError: there is none, or its layout is not supported.
    """
    others = tuple(map(_found, getattr(args, "state_data_ptrs", ())))
    return Pools(_found(args.kv_data_ptrs), others, args.page_size, window_tokens)


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


def shared_pools(pools: Pools, model: Model, layers: Sequence[Sequence[int]], parallel: Parallel) -> SharedCaches:
    """Share found pools.

    Args:
        layers: of each pipeline stage, its `pools.layer_counts`. States are of one stage.
    Raises:
        LayoutError, ArgumentError: as `share_rows`.
    """
    rows = []
    for number, (pool, *stages) in enumerate(zip((pools.kv, *pools.windows), *layers, strict=True)):
        name = ("kv", "window")[number] if number < 2 else f"window-{number}"  # noqa: PLR2004 -- the second window's
        rows.append(_row_cache(pool, name, model, stages, parallel, pools.page_size))
    slots: list[SlotCache] = []
    for pool in pools.states:
        conv, states = pool.mamba_cache.conv[0], pool.mamba_cache.temporal
        sections = tuple(zip(_state_heads(pool, parallel.tp), _state_widths(pool), strict=True))
        if [heads * width for heads, width in sections] != list(pool.conv_shard_groups):
            raise ArgumentError(
                f"the model's convolutions have parts of {list(pool.conv_shard_groups)} channels, and its states heads of "
                f"{_state_widths(pool)}: which of them is of which head is not known"
            )
        heads = states[0].shape[1] * parallel.tp
        slots += state_slots(list(conv), list(states), heads, sections, parallel, len(conv), is_dim_first=True)
    return share_rows(rows, slots)


def _row_cache(
    pool: Any, name: str, model: Model, layers: Sequence[int], parallel: Parallel, page_size: int
) -> RowCache:
    tensors = _tensors(pool)
    if not tensors:
        raise ArgumentError(f"this pipeline stage has no layer of cache {name!r}: use fewer stages")
    (_, local, width), size = tensors[0].shape, tensors[0].element_size()
    shape = ModelShape.latent(sum(layers), width, size)
    if hasattr(pool, "k_buffer"):
        heads = whole_heads(f"0 of cache {name!r}", local, parallel.tp, model.kv_heads, model.config)
        shape = ModelShape.kv(sum(layers), heads, width, size)
    stages = tuple(layers) if len(layers) > 1 else None
    return RowCache(tensors, KVLayout(shape, parallel, page_size, stage_layers=stages, name=name))


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
    texts = [
        token_content(pool.dtype) if hasattr(pool, "k_buffer") else f"SGLang's latents of {pool.dtype}"
        for pool in (pools.kv, *pools.windows)
    ]
    for pool in pools.states:
        conv, states = pool.mamba_cache.conv[0], pool.mamba_cache.temporal
        texts.append(f"SGLang's states of gated delta rules, conv {conv.dtype}, ssm {states.dtype}")
    # Windows of the same data type as the rest need no words of their own, as with vLLM.
    return "; ".join(dict.fromkeys(texts))


def _is_states(pool: Any) -> bool:
    return hasattr(pool, "mamba_cache")


def _tensors(pool: Any) -> list[Any]:
    """Return K of all layers, then V of all layers; for MLA one tensor a layer; of states conv of all layers, then ssm."""
    if _is_states(pool):
        return [layer for tensor in (*pool.mamba_cache.conv, pool.mamba_cache.temporal) for layer in tensor]
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)
