"""Tests the content of test rooms: ranks of all layouts derive the same bytes, and no two places have the same."""

from __future__ import annotations

import pytest

from longshore_client import Attention, KVLayout, ModelShape, PageOrder, Parallel
from longshore_lab.test_engine import pattern

SHAPE = ModelShape(layers=3, kv_heads=4, head_dim=8, element_bytes=2)
LATENT = ModelShape(2, 1, 24, 2, Attention.LATENT)
TOKENS = 32


def rows(layout: KVLayout) -> dict[tuple[int, int, int, int], bytes]:
    """Return the bytes of each (kind, layer, token, head) of a rank, which the order of its pages says where to find."""
    row, size, heads = layout.model.head_bytes, layout.page_size, list(layout.heads)
    page_count = TOKENS // size
    found = {}
    planes = iter(pattern.planes(layout, page_count))
    for kind in range(layout.model.kinds):
        for layer in layout.layers:
            plane = next(planes)
            assert len(plane) == page_count * size * len(heads) * row
            for token in range(TOKENS):
                page, inside = divmod(token, size)
                for index, head in enumerate(heads):
                    place = inside * len(heads) + index
                    if layout.order is PageOrder.HND:
                        place = index * size + inside
                    at = ((page_count - 1 - page) * size * len(heads) + place) * row
                    found[kind, layer, token, head] = plane[at : at + row]
    assert next(planes, None) is None
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
    short, long = pattern.planes(layout, 2), pattern.planes(layout, 4)
    assert [plane[len(plane) // 2 :] for plane in long] == short


def test_blobs_of_opaque_pages_depend_on_page_head_and_layer() -> None:
    layout = KVLayout(SHAPE, Parallel(), 8, PageOrder.OPAQUE)
    planes = pattern.planes(layout, 4)
    size = layout.opaque_bytes
    blobs = [plane[at : at + size] for plane in planes for at in range(0, len(plane), size)]
    assert len(planes) == 3 and len(blobs) == len(set(blobs)) == 3 * 4 * 4
