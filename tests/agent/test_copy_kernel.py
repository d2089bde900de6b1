"""Compares the copy kernel in Triton's interpreter with the reference, bit for bit, and checks its compiled code.

Gathers, scatters and direct copies are one kernel: its two sides are pages or packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
from kernel_process import KernelProcess
from page_shapes import SHAPES, Shape, few

from longshore_agent.kernels.device_grid import Tuning, choose_tile
from longshore_wire.layout import PageOrder

Request = tuple[tuple[int, int], range, range]

CPU = ("cpu", "cpu")
ALL = range(3)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[KernelProcess]:
    with KernelProcess("copy_checks", {"TRITON_INTERPRET": "1"}) as process:
        yield process


OPAQUE = Shape(order=PageOrder.OPAQUE, blob_bytes=1000)
SHAPES_OF_DEVICES = SHAPES | {"opaque pages": OPAQUE, "opaque pages of 5 bytes": replace(OPAQUE, blob_bytes=5)}
# Of the shapes, `make test` gathers some and scatters others.
GATHERED = ("pages of 1, HND", "planes of unequal strides", "latent", "opaque pages of 5 bytes")
SCATTERED = ("NHD", "HND, pages of 17, gaps", "rows of 7 bytes", "one head")


def requests_of(shape: Shape) -> list[Request]:
    """Return requests of all kinds: partial pages, one token, a late position in the sequence, some layers, some heads."""
    size, layers, heads = shape.page_size, shape.layers, shape.heads
    skipped = 0 if shape.order is PageOrder.OPAQUE else size // 2
    late = 1000 * size + (skipped and size // 3)
    return [
        ((skipped, 2 * size + (size + 1) // 2), range(layers), range(heads)),
        ((skipped, skipped + 1), range(layers), range(heads // 3, heads // 3 + 1)),
        ((late, 1002 * size), range(1, 2), range(heads // 2, heads)),
        ((0, max(size, 70 // size * size)), range(layers - 1, layers), range(heads)),
    ]


def several(near: Shape, far: Shape, heads: int) -> list[tuple]:
    """Return requests of whole pages, one token, partial pages and a late position; with the wider side's last heads."""
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
NAMES = {name: name for name in PAIRS}


@pytest.mark.parametrize("shape", few(SHAPES_OF_DEVICES, *GATHERED))
def test_an_interpreted_gather_packs_what_the_reference_packs(shape: Shape, interpreter: KernelProcess) -> None:
    assert interpreter.run("check_gather", shape, requests_of(shape), "cpu") > 0


@pytest.mark.parametrize("shape", few(SHAPES_OF_DEVICES, *SCATTERED))
def test_an_interpreted_scatter_writes_what_the_reference_writes(shape: Shape, interpreter: KernelProcess) -> None:
    assert interpreter.run("check_scatter", shape, requests_of(shape), "cpu") > 0


@pytest.mark.parametrize(
    "name", few(NAMES, *(NAMES.keys() - {"pages of 64 to pages of 256", "4 bytes", "HND to NHD in larger pages"}))
)
def test_interpreted_pages_of_another_layout_hold_what_the_reference_writes(
    name: str, interpreter: KernelProcess
) -> None:
    near, far, heads = PAIRS[name]
    assert interpreter.run("check_direct", near, far, several(near, far, heads), CPU) > 0


@pytest.mark.parametrize("name", few(NAMES, "NHD to HND"))
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_a_launch_bound_to_its_shape_serves_all_slabs_of_that_shape_of_every_room(
    name: str, staged: bool, interpreter: KernelProcess
) -> None:
    near, far, heads = PAIRS[name]
    bound, slabs = interpreter.run("check_bound", near, far, heads, CPU, staged=staged)
    assert 0 < bound < slabs


def test_a_bound_launch_refuses_what_does_not_fit_it_and_writes_nothing(interpreter: KernelProcess) -> None:
    assert interpreter.run("bound_refusals") == ["ShapeError INTERNAL", "LongshoreError TOKENS_OVERLAP"]


@pytest.mark.parametrize("blob_bytes", [5, 1000])
def test_opaque_pages_are_copied_whole(blob_bytes: int, interpreter: KernelProcess) -> None:
    shape = Shape(order=PageOrder.OPAQUE, blob_bytes=blob_bytes)
    requests = [((0, 33), ALL, 0, ALL, 0, 4), ((32, 101), range(1, 3), 1, range(2), 2, 2)]
    assert interpreter.run("check_direct", shape, shape, requests, CPU) > 0


