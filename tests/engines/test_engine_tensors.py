"""Tests KV tensors in the layouts of vLLM and SGLang: detection, sharing in place, and refusals by name."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace

import pytest
import torch

from longshore_client import ArgumentError, KVLayout, LayoutError, ModelShape, PageOrder, Parallel
from longshore_engines.tensors import CacheShape, PageFormat, RowCache, layer_number, layout_of, share, share_rows
from longshore_wire.engine_messages import DeviceRegion

BLOCKS, TOKENS, DIM = 6, 32, 8


def cache(*, tp=2, tp_rank=1, kv_heads=4, layers=3, stage_layers=None, pp=1, pp_rank=0):
    parallel = Parallel(tp=tp, tp_rank=tp_rank, pp=pp, pp_rank=pp_rank)
    return CacheShape(layers, kv_heads, DIM, parallel, stage_layers)


def tensors(layers=(0, 1, 2), *, heads=2, one_storage=True, dtype=torch.float32):
    """Layers of one allocation that does not begin at a page of memory, as vLLM on a CPU makes them."""
    shape = (BLOCKS, heads, TOKENS, 2 * DIM)
    count = BLOCKS * heads * TOKENS * 2 * DIM
    if not one_storage:
        return {f"model.layers.{n}.attn": torch.full(shape, float(n), dtype=dtype) for n in layers}
    whole = torch.zeros(count * len(layers), dtype=dtype)
    made = {}
    for index, number in enumerate(layers):
        made[f"model.layers.{number}.attn"] = whole[index * count : (index + 1) * count].view(shape)
        made[f"model.layers.{number}.attn"].fill_(float(number))
    return made


@pytest.mark.parametrize("one_storage", [True, False])
def test_every_blob_lies_where_the_geometry_says_and_later_writes_are_seen(one_storage):
    kept = tensors(one_storage=one_storage)
    shared = share([(kept, cache())])
    assert len(shared.regions) == (1 if one_storage else 3)
    assert (shared.device, shared.layout.order, shared.layout.page_size) == ("cpu", PageOrder.OPAQUE, TOKENS)
    # Written after sharing, through the tensors that the engine still uses.
    for number, tensor in enumerate(kept.values()):
        tensor[4, 1] = 100.0 + number
    maps = [mmap.mmap(fd, size) for fd, size in zip(shared.regions, shared.geometries[0].region_bytes, strict=True)]
    for number, plane in enumerate(shared.geometries[0].planes):
        for block, head, wanted in ((4, 1, 100.0 + number), (4, 0, number), (5, 1, number)):
            begin = plane.offset + block * plane.page_stride + head * plane.head_stride
            blob = bytearray(maps[plane.region][begin : begin + shared.layout.opaque_bytes])
            assert torch.frombuffer(blob, dtype=torch.float32).eq(wanted).all()
    for region, mapped in zip(shared.regions, maps, strict=True):
        mapped.close()
        os.close(region)


def test_a_blob_is_what_the_engine_keeps_of_a_head_in_a_block():
    layout = layout_of(tensors(), cache())
    assert layout.blob_bytes == TOKENS * 2 * DIM * 4
    assert list(layout.heads) == [2, 3]


def test_replicated_heads_are_one_a_rank():
    layout = layout_of(tensors(heads=1), cache(tp=8, tp_rank=5))
    assert list(layout.heads) == [2]


def test_a_stage_of_a_pipeline_holds_its_own_layers():
    layout = layout_of(tensors((2, 3)), cache(layers=4, pp=2, pp_rank=1, stage_layers=(2, 2)))
    assert list(layout.layers) == [2, 3]


@pytest.mark.parametrize(
    ("given", "shape", "said"),
    [
        ({}, {}, "no KV tensors"),
        (tensors(heads=4), {}, "4 KV heads"),
        (tensors((0, 2)), {}, r"KV of 2 layers, model\.layers\.0\S* to model\.layers\.2\S*, and should have 3"),
        ({"model.layers.0.attn": torch.zeros(2, 6, 32, 2, 8)}, {"layers": 1}, "only .block, head, token, content."),
        ({"model.layers.0.attn": torch.zeros(6, 32, 2, 16).transpose(1, 2)}, {"layers": 1}, "LBHNC"),
        ({**tensors((0, 1)), "model.layers.2.attn": torch.zeros(6, 2, 16, 16)}, {}, "layers must be alike"),
        (tensors(heads=1), {"tp": 3, "tp_rank": 0}, "one must divide the other"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(given, shape, said):
    with pytest.raises((LayoutError, ArgumentError), match=said):
        share([(given, cache(**shape))])


@pytest.mark.parametrize("name", ["attn", "layers.1.experts.2.attn"])
def test_a_layer_whose_number_is_not_clear_is_refused(name):
    with pytest.raises(ArgumentError, match="numbers in its name"):
        layer_number(name)


class OnDevice:
    """A fake tensor in GPU memory with the attributes that `share` reads; the driver is a fake, too."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, tensor):
        self._tensor = tensor
        for name in ("shape", "stride", "storage_offset", "element_size", "untyped_storage", "data_ptr"):
            setattr(self, name, getattr(tensor, name))


