"""Compares the digest kernel in Triton's interpreter with the reference, and checks a copier's launches.

The launches are those of a simulated device; see `played_device`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_process import KernelProcess
from page_shapes import PARTS, SHAPES, Shape, few
from test_copy_kernel import SCATTERED, SHAPES_OF_DEVICES, SMALL, requests_of

from longshore_agent.kernels.device_grid import Tile, Tuning
from longshore_wire.layout import Attention, PageOrder

OPAQUE = Shape(order=PageOrder.OPAQUE, blob_bytes=1000)
LATENT = Shape(heads=1, attention=Attention.LATENT, head_dim=576, page_count=4)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[KernelProcess]:
    with KernelProcess("digest_checks", {"TRITON_INTERPRET": "1"}) as process:
        yield process


@pytest.fixture(scope="module")
def played() -> Iterator[KernelProcess]:
    with KernelProcess("digest_checks", {}) as process:
        yield process


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelProcess]:
    cache = str(tmp_path_factory.mktemp("triton"))
    with KernelProcess("kernel_code", {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}) as process:
        yield process


@pytest.mark.parametrize("shape", few(SHAPES_OF_DEVICES, "latent", "opaque pages of 5 bytes", *SCATTERED))
def test_interpreted_digests_are_those_of_the_reference(shape: Shape, interpreter: KernelProcess) -> None:
    assert interpreter.run("check_digests", shape, requests_of(shape), "cpu") > 0


@pytest.mark.parametrize("shift", few({"1": 1, "2": 2, "4": 4, "8": 8}, "1", "8"))
def test_pages_at_odd_addresses_have_the_same_digests(shift: int, interpreter: KernelProcess) -> None:
    for shape in (replace(SMALL, layers=2, heads=2), replace(LATENT, layers=1)):
        request = [((4, 13), range(shape.layers), range(shape.heads))]
        assert interpreter.run("check_digests", shape, request, "cpu", pool_shift=shift) > 0


def test_a_row_counts_with_its_number_in_a_long_sequence(interpreter: KernelProcess) -> None:
    late = 2**31 - 2**21
    requests = [((first, first + 5), range(1), range(4)) for first in (late, 2**40 + 3)]
    assert interpreter.run("check_digests", replace(SMALL, layers=1), requests, "cpu") > 0


SAME_CONTENT = {
    "smaller pages": (Shape(), SMALL),
    "HND, pages of 17": (Shape(spread=True), Shape(page_size=17, order=PageOrder.HND)),
    "more heads, interleaved": (Shape(split=True), Shape(heads=6, interleaved=True)),
    "latent": (LATENT, replace(LATENT, page_size=5, page_count=20, uneven=True)),
    "rows of 7 bytes": (SHAPES["rows of 7 bytes"], Shape(head_dim=7, element_bytes=1, page_size=16)),
    "opaque": (OPAQUE, replace(OPAQUE, page_count=20, heads=5)),
}


@pytest.mark.parametrize("pair", few(SAME_CONTENT, "HND, pages of 17", "latent", "opaque"))
def test_pages_of_two_layouts_with_the_same_content_have_equal_digests(
    pair: tuple[Shape, Shape], interpreter: KernelProcess
) -> None:
    near, far = pair
    first = 0 if near.order is PageOrder.OPAQUE else 1
    assert interpreter.run("check_layouts", near, far, (first, 30)) > 0


PAIRS = {
    "NHD to smaller HND pages": (replace(SMALL, layers=1), Shape(layers=1, page_size=8, order=PageOrder.HND)),
    "from twice as many heads": (replace(SMALL, layers=1), replace(SMALL, layers=1, heads=2)),
    "opaque": (replace(OPAQUE, layers=1), replace(OPAQUE, layers=1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_copier_returns_the_digests_of_the_sides_that_are_pages(name: str, interpreter: KernelProcess) -> None:
    near, far = PAIRS[name]
    tokens = (0, 33) if near.order is PageOrder.OPAQUE else (3, 18)
    assert interpreter.run("check_copies", near, far, tokens, "cpu") == near.layout.plane_count * min(
        near.heads, far.heads
    )


@pytest.mark.parametrize("name", PARTS)
def test_a_copier_moves_all_sections_of_a_cache_and_returns_their_digests(
    name: str, interpreter: KernelProcess
) -> None:
    layouts, digest_count = PARTS[name]
    assert interpreter.run("check_parts", layouts, "cpu") == digest_count


@pytest.mark.parametrize("shape", [replace(SMALL, layers=2), OPAQUE], ids=["NHD", "opaque"])
def test_a_flipped_bit_changes_the_digest_of_its_plane_and_head(shape: Shape, interpreter: KernelProcess) -> None:
    assert interpreter.run("check_flip", shape, (0, 14), "cpu") > 1


def test_digests_do_not_read_the_page_list_of_the_copy(interpreter: KernelProcess) -> None:
    digests, different = interpreter.run("damaged_list", replace(SMALL, layers=1), (0, 8))
    assert digests == different


# Of the tests on GPUs: whether digests find it in pages that are copied directly, and by way of a slab.
DAMAGES = {
    "none": (False, False),
    "a bit in prefill's pages": (True, True),
    "a wrong page that is read": (True, True),
    "a bit in decode's pages": (True, True),
    "a wrong page that is written": (True, True),
    "a bit in the lane": (False, True),
    "a bit in the ring": (False, True),
    "swapped heads": (False, True),
    "a stale slab": (False, True),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_that_tests_on_gpus_plant_is_done_and_found(
    damage: str, interpreter: KernelProcess, tmp_path: Path
) -> None:
    assert interpreter.run("planted", damage, tmp_path / "damage") == DAMAGES[damage]


GATHERS, SCATTERS, DIRECTS = 1, 2, 3
# What a copy queues without a key, and with one.
QUEUED = {
    "gather": (GATHERS, ["copy"], ["key and zeros", "digest", "copy", "sums"]),
    "scatter": (SCATTERS, ["trailer", "copy"], ["trailer", "key and zeros", "copy", "digest", "sums"]),
    "direct": (DIRECTS, ["copy"], ["key and zeros", "digest", "copy", "digest", "sums"]),
}


@pytest.mark.parametrize("kind", QUEUED)
def test_a_key_queues_digests_around_the_copy_on_its_stream_and_no_key_queues_what_it_did(
    kind: str, played: KernelProcess
) -> None:
    stream, without, with_key = QUEUED[kind]
    found = played.run("queued", kind)
    lists = 2 if kind == "direct" else 1
    assert found["first"] == [("page ids", stream)] * lists + [(name, stream) for name in without]
    assert found["again"] == found["no key"] == [(name, stream) for name in without]
    assert found["key again"] == [(name, stream) for name in with_key]
    # Digests have page lists of their own.
    assert sorted(found["key"]) == sorted([*found["key again"], *[("page ids", stream)] * lists])
    assert [each for each in found["key"] if each[0] != "page ids"] == found["key again"]
    assert found["alone"] == [(name, GATHERS) for name in ("key and zeros", "digest", "sums")]


@pytest.mark.parametrize("kind", QUEUED)
def test_a_first_launch_that_is_refused_begins_nothing(kind: str, played: KernelProcess) -> None:
    found = played.run("refused", kind, 0)
    _, _, with_key = QUEUED[kind]
    assert found == {
        "queued": with_key[: with_key.index("key and zeros") + 1],
        "error": "the driver refuses",
        "at end": False,
        "held later": False,
        "queued later": with_key,
    }


@pytest.mark.parametrize(("kind", "number"), [("gather", 1), ("scatter", 1), ("direct", 1), ("direct", 2)])
def test_a_later_launch_that_is_refused_holds_the_pools_until_the_stream_has_passed_the_others(
    kind: str, number: int, played: KernelProcess
) -> None:
    found = played.run("refused", kind, number)
    _, _, with_key = QUEUED[kind]
    assert found == {
        "queued": with_key[: with_key.index("key and zeros") + 1 + number],
        "held": True,
        "error": "the driver refuses",
        "at end": True,
        "held later": False,
        "queued later": with_key,
    }


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        ("no tokens", "ShapeError INTERNAL", "tokens"),
        ("too few pages", "ShapeError INTERNAL", "pages"),
        ("a page beyond the last", "LongshoreError PAGE_OUT_OF_RANGE", "pages[1]"),
        ("a pool that has left", "PoolError UNKNOWN_POOL", "unregistered"),
        ("no host memory", "DeviceError INTERNAL", "refuses"),
        ("no event", "DeviceError INTERNAL", "refuses"),
    ],
)
def test_digests_that_cannot_be_are_refused_and_hold_nothing(
    fault: str, kind: str, word: str, played: KernelProcess
) -> None:
    found, message = played.run("digest_refusal", fault)
    assert found == kind
    assert word in message


TUNING = Tuning(tile_bytes=16384)


def tile_of(unit_bytes: int, columns: int, page_tokens: int = 16) -> Tile:
    rows = TUNING.tile_bytes // (columns * 8)
    return Tile(unit_bytes, 8, rows, columns, page_tokens, 0, one_page=False, whole_rows=True, narrow=False)


@pytest.mark.parametrize("columns", few({"8": 8, "16": 16, "32": 32, "64": 64}, "8", "64"))
def test_the_compiled_kernel_reads_16_bytes_an_access_and_writes_no_page(columns: int, compiler: KernelProcess) -> None:
    counts = compiler.run("memory_instructions", tile_of(16, columns), TUNING, kernel="digest")
    assert counts["ld.global.v2.b64"] >= TUNING.tile_bytes // 16 // (32 * TUNING.warps)
    assert not [name for name in counts if name.startswith("st.global")]


@pytest.mark.parametrize("unit_bytes", few({"1": 1, "2": 2, "4": 4, "8": 8}, "1", "4"))
def test_the_compiled_kernel_never_reads_more_at_once_than_the_alignment_allows(
    unit_bytes: int, compiler: KernelProcess
) -> None:
    counts = compiler.run("memory_instructions", tile_of(unit_bytes, 16), TUNING, kernel="digest")
    accesses = TUNING.tile_bytes // unit_bytes // (32 * TUNING.warps)
    assert counts[f"ld.global.b{8 * unit_bytes}"] >= accesses
    assert not [name for name in counts if name.startswith("ld.global.v")]


def test_the_driver_is_given_what_the_compiled_kernel_takes(compiler: KernelProcess) -> None:
    taken, given, places = compiler.run("parameters", tile_of(16, 16), TUNING, kernel="digest")
    assert taken[: len(given)] == given
    assert set(taken[len(given) :]) <= {64}
    assert len(taken) <= places


def test_the_public_launch_compiles_no_kernel_of_its_own_for_any_value(compiler: KernelProcess) -> None:
    named, given = compiler.run("annotated_types", kernel="digest")
    assert named == given
