"""The device kernels in Triton's interpreter against the references, bit for bit, and what the compiler makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
from kernel_process import KernelProcess
from page_shapes import SHAPES, Shape

from longshore_agent.kernels.device_grid import Tuning, choose_tile
from longshore_wire.layout import PageOrder

Request = tuple[tuple[int, int], range, range]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[KernelProcess]:
    with KernelProcess("kernel_checks", {"TRITON_INTERPRET": "1"}) as process:
        yield process


OPAQUE = Shape(order=PageOrder.OPAQUE, blob_bytes=1000)
SHAPES_OF_DEVICES = SHAPES | {"opaque pages": OPAQUE, "opaque pages of 5 bytes": replace(OPAQUE, blob_bytes=5)}


def requests_of(shape: Shape) -> list[Request]:
    """One of everything: parts of pages, one token, a late place in the sequence, some layers, some heads."""
    size, layers, heads = shape.page_size, shape.layers, shape.heads
    skipped = 0 if shape.order is PageOrder.OPAQUE else size // 2
    late = 1000 * size + (skipped and size // 3)
    return [
        ((skipped, 2 * size + (size + 1) // 2), range(layers), range(heads)),
        ((skipped, skipped + 1), range(layers), range(heads // 3, heads // 3 + 1)),
        ((late, 1002 * size), range(1, 2), range(heads // 2, heads)),
        ((0, max(size, 70 // size * size)), range(layers - 1, layers), range(heads)),
    ]


@pytest.mark.parametrize("shape", SHAPES_OF_DEVICES.values(), ids=SHAPES_OF_DEVICES)
def test_an_interpreted_gather_packs_what_the_reference_packs(shape: Shape, interpreter: KernelProcess) -> None:
    assert interpreter.run("check_gather", shape, requests_of(shape), "cpu") > 0


@pytest.mark.parametrize("shape", SHAPES_OF_DEVICES.values(), ids=SHAPES_OF_DEVICES)
def test_an_interpreted_scatter_writes_what_the_reference_writes(shape: Shape, interpreter: KernelProcess) -> None:
    assert interpreter.run("check_scatter", shape, requests_of(shape), "cpu") > 0


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_pages_and_slabs_at_odd_addresses_are_copied_all_the_same(shift: int, interpreter: KernelProcess) -> None:
    shape = Shape(layers=2, heads=2, page_count=4)
    request = [((4, 30), range(2), range(2))]
    for operation in ("check_gather", "check_scatter"):
        interpreter.run(operation, shape, request, "cpu", pool_shift=shift)
        interpreter.run(operation, shape, request, "cpu", slab_shift=shift)


@pytest.mark.parametrize("tile_bytes", [512, 4096, 65536])
@pytest.mark.parametrize("programs_max", [0, 3])
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


def test_the_fences_end_a_process_that_reads_beyond_them() -> None:
    with KernelProcess("kernel_checks", {}) as process, pytest.raises(BrokenProcessPool):
        process.run("read_beyond_a_fence")


@pytest.mark.parametrize("what", ["pages", "tokens"])
def test_what_lies_further_apart_than_32_bits_count_is_found(what: str, interpreter: KernelProcess) -> None:
    assert interpreter.run("check_far", what) > 0


ARGUMENTS = {
    "pages": ["too few pages", "pages of another part", "pages of 64 bits", "no pages"],
    "tokens": ["no tokens"],
    "layers": ["layers beyond the last"],
    "heads": ["every second head"],
    "target": ["a short target", "a target of words", "a target with gaps", "a target elsewhere"],
    "source": ["a short source", "a source elsewhere"],
    "trailer": ["another payload"],
    "stream": ["a stream elsewhere"],
}


@pytest.mark.parametrize(("argument", "fault"), [(name, fault) for name in ARGUMENTS for fault in ARGUMENTS[name]])
def test_an_argument_that_breaks_the_contract_is_named_and_nothing_is_launched(
    argument: str, fault: str, interpreter: KernelProcess
) -> None:
    kind, message, touched = interpreter.run("refusal", fault)
    assert kind == "ShapeError"
    assert message.startswith(argument)
    assert not touched


@pytest.mark.parametrize(
    ("fault", "reason"), [("a page beyond the last", "PAGE_OUT_OF_RANGE"), ("a page twice", "TOKENS_OVERLAP")]
)
def test_pages_that_cannot_be_are_refused_by_their_index(fault: str, reason: str, interpreter: KernelProcess) -> None:
    kind, message, touched = interpreter.run("refusal", fault)
    assert kind == f"LongshoreError {reason}"
    assert "pages[1]" in message
    assert not touched


@pytest.mark.parametrize("at_end", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("name", ["NHD", "HND, pages of 17, gaps", "rows of 7 bytes"])
def test_nothing_beside_pages_and_slab_is_even_read(name: str, at_end: bool, interpreter: KernelProcess) -> None:
    shape = replace(SHAPES[name], guard_bytes=0, page_count=3, layers=2)
    size = shape.page_size
    # All three pages, so that the first and the last byte of the pool are among what is copied; a stray access ends the
    # process.
    assert interpreter.run("check_fences", shape, ((0, 3 * size), range(2), range(4)), at_end=at_end) > 0


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelProcess]:
    cache = str(tmp_path_factory.mktemp("triton"))
    with KernelProcess("kernel_code", {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}) as process:
        yield process


@pytest.mark.parametrize("operation", ["gather", "scatter"])
@pytest.mark.parametrize("page_tokens", [1, 16, 17, 64])
def test_the_compiled_kernel_moves_16_bytes_an_access_and_loads_a_page_id_once(
    operation: str, page_tokens: int, compiler: KernelProcess
) -> None:
    row_bytes, tuning = 512, Tuning()
    tile = choose_tile(16, row_bytes, 2048, page_tokens, tuning.tile_bytes)
    counts = compiler.run("memory_instructions", operation, tile, tuning)
    accesses = tile.rows * row_bytes // 16 // (32 * tuning.warps)
    assert counts["ld.global.v2.b64"] == accesses
    assert counts["st.global.v2.b64"] == accesses
    # A page id for each row that a thread has a part of, or one for all of them.
    assert counts["ld.global.b32"] == (1 if page_tokens in {16, 64} else accesses)
    # The plane's address and strides; pages of one token have no step between tokens.
    assert counts["ld.global.b64"] <= 4
    # The tail of a gather goes byte by byte, and comes with the launch.
    tail = 1 if operation == "gather" else 0
    assert (counts["ld.global.b8"], counts["st.global.b8"]) == (0, tail)
    assert counts.total() == 2 * accesses + counts["ld.global.b32"] + counts["ld.global.b64"] + tail


@pytest.mark.parametrize("unit_bytes", [1, 2, 4, 8])
def test_the_compiled_kernel_never_takes_more_at_once_than_the_alignment_allows(
    unit_bytes: int, compiler: KernelProcess
) -> None:
    tile = choose_tile(unit_bytes, 32 * unit_bytes, 2048, 64, 8192)
    counts = compiler.run("memory_instructions", "gather", tile, Tuning())
    wider = {f"st.global.b{8 * size}" for size in (1, 2, 4, 8) if size > unit_bytes}
    assert counts[f"st.global.b{8 * unit_bytes}"] > 0
    assert not wider & counts.keys()
    assert not [name for name in counts if ".global.v" in name]