@pytest.mark.parametrize("shift", few({"1": 1, "2": 2, "4": 4, "8": 8}, "1", "8"))
def test_pages_and_slabs_at_odd_addresses_are_copied_all_the_same(shift: int, interpreter: KernelProcess) -> None:
    shape = Shape(layers=2, heads=2, page_count=4)
    request = [((4, 30), range(2), range(2))]
    for operation in ("check_gather", "check_scatter"):
        interpreter.run(operation, shape, request, "cpu", pool_shift=shift)
        interpreter.run(operation, shape, request, "cpu", slab_shift=shift)


@pytest.mark.parametrize("tile_bytes", few({"512": 512, "4096": 4096, "65536": 65536}, "4096"))
@pytest.mark.parametrize("programs_max", few({"0": 0, "3": 3}, "3"))
def test_tiles_of_every_size_give_the_same_bytes(
    tile_bytes: int, programs_max: int, interpreter: KernelProcess
) -> None:
    tuning = Tuning(tile_bytes=tile_bytes, programs_max=programs_max)
    for shape in (
        SHAPES["HND, pages of 17, gaps"],
        Shape(layers=1, head_dim=80),
        Shape(layers=1, page_size=1, page_count=20),
    ):
        request = [((3, 20), range(shape.layers), range(1, 4))]
        interpreter.run("check_gather", shape, request, "cpu", tuning=tuning)
        interpreter.run("check_scatter", shape, request, "cpu", tuning=tuning)


@pytest.mark.parametrize("tile_bytes", few({"512": 512, "65536": 65536}, "65536"))
@pytest.mark.parametrize("programs_max", few({"0": 0, "3": 3}, "3"))
def test_tiles_of_every_size_give_the_same_bytes_between_pages(
    tile_bytes: int, programs_max: int, interpreter: KernelProcess
) -> None:
    tuning = Tuning(tile_bytes=tile_bytes, programs_max=programs_max)
    # A tile belongs to one plane, so K and V of one layer, a different one on each side, represent all layers.
    one, other = range(1, 2), range(2, 3)
    for near, far in ((Shape(), SMALL), (Shape(), Shape(page_size=17)), (Shape(page_size=64), Shape(heads=5))):
        requests = [((5, 63), one, 1, other, 0, 2), ((0, 64), other, 0, one, 0, 4)]
        assert interpreter.run("check_direct", near, replace(far, page_count=40), requests, CPU, tuning=tuning) > 0


@pytest.mark.parametrize("what", ["pages", "tokens"])
def test_what_lies_further_apart_than_32_bits_count_is_found(what: str, interpreter: KernelProcess) -> None:
    assert interpreter.run("check_far", what) > 0


def test_the_fences_end_a_process_that_reads_beyond_them() -> None:
    with KernelProcess("copy_checks", {}) as process, pytest.raises(BrokenProcessPool):
        process.run("read_beyond_a_fence")


THREE = Shape(page_count=3, layers=2)


@pytest.mark.parametrize("at_end", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(
    "pair",
    few(
        {
            "NHD": (THREE, THREE),
            **{
                name: (replace(SHAPES[name], page_count=3, layers=2),) * 2
                for name in ("HND, pages of 17, gaps", "rows of 7 bytes")
            },
            "smaller pages": (Shape(page_count=2), Shape(page_size=8, page_count=4)),
            "pages of 16 to pages of 17": (Shape(), Shape(page_size=17)),
        },
        "NHD",
        "rows of 7 bytes",
        "smaller pages",
    ),
)
def test_nothing_beside_pages_and_slab_is_even_read(
    pair: tuple[Shape, Shape], at_end: bool, interpreter: KernelProcess
) -> None:
    near, far = pair
    # All pages, so that the copy includes the first and the last byte of a pool. A stray access ends the process.
    tokens = (0, min(near.page_size * near.page_count, far.page_size * far.page_count))
    assert interpreter.run("check_fences", near, far, tokens, at_end=at_end) > 0


ARGUMENTS = {
    "gather": {
        "too few pages": "pages",
        "pages of another part": "pages",
        "pages of 64 bits": "pages",
        "no pages": "pages",
        "no tokens": "tokens",
        "layers beyond the last": "layers",
        "every second head": "heads",
        "a short slab": "target",
        "no room for a trailer": "target",
        "another payload": "target.payload_bytes",
        "another trailer": "trailer",
        "a stream elsewhere": "stream",
        "two slabs": "source and target",
    },
    "scatter": {
        "no tokens": "tokens",
        "a short slab": "source",
        "another payload": "source.payload_bytes",
        "a trailer behind pages": "trailer",
        "a stream elsewhere": "stream",
    },
    "direct": {
        "another model": "rows of",
        "fewer heads": "layers range(0, 3) and heads",
        "layers beyond the last": "layers",
        "too few pages": "target.pages",
        "no tokens": "tokens",
        "a stream elsewhere": "stream",
        "a trailer behind pages": "trailer",
    },
}


@pytest.mark.parametrize(
    ("kind", "fault", "argument"),
    [(kind, fault, argument) for kind, faults in ARGUMENTS.items() for fault, argument in faults.items()],
)
def test_an_argument_that_breaks_the_contract_is_named_and_nothing_is_launched(
    kind: str, fault: str, argument: str, interpreter: KernelProcess
) -> None:
    found, message, touched = interpreter.run("refusal", kind, fault)
    assert found == "ShapeError INTERNAL"
    assert message.startswith(argument)
    assert not touched


@pytest.mark.parametrize(
    ("kind", "fault", "reason"),
    [
        ("gather", "a page beyond the last", "PAGE_OUT_OF_RANGE"),
        ("scatter", "a page beyond the last", "PAGE_OUT_OF_RANGE"),
        ("direct", "a page beyond the last", "PAGE_OUT_OF_RANGE"),
        ("scatter", "a page twice", "TOKENS_OVERLAP"),
        ("direct", "a page twice", "TOKENS_OVERLAP"),
    ],
)
def test_pages_that_cannot_be_are_refused_by_their_index(
    kind: str, fault: str, reason: str, interpreter: KernelProcess
) -> None:
    found, message, touched = interpreter.run("refusal", kind, fault)
    assert found == f"LongshoreError {reason}"
    assert "pages[1]" in message
    assert not touched


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelProcess]:
    cache = str(tmp_path_factory.mktemp("triton"))
    with KernelProcess("kernel_code", {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}) as process:
        yield process


