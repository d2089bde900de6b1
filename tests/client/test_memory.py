"""Tests engines' shared memory: regions, torch storages moved in place, and the geometry against brute force."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from scene import left_open, open_descriptors

from longshore_client import (
    ArgumentError,
    Attention,
    KVLayout,
    LayoutError,
    ModelShape,
    PageOrder,
    Parallel,
    create_region,
    pool_geometry,
    torch_region,
)


def layout(order=PageOrder.NHD, attention=Attention.HEADS, page_size=4):
    model = ModelShape.of(attention, layers=3, kv_heads=4, head_dim=8, element_bytes=2)
    return KVLayout(model, Parallel(tp=2, tp_rank=1), page_size, order)


def test_a_region_is_the_same_memory_through_every_mapping_of_its_descriptor():
    descriptor, here = create_region(10_000, "test-region")
    with mmap.mmap(descriptor, 10_000) as there:
        here[9_999] = 7
        assert there[9_999] == 7
        there[0:4] = b"abcd"
        assert here[0:4] == b"abcd"
    assert not os.get_inheritable(descriptor)
    here.close()
    os.close(descriptor)


def test_the_pages_of_a_region_are_allocated_before_anybody_uses_them():
    descriptor, here = create_region(3 << 20, "test-region")
    assert os.fstat(descriptor).st_blocks * 512 == 3 << 20
    assert not any(here[:4096])
    here.close()
    os.close(descriptor)


def test_memory_that_is_shared_with_an_agent_cannot_be_made_smaller():
    region, here = create_region(10_000, "test-region")
    tensor = torch.arange(1000.0)
    storage, _, _ = torch_region(tensor)
    for descriptor in (region, storage):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)
    here.close()
    assert tensor.equal(torch.arange(1000.0))


def test_a_torch_storage_that_is_shared_with_others_stays_where_they_have_it():
    tensor = torch.arange(1000.0).share_memory_()
    theirs = os.dup(tensor.untyped_storage()._share_fd_cpu_()[0])
    descriptor, _, length_bytes = torch_region(tensor)
    tensor[3] = -1.0
    with mmap.mmap(theirs, length_bytes) as region:
        assert torch.frombuffer(bytearray(region[12:16]), dtype=torch.float32)[0] == -1.0
    assert os.fstat(descriptor).st_ino == os.fstat(theirs).st_ino
    for each in (descriptor, theirs):
        os.close(each)


def test_a_torch_storage_is_gone_when_tensor_and_descriptor_are():
    before = open_descriptors()
    tensor = torch.zeros(1 << 20)
    descriptor, _, _ = torch_region(tensor)
    os.close(descriptor)
    del tensor
    assert not left_open(before)
    assert "longshore-pages" not in Path("/proc/self/maps").read_text()


def test_a_region_of_no_bytes_is_refused():
    with pytest.raises(ArgumentError, match="length_bytes"):
        create_region(0, "empty")


@pytest.mark.shows("argument.torch_region.tensor")
def test_a_torch_storage_is_shared_in_place_and_its_views_follow():
    cache = torch.arange(1000, dtype=torch.float32)
    view = cache[100:200].view(10, 10)
    descriptor, offset, length_bytes = torch_region(view)
    assert (offset, length_bytes) == (400, 4000)
    with mmap.mmap(descriptor, length_bytes) as region:
        assert torch.frombuffer(bytearray(region[:]), dtype=torch.float32).equal(torch.arange(1000.0))
        view[0, 0] = -5.0
        assert torch.frombuffer(bytearray(region[400:404]), dtype=torch.float32)[0] == -5.0
        region[396:400] = bytes(4)
        assert cache[99] == 0.0
    os.close(descriptor)
    assert cache.sum() == 1000 * 999 / 2 - 100 - 5 - 99


def test_sharing_a_torch_storage_twice_gives_two_descriptors_of_one_memory():
    cache = torch.zeros(64)
    first, _, length_bytes = torch_region(cache)
    second, _, _ = torch_region(cache)
    assert first != second
    assert os.fstat(first).st_ino == os.fstat(second).st_ino
    os.close(first)
    cache[0] = 3.0
    with mmap.mmap(second, length_bytes) as region:
        assert torch.frombuffer(bytearray(region[:4]), dtype=torch.float32)[0] == 3.0
    os.close(second)


@pytest.mark.parametrize("wrong", [torch.zeros(4, device="meta"), [1, 2, 3]], ids=["meta tensor", "list"])
def test_what_is_no_cpu_tensor_is_refused(wrong):
    before = open_descriptors()
    with pytest.raises(ArgumentError, match="on the CPU"):
        torch_region(wrong)
    assert not left_open(before)


@pytest.mark.shows("argument.pool_geometry.layout")
@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
def test_the_plain_geometry_addresses_each_element_of_a_contiguous_tensor(order):
    rank, pages, offset = layout(order), 5, 128
    heads, dim = len(rank.heads), 8
    geometry = pool_geometry(rank, pages, offset=offset)
    inner = (4, heads, dim) if order is PageOrder.NHD else (heads, 4, dim)
    tensor = torch.arange(2 * 3 * pages * 4 * heads * dim).reshape(2 * 3, pages, *inner)
    assert len(geometry.planes) == 6
    for number, plane in enumerate(geometry.planes):
        for page in range(pages):
            for token in range(4):
                for head in range(heads):
                    at = page * plane.page_stride + token * plane.token_stride + head * plane.head_stride
                    row = tensor[number, page]
                    row = row[token, head] if order is PageOrder.NHD else row[head, token]
                    assert (plane.offset + at - offset) // 2 == row[0]
    assert geometry.region_bytes == (offset + 2 * tensor.numel(),)
    assert geometry.page_count == pages


def test_mla_and_opaque_pages_have_one_plane_a_layer_and_as_many_bytes_as_the_layout_says():
    latent = KVLayout(ModelShape.latent(3, 576, 2), Parallel(), 4)
    assert len(pool_geometry(latent, 7).planes) == 3
    assert pool_geometry(latent, 7).region_bytes == (7 * 4 * latent.token_bytes,)
    opaque = pool_geometry(layout(PageOrder.OPAQUE), 7)
    assert len(opaque.planes) == 3
    assert opaque.region_bytes == (7 * 4 * layout().token_bytes,)
    assert opaque.planes[0].token_stride == 0
    assert opaque.planes[0].head_stride == 2 * 4 * 8 * 2


def test_a_geometry_that_cannot_be_is_refused_and_names_why():
    with pytest.raises(ArgumentError, match="page_count"):
        pool_geometry(layout(), 0)
    with pytest.raises(ArgumentError, match="region_bytes is 100"):
        pool_geometry(layout(), 2, region_bytes=100)
    with pytest.raises(LayoutError, match="page_size"):
        pool_geometry(layout(page_size=0), 2)
