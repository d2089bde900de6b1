"""The pages of one cache of a rank and their expected content, computed by this file's own arithmetic.

Of a layout with others, functions take the first cache; `KVLayout.caches` has a layout of each. Called by all that plays an
engine: `longshore verify`, the benchmarks, and tests of agents. Must not ask planners or a layout which layers and heads a
rank holds: moved bytes are compared with these.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from longshore_client.memory import pool_geometry
from longshore_lab.test_engine.memory import HostMemory, Memory
from longshore_wire.layout import KVLayout, PageOrder, Plane, PoolGeometry

Bytes = npt.NDArray[np.uint8]

# The content of all sequences is a piece of one random stream, which is repeated. A prime number, so that two rows of a
# sequence begin at the same byte of the stream only if a million rows are between them.
_STREAM_BYTES = 1_048_583
_STREAM_SEED = 20261201
# Multiples of these numbers, modulo 2**64, are spread evenly. They separate the beginnings of sequences and of planes.
_SEQUENCE_STEP, _PLANE_STEP, _MASK = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, (1 << 64) - 1
_POISON = 0xDE


def held(layout: KVLayout) -> tuple[list[int], list[int]]:
    """Return the global layers and heads that a rank must hold, by the definition of its parallel sizes."""
    return held_layers(layout), held_heads(layout, layout.model.kv_heads)


def held_layers(layout: KVLayout) -> list[int]:
    """Return a rank's layers: as given; else split evenly over the stages, of which the first take the remainder."""
    count, place = layout.model.layers, layout.parallel
    counts = layout.stage_layers or [count // place.pp + (stage < count % place.pp) for stage in range(place.pp)]
    first = sum(counts[: place.pp_rank])
    return list(range(first, first + counts[place.pp_rank]))


def held_heads(layout: KVLayout, heads: int) -> list[int]:
    """Return a rank's heads of so many, split into equal shares. With more ranks, several adjacent ones hold a head."""
    tp, rank = layout.parallel.tp, layout.parallel.tp_rank
    if tp <= heads:
        return [head for head in range(heads) if head * tp // heads == rank]
    return [rank * heads // tp]


def unit_tokens(layout: KVLayout) -> int:
    """Return the smallest number of tokens that can be addressed in a page: one, or the whole page if it is opaque."""
    return layout.page_size if layout.order is PageOrder.OPAQUE else 1


def planes_of(layout: KVLayout) -> list[Plane]:
    """Return what each layer has: the planes of the model, such as K and V; one of blobs if pages are opaque."""
    planes = list(layout.model.planes)
    if layout.order is not PageOrder.OPAQUE:
        return planes
    return [Plane(planes[0].heads, layout.blob_bytes or layout.page_size * sum(plane.row_bytes for plane in planes))]


def page_rows(layout: KVLayout, plane: Plane) -> int:
    """Return the rows of one head in a page."""
    return plane.rows if layout.order is PageOrder.SLOT else layout.page_size // unit_tokens(layout)


def page_numbers(layout: KVLayout, first_token: int, end_token: int) -> range:
    """Return the numbers of a sequence's pages that hold tokens [first, end); of a slot, those of the rank's layers."""
    if first_token >= end_token:
        return range(0)
    if layout.order is PageOrder.SLOT:
        return range(-(-len(held_layers(layout)) // layout.page_size))
    return range(first_token // layout.page_size, -(-end_token // layout.page_size))


def layer_content(seed: int, kind: int, layer: int, end_token: int, layout: KVLayout) -> Bytes:
    """Return one plane of one layer of a sequence, [token, head, byte]; opaque: [page, head, byte]; a slot: [row, head, byte].

    It has all heads, is the same for every process and layout, and begins with the content of shorter sequences. It may be
    a view that cannot be written.

    Args:
        kind: index of the plane in `planes_of`.
    """
    plane = planes_of(layout)[kind]
    rows = plane.rows if layout.order is PageOrder.SLOT else -(-end_token // unit_tokens(layout))
    shape = (rows, plane.heads, plane.row_bytes)
    length = shape[0] * shape[1] * shape[2]
    number = kind * layout.model.layers + layer
    begin = ((seed * _SEQUENCE_STEP + number * _PLANE_STEP) & _MASK) % _STREAM_BYTES
    data = _stream()[begin : begin + length]
    if len(data) < length:
        data = np.concatenate([data, np.resize(_stream(), length - len(data))])
    return data.reshape(shape)


def content(seed: int, end_token: int, layout: KVLayout) -> Bytes:
    """Return the cache of a sequence, [K and V, layer, token, head, byte], of all layers and heads; see `layer_content`.

    The planes of the cache must be alike.
    """
    layers = range(layout.model.layers)
    kinds = range(len(planes_of(layout)))
    return np.stack(
        [np.stack([layer_content(seed, kind, layer, end_token, layout) for layer in layers]) for kind in kinds]
    )


class Pool:
    """The memory of one rank's pages.

    Args:
        layout: of the rank.
        page_count: pages of each plane.
        allocate: returns memory of this many bytes.
    Attributes:
        geometry: for `Client.register_pool`.
        memory: of the pages, which `close` frees.
    """

    def __init__(self, layout: KVLayout, page_count: int, allocate: Callable[[int], Memory] = HostMemory) -> None:
        self.layout = layout
        self.geometry = _geometry(layout, page_count)
        self.memory = allocate(self.geometry.region_bytes[0])

    def close(self) -> None:
        """Free the memory. The agent must not use it any more."""
        self.memory.close()


class Pages(Pool):
    """The pages of one cache of a rank.

    In host memory, if they hold tokens and their planes are alike:

    Attributes:
        planes: the content of all pages, [K and V, layer, page, slot, head, byte].
        expected: what `planes` should be, once `poison` was called.
    """

    planes: Bytes
    expected: Bytes

    def __init__(self, layout: KVLayout, page_count: int, allocate: Callable[[int], Memory] = HostMemory) -> None:
        super().__init__(layout, page_count, allocate)
        self._layers, self._kinds = held_layers(layout), planes_of(layout)
        # The first and the last head of each plane; those between are held, too.
        self._heads = [slice(own[0], own[-1] + 1) for own in (held_heads(layout, each.heads) for each in self._kinds)]
        self._slots = page_rows(layout, self._kinds[0])
        is_alike = layout.order is not PageOrder.SLOT and len(set(self._kinds)) == 1
        if is_alike and isinstance(self.memory, HostMemory):
            pages = self._as_pages(self.memory.read(0, self.geometry.region_bytes[0]), 0, len(self.geometry.planes))
            self.planes = pages.reshape(len(self._kinds), len(self._layers), *pages.shape[1:])

    # -- in host memory --------------------------------------------------------------------------------------------

    def poison(self) -> None:
        """Fill all pages with a pattern, and expect it everywhere."""
        self.planes[:] = _POISON
        self.expected = self.planes.copy()

    def put(self, where: Bytes, pages: Sequence[int], data: Bytes, first_token: int, end_token: int) -> None:
        """Write tokens [first, end) of a sequence's `content` into an array shaped as `planes`; whole pages if opaque.

        Args:
            pages: those from the page of `first_token` on.
        """
        unit = unit_tokens(self.layout)
        first, end = first_token // unit, -(-end_token // unit)
        units = np.arange(first, end)
        numbers = np.asarray(pages, dtype=np.int64)[units // self._slots - first_token // self.layout.page_size]
        # Views, since copies would take most of the time of many tests. Layers, units and heads are adjacent.
        layers = slice(self._layers[0], self._layers[-1] + 1)
        where[:, :, numbers, units % self._slots] = data[:, layers, first:end, self._heads[0]]

    def intact(self) -> bool:
        """Whether every byte of the pool has its expected value, also where nothing was to be written."""
        return bool(np.array_equal(self.planes, self.expected))

    # -- in any memory, a plane at a time --------------------------------------------------------------------------

    def numbers(self, plane: int, first_token: int, end_token: int) -> range:
        """Return the numbers of a sequence's pages that have bytes of tokens [first, end) in one plane."""
        numbers = page_numbers(self.layout, first_token, end_token)
        if self.layout.order is not PageOrder.SLOT:
            return numbers
        number = plane % len(self._layers) // self.layout.page_size
        return numbers[number : number + 1]

    def sequence(self, plane: int, seed: int, end_token: int, first_token: int = 0) -> Bytes:
        """Return the pages of a sequence in one plane, in its order, [page, slot, head, byte]; zero but for tokens [first, end).

        They are those of `numbers` from token 0 on.
        """
        kind, layer = divmod(plane, len(self._layers))
        data = layer_content(seed, kind, self._layers[layer], end_token, self.layout)[:, self._heads[kind]]
        slots, page_count = page_rows(self.layout, self._kinds[kind]), len(self.numbers(plane, 0, end_token))
        pages = np.zeros((page_count * slots, *data.shape[1:]), np.uint8)
        skipped = first_token // unit_tokens(self.layout)
        pages[skipped : len(data)] = data[skipped:]
        return pages.reshape(page_count, slots, *data.shape[1:])

    def read(self, plane: int, first_page: int, end_page: int) -> Bytes:
        """Return pages [first, end) of one plane, [page, slot, head, byte]; of host memory a view."""
        where = self.geometry.planes[plane]
        page_bytes = where.page_stride
        data = self.memory.read(where.offset + first_page * page_bytes, (end_page - first_page) * page_bytes)
        pages: Bytes = self._as_pages(data, plane // len(self._layers), 1)[0]
        return pages

    def write(self, plane: int, first_page: int, pages: Bytes) -> None:
        """Write pages from `first_page` on into one plane, given as `read` returns them."""
        where = self.geometry.planes[plane]
        self.memory.write(where.offset + first_page * where.page_stride, self.as_bytes(pages))

    def scatter(self, plane: int, pages: Sequence[int], content: Bytes | int) -> None:
        """Write these pages of one plane, given as `read` returns them, or fill them with a byte."""
        whole = self.read(plane, 0, self.geometry.page_count)
        if whole.flags.writeable:
            whole[pages] = content
            return
        changed = whole.copy()
        changed[pages] = content
        self.write(plane, 0, changed)

    def as_bytes(self, pages: Bytes) -> bytes:
        """Return the bytes of pages, given as `read` returns them, in the order in which they are in memory."""
        return (pages.swapaxes(1, 2) if self.layout.order is PageOrder.HND else pages).tobytes()

    def _as_pages(self, data: Any, kind: int, plane_count: int) -> Bytes:
        """Return bytes of as many pages of each of so many planes of a kind as [plane, page, slot, head, byte]."""
        plane, head_major = self._kinds[kind], self.layout.order is PageOrder.HND
        slots, heads = page_rows(self.layout, plane), self._heads[kind].stop - self._heads[kind].start
        inner = (heads, slots) if head_major else (slots, heads)
        pages = np.frombuffer(data, np.uint8).reshape(plane_count, -1, *inner, plane.row_bytes)
        return pages.swapaxes(2, 3) if head_major else pages


def _geometry(layout: KVLayout, page_count: int) -> PoolGeometry:
    """Return the geometry of pages without gaps. Layers of a slot share memory if they have the same number in their page."""
    if layout.order is not PageOrder.SLOT:
        return pool_geometry(layout, page_count)
    layers = range(len(held_layers(layout)))
    shared = layers[: layout.page_size]
    few = msgspec.structs.replace(layout, stage_layers=None, layer_range=(0, len(shared)), others=())
    geometry = pool_geometry(few, page_count)
    kinds = range(len(planes_of(layout)))
    planes = [geometry.planes[kind * len(shared) + layer % len(shared)] for kind in kinds for layer in layers]
    return msgspec.structs.replace(geometry, planes=tuple(planes))


@functools.cache
def _stream() -> Bytes:
    return np.frombuffer(random.Random(_STREAM_SEED).randbytes(_STREAM_BYTES), np.uint8)
