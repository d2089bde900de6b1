"""Tests the test engine's pages: ranks of all layouts hold the same content, and no two places of it have the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from cache_oracle import Memory

from longshore_client import KVLayout, ModelShape, PageOrder, Parallel
from longshore_lab.test_engine.pages import Pages, content, layer_content, planes_of
from longshore_wire.layout import Plane

SHAPE = ModelShape.kv(layers=3, kv_heads=4, head_dim=8, element_bytes=2)
LATENT = ModelShape.latent(2, 24, 2)
# Of unequal planes: K and V, and states with other heads each, of which some have replicas.
UNEQUAL = ModelShape(3, (Plane(4, 48), Plane(2, 32)), 2)
STATES = ModelShape(5, (Plane(4, 32, 3), Plane(4, 32, 3), Plane(1, 16, 3), Plane(8, 64, 2)), 2)
TOKENS = 32


def planes(layout: KVLayout, tokens: int) -> list[bytes]:
    """Return the bytes of each plane of a rank's pool that holds a sequence, the last page first."""
    pages = Pages(layout, -(-tokens // layout.page_size))
    for plane in range(len(pages.geometry.planes)):
        pages.write(plane, 0, pages.sequence(plane, 1, tokens)[::-1])
    found = [
        bytes(pages.memory.read(plane.offset, pages.geometry.page_count * plane.page_stride))
        for plane in pages.geometry.planes
    ]
    pages.close()
    return found


def rows(layout: KVLayout) -> dict[tuple[int, int, int, int], bytes]:
    """Return the bytes of each (kind, layer, token, head) of a rank, which the order of its pages says where to find."""
    row, size, heads = layout.model.head_bytes, layout.page_size, list(layout.heads)
    page_count = TOKENS // size
    found = {}
    of_rank = iter(planes(layout, TOKENS))
    for kind in range(layout.model.kinds):
        for layer in layout.layers:
            plane = next(of_rank)
            assert len(plane) == page_count * size * len(heads) * row
            for token in range(TOKENS):
                page, inside = divmod(token, size)
                for index, head in enumerate(heads):
                    place = inside * len(heads) + index
                    if layout.order is PageOrder.HND:
                        place = index * size + inside
                    at = ((page_count - 1 - page) * size * len(heads) + place) * row
                    found[kind, layer, token, head] = plane[at : at + row]
    assert next(of_rank, None) is None
    return found


@pytest.mark.parametrize(
    ("model", "parallels", "page_size", "order"),
    [
        (SHAPE, [Parallel(tp=2, tp_rank=rank) for rank in range(2)], 16, PageOrder.NHD),
        (SHAPE, [Parallel(tp=2, tp_rank=rank) for rank in range(2)], 8, PageOrder.HND),
        (SHAPE, [Parallel(tp=8, tp_rank=rank) for rank in range(8)], 8, PageOrder.NHD),
        (SHAPE, [Parallel(pp=2, pp_rank=rank) for rank in range(2)], 4, PageOrder.NHD),
        (LATENT, [Parallel()], 16, PageOrder.HND),
    ],
)
def test_all_layouts_hold_the_same_content(model, parallels, page_size, order) -> None:
    whole = rows(KVLayout(model, Parallel(), 32))
    found: dict[tuple[int, int, int, int], bytes] = {}
    for parallel in parallels:
        for place, row in rows(KVLayout(model, parallel, page_size, order)).items():
            assert found.setdefault(place, row) == row
    assert found == whole


def test_each_place_has_bytes_of_its_own_and_longer_rooms_begin_with_those_of_shorter_ones() -> None:
    layout = KVLayout(SHAPE, Parallel(), 8)
    found = list(rows(layout).values())
    assert len(set(found)) == len(found)
    short, long = planes(layout, 16), planes(layout, 32)
    assert [plane[len(plane) // 2 :] for plane in long] == short


def test_blobs_of_opaque_pages_depend_on_page_head_and_layer() -> None:
    layout = KVLayout(SHAPE, Parallel(), 8, PageOrder.OPAQUE)
    of_rank = planes(layout, 32)
    size = layout.opaque_bytes
    blobs = [plane[at : at + size] for plane in of_rank for at in range(0, len(plane), size)]
    assert len(of_rank) == 3 and len(blobs) == len(set(blobs)) == 3 * 4 * 4


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND, PageOrder.OPAQUE])
def test_tokens_that_are_put_chunk_by_chunk_lie_where_a_whole_sequence_has_them(order: PageOrder) -> None:
    layout = KVLayout(SHAPE, Parallel(tp=2, tp_rank=1), 8, order)
    one, other = Pages(layout, 5), Pages(layout, 5)
    data, table = content(7, 29, layout), [4, 1, 3, 0]
    for first, end in ((0, 16), (16, 29)):
        one.put(one.planes, table[first // 8 : -(-end // 8)], data, first, end)
    for plane in range(len(other.geometry.planes)):
        other.scatter(plane, table, other.sequence(plane, 7, 29))
    assert np.array_equal(one.planes, other.planes)
    assert one.planes[:, :, table].any() and not one.planes[:, :, 2].any()
    one.close()
    other.close()


def test_content_longer_than_the_random_stream_repeats_no_row_of_a_head() -> None:
    long = content(3, 20_000, KVLayout(ModelShape.kv(1, 2, 32, 2), Parallel(), 16))
    assert long.nbytes > 4 << 20
    rows = long.reshape(-1, 64).view("V64").ravel()
    assert len(np.unique(rows)) == len(rows)


@pytest.mark.parametrize(
    ("model", "page_size", "order"),
    [
        (UNEQUAL, 8, PageOrder.NHD),
        (UNEQUAL, 16, PageOrder.HND),
        (SHAPE, 8, PageOrder.OPAQUE),
        (STATES, 2, PageOrder.SLOT),
        (STATES, 64, PageOrder.SLOT),
    ],
)
@pytest.mark.parametrize("place", [Parallel(), Parallel(2, 1, 2, 1), Parallel(4, 2, 2, 0)])
def test_planes_of_any_kind_lie_where_loops_over_their_definition_put_them(
    model: ModelShape, page_size: int, order: PageOrder, place: Parallel
) -> None:
    layout, tokens = KVLayout(model, place, page_size, order), 29
    page_count = layout.pages_of(0, tokens)[1]
    pages = Pages(layout, page_count + 1)
    oracle = Memory(layout, pages.geometry, [np.zeros(pages.geometry.region_bytes[0], np.uint8)])
    layers = range(model.layers)
    whole = [
        np.stack([layer_content(3, kind, layer, tokens, layout) for layer in layers])
        for kind in range(len(planes_of(layout)))
    ]
    oracle.put(oracle.data, list(reversed(range(page_count))), whole, 0, tokens)
    for plane in range(len(pages.geometry.planes)):
        first = page_count - pages.numbers(plane, 0, tokens).stop
        pages.write(plane, first, pages.sequence(plane, 3, tokens)[::-1])
    assert oracle.data[0].any()
    assert bytes(pages.memory.read(0, pages.geometry.region_bytes[0])) == oracle.data[0].tobytes()
    pages.close()
