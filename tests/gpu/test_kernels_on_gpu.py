"""Compares the kernels on a real GPU with the reference, bit for bit. Skipped without a GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from page_shapes import PARTS, SHAPES, Shape, requests_of

from longshore_agent.kernels.device_grid import Tuning
from longshore_wire.layout import PageOrder

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def checks() -> Any:
    """Return the checks, loaded into this process, in which Triton compiles."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        pytest.skip("needs a CUDA device and Triton")
    import copy_checks

    return copy_checks


@pytest.fixture(scope="module")
def digests(checks: Any) -> Any:
    """Return the checks of digests."""
    assert checks
    import digest_checks

    return digest_checks


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_gpu_gathers_what_the_reference_packs(shape: Shape, checks: Any) -> None:
    assert checks.check_gather(shape, requests_of(shape), DEVICE) > 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_gpu_scatters_what_the_reference_writes(shape: Shape, checks: Any) -> None:
    assert checks.check_scatter(shape, requests_of(shape), DEVICE) > 0


@pytest.mark.parametrize("blob_bytes", [5, 1000, 65536])
def test_a_gpu_copies_opaque_pages_whole(blob_bytes: int, checks: Any) -> None:
    shape = Shape(order=PageOrder.OPAQUE, blob_bytes=blob_bytes)
    requests = [((32, 101), range(1, 3), range(1, 3)), ((0, 16), range(3), range(4))]
    assert checks.check_gather(shape, requests, DEVICE) > 0
    assert checks.check_scatter(shape, requests, DEVICE) > 0


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_a_gpu_copies_at_odd_addresses(shift: int, checks: Any) -> None:
    shape = Shape(layers=2, heads=2)
    request = [((4, 30), range(2), range(2))]
    for check in (checks.check_gather, checks.check_scatter):
        check(shape, request, DEVICE, pool_shift=shift)
        check(shape, request, DEVICE, slab_shift=shift)


@pytest.mark.parametrize("programs_max", [0, 7])
@pytest.mark.parametrize("tile_bytes", [512, 8192, 65536])
def test_every_tuning_gives_the_same_bytes(tile_bytes: int, programs_max: int, checks: Any) -> None:
    tuning = Tuning(tile_bytes=tile_bytes, warps=8, programs_max=programs_max)
    for name in ("NHD", "HND, pages of 17, gaps", "pages of 1", "pages of 256"):
        request = [((3, 2 * SHAPES[name].page_size + 2), range(2), range(1, 4))]
        checks.check_gather(SHAPES[name], request, DEVICE, tuning=tuning)
        checks.check_scatter(SHAPES[name], request, DEVICE, tuning=tuning)


def test_a_slab_above_4_gib_is_whole(checks: Any) -> None:
    assert checks.check_large_slab(DEVICE) > 2**32


def test_launches_on_one_stream_keep_their_own_pages(checks: Any) -> None:
    # The host is ahead of the device here: later launches must not overwrite a launch's arguments.
    assert checks.check_many_launches(DEVICE, 64) == 64


def test_an_untried_triton_launches_through_its_public_interface(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from longshore_agent.kernels import device_kernel, device_launch

    def no_driver(*_: object) -> None:
        raise AssertionError("the driver's launch was called")

    monkeypatch.setattr(device_kernel, "_is_tried", lambda _: False)
    monkeypatch.setattr(device_kernel.cuda, "launch", no_driver)
    monkeypatch.setattr(device_launch, "_KERNEL", device_kernel.DeviceKernel())
    for name in ("NHD", "HND, pages of 17, gaps"):
        assert checks.check_gather(SHAPES[name], requests_of(SHAPES[name]), DEVICE) > 0
        assert checks.check_scatter(SHAPES[name], requests_of(SHAPES[name]), DEVICE) > 0


OPAQUE = Shape(order=PageOrder.OPAQUE, blob_bytes=65536 + 5)


@pytest.mark.parametrize("shape", [*SHAPES.values(), OPAQUE], ids=[*SHAPES, "opaque"])
def test_a_gpu_computes_the_digests_of_the_reference(shape: Shape, digests: Any) -> None:
    size, layers, heads = shape.page_size, range(shape.layers), range(shape.heads)
    first = 0 if shape.order is PageOrder.OPAQUE else size // 2
    requests = [
        ((first, 2 * size + (size + 1) // 2), layers, heads),
        ((first, first + 1), layers, range(shape.heads // 3, shape.heads // 3 + 1)),
        ((1000 * size, 1002 * size), range(1, 2), range(shape.heads // 2, shape.heads)),
    ]
    assert digests.check_digests(shape, requests, DEVICE) > 0


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_a_gpu_computes_digests_at_odd_addresses(shift: int, digests: Any) -> None:
    shape = Shape(layers=2, heads=2)
    assert digests.check_digests(shape, [((4, 30), range(2), range(2))], DEVICE, pool_shift=shift) > 0


@pytest.mark.parametrize(
    ("near", "far", "tokens"),
    [
        (Shape(page_size=4, page_count=30), Shape(page_size=17, order=PageOrder.HND), (3, 70)),
        (Shape(), Shape(heads=2, interleaved=True), (8, 100)),
        (SHAPES["latent"], replace(SHAPES["latent"], page_size=64), (1, 130)),
        (OPAQUE, OPAQUE, (0, 100)),
    ],
    ids=["HND in larger pages", "fewer heads", "latent", "opaque"],
)
def test_a_gpu_returns_the_digests_of_the_sides_that_are_pages(
    near: Shape, far: Shape, tokens: tuple[int, int], digests: Any
) -> None:
    planes = near.layout.plane_count
    assert digests.check_copies(near, far, tokens, DEVICE) == planes * min(near.heads, far.heads)


@pytest.mark.parametrize("name", PARTS)
def test_a_gpu_moves_all_sections_of_a_cache_and_returns_their_digests(name: str, digests: Any) -> None:
    layouts, digest_count = PARTS[name]
    assert digests.check_parts(layouts, DEVICE) == digest_count


def test_the_first_digests_of_a_registered_pool_do_not_wait_for_a_compiler(digests: Any) -> None:
    # No other test has this shape, whose kernel would be compiled already.
    threads = digests.compiling_threads(Shape(page_size=24, page_count=40, head_dim=40), DEVICE)
    assert [name.startswith("compile") for name in threads] == [True]


@pytest.mark.parametrize("name", ["NHD", "HND, pages of 17, gaps", "latent"])
def test_a_flipped_bit_on_a_gpu_changes_the_digest_of_its_plane_and_head(name: str, digests: Any) -> None:
    shape = SHAPES[name]
    assert digests.check_flip(shape, (3, 4 * shape.page_size + 1), DEVICE) == shape.layout.plane_count * shape.heads
