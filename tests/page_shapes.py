"""Provides pools of every layout in poisoned memory with guards, for tests of copies on CPUs and GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from longshore_agent.kernels.copier import Copy, Pages, Part, Slab, View, pool_view, slab_view
from longshore_agent.memory.pools import KVPool
from longshore_wire import slabs
from longshore_wire.layout import (
    Attention,
    KVLayout,
    ModelShape,
    PageOrder,
    Parallel,
    Plane,
    PlaneGeometry,
    PoolGeometry,
)

Bytes = npt.NDArray[np.uint8]

GUARD_BYTES = 192
POISON = 0xA5


def few(cases: Mapping[str, Any], *names: str) -> list[Any]:
    """Return parameters of tests, of which `make test` takes the named cases, and `make test-all` all."""
    further = pytest.mark.rest("kernels")
    return [pytest.param(case, id=name, marks=() if name in names else further) for name, case in cases.items()]


@dataclass(frozen=True)
class Shape:
    """One pool of a test.

    `spread` puts gaps of one element between pages, `split` puts each layer into its own region, `interleaved` puts all
    planes of a page beside each other, `uneven` puts the pages of every third plane further apart. `transposed` keeps in
    each head of a page its K with the tokens adjacent, then its V, as vLLM does on CPUs.
    """

    layers: int = 3
    heads: int = 4
    head_dim: int = 64
    element_bytes: int = 2
    page_size: int = 16
    page_count: int = 12
    order: PageOrder = PageOrder.NHD
    attention: Attention = Attention.HEADS
    spread: bool = False
    split: bool = False
    interleaved: bool = False
    uneven: bool = False
    transposed: bool = False
    guard_bytes: int = GUARD_BYTES
    blob_bytes: int = 0

    @property
    def layout(self) -> KVLayout:
        model = ModelShape.of(self.attention, self.layers, self.heads, self.head_dim, self.element_bytes)
        return KVLayout(model, Parallel(), self.page_size, self.order, blob_bytes=self.blob_bytes)

    @property
    def geometry(self) -> PoolGeometry:
        row = self.head_dim * self.element_bytes
        if self.transposed:
            return self._transposed
        if self.order is PageOrder.NHD:
            token_stride, head_stride = self.heads * row, row
            page = self.page_size * token_stride
        elif self.order is PageOrder.HND:
            token_stride, head_stride = row, self.page_size * row
            page = self.heads * head_stride
        else:
            token_stride, head_stride = 0, self.blob_bytes
            page = self.heads * head_stride
        page_stride = page + (self.element_bytes if self.spread else 0)
        plane = page_stride * self.page_count
        count = self.layout.plane_count
        if self.split:
            # K and V of one layer beside each other in the layer's own region, as engines with one tensor a layer do.
            kinds = count // self.layers
            places = [(i % self.layers, self.guard_bytes + i // self.layers * plane) for i in range(count)]
            regions = (kinds * plane + 2 * self.guard_bytes,) * self.layers
        elif self.interleaved:
            # All planes of a page beside each other.
            places = [(0, self.guard_bytes + i * page) for i in range(count)]
            page_stride = count * page
            regions = (page_stride * self.page_count + 2 * self.guard_bytes,)
        else:
            places = [(0, self.guard_bytes + i * plane) for i in range(count)]
            regions = (count * plane + 2 * self.guard_bytes,)
        planes = tuple(PlaneGeometry(region, at, page_stride, token_stride, head_stride) for region, at in places)
        if self.uneven:
            gap = 4 * row
            regions = (regions[0] + count * self.page_count * gap,)
            planes = tuple(
                PlaneGeometry(
                    0,
                    plane.offset + i * self.page_count * gap,
                    plane.page_stride + (gap if i % 3 == 2 else 0),
                    plane.token_stride,
                    plane.head_stride,
                )
                for i, plane in enumerate(planes)
            )
        return PoolGeometry(self.page_count, regions, planes)

    @property
    def _transposed(self) -> PoolGeometry:
        half = self.page_size * self.head_dim * self.element_bytes
        page = self.heads * 2 * half
        starts = [self.guard_bytes + layer * self.page_count * page for layer in range(self.layers)]
        tall, row = self.page_size * self.element_bytes, self.head_dim * self.element_bytes
        keys = [PlaneGeometry(0, start, page, self.element_bytes, 2 * half, tall) for start in starts]
        values = [PlaneGeometry(0, start + half, page, row, 2 * half) for start in starts]
        return PoolGeometry(
            self.page_count, (self.layers * self.page_count * page + 2 * self.guard_bytes,), (*keys, *values)
        )


_ELEMENT_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def plane_of(pool: KVPool, index: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """One plane of a pool, [pages, page_tokens, heads, head_dim], in its element size; valid only inside `in_use`.

    With PageOrder.OPAQUE: [pages, 1, heads, bytes of a blob].
    """
    unit = 1 if pool.layout.order is PageOrder.OPAQUE else pool.layout.model.element_bytes
    plane, rows = pool.geometry.planes[index], pool.sections[0]
    # OPAQUE has no token stride, and a dimension of size 1 needs none.
    return np.ndarray(
        (pool.page_count, rows.page_rows, rows.heads, rows.row_bytes // unit),
        _ELEMENT_DTYPES[unit],
        pool.region(plane.region).data,
        plane.offset,
        (plane.page_stride, plane.token_stride or unit, plane.head_stride, plane.element_stride or unit),
    )


def create_memfd(name: str, length_bytes: int) -> int:
    """A new descriptor of zeroed shared memory, closed on exec."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.posix_fallocate(descriptor, 0, length_bytes)
    return descriptor


