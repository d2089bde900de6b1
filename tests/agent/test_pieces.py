"""Compares the pieces of writes in place with an oracle that walks every byte."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from longshore_agent.kernels.copier import Part, Parts, remote_view
from longshore_agent.memory.pools import pool_sections
from longshore_agent.pipeline.slabs import pieces_in_place
from longshore_client.memory import pool_geometry
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, PoolGeometry


class Side(NamedTuple):
    """Pages of another process."""

    layout: KVLayout
    geometry: PoolGeometry
    region_addresses: tuple[int, ...]
    pages: npt.NDArray[np.int32]
    first_page: int
    layers: range
    heads: range

    def parts(self, tokens: tuple[int, int]) -> Parts:
        sections = pool_sections(self.layout, self.geometry, self.region_addresses)
        return (Part(remote_view(sections[0], len(self.layout.layers), *self[3:]), tokens),)


SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])


def side(
    data: st.DataObject, model: ModelShape, order: PageOrder, chosen: random.Random, tokens: tuple[int, int]
) -> Side:
    """One rank of any TP with pages of any size, and a page table for at least `tokens`."""
    tp = data.draw(st.sampled_from([tp for tp in (1, 2, 3, 6) if model.kv_heads % tp == 0]), "tp")
    layout = KVLayout(model, Parallel(tp=tp, tp_rank=data.draw(st.integers(0, tp - 1))), data.draw(SIZES), order)
    size = layout.page_size
    first_page = data.draw(st.integers(0, tokens[0] // size), "first page")
    count = -(-tokens[1] // size) - first_page
    page_count = count + data.draw(st.integers(0, 3))
    geometry = pool_geometry(layout, page_count, offset=data.draw(st.sampled_from([0, 64])))
    if order is PageOrder.HND and data.draw(st.booleans(), "elements apart"):
        geometry = with_elements_apart(layout, geometry)
    pages = np.array(chosen.sample(range(page_count), count), dtype=np.int32)
    address = data.draw(st.sampled_from([0, 1 << 40]), "address")
    return Side(layout, geometry, (address,), pages, first_page, range(len(layout.layers)), range(0))


def with_elements_apart(layout: KVLayout, geometry: PoolGeometry) -> PoolGeometry:
    """The same memory, with the tokens of a page beside each other in each head instead of the elements of a token."""
    element = layout.model.element_bytes
    strides = {"token_stride": element, "element_stride": layout.page_size * element}
    planes = tuple(msgspec.structs.replace(plane, **strides) for plane in geometry.planes)
    return PoolGeometry(geometry.page_count, geometry.region_bytes, planes)


def common_heads(one: KVLayout, other: KVLayout) -> range:
    return range(max(one.heads.start, other.heads.start), min(one.heads.stop, other.heads.stop))


def with_share(found: Side, first_layer: int, layer_count: int, heads: range) -> Side:
    layers = range(first_layer, first_layer + layer_count)
    local = range(heads.start - found.layout.heads.start, heads.stop - found.layout.heads.start)
    return Side(found.layout, found.geometry, found.region_addresses, found.pages, found.first_page, layers, local)


def byte_of(found: Side, plane: int, token: int, local_head: int, byte: int) -> int:
    """Return the address of one byte of the cache, by the definition of a geometry."""
    place = found.geometry.planes[plane]
    size = found.layout.page_size
    element, inside = divmod(byte, found.layout.model.element_bytes)
    page = int(found.pages[token // size - found.first_page])
    return (
        found.region_addresses[place.region]
        + place.offset
        + page * place.page_stride
        + token % size * place.token_stride
        + local_head * place.head_stride
        + element * (place.element_stride or found.layout.model.element_bytes)
        + inside
    )


@given(st.data(), st.integers(0, 2**32))
def test_pieces_copy_every_byte_once_from_where_it_is_to_where_it_belongs_and_nothing_else(data, seed):
    model = ModelShape.kv(
        data.draw(st.integers(1, 2)), 6, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2]))
    )
    first = data.draw(st.integers(0, 40), "first")
    tokens = (first, first + data.draw(st.integers(1, 40), "tokens"))
    chosen = random.Random(seed)
    orders = st.sampled_from([PageOrder.NHD, PageOrder.HND])
    source = side(data, model, data.draw(orders), chosen, tokens)
    target = side(data, model, data.draw(orders), chosen, tokens)
    heads = common_heads(source.layout, target.layout)
    if not heads:
        return
    # Stages of a pipeline share some layers only.
    count = data.draw(st.integers(1, model.layers), "layers")
    starts = st.integers(0, model.layers - count)
    source = with_share(source, data.draw(starts), count, heads)
    target = with_share(target, data.draw(starts), count, heads)

    near, far, lengths = pieces_in_place(source.parts(tokens), target.parts(tokens))

    copied: dict[int, int] = {}
    for start, goal, length in zip(near.tolist(), far.tolist(), lengths.tolist(), strict=True):
        assert length > 0
        for byte in range(length):
            assert goal + byte not in copied, "a byte is written twice"
            copied[goal + byte] = start + byte
    wanted = {
        byte_of(target, kind * model.layers + target_layer, token, target_head, byte): byte_of(
            source, kind * model.layers + source_layer, token, source_head, byte
        )
        for kind in range(2)
        for source_layer, target_layer in zip(source.layers, target.layers, strict=True)
        for token in range(*tokens)
        for source_head, target_head in zip(source.heads, target.heads, strict=True)
        for byte in range(model.head_bytes)
    }
    assert copied == wanted


def test_whole_pages_in_the_same_order_are_one_piece_a_plane_and_page_and_neighbours_are_joined():
    model = ModelShape.kv(layers=3, kv_heads=2, head_dim=8, element_bytes=2)
    layout = KVLayout(model, Parallel(), 16)
    geometry = pool_geometry(layout, 8)

    def whole(pages: list[int], address: int) -> Side:
        return Side(layout, geometry, (address,), np.array(pages, np.int32), 0, range(3), range(2))

    def found(near: list[int], far: list[int]) -> tuple[npt.NDArray[np.uint64], ...]:
        return pieces_in_place(whole(near, 0).parts((0, 48)), whole(far, 1 << 30).parts((0, 48)))

    apart = found([1, 5, 3], [7, 0, 4])
    assert [len(part) for part in apart] == [6 * 3] * 3
    assert set(apart[2].tolist()) == {16 * layout.token_bytes // 6}
    joined = found([1, 2, 3], [4, 5, 6])
    assert [len(part) for part in joined] == [6] * 3
    assert int(joined[2].sum()) == 48 * layout.token_bytes


def test_planes_may_lie_in_regions_of_their_own():
    model = ModelShape.kv(layers=2, kv_heads=1, head_dim=4, element_bytes=1)
    layout = KVLayout(model, Parallel(), 2)
    one = pool_geometry(layout, 4)
    plane_bytes = one.region_bytes[0] // 4
    split = type(one)(
        4,
        (plane_bytes,) * 4,
        tuple(
            type(plane)(index, 0, plane.page_stride, plane.token_stride, plane.head_stride)
            for index, plane in enumerate(one.planes)
        ),
    )
    pages = np.array([2, 0], np.int32)
    bases = (1 << 20, 3 << 20, 2 << 20, 9 << 20)
    source = Side(layout, split, bases, pages, 0, range(2), range(1))
    target = Side(layout, one, (1 << 40,), pages, 0, range(2), range(1))
    near, far, lengths = pieces_in_place(source.parts((1, 4)), target.parts((1, 4)))
    found = {
        start + byte: goal + byte for start, goal, n in zip(near, far, lengths, strict=True) for byte in range(int(n))
    }
    assert found == {
        byte_of(source, plane, token, 0, byte): byte_of(target, plane, token, 0, byte)
        for plane in range(4)
        for token in range(1, 4)
        for byte in range(4)
    }
