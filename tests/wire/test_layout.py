"""Compares a layout's arithmetic with counting and a pool's geometry with a map of its bytes; tests their errors."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore_wire import layout as layouts
from longshore_wire import names
from longshore_wire.errors import LayoutError
from longshore_wire.layout import (
    KVLayout,
    ModelShape,
    PageOrder,
    Parallel,
    Plane,
    PlaneGeometry,
    PoolGeometry,
)

MODEL = ModelShape.kv(layers=80, kv_heads=8, head_dim=128, element_bytes=2)


def layout(model: ModelShape = MODEL, page_size: int = 16, order: PageOrder = PageOrder.NHD, **sizes: int) -> KVLayout:
    return KVLayout(model, Parallel(**sizes), page_size, order)


@pytest.mark.parametrize("heads", [1, 2, 8, 10, 12])
def test_shared_head_counts_are_those_that_ranks_of_all_tp_sizes_hold_in_common(heads: int) -> None:
    sizes = [tp for tp in range(1, 2 * heads + 1) if heads % tp == 0 or tp % heads == 0]
    ranks = [layout(ModelShape.kv(2, heads, 64, 2), tp=tp, tp_rank=rank) for tp in sizes for rank in range(tp)]
    for one in ranks:
        common = {len(set(one.heads) & set(other.heads)) for other in ranks} - {0}
        assert one.shared_head_counts(heads) == tuple(sorted(common, reverse=True))


@given(layers=st.integers(1, 100), heads=st.sampled_from([1, 2, 4, 8, 12]), tp=st.integers(1, 16), pp=st.integers(1, 8))
def test_ranks_of_a_replica_hold_each_layer_and_head_as_often_as_there_are_replicas(
    layers: int, heads: int, tp: int, pp: int
) -> None:
    one = layout(ModelShape.kv(layers, heads, 64, 2), tp=tp, pp=pp)
    if (heads % tp and tp % heads) or pp > layers:
        with pytest.raises(LayoutError):
            one.check()
        return
    one.check()
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(one.rank_count):
        other = one.at(rank)
        other.check()
        assert other.rank == rank
        found.update((layer, head) for layer in other.layers for head in other.heads)
    assert found == Counter({(layer, head): one.replicas for layer in range(layers) for head in range(heads)})
    stages = [len(one.at(rank).layers) for rank in range(0, one.rank_count, tp)]
    assert max(stages) - min(stages) <= 1


def test_a_token_of_a_70b_model_takes_the_bytes_that_its_card_says() -> None:
    assert layout().token_bytes == 327680
    assert layout(tp=4).token_bytes == 81920
    assert layout(tp=4, pp=2).token_bytes == 40960
    assert layout(tp=16).token_bytes == 40960
    assert layout(ModelShape.latent(61, 576, 2), tp=8).token_bytes == 61 * 576 * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (layout(tp=3), r"parallel\.tp is 3 and model\.planes\[0\]\.heads is 8"),
        (layout(tp=4, tp_rank=4), r"parallel\.tp_rank is 4: .* 0 to 3"),
        (layout(tp=4, tp_rank=-1), r"parallel\.tp_rank is -1"),
        (layout(pp=2, pp_rank=2), r"parallel\.pp_rank is 2"),
        (layout(dp=2, dp_rank=2), r"parallel\.dp_rank is 2"),
        (layout(tp=0), r"parallel\.tp is 0"),
        (layout(pp=81), r"parallel\.pp is 81: a model of 80 layers"),
        (layout(tp=1024, pp=4), r"parallel\.tp is 1024 and parallel\.pp is 4: at most 2048 ranks"),
        (layout(page_size=0), "page_size is 0"),
        (layout(ModelShape.kv(0, 8, 128, 2)), r"model\.layers is 0"),
        (layout(ModelShape.kv(80, 0, 128, 2)), r"model\.planes\[0\]\.heads is 0"),
        (layout(ModelShape.kv(80, 8, 0, 2)), r"model\.planes\[0\]\.row_bytes is 0"),
        (layout(ModelShape.kv(80, 8, 128, 8)), r"model\.element_bytes is 8"),
        (
            layout(page_size=1, order=PageOrder.SLOT, model=ModelShape.kv(300, 8, 128, 2)),
            r"page_size is 1 .* in 600 pieces",
        ),
        (msgspec.structs.replace(layout(), layer_range=(10, 81)), r"layer_range is \(10, 81\)"),
        (msgspec.structs.replace(layout(), layer_range=(10, 10)), r"layer_range is \(10, 10\)"),
        (msgspec.structs.replace(layout(pp=2), stage_layers=(40, 20, 20)), r"stage_layers is \(40, 20, 20\): give 2 "),
        (msgspec.structs.replace(layout(pp=2), stage_layers=(40, 41)), r"stage_layers is \(40, 41\): .* sum is 80"),
        (msgspec.structs.replace(layout(pp=2), stage_layers=(80, 0)), r"stage_layers is \(80, 0\): .* 1 or more"),
        (msgspec.structs.replace(layout(), stage_layers=(80,), layer_range=(0, 80)), "layer_range and stage_layers"),
        (msgspec.structs.replace(layout(), blob_bytes=64), "blob_bytes is 64 and order is NHD"),
        (msgspec.structs.replace(layout(), order=PageOrder.OPAQUE, blob_bytes=-1), "blob_bytes is -1"),
    ],
)
def test_a_layout_that_cannot_exist_is_refused_by_field(wrong: KVLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        wrong.check()


def test_layers_of_other_stages_are_not_guessed_from_a_stage_that_was_given_its_own() -> None:
    given_layers = msgspec.structs.replace(layout(tp=2, pp=2), layer_range=(0, 50))
    assert given_layers.at(1).layers == range(50)
    with pytest.raises(LayoutError, match="stage 1"):
        given_layers.at(2)


def dense_pool(one: KVLayout, page_count: int) -> PoolGeometry:
    """Return a geometry with all planes in one region, page after page within a plane."""
    head_bytes, heads, page_size = one.model.head_bytes, len(one.heads), one.page_size
    token_stride, head_stride = head_bytes * heads, head_bytes
    if one.order is PageOrder.HND:
        token_stride, head_stride = head_bytes, head_bytes * page_size
    elif one.order is PageOrder.OPAQUE:
        token_stride, head_stride = 0, 2 * head_bytes * page_size
    page_stride = head_stride * heads if one.order is PageOrder.OPAQUE else head_bytes * heads * page_size
    planes = tuple(
        PlaneGeometry(0, index * page_stride * page_count, page_stride, token_stride, head_stride)
        for index in range(one.plane_count)
    )
    return PoolGeometry(page_count, (one.plane_count * page_stride * page_count,), planes)


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND, PageOrder.OPAQUE])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_dense_pool_of_every_order_fits_its_region_to_the_byte(order: PageOrder, page_size: int) -> None:
    one = layout(ModelShape.kv(2, 4, 8, 2), page_size, order, tp=2)
    pool = dense_pool(one, page_count=3)
    pool.check(one)
    short = msgspec.structs.replace(pool, region_bytes=(pool.region_bytes[0] - 1,))
    with pytest.raises(LayoutError, match=rf"planes\[{one.plane_count - 1}\] ends at byte"):
        short.check(one)


def test_a_blob_holds_a_page_of_all_planes() -> None:
    uneven = ModelShape(2, (Plane(4, 96), Plane(4, 32)), 2)
    assert layout(uneven, page_size=16, order=PageOrder.OPAQUE).opaque_bytes == 16 * (96 + 32)


def test_k_and_v_may_be_interleaved_in_one_page() -> None:
    one = layout(ModelShape.kv(1, 2, 4, 2), page_size=4)
    half_bytes = 4 * 2 * 8
    planes = tuple(PlaneGeometry(0, kind * half_bytes, 2 * half_bytes, 16, 8) for kind in range(2))
    PoolGeometry(5, (5 * 2 * half_bytes,), planes).check(one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"region": 1}, r"planes\[0\]\.region is 1: 1 regions"),
        ({"region": -1}, r"planes\[0\]\.region is -1"),
        ({"offset": -8}, r"planes\[0\]\.offset is -8"),
        ({"head_stride": 4}, r"planes\[0\]\.head_stride is 4: entries of 8 bytes"),
        ({"token_stride": 8}, r"planes\[0\]\.(token|head)_stride is 8"),
        ({"page_stride": 32}, r"planes\[0\]\.page_stride is 32"),
        ({"page_stride": 1 << 62}, r"planes\[0\] ends at byte"),
    ],
)
def test_pages_that_overlap_or_leave_their_region_are_refused_by_field(change: dict[str, int], message: str) -> None:
    one = layout(ModelShape.kv(1, 2, 4, 2), page_size=4)
    pool = dense_pool(one, page_count=3)
    plane = msgspec.structs.replace(pool.planes[0], **change)
    with pytest.raises(LayoutError, match=message):
        msgspec.structs.replace(pool, planes=(plane, *pool.planes[1:])).check(one)


def transposed(one: KVLayout, pages: int = 3) -> PoolGeometry:
    """A geometry whose K has the tokens of a page adjacent, and whose V has the elements of a token adjacent."""
    row, tall = one.model.head_bytes, one.page_size * one.model.element_bytes
    half = one.page_size * row
    page = len(one.heads) * 2 * half
    keys = PlaneGeometry(0, 0, page, one.model.element_bytes, 2 * half, tall)
    return PoolGeometry(pages, (pages * page,), (keys, PlaneGeometry(0, half, page, row, 2 * half)))


def test_the_elements_of_a_head_may_lie_apart_and_then_its_tokens_beside_each_other() -> None:
    one = layout(ModelShape.kv(1, 2, 8, 2), 4, PageOrder.HND)
    pool = transposed(one)
    pool.check(one)
    for name, value in (("element_stride", 6), ("token_stride", 1), ("head_stride", 30)):
        planes = (msgspec.structs.replace(pool.planes[0], **{name: value}), pool.planes[1])
        with pytest.raises(LayoutError, match=r"planes\[0\]\.\w+_stride is \d+: entries of \d+ bytes would overlap"):
            msgspec.structs.replace(pool, planes=planes).check(one)
    with pytest.raises(LayoutError, match=r"planes\[0\] ends at byte"):
        msgspec.structs.replace(pool, region_bytes=(pool.region_bytes[0] // 3,)).check(one)
    blob = layout(ModelShape.kv(1, 2, 8, 2), 4, PageOrder.OPAQUE)
    with pytest.raises(LayoutError, match="element_stride is 2"):
        PoolGeometry(1, (4096,), (PlaneGeometry(0, 0, 256, 0, 128, 2),)).check(blob)


def test_a_pool_needs_a_plane_for_each_kind_of_each_layer_and_at_least_a_page() -> None:
    one = layout(ModelShape.kv(2, 2, 4, 2), page_size=4)
    pool = dense_pool(one, page_count=3)
    with pytest.raises(LayoutError, match=r"planes has 3 entries: .* have 4"):
        msgspec.structs.replace(pool, planes=pool.planes[:3]).check(one)
    with pytest.raises(LayoutError, match="page_count is 0"):
        msgspec.structs.replace(pool, page_count=0).check(one)


@given(
    strides=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2])),
)
def test_an_accepted_geometry_never_gives_one_byte_to_two_entries(
    strides: tuple[int, int, int], counts: tuple[int, int, int]
) -> None:
    page_count, page_size, heads = counts
    one = KVLayout(ModelShape.kv(1, heads, 3, 1), Parallel(), page_size)
    plane = PlaneGeometry(0, 5, *strides)
    pool = PoolGeometry(page_count, (1000,), (plane, plane))
    bytes_taken: Counter[int] = Counter()
    for page in range(page_count):
        for token in range(page_size):
            for head in range(heads):
                first = 5 + page * strides[0] + token * strides[1] + head * strides[2]
                bytes_taken.update(range(first, first + 3))
    try:
        pool.check(one)
    except LayoutError:
        return
    assert max(bytes_taken.values()) == 1
    tight = msgspec.structs.replace(pool, region_bytes=(max(bytes_taken) + 1,))
    tight.check(one)


def test_layouts_with_too_many_caches_are_refused_and_not_kept() -> None:
    before = layouts._caches.cache_info().currsize
    for size in range(1, 9):
        others = tuple(KVLayout(MODEL, Parallel(), size, name=f"c{number}") for number in range(1000))
        with pytest.raises(LayoutError, match="others has 1000 caches: give at most 15"):
            KVLayout(MODEL, Parallel(), size, others=others).check()
    kept = names._matches_name.cache_info().currsize
    with pytest.raises(LayoutError, match="name is 'nnn"):
        KVLayout(MODEL, Parallel(), 16, name="n" * 1_000_000).check()
    assert names._matches_name.cache_info().currsize == kept
    nested = KVLayout(MODEL, Parallel(), 16, others=(KVLayout(MODEL, Parallel(), 16, name="a", others=others),))
    with pytest.raises(LayoutError, match="cache 'a' has others"):
        nested.check()
    assert layouts._caches.cache_info().currsize == before


def test_the_caches_of_a_rank_have_its_place_and_what_is_wrong_with_one_is_named() -> None:
    other = KVLayout(ModelShape.kv(3, 4, 16, 2), Parallel(), 8, name="draft")
    found = KVLayout(MODEL, Parallel(tp=4, tp_rank=2), 16, others=(other,))
    found.check()
    assert [(cache.name, cache.parallel, cache.page_size) for cache in found.caches] == [
        ("kv", found.parallel, 16),
        ("draft", found.parallel, 8),
    ]
    assert [cache.heads for cache in found.at(1).caches] == [range(2, 4), range(1, 2)]
    wrong = msgspec.structs.replace(found, others=(msgspec.structs.replace(other, page_size=0),))
    with pytest.raises(LayoutError, match="cache 'draft': page_size is 0"):
        wrong.check()
