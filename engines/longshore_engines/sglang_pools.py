"""Finds SGLang's KV pool, and shares it with the agent.

Called by the hooks of `sglang` when a pool is made, and by `sglang_manager` once. It uses attributes of SGLang's pools and
does not import SGLang.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from longshore_client.errors import ArgumentError
from longshore_client.memory import torch_region
from longshore_engines.handover import token_content
from longshore_engines.sglang_checks import check_pool
from longshore_engines.tensors import SharedCaches, share_rows
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


def found_pool(pointers: Sequence[int]) -> Any:
    """Return the recorded pool that has these addresses, which SGLang gives to its transfer backend.

    Raises:
        ArgumentError: there is none, or its layout is not supported.
    """
    for reference in _recorded:
        pool = reference()
        if pool is not None and [tensor.data_ptr() for tensor in _tensors(pool)] == list(pointers):
            check_pool(pool)
            return pool
    raise ArgumentError(
        "this model's KV pool is of a kind that is not moved: only SGLang's MHATokenToKVPool and MLATokenToKVPool, with "
        "plain data types and without --enable-unified-memory, --enable-hisparse or a windowed attention"
    )


def shared_pool(pool: Any, kv_heads: int, layers: Sequence[int], parallel: Parallel, page_size: int) -> SharedCaches:
    """Share a found pool.

    Args:
        kv_heads: of the whole model; not used for MLA.
        layers: number of layers of each pipeline stage.
    Raises:
        LayoutError, ArgumentError: as `share_rows`.
    """
    tensors = _tensors(pool)
    is_latent = not hasattr(pool, "k_buffer")
    first = tensors[0]
    if is_latent:
        model = ModelShape.latent(sum(layers), first.shape[2], first.element_size())
    else:
        model = ModelShape.kv(sum(layers), kv_heads, first.shape[2], first.element_size())
    return share_rows(
        tensors, KVLayout(model, parallel, page_size, stage_layers=tuple(layers) if len(layers) > 1 else None)
    )


def content_of(pool: Any) -> str:
    """Return the meaning of the bytes of a pool's pages, beyond the layout; equal on both sides."""
    return token_content(pool.dtype) if hasattr(pool, "k_buffer") else f"SGLang's latents of {pool.dtype}"


def _tensors(pool: Any) -> list[Any]:
    """Return K of all layers, then V of all layers; for MLA one tensor a layer."""
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)
