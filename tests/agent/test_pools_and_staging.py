"""Tests engines' pages and staging memory: refusals, mappings and their release."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
from page_shapes import create_memfd, plane_of

from longshore_agent.errors import PoolError, ShapeError
from longshore_agent.memory.cuda import Device
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool, check_geometry
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, Plane, PlaneGeometry, PoolGeometry

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, PAGE_COUNT = 2, 2, 8, 4, 5
LAYOUT = KVLayout(ModelShape.kv(LAYERS, HEADS, HEAD_DIM, 2), Parallel(), PAGE_SIZE)
PAGE_BYTES = PAGE_SIZE * HEADS * HEAD_DIM * 2
PLANE_BYTES = PAGE_COUNT * PAGE_BYTES
GEOMETRY = PoolGeometry(
    PAGE_COUNT,
    (4 * PLANE_BYTES,),
    tuple(PlaneGeometry(0, i * PLANE_BYTES, PAGE_BYTES, HEADS * HEAD_DIM * 2, HEAD_DIM * 2) for i in range(4)),
)


def with_plane(index: int, **changes: int) -> PoolGeometry:
    planes = list(GEOMETRY.planes)
    planes[index] = msgspec.structs.replace(planes[index], **changes)
    return msgspec.structs.replace(GEOMETRY, planes=tuple(planes))


@pytest.fixture
def descriptor() -> Iterator[int]:
    opened = create_memfd("longshore-pools-test", 4 * PLANE_BYTES)
    yield opened
    os.close(opened)


def mapped_ranges(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines() if name in line]


def open_descriptors(name: str) -> int:
    """Return the number of this process's descriptors for a memory file of this name.

    Other descriptors do not count, since threads of other tests' libraries open and close some meanwhile.
    """
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += name in str(entry.readlink())
    return count


@pytest.mark.parametrize(
    ("named", "geometry"),
    [
        ("page_count", msgspec.structs.replace(GEOMETRY, page_count=0)),
        ("page_count", msgspec.structs.replace(GEOMETRY, page_count=2**31)),
        ("page_count", msgspec.structs.replace(GEOMETRY, page_count=-1)),
        (r"planes\[3\]", msgspec.structs.replace(GEOMETRY, page_count=6)),
        ("planes", msgspec.structs.replace(GEOMETRY, planes=GEOMETRY.planes[:3])),
        (r"region_bytes\[0\]", msgspec.structs.replace(GEOMETRY, region_bytes=(0,))),
        (r"region_bytes\[0\]", msgspec.structs.replace(GEOMETRY, region_bytes=(-(2**40),))),
        (r"region_bytes\[0\]", msgspec.structs.replace(GEOMETRY, region_bytes=(2**63,))),
        (r"planes\[1\].region", with_plane(1, region=1)),
        (r"planes\[1\].region", with_plane(1, region=-1)),
        (r"planes\[2\].offset", with_plane(2, offset=-2)),
        (r"planes\[2\].offset", with_plane(2, offset=3)),
        (r"planes\[3\]", with_plane(3, offset=3 * PLANE_BYTES + 2)),
        (r"planes\[3\]", with_plane(3, offset=2**63 - 2)),
        (r"planes\[0\].page_stride", with_plane(0, page_stride=0)),
        (r"planes\[0\].page_stride", with_plane(0, page_stride=-PAGE_BYTES)),
        (r"planes\[0\].page_stride", with_plane(0, page_stride=PAGE_BYTES - 2)),
        (r"planes\[0\]", with_plane(0, page_stride=2**62)),
        (r"planes\[0\].token_stride", with_plane(0, token_stride=0)),
        (r"planes\[0\].token_stride", with_plane(0, token_stride=-32)),
        (r"planes\[0\].head_stride", with_plane(0, head_stride=0)),
        (r"planes\[0\].head_stride", with_plane(0, head_stride=HEAD_DIM * 2 - 2)),
        (r"planes\[0\].page_stride", with_plane(0, page_stride=PAGE_BYTES + 1, offset=0)),
    ],
)
def test_a_geometry_that_reaches_outside_its_region_or_overlaps_is_refused_by_plane_and_field(
    named: str, geometry: PoolGeometry, descriptor: int
) -> None:
    before = mapped_ranges("longshore-pools-test")
    with pytest.raises(PoolError, match=f"^{named}") as refused:
        KVPool(LAYOUT, geometry, [descriptor])
    assert refused.value.reason is Reason.LAYOUT_MISMATCH
    assert mapped_ranges("longshore-pools-test") == before


@pytest.mark.slow
def test_every_accepted_geometry_of_a_random_sample_keeps_all_rows_inside_and_apart() -> None:
    rng = np.random.default_rng(0)
    accepted = [0, 0]
    for number in range(24_000):
        strides = [int(rng.choice([-16, 0, 2, 16, 32, 64, 128, 256, 512])) for _ in range(3)]
        apart = int(rng.choice([-2, 2, 4, 8, 16, 32, 64, 128])) if number % 2 else 0
        plane = PlaneGeometry(0, int(rng.choice([-2, 0, 2, 64])), strides[0], strides[1], strides[2], apart)
        geometry = PoolGeometry(PAGE_COUNT, (int(rng.choice([64, 640, 1280, 2560])),), (plane,) * 4)
        try:
            check_geometry(LAYOUT, geometry)
        except PoolError:
            continue
        accepted[apart > 2] += 1
        used = np.zeros(geometry.region_bytes[0], dtype=np.int32)
        for page in range(PAGE_COUNT):
            for token in range(PAGE_SIZE):
                for head in range(HEADS):
                    begin = plane.offset + page * strides[0] + token * strides[1] + head * strides[2]
                    for element in range(HEAD_DIM):
                        at = begin + element * (apart or 2)
                        assert 0 <= at <= at + 2 <= used.size
                        used[at : at + 2] += 1
        assert used.max() == 1
    assert min(accepted) > 20


@pytest.mark.parametrize("changes", [{"token_stride": 2}, {"head_stride": 0}, {"head_stride": 32}])
def test_opaque_planes_have_no_token_stride_and_blobs_of_one_size(changes: dict[str, int]) -> None:
    layout = msgspec.structs.replace(LAYOUT, order=PageOrder.OPAQUE, blob_bytes=40)
    right = tuple(PlaneGeometry(0, i * 400, 80, 0, 40) for i in range(LAYERS))
    check_geometry(layout, PoolGeometry(PAGE_COUNT, (800,), right))
    wrong = (msgspec.structs.replace(right[0], **changes), right[1])
    with pytest.raises(PoolError, match=r"^planes\[[01]\]"):
        check_geometry(layout, PoolGeometry(PAGE_COUNT, (800,), wrong))


def test_elements_that_are_apart_are_refused_in_the_memory_of_a_gpu(descriptor: int) -> None:
    strides = {"token_stride": 2, "head_stride": PAGE_SIZE * HEAD_DIM * 2, "element_stride": PAGE_SIZE * 2}
    layout, geometry = msgspec.structs.replace(LAYOUT, order=PageOrder.HND), with_plane(1, **strides)
    KVPool(layout, geometry, [descriptor]).close()
    no_device = cast(Device, object())  # refused before it is used
    with pytest.raises(PoolError, match=r"^planes\[1\].element_stride is 8: .* GPU"):
        KVPool(layout, geometry, [descriptor], no_device)


def test_a_region_shorter_than_declared_is_refused_and_leaves_no_mapping_of_the_others(descriptor: int) -> None:
    geometry = msgspec.structs.replace(GEOMETRY, region_bytes=(4 * PLANE_BYTES, 4 * PLANE_BYTES))
    short = create_memfd("longshore-pools-test", 4 * PLANE_BYTES - 1)
    try:
        with pytest.raises(PoolError, match=r"^region 1: the file has"):
            KVPool(LAYOUT, geometry, [descriptor, short])
    finally:
        os.close(short)
    with pytest.raises(PoolError, match="1 file descriptors for 2 regions"):
        KVPool(LAYOUT, geometry, [descriptor])
    assert mapped_ranges("longshore-pools-test") == []


def test_a_descriptor_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(4 * PLANE_BYTES))
    opened = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(PoolError, match="region 0: the file cannot be mapped"):
            KVPool(LAYOUT, GEOMETRY, [opened])
    finally:
        os.close(opened)


def test_what_the_engine_writes_is_seen_in_the_pools_planes_and_back(descriptor: int) -> None:
    pool = KVPool(LAYOUT, GEOMETRY, [descriptor])
    number = PLANE_BYTES * 3 + 2 * PAGE_BYTES + 1 * HEADS * HEAD_DIM * 2 + 1 * HEAD_DIM * 2
    os.pwrite(descriptor, (-1234).to_bytes(2, "little", signed=True), number)
    assert plane_of(pool, 3).shape == (PAGE_COUNT, PAGE_SIZE, HEADS, HEAD_DIM)
    assert plane_of(pool, 3).dtype == np.uint16
    assert int(plane_of(pool, 3)[2, 1, 1, 0]) == 2**16 - 1234
    plane_of(pool, 3)[2, 1, 1, 0] = 77
    assert int.from_bytes(os.pread(descriptor, 2, number), "little") == 77
    assert pool.regions[0][1] == 4 * PLANE_BYTES
    assert pool.regions[0][0] == pool.region(0).ctypes.data
    pool.close()


def test_planes_of_equal_strides_are_one_run_and_their_addresses_are_those_of_their_pages(descriptor: int) -> None:
    # K and V of a layer beside each other, and the last plane with gaps between its pages.
    planes = [GEOMETRY.planes[i] for i in (0, 2, 1)]
    planes.append(msgspec.structs.replace(GEOMETRY.planes[3], page_stride=PAGE_BYTES + 2))
    geometry = msgspec.structs.replace(
        GEOMETRY, planes=tuple(planes), region_bytes=(GEOMETRY.region_bytes[0] + 2 * PAGE_COUNT,)
    )
    os.posix_fallocate(descriptor, 0, geometry.region_bytes[0])
    pool = KVPool(LAYOUT, geometry, [descriptor])
    assert [(run.first, len(run.addresses), run.page_stride) for run in pool.sections[0].groups] == [
        (0, 3, PAGE_BYTES),
        (3, 1, PAGE_BYTES + 2),
    ]
    for run in pool.sections[0].groups:
        for index, address in enumerate(run.addresses, run.first):
            assert address == plane_of(pool, index).ctypes.data
    pool.close()


def test_page_ids_are_checked_by_index(descriptor: int) -> None:
    pool = KVPool(LAYOUT, GEOMETRY, [descriptor])
    pool.check_pages(np.array([], dtype=np.int32))
    pool.check_pages(np.array([4, 0, 4], dtype=np.int32))
    pool.check_pages(np.array([4, 0, 1], dtype=np.int32), unique=True)
    for pages, index in (([0, 5], 1), ([-1], 0), ([1, 2, -(2**31)], 2)):
        with pytest.raises(LongshoreError, match=rf"^pages\[{index}\] is") as refused:
            pool.check_pages(np.array(pages, dtype=np.int32))
        assert refused.value.reason is Reason.PAGE_OUT_OF_RANGE
    with pytest.raises(LongshoreError, match=r"^pages\[1\] and pages\[3\] are both 2"):
        pool.check_pages(np.array([0, 2, 3, 2], dtype=np.int32), unique=True)
    pool.close()


def test_layers_of_a_state_need_pages_of_their_own_only_where_they_share_a_tensor(descriptor: int) -> None:
    # One layer a page: the first and the last lie in one tensor.
    layout = KVLayout(ModelShape(3, (Plane(HEADS, 64),), 4), Parallel(), 1, PageOrder.SLOT, name="ssm")
    planes = tuple(PlaneGeometry(0, at * PLANE_BYTES, HEADS * 64, HEADS * 64, 64) for at in (0, 1, 0))
    pool = KVPool(layout, PoolGeometry(PAGE_COUNT, (4 * PLANE_BYTES,), planes), [descriptor])
    pool.check_claimed(np.array([], dtype=np.int32))
    pool.check_claimed(np.array([4, 4, 1], dtype=np.int32))
    with pytest.raises(LongshoreError, match=r"^pages\[0\] and pages\[2\] are both 4") as refused:
        pool.check_claimed(np.array([4, 1, 4], dtype=np.int32))
    assert refused.value.reason is Reason.TOKENS_OVERLAP
    pool.close()


def test_close_unmaps_at_once_even_when_views_exist_and_keeps_no_descriptor(descriptor: int) -> None:
    assert open_descriptors("longshore-pools-test") == 1
    pool = KVPool(LAYOUT, GEOMETRY, [descriptor])
    assert len(mapped_ranges("longshore-pools-test")) == 1
    assert open_descriptors("longshore-pools-test") == 1
    kept = [plane_of(pool, 0), pool.region(0)]
    assert pool.close()
    assert mapped_ranges("longshore-pools-test") == []
    assert pool.close()
    assert pool.wait_closed(0)
    assert len(kept) == 2


def test_close_while_a_job_runs_is_deferred_to_its_end_and_new_jobs_are_refused(descriptor: int) -> None:
    pool = KVPool(LAYOUT, GEOMETRY, [descriptor])
    entered, leave = threading.Event(), threading.Event()

    def job() -> None:
        with pool.in_use(), pool.in_use():
            entered.set()
            leave.wait()
            pool.region(0)[:] = 5

    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    assert entered.wait(10)
    assert not pool.close()
    assert not pool.wait_closed(0)
    with pytest.raises(PoolError, match="unregistered") as refused, pool.in_use():
        pass
    assert refused.value.reason is Reason.UNKNOWN_POOL
    assert len(mapped_ranges("longshore-pools-test")) == 1
    leave.set()
    assert pool.wait_closed(10)
    thread.join()
    assert mapped_ranges("longshore-pools-test") == []
    assert os.pread(descriptor, 1, 0) == b"\x05"


def test_a_job_that_fails_gives_its_hold_back(descriptor: int) -> None:
    pool = KVPool(LAYOUT, GEOMETRY, [descriptor])

    def fail() -> None:
        with pool.in_use():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert pool.close()


def test_a_staging_buffer_is_resident_from_the_start_and_gone_after_close() -> None:
    length = 8 << 20
    resident_before = resident_bytes()
    buffer = StagingBuffer(length)
    assert resident_bytes() - resident_before >= length - (1 << 20)
    assert buffer.address % os.sysconf("SC_PAGESIZE") == 0
    assert buffer.view(0, length).ctypes.data == buffer.address
    buffer.view(1000, 4)[:] = [1, 2, 3, 4]
    assert buffer.bytes_at(999, 6) == b"\x00\x01\x02\x03\x04\x00"
    buffer.close()
    buffer.close()
    assert resident_bytes() - resident_before < length // 2


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_extents_cover_the_buffer_once_and_the_last_is_as_small_as_it_is() -> None:
    buffer = StagingBuffer(10_000, extent_bytes=4096)
    assert buffer.extents() == [(buffer.address, 4096), (buffer.address + 4096, 4096), (buffer.address + 8192, 1808)]
    assert buffer.pieces(4000, 200) == [(buffer.address + 4000, 96), (buffer.address + 4096, 104)]
    assert buffer.pieces(4096, 4096) == [(buffer.address + 4096, 4096)]
    assert buffer.pieces(9_999, 0) == []
    buffer.close()
    even = StagingBuffer(8192, extent_bytes=4096)
    assert [length for _, length in even.extents()] == [4096, 4096]
    even.close()


@pytest.mark.parametrize("take", [StagingBuffer.view, StagingBuffer.bytes_at, StagingBuffer.pieces])
@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 101), (101, 0), (50, -1), (100, 2**70)])
def test_a_range_outside_a_staging_buffer_is_refused(
    take: Callable[[StagingBuffer, int, int], object], offset: int, length: int
) -> None:
    buffer = StagingBuffer(100)
    with pytest.raises(ShapeError, match="offset_bytes"):
        take(buffer, offset, length)
    buffer.close()
