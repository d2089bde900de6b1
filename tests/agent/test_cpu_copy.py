"""The copy on a CPU against its reference, bit for bit, in poisoned memory: gathers, scatters, and pages to pages."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from page_shapes import (
    CPU_SHAPES,
    GUARD_BYTES,
    LARGE,
    POISON,
    Bytes,
    Shape,
    chosen_of,
    contents,
    few,
    opened,
    page_ids,
    payload_bytes,
    plane_of,
    requests_of,
    trailer_for,
)

from longshore_agent.errors import PoolError, ShapeError
from longshore_agent.kernels import reference
from longshore_agent.kernels.copier import Pages, PlaneRows, Strides, View, pool_view
from longshore_agent.kernels.cpu_copy import copy_addresses, copy_rows
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_wire import slabs
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import PageOrder


def gathered(pool: KVPool, pages: Pages, tokens: tuple[int, int], layers: range, heads: range) -> tuple[Bytes, Bytes]:
    """The whole buffer, guards included, as the copy and as the reference leave it."""
    payload = payload_bytes(pool, tokens, layers, heads)
    length = slabs.slab_bytes(payload)
    results = []
    for each in (copy_rows, reference.copy):
        buffer = np.full(length + 2 * GUARD_BYTES, POISON, dtype=np.uint8)
        target = buffer[GUARD_BYTES : GUARD_BYTES + length]
        assert each(*chosen_of(pool, pages, tokens, layers, heads, target), tokens, trailer_for(payload)) == payload
        results.append(buffer)
    return results[0], results[1]


@pytest.mark.parametrize("shape", few(CPU_SHAPES, *(CPU_SHAPES.keys() - LARGE)))
def test_a_slab_is_what_the_reference_packs_and_nothing_around_it_is_touched(shape: Shape) -> None:
    with opened(shape, seed=1) as pool:
        before = contents(pool)
        for seed, (tokens, layers, heads) in enumerate(requests_of(shape)):
            pages = page_ids(shape, tokens, seed, repeats=True)
            actual, expected = gathered(pool, pages, tokens, layers, heads)
            assert np.array_equal(actual, expected), (tokens, layers, heads, pages)
        assert all(map(np.array_equal, before, contents(pool)))


@pytest.mark.parametrize("shape", few(CPU_SHAPES, *(CPU_SHAPES.keys() - LARGE)))
def test_pages_hold_what_the_reference_writes_and_no_other_byte_of_the_pool_changes(shape: Shape) -> None:
    with opened(shape, seed=None) as pool, opened(shape, seed=None) as other:
        for seed, (tokens, layers, heads) in enumerate(requests_of(shape)):
            pages = page_ids(shape, tokens, seed, repeats=False)
            payload = payload_bytes(pool, tokens, layers, heads)
            slab = np.random.default_rng(seed).integers(0, 256, payload + 5, np.uint8)
            before = slab.copy()
            assert copy_rows(*chosen_of(pool, pages, tokens, layers, heads, slab)[::-1], tokens) == payload
            reference.copy(*chosen_of(other, pages, tokens, layers, heads, slab)[::-1], tokens)
            assert all(map(np.array_equal, contents(pool), contents(other))), (tokens, layers, heads, pages)
            assert np.array_equal(slab, before)


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
@pytest.mark.parametrize("page_size", [1, 16])
def test_long_runs_of_pages_and_scattered_pages_give_the_same_bytes_as_the_reference(
    order: PageOrder, page_size: int
) -> None:
    shape = Shape(
        layers=2, head_dim=128, page_size=page_size, page_count=640 // page_size, order=order, element_bytes=4
    )
    tokens, layers, heads = (5, 600), range(2), range(1, 3)
    count = -(-tokens[1] // page_size) - tokens[0] // page_size
    runs = np.arange(count, dtype=np.int32)
    halves = np.concatenate([runs[count // 2 :], runs[: count // 2]])
    backwards = runs[::-1].copy()
    with opened(shape, seed=4) as source, opened(shape, seed=None) as target, opened(shape, seed=None) as other:
        for pages in (runs, halves, backwards):
            actual, expected = gathered(source, pages, tokens, layers, heads)
            assert np.array_equal(actual, expected)
            slab = actual[GUARD_BYTES:-GUARD_BYTES]
            copy_rows(*chosen_of(target, pages, tokens, layers, heads, slab)[::-1], tokens)
            reference.copy(*chosen_of(other, pages, tokens, layers, heads, slab)[::-1], tokens)
            assert all(map(np.array_equal, contents(target), contents(other)))


@pytest.mark.parametrize("source_order", [PageOrder.NHD, PageOrder.HND])
@pytest.mark.parametrize("target_order", [PageOrder.NHD, PageOrder.HND])
@pytest.mark.parametrize(("source_size", "target_size"), [(16, 64), (17, 1), (1, 16), (64, 17), (16, 16)])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_pages_to_pages_and_through_a_slab_give_the_bytes_that_indexing_finds(
    source_order: PageOrder, target_order: PageOrder, source_size: int, target_size: int, uneven: bool, transposed: bool
) -> None:
    tokens = (19, 133)
    wide = Shape(
        heads=8,
        page_size=source_size,
        page_count=150 // source_size + 3,
        order=source_order,
        element_bytes=4,
        uneven=uneven,
    )
    narrow = Shape(
        heads=3,
        page_size=target_size,
        page_count=150 // target_size + 3,
        order=PageOrder.HND if transposed else target_order,
        element_bytes=4,
        transposed=transposed,
    )
    source_pages = page_ids(wide, tokens, 1, repeats=False)
    target_pages = page_ids(narrow, tokens, 2, repeats=False)
    with opened(wide, seed=9) as source, opened(narrow, seed=None) as target, opened(narrow, seed=None) as other:
        slab = np.empty(payload_bytes(source, tokens, range(3), range(4, 7)), dtype=np.uint8)
        near, into = chosen_of(source, source_pages, tokens, range(3), range(4, 7), slab)
        copy_rows(near, into, tokens)
        copy_rows(*chosen_of(target, target_pages, tokens, range(3), range(3), slab)[::-1], tokens)
        for plane in range(6):
            for token in range(*tokens):
                page = source_pages[token // source_size - tokens[0] // source_size]
                sent = plane_of(source, plane)[page, token % source_size, 4:7]
                page = target_pages[token // target_size - tokens[0] // target_size]
                assert np.array_equal(plane_of(target, plane)[page, token % target_size], sent)
        far = pool_view(other, target_pages, tokens[0] // target_size, range(3), range(3))
        assert copy_rows(near, far, tokens) == slab.size
        assert all(map(np.array_equal, contents(target), contents(other)))


def test_the_layers_of_a_stage_are_copied_between_pools_that_hold_more_of_them() -> None:
    tokens, pages = (3, 40), np.array([4, 0, 7], dtype=np.int32)
    with opened(Shape(layers=4), seed=5) as source:
        results = []
        for each in (copy_rows, reference.copy):
            with opened(Shape(layers=3, uneven=True), seed=None) as target:
                near = pool_view(source, pages, 0, range(2, 4), range(1, 3))
                each(near, pool_view(target, pages[::-1].copy(), 0, range(1, 3), range(2)), tokens)
                results.append(contents(target))
        assert all(map(np.array_equal, *results))


def test_opaque_pages_travel_as_whole_blobs_and_cannot_be_entered_in_the_middle() -> None:
    shape = Shape(order=PageOrder.OPAQUE, blob_bytes=1000, page_size=16)
    with opened(shape, seed=3) as source, opened(shape, seed=None) as target:
        tokens, chosen = (32, 101), (range(1, 3), range(1, 3))
        pages = np.array([4, 0, 11, 2, 9], dtype=np.int32)
        actual, expected = gathered(source, pages, tokens, *chosen)
        assert np.array_equal(actual, expected)
        slab = actual[GUARD_BYTES:-GUARD_BYTES]
        assert payload_bytes(source, tokens, *chosen) == 2 * 5 * 2 * 1000
        copy_rows(*chosen_of(target, pages, tokens, *chosen, slab)[::-1], tokens)
        for layer in (1, 2):
            assert np.array_equal(plane_of(target, layer)[pages, :, 1:3], plane_of(source, layer)[pages, :, 1:3])
        near = pool_view(source, pages, 2, *chosen)
        with pytest.raises(ShapeError, match="tokens"):
            copy_rows(near, pool_view(target, pages, 2, *chosen), (33, 101))


def test_a_slab_at_an_odd_address_is_packed_all_the_same() -> None:
    with opened(Shape(), seed=1) as pool:
        pages, tokens = np.array([3, 1], dtype=np.int32), (4, 30)
        payload = payload_bytes(pool, tokens, range(3), range(4))
        expected = np.empty(payload, dtype=np.uint8)
        reference.copy(*chosen_of(pool, pages, tokens, range(3), range(4), expected), tokens)
        for shift in (1, 2, 4, 8):
            buffer = np.full(payload + 16, POISON, dtype=np.uint8)
            copy_rows(*chosen_of(pool, pages, tokens, range(3), range(4), buffer[shift : shift + payload]), tokens)
            assert np.array_equal(buffer[shift : shift + payload], expected)
            assert bool((buffer[:shift] == POISON).all())
            assert bool((buffer[shift + payload :] == POISON).all())


def test_the_trailer_lies_at_the_aligned_end_and_no_old_byte_lies_before_it() -> None:
    shape = Shape(head_dim=7, element_bytes=1, page_size=3)
    with opened(shape, seed=1) as pool:
        chosen = ((0, 2), range(3), range(1))
        payload = payload_bytes(pool, *chosen)
        assert payload % slabs.ALIGNMENT_BYTES != 0
        slab = np.full(slabs.slab_bytes(payload), POISON, dtype=np.uint8)
        copy_rows(*chosen_of(pool, np.array([5], dtype=np.int32), *chosen, slab), chosen[0], trailer_for(payload))
        tail = slab[payload:].tobytes()
        assert tail[-slabs.TRAILER_BYTES :] == trailer_for(payload).data
        assert not any(tail[: -slabs.TRAILER_BYTES])


def test_pages_out_of_range_are_refused_by_their_index_before_anything_is_written() -> None:
    with opened(Shape(), seed=1) as pool:
        before = contents(pool)
        slab = np.full(1 << 18, POISON, dtype=np.uint8)
        tokens = (0, 48)

        def sides(*pages: int) -> tuple[View, View]:
            return chosen_of(pool, np.array(pages, dtype=np.int32), tokens, range(3), range(4), slab)

        for wrong in (-1, 12, 2**31 - 1):
            for near, far in (sides(3, wrong, 0), sides(3, wrong, 0)[::-1]):
                with pytest.raises(LongshoreError, match=r"pages\[1\]") as refused:
                    copy_rows(near, far, tokens)
                assert refused.value.reason is Reason.PAGE_OUT_OF_RANGE
        with pytest.raises(LongshoreError, match=r"pages\[0\] and pages\[2\] are both 3") as refused:
            copy_rows(*sides(3, 1, 3)[::-1], tokens)
        assert refused.value.reason is Reason.TOKENS_OVERLAP
        assert bool((slab == POISON).all())
        assert all(map(np.array_equal, before, contents(pool)))


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("target.pages", {"pages": np.array([], dtype=np.int32)}),
        ("pages", {"pages": np.array([1], dtype=np.int64)}),
        ("pages", {"pages": np.array([[1]], dtype=np.int32)}),
        ("tokens", {"tokens": (3, 3)}),
        ("tokens", {"tokens": (-1, 3)}),
        ("target.pages", {"tokens": (0, 17)}),
        ("layers", {"layers": range(4)}),
        ("layers", {"layers": range(0)}),
        ("layers", {"layers": range(2)}),
        ("heads", {"heads": range(2, 5)}),
        ("heads", {"heads": range(0, 4, 2)}),
        ("layers range(0, 3) and heads", {"heads": range(3)}),
        ("rows", {"shape": Shape(head_dim=32)}),
        ("trailer", {"trailer": trailer_for(1)}),
        ("trailer", {"trailer": trailer_for(2 * 3 * 16 * 4 * 128)}),
    ],
)
def test_an_argument_that_breaks_the_contract_is_named_and_nothing_is_written(
    argument: str, changes: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {
        "pages": np.array([1], dtype=np.int32),
        "tokens": (0, 16),
        "layers": range(3),
        "heads": range(4),
        "shape": Shape(),
        "trailer": None,
    } | changes
    with opened(Shape(), seed=1) as source, opened(asked["shape"], seed=None) as target:
        near = pool_view(source, np.arange(3, dtype=np.int32), 0, range(3), range(4))
        with pytest.raises(ShapeError, match=f"^{re.escape(argument)}"):
            copy_rows(
                near,
                pool_view(target, asked["pages"], 0, asked["layers"], asked["heads"]),
                asked["tokens"],
                asked["trailer"],
            )
        assert all(bool((region == POISON).all()) for region in contents(target))


@pytest.mark.parametrize(
    "slab",
    [np.zeros(16, dtype=np.uint8), np.zeros(1 << 16, dtype=np.int8), np.zeros(1 << 17, dtype=np.uint8)[::2]],
    ids=["short", "of another type", "with gaps"],
)
def test_a_slab_that_is_no_memory_for_it_is_refused(slab: Bytes) -> None:
    with opened(Shape(), seed=1) as pool, pytest.raises(ShapeError, match=r"^slab"):
        chosen_of(pool, np.array([1], dtype=np.int32), (0, 16), range(3), range(4), slab)


def test_an_unregistered_pool_is_refused_rather_than_read() -> None:
    with opened(Shape(), seed=1) as pool:
        slab = np.zeros(1 << 16, dtype=np.uint8)
        near, far = chosen_of(pool, np.array([1], dtype=np.int32), (0, 16), range(3), range(4), slab)
        assert pool.close()
        with pytest.raises(PoolError, match="unregistered"):
            copy_rows(near, far, (0, 16))


@pytest.mark.parametrize("row_bytes", [64, 192, 1024])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("heads", [1, 3])
def test_streaming_stores_copy_every_row_of_groups_and_of_what_is_left_over(row_bytes, tokens, heads) -> None:
    source_stride, target_stride = heads * row_bytes + 64, heads * (row_bytes + 128)
    source = np.random.default_rng(1).integers(1, 256, tokens * source_stride, np.uint8)
    buffer = StagingBuffer(4096 + tokens * target_stride)
    target = buffer.view(64, tokens * target_stride)
    wanted = target.copy()
    for token, head in itertools.product(range(tokens), range(heads)):
        near, far = token * source_stride + head * row_bytes, token * target_stride + head * (row_bytes + 128)
        wanted[far : far + row_bytes] = source[near : near + row_bytes]
    segments = np.array([[0, 0, tokens, row_bytes]], dtype=np.int64)
    rows = PlaneRows(
        np.array([source.ctypes.data]),
        np.array([target.ctypes.data]),
        segments,
        Strides(source_stride, row_bytes),
        Strides(target_stride, row_bytes + 128),
        heads,
    )
    copy_addresses(rows, stream=True)
    assert (target == wanted).all()
    buffer.close()


@pytest.mark.parametrize("lengths", [[64], [512, 1536], [4096, 65536], [8192 + 64, 64]])
def test_long_runs_of_any_length_are_copied_whole_by_streaming_stores(lengths) -> None:
    source = np.random.default_rng(2).integers(1, 256, sum(lengths) + 64 * len(lengths), np.uint8)
    buffer = StagingBuffer(1 << 20)
    ends = np.cumsum([0, *lengths])
    segments = np.array(
        [[end + 64 * index, end, 1, length] for index, (end, length) in enumerate(zip(ends, lengths, strict=False))],
        dtype=np.int64,
    )
    sides = (np.array([source.ctypes.data]), np.array([buffer.address]))
    copy_addresses(PlaneRows(*sides, segments, Strides(0, 0), Strides(0, 0), 1), stream=True)
    wanted = np.concatenate([source[near : near + length] for near, _, _, length in segments])
    assert (buffer.view(0, sum(lengths)) == wanted).all()
    assert not buffer.view(sum(lengths), 4096).any()
    buffer.close()
