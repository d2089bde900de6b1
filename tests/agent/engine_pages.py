"""Provides an engine rank's pages in a memfd and their expected content, computed by this file's own arithmetic.

Used by `agent_world`. Knows nothing of planners, agents or transfers: tests compare moved bytes with these.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np

from longshore_client import KVLayout, PageOrder
from longshore_client.memory import create_region, pool_geometry
from longshore_wire.layout import Attention

_POISON = 0xDEADBEEF
_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def held(layout: KVLayout) -> tuple[list[int], list[int]]:
    """Return the global layers and heads that a rank must hold, by the definition of its parallel sizes.

    Layers: as given; else split evenly over the stages, the first ones take the remainder. Heads: split into equal shares.
    With more ranks than heads, several adjacent ranks hold copies of a head.
    """
    model, place = layout.model, layout.parallel
    counts = layout.stage_layers or [
        model.layers // place.pp + (stage < model.layers % place.pp) for stage in range(place.pp)
    ]
    first = sum(counts[: place.pp_rank])
    heads = [place.tp_rank * model.kv_heads // place.tp]
    if place.tp <= model.kv_heads:
        heads = [head for head in range(model.kv_heads) if head * place.tp // model.kv_heads == place.tp_rank]
    return list(range(first, first + counts[place.pp_rank])), heads


def unit_tokens(layout: KVLayout) -> int:
    """Return the smallest number of tokens that can be addressed in a page: one, or the whole page if it is opaque."""
    return layout.page_size if layout.order is PageOrder.OPAQUE else 1


def content(seed: int, end_token: int, layout: KVLayout) -> np.ndarray:
    """Return the cache of a sequence, [K and V, layer, token, head, element]; the same for every process and layout.

    One entry instead of K and V for a latent. Opaque: [1, layer, page, head, byte].
    """
    model = layout.model
    kinds, row, dtype = 2, model.head_dim, _DTYPES[model.element_bytes]
    if layout.order is PageOrder.OPAQUE:
        kinds, row, dtype = 1, layout.opaque_bytes, np.uint8
    elif model.attention is Attention.LATENT:
        kinds = 1
    shape = (kinds, model.layers, -(-end_token // unit_tokens(layout)), model.kv_heads, row)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    # Whole words, which numpy draws several times as fast as small numbers.
    words = np.random.default_rng(seed).integers(0, 1 << 64, -(-size // 8), dtype=np.uint64)
    return words.view(np.uint8)[:size].view(dtype).reshape(shape)


class EnginePages:
    """One rank's poisoned pool and its expected content, both [K and V, layer, page, slot, head, element]."""

    def __init__(self, layout: KVLayout, page_count: int, name: str) -> None:
        self.layout = layout
        self._layers, self._heads = held(layout)
        self.geometry = pool_geometry(layout, page_count)
        self.descriptor, self.memory = create_region(self.geometry.region_bytes[0], name)
        self.planes = self._view()
        self.planes[:] = _POISON & (256**self.planes.itemsize - 1)
        self.expected = self.planes.copy()

    def put(self, where: np.ndarray, pages: Sequence[int], data: np.ndarray, first_token: int, end_token: int) -> None:
        """Write tokens [first, end) of a sequence into an array shaped as `planes`; whole pages if they are opaque."""
        unit = unit_tokens(self.layout)
        first, end = first_token // unit, -(-end_token // unit)
        units = np.arange(first, end)
        slots = self.layout.page_size // unit
        numbers = np.asarray(pages, dtype=np.int64)[units // slots - first_token // self.layout.page_size]
        # Views, since copies would take most of the time of many tests. Layers, units and heads are adjacent.
        layers, heads = (slice(found[0], found[-1] + 1) for found in (self._layers, self._heads))
        where[:, :, numbers, units % slots] = data[:, layers, first:end, heads]

    def intact(self) -> bool:
        """Whether every byte of the pool has its expected value, also where nothing was to be written."""
        return bool(np.array_equal(self.planes, self.expected))

    def close(self) -> None:
        os.close(self.descriptor)

    def _view(self) -> np.ndarray:
        layout, heads = self.layout, len(self._heads)
        slots = layout.page_size // unit_tokens(layout)
        kinds, dtype, row = 2, _DTYPES[layout.model.element_bytes], layout.model.head_dim
        if layout.order is PageOrder.OPAQUE:
            kinds, dtype, row = 1, np.uint8, layout.opaque_bytes
        elif layout.model.attention is Attention.LATENT:
            kinds = 1
        head_major = layout.order is PageOrder.HND
        inner = (heads, slots) if head_major else (slots, heads)
        shape = (kinds, len(self._layers), self.geometry.page_count, *inner, row)
        pages = np.frombuffer(self.memory, dtype).reshape(shape)
        return pages.swapaxes(3, 4) if head_major else pages
