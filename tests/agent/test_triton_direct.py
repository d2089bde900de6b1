"""The direct kernel in Triton's interpreter against its reference, bit for bit, and what the compiler makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from kernel_process import KernelProcess
from page_shapes import SHAPES, Shape

from longshore_agent.kernels.device_grid import Tuning
from longshore_wire.layout import PageOrder

CPU = ("cpu", "cpu")
ALL = range(3)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[KernelProcess]:
    with KernelProcess("direct_checks", {"TRITON_INTERPRET": "1"}) as process:
        yield process


def several(near: Shape, far: Shape, heads: int) -> list[tuple]:
    """Whole pages, one token, a piece that begins and ends within pages, a late place; the last heads of the wider side."""
    size = max(near.page_size, far.page_size)
    near_last, far_last = near.heads - heads, far.heads - heads
    layers = range(near.layers)
    return [
        ((0, 2 * size), layers, 0, layers, 0, heads),
        ((size // 3, size // 3 + 1), layers, near_last, layers, far_last, heads),
        ((size // 2, 2 * size - size // 3), range(1, near.layers), 0, range(near.layers - 1), far_last, heads),
        ((1000 * size + size // 3, 1001 * size + 1), range(1), near_last, range(1, 2), 0, heads),
    ]


SMALL = Shape(page_size=4, page_count=30)
PAIRS = {
    "to four times as many heads": (replace(SMALL, heads=1), SMALL, 1),
    "from twice as many heads": (SMALL, replace(SMALL, heads=2), 2),
    "NHD to HND": (SMALL, replace(SMALL, order=PageOrder.HND), 3),
    "HND to NHD in larger pages": (replace(SMALL, order=PageOrder.HND), Shape(page_count=12), 4),
    "pages of 16 to pages of 4": (Shape(), SMALL, 2),
    "pages of 4 to pages of 16": (SMALL, Shape(), 4),
    "pages of 16 to pages of 17": (Shape(), Shape(page_size=17), 4),
    "pages of 1 to pages of 16": (Shape(page_size=1, page_count=60), Shape(page_count=12), 4),
    "pages of 64 to pages of 256": (
        Shape(page_size=64, page_count=12, layers=2),
        Shape(page_size=256, page_count=3, layers=2),
        4,
    ),
    "rows of 7 bytes with gaps": (
        replace(SHAPES["rows of 7 bytes"], page_count=20),
        Shape(head_dim=7, element_bytes=1, page_size=5, page_count=20),
        2,
    ),
    "a region a layer to planes of a page beside each other": (Shape(split=True), Shape(interleaved=True), 4),
    "planes of unequal strides": (Shape(uneven=True), Shape(order=PageOrder.HND, uneven=True), 2),
    "latent": (SHAPES["latent"], replace(SHAPES["latent"], page_size=4, page_count=30), 1),
    "4 bytes": (Shape(head_dim=128, element_bytes=4), Shape(head_dim=128, element_bytes=4, page_size=8), 3),
}


@pytest.mark.parametrize("name", PAIRS)
def test_interpreted_pages_of_another_layout_hold_what_the_reference_writes(
    name: str, interpreter: KernelProcess
) -> None:
    near, far, heads = PAIRS[name]
    assert interpreter.run("check_direct", near, far, several(near, far, heads), CPU) > 0


@pytest.mark.parametrize("name", PAIRS)
def test_a_launch_bound_to_its_shape_serves_all_slabs_of_that_shape_of_every_room(
    name: str, interpreter: KernelProcess
) -> None:
    near, far, heads = PAIRS[name]
    bound, slabs = interpreter.run("check_bound", near, far, heads, CPU)
    assert 0 < bound < slabs


def test_a_bound_launch_refuses_what_does_not_fit_it_and_writes_nothing(interpreter: KernelProcess) -> None:
    assert interpreter.run("bound_refusals") == ["ShapeError INTERNAL", "LongshoreError TOKENS_OVERLAP"]


@pytest.mark.parametrize("blob_bytes", [5, 1000])
def test_opaque_pages_are_copied_whole(blob_bytes: int, interpreter: KernelProcess) -> None:
    shape = Shape(order=PageOrder.OPAQUE, blob_bytes=blob_bytes)
    requests = [((0, 33), ALL, 0, ALL, 0, 4), ((32, 101), range(1, 3), 1, range(2), 2, 2)]
    assert interpreter.run("check_direct", shape, shape, requests, CPU) > 0


@pytest.mark.parametrize("tile_bytes", [512, 65536])
@pytest.mark.parametrize("programs_max", [0, 3])
def test_tiles_of_every_size_give_the_same_bytes(
    tile_bytes: int, programs_max: int, interpreter: KernelProcess
) -> None:
    tuning = Tuning(tile_bytes=tile_bytes, programs_max=programs_max)
    # A tile is of one plane: K and V of a layer, another one on each side, show what those of all do.
    one, other = range(1, 2), range(2, 3)
    for near, far in ((Shape(), SMALL), (Shape(), Shape(page_size=17)), (Shape(page_size=64), Shape(heads=5))):
        requests = [((5, 63), one, 1, other, 0, 2), ((0, 64), other, 0, one, 0, 4)]
        assert interpreter.run("check_direct", near, replace(far, page_count=40), requests, CPU, tuning=tuning) > 0


@pytest.mark.parametrize("at_end", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(
    ("near", "far"), [(Shape(page_count=2), Shape(page_size=8, page_count=4)), (Shape(), Shape(page_size=17))]
)
def test_nothing_beside_the_pages_is_even_read(
    near: Shape, far: Shape, at_end: bool, interpreter: KernelProcess
) -> None:
    tokens = (0, min(near.page_size * near.page_count, far.page_size * far.page_count))
    assert interpreter.run("check_fences", near, far, tokens, at_end=at_end) > 0


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        ("another model", "ShapeError", "one model"),
        ("fewer heads", "ShapeError", "heads"),
        ("layers beyond the last", "ShapeError", "layers"),
        ("too few pages", "ShapeError", "pages"),
        ("a stream elsewhere", "ShapeError", "stream"),
        ("a target page twice", "LongshoreError TOKENS_OVERLAP", "pages[1]"),
        ("a target page out of range", "LongshoreError PAGE_OUT_OF_RANGE", "pages[1]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(
    fault: str, kind: str, word: str, interpreter: KernelProcess
) -> None:
    found, message, touched = interpreter.run("refusal", fault)
    assert found.startswith(kind)
    assert word in message
    assert not touched
