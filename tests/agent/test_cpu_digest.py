"""Digests on a CPU: equal to the reference, the same for any two layouts, and different after any damage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_shapes import (
    CPU_SHAPES,
    LARGE,
    Shape,
    chosen_of,
    few,
    one_part,
    opened,
    page_ids,
    payload_bytes,
    plane_of,
    requests_of,
    trailer_for,
)

from longshore_agent.errors import ShapeError
from longshore_agent.kernels import cpu_copy, reference
from longshore_agent.kernels.copier import Part, PlaneRows, Slab, View, pool_view, slab_view
from longshore_agent.kernels.cpu_copy import CpuCopier, copy_rows, digest_rows
from longshore_agent.kernels.digest import READ_BACK_EVERY, Digests, Words, first_difference
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_wire.layout import PageOrder
from longshore_wire.slabs import slab_bytes

KEY = b"sixteen bytes..."
# One cache in two layouts: pages of both sizes hold TOKENS tokens.
NEAR = Shape(layers=2, heads=4, head_dim=24, page_size=4, page_count=12)
FAR = dataclasses.replace(NEAR, page_size=8, order=PageOrder.HND, page_count=9)
APART = dataclasses.replace(NEAR, transposed=True, page_size=2, page_count=20)
TOKENS = 29


def digests(view: View, tokens: tuple[int, int], key: bytes = KEY) -> Words:
    """Return the digests of a view, [planes, heads]."""
    return np.frombuffer(digest_rows(view, tokens, key), np.uint64).reshape(view.plane_count, len(view.heads))


def whole(pool: KVPool, pages: list[int]) -> View:
    """Return the view of a sequence in these pages, all layers and heads."""
    layout = pool.layout
    ids = np.array(pages, dtype=np.int32)
    return pool_view(pool, ids, 0, range(len(layout.layers)), range(len(layout.heads)))


@contextmanager
def cache(*shapes: Shape) -> Iterator[list[View]]:
    """Return one sequence of random bytes in a pool of each shape, in shuffled pages."""
    with ExitStack() as stack:
        views: list[View] = []
        for seed, shape in enumerate(shapes):
            pool = stack.enter_context(opened(shape, seed=1 if not seed else None))
            count = -(-TOKENS // shape.page_size)
            pages = np.random.default_rng(seed).permutation(shape.page_count)[:count].tolist()
            views.append(whole(pool, pages))
            if seed:
                copy_rows(views[0], views[seed], (0, TOKENS))
        yield views


@pytest.mark.parametrize("shape", few(CPU_SHAPES, *(CPU_SHAPES.keys() - LARGE)))
def test_digests_of_pages_are_those_of_the_reference(shape: Shape) -> None:
    with opened(shape, seed=1) as pool:
        for seed, (tokens, layers, heads) in enumerate(requests_of(shape)):
            pages = page_ids(shape, tokens, seed, repeats=True)
            slab = np.zeros(payload_bytes(pool, tokens, layers, heads), np.uint8)
            view, _ = chosen_of(pool, pages, tokens, layers, heads, slab)
            assert np.array_equal(digests(view, tokens), reference.digests(view, tokens, KEY)), (tokens, layers, heads)


@pytest.mark.parametrize("row_bytes", [2, 62, 64, 66, 510, 512, 514, 1152])
def test_a_row_of_any_length_has_the_digest_of_the_reference(row_bytes: int) -> None:
    shape = dataclasses.replace(NEAR, head_dim=row_bytes // 2)
    with opened(shape, seed=3) as pool:
        view = whole(pool, [2, 7, 1])
        assert np.array_equal(digests(view, (1, 11)), reference.digests(view, (1, 11), KEY))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, TOKENS - 1), st.integers(1, TOKENS), st.sampled_from([FAR, APART, NEAR]))
def test_any_two_layouts_of_one_cache_have_equal_digests(first: int, count: int, shape: Shape) -> None:
    tokens = (first, min(first + count, TOKENS))
    with cache(NEAR, shape) as (near, far):
        assert np.array_equal(digests(near, tokens), digests(far, tokens))


def test_digests_of_adjacent_ranges_add_up() -> None:
    with cache(NEAR) as (view,):
        parts = digests(view, (0, 13)) + digests(view, (13, TOKENS))
        assert np.array_equal(parts, digests(view, (0, TOKENS)))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3), st.integers(0, 11), st.integers(0, 3), st.integers(0, 3), st.integers(0, 23), st.integers(0, 15)
)
def test_one_changed_bit_changes_the_digest_of_its_layer_and_head_alone(
    plane: int, page: int, slot: int, head: int, element: int, bit: int
) -> None:
    with opened(NEAR, seed=1) as pool:
        view = whole(pool, list(range(NEAR.page_count)))
        tokens = (0, NEAR.page_count * NEAR.page_size)
        before = digests(view, tokens)
        with pool.in_use():
            plane_of(pool, plane)[page, slot, head, element] ^= np.uint16(1 << bit)
        changed = np.argwhere(before != digests(view, tokens))
        assert changed.tolist() == [[plane, head]]


def test_a_moved_token_a_swapped_head_and_a_wrong_page_change_digests() -> None:
    with opened(NEAR, seed=1) as pool:
        view = whole(pool, [3, 5, 7])
        before = digests(view, (0, 12))
        assert (digests(whole(pool, [3, 7, 5]), (0, 12)) != before).all()
        assert (digests(whole(pool, [3, 5, 8]), (0, 12)) != before).all()
        # The same rows at other places of the sequence.
        assert (digests(view, (0, 4)) != digests(whole(pool, [5, 3, 7]), (4, 8))).all()
        with pool.in_use():
            keys = plane_of(pool, 0)
            keys[:, :, [0, 1]] = keys[:, :, [1, 0]]
            keys[3, [0, 2]] = keys[3, [2, 0]]
        differs = digests(view, (0, 12)) != before
        assert differs[0].all()
        assert not differs[1:].any()


def test_another_key_gives_other_digests() -> None:
    with cache(NEAR) as (view,):
        assert (digests(view, (0, TOKENS), b"another key") != digests(view, (0, TOKENS))).all()


@pytest.mark.parametrize("shape", [NEAR, FAR, APART], ids=["NHD", "HND", "elements apart"])
def test_a_copy_gives_the_digests_of_its_pages_and_the_bytes_that_it_copies_without(shape: Shape) -> None:
    copier, tokens = CpuCopier(), (3, TOKENS)
    with cache(NEAR, shape) as (near, far), opened(shape, seed=None) as other:
        payload = near.payload_bytes(tokens)
        buffer = StagingBuffer(slab_bytes(payload))
        expected = digest_rows(near, tokens, KEY)

        gather = copier.submit(one_part(near, Slab(buffer, 0, payload), tokens, trailer_for(payload), digest_key=KEY))
        assert gather.digests == Digests(expected, b"")
        plain = np.zeros(slab_bytes(payload), np.uint8)
        copy_rows(near, slab_view(plain, near, tokens), tokens, trailer_for(payload))
        assert np.array_equal(buffer.view(0, slab_bytes(payload)), plain)

        pages = whole(other, far.pages.tolist())
        scatter = copier.submit(one_part(Slab(buffer, 0, payload), pages, tokens, digest_key=KEY))
        assert scatter.end()
        assert scatter.digests == Digests(b"", expected)

        direct = copier.submit(one_part(near, pages, tokens, digest_key=KEY))
        assert direct.digests == Digests(expected, expected)
        assert copier.submit(one_part(near, pages, tokens)).digests == Digests()
        assert copier.digest((Part(pages, tokens),), KEY).digests == Digests(expected)


@pytest.mark.parametrize("direct", [False, True])
def test_a_plane_that_is_always_written_elsewhere_is_found_within_as_many_copies_as_planes(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dataclasses.replace(NEAR, layers=8)
    real = cpu_copy.copy_addresses

    def copy_addresses(rows: PlaneRows, **given: Any) -> None:
        planes = rows.target_planes.copy()
        # Streaming stores need the alignment of the right address.
        planes[5] = scratch.ctypes.data + (planes[5] - scratch.ctypes.data) % 64
        real(rows._replace(target_planes=planes), **given)

    with opened(shape, seed=1) as source, opened(shape, seed=2) as target:
        views = whole(source, [1, 2, 3]), whole(target, [4, 5, 6])
        scratch = np.zeros(1 << 20, np.uint8)
        buffer = StagingBuffer(slab_bytes(views[0].payload_bytes((0, 12))))
        slab = Slab(buffer, 0, views[0].payload_bytes((0, 12)))
        copier = CpuCopier()
        copier.submit(one_part(views[0], slab, (0, 12)))
        wanted = digest_rows(views[0], (0, 12), KEY)
        monkeypatch.setattr(cpu_copy, "copy_addresses", copy_addresses)
        copy = one_part(views[0] if direct else slab, views[1], (0, 12), digest_key=KEY)
        found = [copier.submit(copy).digests.target for _ in range(READ_BACK_EVERY)]
        assert [first_difference(wanted, each) for each in found].count(5 * shape.heads) == 1


def test_pages_that_lack_tokens_are_refused() -> None:
    with opened(NEAR, seed=1) as pool, pytest.raises(ShapeError, match="rows 0 to 13 are wanted"):
        digest_rows(whole(pool, [1, 2, 3]), (0, 13), KEY)


def test_the_first_difference_is_the_first_digest_that_differs_or_lacks() -> None:
    some = np.arange(4, dtype="<u8").tobytes()
    assert first_difference(some, some) is None
    assert first_difference(some, some[:16] + bytes(16)) == 2
    assert first_difference(some, some[:24]) == 3
    assert first_difference(some, b"") == 0