@contextmanager
def opened(shape: Shape, seed: int | None) -> Iterator[KVPool]:
    """Return a pool of random bytes, or of poison if `seed` is None."""
    geometry = shape.geometry
    with ExitStack() as stack:
        descriptors = [create_memfd("longshore-test", size) for size in geometry.region_bytes]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        pool = KVPool(shape.layout, geometry, descriptors)
        stack.callback(pool.close)
        generator = np.random.default_rng(seed or 0)
        for index in range(len(descriptors)):
            region = pool.region(index)
            if seed is None:
                region[:] = POISON
            else:
                region[:] = generator.integers(0, 256, region.shape, np.uint8)
        yield pool


def contents(pool: KVPool) -> list[Bytes]:
    return [pool.region(index).copy() for index in range(len(pool.geometry.region_bytes))]


def one_part(source: View | Slab, target: View | Slab, tokens: tuple[int, int], *rest: Any, **more: Any) -> Copy:
    """A copy of one section."""
    near, far = (side if isinstance(side, Slab) else (Part(side, tokens),) for side in (source, target))
    return Copy(near, far, *rest, **more)


def page_ids(shape: Shape, tokens: tuple[int, int], seed: int, *, repeats: bool) -> npt.NDArray[np.int32]:
    count = -(-tokens[1] // shape.page_size) - tokens[0] // shape.page_size
    return np.random.default_rng(seed).choice(shape.page_count, count, replace=repeats).astype(np.int32)


def chosen_of(
    pool: KVPool, pages: Pages, tokens: tuple[int, int], layers: range, heads: range, slab: Bytes
) -> tuple[View, View]:
    """Both sides of a gather into `slab`, whose pages begin with that of the first token; in turn, those of a scatter."""
    view = pool_view(pool, pages, tokens[0] // pool.layout.page_size, layers, heads)
    return view, slab_view(slab, view, tokens)


def payload_bytes(pool: KVPool, tokens: tuple[int, int], layers: range, heads: range) -> int:
    """Return the bytes of a slab without padding and trailer."""
    return pool_view(pool, np.empty(0, dtype=np.int32), 0, layers, heads).payload_bytes(tokens)


TRAILER_KEY = b"a key of sixteen"


def trailer_for(payload: int) -> slabs.SealedTrailer:
    return slabs.Trailer(7, 0, 3, 1, 2, 11, 12, 13, payload).seal(TRAILER_KEY)


SHAPES = {
    "NHD": Shape(),
    "HND": Shape(order=PageOrder.HND),
    "NHD, pages of 17, gaps between pages": Shape(head_dim=80, page_size=17, spread=True),
    "HND, pages of 17, gaps": Shape(head_dim=80, page_size=17, order=PageOrder.HND, spread=True),
    "4 bytes, a region a layer": Shape(head_dim=128, element_bytes=4, split=True),
    "1 byte, HND, a region a layer": Shape(head_dim=80, element_bytes=1, order=PageOrder.HND, split=True),
    "rows of 7 bytes": Shape(head_dim=7, element_bytes=1, page_size=3, page_count=40, spread=True),
    "pages of 1": Shape(page_size=1, page_count=200),
    "pages of 1, HND": Shape(page_size=1, page_count=200, order=PageOrder.HND, element_bytes=4),
    "pages of 256": Shape(page_size=256, page_count=3, layers=2),
    "pages of 256, HND": Shape(page_size=256, page_count=3, layers=2, order=PageOrder.HND),
    "planes of a page beside each other": Shape(interleaved=True),
    "planes of unequal strides": Shape(uneven=True),
    "latent": Shape(heads=1, attention=Attention.LATENT, head_dim=576),
    "one head": Shape(heads=1, order=PageOrder.HND),
}

# Their tests take the longest.
LARGE = {"pages of 256", "pages of 256, HND"}
# Only CPUs copy rows whose elements are apart.
CPU_SHAPES = SHAPES | {
    "K transposed": Shape(order=PageOrder.HND, transposed=True),
    "K transposed, 4 bytes, pages of 17": Shape(
        order=PageOrder.HND, transposed=True, element_bytes=4, page_size=17, head_dim=80
    ),
}


def requests_of(shape: Shape) -> list[tuple[tuple[int, int], range, range]]:
    size, layers, heads = shape.page_size, shape.layers, shape.heads
    last = min(shape.page_count, 9) * size
    tokens = {
        (0, size),
        (0, last),
        (size // 2, last - size // 3),
        (size // 2, size // 2 + 1),
        (size - 1, size + 1),
        (size, 2 * size + (size + 1) // 2),
        (1000 * size + size // 3, 1002 * size),
    }
    layer_ranges = (range(layers), range(1, layers))
    head_ranges = {range(heads), range(heads // 2, heads), range(heads // 3, heads // 3 + 1)}
    return [(t, ls, hs) for t in sorted(tokens) for ls in layer_ranges for hs in sorted(head_ranges, key=repr)]


def _sides(
    model: ModelShape, order: PageOrder, sizes: tuple[int, int], tps: tuple[int, int], stages: int = 1
) -> tuple[KVLayout, KVLayout]:
    near, far = (Parallel(tps[0], pp=stages), Parallel(tps[1]))
    return KVLayout(model, near, sizes[0], order), KVLayout(model, far, sizes[1], order)


_UNEVEN = ModelShape(2, (Plane(4, 96), Plane(4, 32)), 2)
# Conv states of q, k and v, of which v has more heads, and recurrent states.
_STATE = ModelShape(3, (Plane(4, 32, 3), Plane(4, 32, 3), Plane(8, 32, 3), Plane(8, 64, 4)), 2)
# Caches with several sections on both sides, and the digests of their first pair of ranks.
PARTS = {
    "K and V of unequal width": (_sides(_UNEVEN, PageOrder.NHD, (8, 4), (2, 1)), 2 * 2 * 2),
    # The first stage has two of three layers.
    "three equal planes of a stage": (
        _sides(ModelShape(3, (Plane(4, 64),) * 3, 2), PageOrder.NHD, (8, 8), (1, 1), stages=2),
        3 * 2 * 4,
    ),
    "states of unequal ranks": (_sides(_STATE, PageOrder.SLOT, (2, 3), (2, 1)), 3 * (2 + 2 + 4 + 4)),
    "states of equal ranks": (_sides(_STATE, PageOrder.SLOT, (64, 1), (1, 1)), 3 * 24),
}