def test_tensors_on_a_gpu_stay_where_they_are_and_go_by_one_handle_an_allocation(monkeypatch):
    asked = []

    def handle_of(tensor):
        asked.append(tensor.data_ptr())
        return DeviceRegion(b"h" * 64, 512)

    monkeypatch.setattr("longshore_engines.tensors.device_region", handle_of)
    monkeypatch.setattr("longshore_engines.tensors.device_name", lambda tensor: "GPU-7")
    kept = tensors()
    storage = next(iter(kept.values())).untyped_storage()
    shared = share([({name: OnDevice(tensor) for name, tensor in kept.items()}, cache())])
    assert (shared.device, shared.regions) == ("GPU-7", (DeviceRegion(b"h" * 64, 512),))
    # The handle refers to the storage's first byte; plane offsets count from there.
    assert asked == [storage.data_ptr()]
    assert shared.geometries[0].region_bytes == (storage.nbytes(),)
    layer_bytes = storage.nbytes() // 3
    assert [plane.offset for plane in shared.geometries[0].planes] == [0, layer_bytes, 2 * layer_bytes]


@pytest.mark.parametrize("pages", [PageFormat.TOKEN_ROWS, PageFormat.TRANSPOSED_KEYS])
def test_each_element_of_a_token_lies_where_the_geometry_says(pages):
    shared = share([(tensors(one_storage=False), cache())], pages)
    assert (shared.layout.order, shared.layout.page_size, shared.layout.blob_bytes) == (PageOrder.HND, TOKENS, 0)
    kept = tensors(one_storage=False)
    for number, tensor in enumerate(kept.values()):
        # As the engine's kernels see a (block, head): of each token K and V, or K of all tokens and then V of all.
        fused = tensor.view(BLOCKS, 2, -1)
        for token, kind in ((0, 0), (5, 0), (31, 1)):
            content = torch.arange(DIM, dtype=torch.float32) + 1000 * token + 100 * kind + 10_000 * number
            if pages is PageFormat.TOKEN_ROWS:
                tensor[4, 1, token, kind * DIM : (kind + 1) * DIM] = content
            elif kind == 0:
                fused[4, 1, : TOKENS * DIM].view(DIM, TOKENS)[:, token] = content
            else:
                fused[4, 1, TOKENS * DIM :].view(TOKENS, DIM)[token] = content
    layers = len(kept)
    for number, tensor in enumerate(kept.values()):
        memory = bytearray(tensor.untyped_storage())
        for token, kind in ((0, 0), (5, 0), (31, 1)):
            plane = shared.geometries[0].planes[kind * layers + number]
            at = plane.offset + 4 * plane.page_stride + plane.head_stride + token * plane.token_stride
            found = [
                torch.frombuffer(
                    memory, dtype=torch.float32, count=1, offset=at + i * (plane.element_stride or 4)
                ).item()
                for i in range(DIM)
            ]
            assert found == [i + 1000 * token + 100 * kind + 10_000 * number for i in range(DIM)]
    shared.geometries[0].check(shared.layout)
    for region in shared.regions:
        os.close(region)