def pages_of(kind: str, page_tokens: int) -> tuple[int, int]:
    """Return the tokens of a page of source and target; 0 for a slab."""
    return (0 if kind == "scatter" else page_tokens), (0 if kind == "gather" else page_tokens)


@pytest.mark.parametrize("kind", ["gather", "scatter", "direct"])
@pytest.mark.parametrize("page_tokens", few({"1": 1, "16": 16, "17": 17, "64": 64}, "1", "17"))
def test_the_compiled_kernel_moves_16_bytes_an_access_and_loads_a_page_id_once(
    kind: str, page_tokens: int, compiler: KernelProcess
) -> None:
    row_bytes, tuning = 512, Tuning()
    tile = choose_tile(16, row_bytes, 2048, pages_of(kind, page_tokens), tuning.tile_bytes)
    counts = compiler.run("memory_instructions", tile, tuning)
    accesses = tile.rows * row_bytes // 16 // (32 * tuning.warps)
    sides = 2 if kind == "direct" else 1
    assert counts["ld.global.v2.b64"] == accesses
    assert counts["st.global.v2.b64"] == accesses
    # One page id for each row of a thread, or one for all of them; a slab has none.
    assert counts["ld.global.b32"] == sides * (1 if page_tokens in {16, 64} else accesses)
    # A plane's address and strides; pages of one token have no stride between tokens.
    assert counts["ld.global.b64"] <= 4 * sides
    # The tail of a gather is written byte by byte and passed with the launch.
    tail = 1 if kind == "gather" else 0
    assert (counts["ld.global.b8"], counts["st.global.b8"]) == (0, tail)
    assert counts.total() == 2 * accesses + counts["ld.global.b32"] + counts["ld.global.b64"] + tail


@pytest.mark.parametrize("unit_bytes", few({"1": 1, "2": 2, "4": 4, "8": 8}, "1", "4"))
def test_the_compiled_kernel_never_takes_more_at_once_than_the_alignment_allows(
    unit_bytes: int, compiler: KernelProcess
) -> None:
    tile = choose_tile(unit_bytes, 32 * unit_bytes, 2048, (64, 0), 8192)
    counts = compiler.run("memory_instructions", tile, Tuning())
    wider = {f"st.global.b{8 * size}" for size in (1, 2, 4, 8) if size > unit_bytes}
    assert counts[f"st.global.b{8 * unit_bytes}"] > 0
    assert not wider & counts.keys()
    assert not [name for name in counts if ".global.v" in name]


@pytest.mark.parametrize("kind", ["gather", "scatter", "direct"])
def test_the_driver_is_given_what_the_compiled_kernel_takes(kind: str, compiler: KernelProcess) -> None:
    tuning = Tuning()
    tile = choose_tile(16, 512, 2048, pages_of(kind, 16), tuning.tile_bytes)
    taken, given, places = compiler.run("parameters", tile, tuning)
    assert taken[: len(given)] == given
    # Behind our arguments are addresses of scratch memory, which this kernel does not use.
    assert set(taken[len(given) :]) <= {64}
    assert len(taken) <= places


def test_the_public_launch_compiles_no_kernel_of_its_own_for_any_value(compiler: KernelProcess) -> None:
    named, given = compiler.run("annotated_types")
    assert named == given