LATENT = CacheShape(3, 8, 576, Parallel(tp=4, tp_rank=3), is_latent=True)


@pytest.mark.parametrize("pages", [PageFormat.TOKEN_ROWS, PageFormat.BLOB])
def test_each_rank_has_the_whole_latent_of_a_token_where_the_geometry_says(pages):
    # An engine may keep scales in a row, so that it is longer than the latent.
    kept = {f"model.layers.{n}.attn": torch.rand(BLOCKS, 1, TOKENS, 20) for n in range(3)}
    shared = share([(kept, LATENT)], pages)
    assert shared.layout.model == ModelShape.latent(3, 20, 4)
    assert list(shared.layout.heads) == [0]
    assert len(shared.geometries[0].planes) == 3
    for tensor, plane in zip(kept.values(), shared.geometries[0].planes, strict=True):
        memory = bytearray(tensor.untyped_storage())
        at = plane.offset + 4 * plane.page_stride + (5 * plane.token_stride if plane.token_stride else 5 * 80)
        assert torch.equal(torch.frombuffer(memory, dtype=torch.float32, count=20, offset=at), tensor[4, 0, 5])
    for region in shared.regions:
        os.close(region)


def test_two_caches_share_their_memory_once_and_each_has_its_layers():
    whole = torch.arange(3 * BLOCKS * 2 * TOKENS * 2 * DIM, dtype=torch.float32)
    parts = whole.view(3, BLOCKS, 2, TOKENS, 2 * DIM)
    target = {f"model.layers.{n}.attn": parts[n] for n in range(2)}
    draft = cache(layers=1)._replace(name="draft")
    shared = share([(target, cache(layers=2)), ({"layers.0": parts[2]}, draft)], PageFormat.TOKEN_ROWS)
    assert len(shared.regions) == 1
    assert [(each.name, list(each.layers)) for each in shared.layout.caches] == [("kv", [0, 1]), ("draft", [0])]
    memory = bytearray(whole.untyped_storage())
    layers = [shared.geometries[0].planes[0], shared.geometries[0].planes[1], shared.geometries[1].planes[0]]
    for number, plane in enumerate(layers):
        at = plane.offset + 4 * plane.page_stride + plane.head_stride + 5 * plane.token_stride
        assert torch.equal(
            torch.frombuffer(memory, dtype=torch.float32, count=DIM, offset=at), parts[number, 4, 1, 5, :DIM]
        )
    os.close(shared.regions[0])


def test_tokens_are_not_found_in_content_of_another_size():
    odd = {f"model.layers.{n}.attn": torch.zeros(BLOCKS, 2, TOKENS, 2 * DIM + 4) for n in range(3)}
    with pytest.raises(LayoutError, match="20 elements of a token"):
        layout_of(odd, cache(), PageFormat.TOKEN_ROWS)


def test_rows_of_tokens_are_shared_with_k_and_v_of_a_layer_in_one_region():
    layers = [torch.zeros(2, 16, 2, 8) for _ in range(2)]
    layout = KVLayout(ModelShape.kv(2, 2, 8, 4), Parallel(), 4)
    shared = share_rows([RowCache([*(each[0] for each in layers), *(each[1] for each in layers)], layout)])
    for descriptor in shared.regions:
        os.close(descriptor)
    assert (shared.geometries[0].page_count, len(shared.regions), shared.device) == (4, 2, "cpu")
    half_bytes = 16 * 2 * 8 * 4
    assert [(each.region, each.offset) for each in shared.geometries[0].planes] == [
        (0, 0),
        (1, 0),
        (0, half_bytes),
        (1, half_bytes),
    ]
    assert {each[1].is_shared() for each in layers} == {True}


def test_rows_of_other_heads_or_with_gaps_are_refused():
    layout = KVLayout(ModelShape.kv(1, 2, 8, 4), Parallel(), 4)
    for tensor in (torch.zeros(16, 4, 8), torch.zeros(16, 2, 16)[:, :, :8]):
        with pytest.raises(LayoutError, match="rows of 2 heads of 8 elements without gaps"):
            share_rows([RowCache([tensor, tensor], layout)])
