"""Tests how vLLM's groups of layers become caches: kinds, layouts, the places of bytes, and the pages of each cache."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from stand_in_vllm import CacheConfig, FullAttentionSpec, SlidingWindowSpec, cache_group

from longshore_client import ArgumentError, Parallel
from longshore_client.arguments import CacheTokens
from longshore_engines.handover import GroupPages
from longshore_engines.requests import PageGroup
from longshore_engines.rooms import CacheGroups
from longshore_engines.vllm_caches import caches_of, held_back, is_draft, page_groups
from longshore_wire.errors import LayoutError
from longshore_wire.layout import PageOrder, Plane

BLOCKS, TOKENS, DIM = 6, 16, 8
PAGE_BYTES = 4096


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size = 64


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    def __init__(self, *arguments, role="SPARSE"):
        super().__init__(*arguments)
        self.cache_role = SimpleNamespace(name=role)


class MambaSpec:
    def __init__(self, kind, mode="none", spares=0, *, replicated=False):
        self.block_size, self.mamba_type, self.mamba_cache_mode = 2048, SimpleNamespace(name=kind), mode
        self.num_speculative_blocks, self.tp_replicated = spares, replicated


FULL, WINDOW = FullAttentionSpec(TOKENS, DIM), SlidingWindowSpec(TOKENS, DIM)


def engine(*, tp=1, heads=2, layers=8, **text):
    model = SimpleNamespace(
        use_mla=False,
        get_total_num_hidden_layers=lambda: layers,
        get_total_num_kv_heads=lambda: heads,
        hf_text_config=SimpleNamespace(**text),
    )
    return SimpleNamespace(model_config=model, speculative_config=None, tp=tp)


def allocation(heads=1, parts=1):
    """Return one allocation as vLLM overlays it: layer l of each group lies behind layer l-1 of each, in blocks of PAGE_BYTES."""
    raw = torch.zeros(3 * BLOCKS * PAGE_BYTES, dtype=torch.int8)

    def tensor(layer, shape, dtype, offset_bytes=0, count=BLOCKS):
        size = torch.empty(0, dtype=dtype).element_size()
        strides = [PAGE_BYTES * BLOCKS // count // size]
        for index in range(len(shape)):
            inner = 1
            for length in shape[index + 1 :]:
                inner *= length
            strides.append(inner)
        begin = (layer * BLOCKS * PAGE_BYTES + offset_bytes) // size
        return torch.as_strided(raw.view(dtype), (count, *shape), strides, begin)

    def attention(layer):
        return tensor(layer, (heads, TOKENS, 2 * DIM), torch.float32, count=BLOCKS * parts)

    return tensor, attention


def described(
    config, groups, kv_caches, states=None, *, pages="opaque", is_dim_first=False, tp_rank=0, writers=None, stages=None
):
    found = caches_of(
        config,
        CacheConfig(BLOCKS, groups),
        kv_caches,
        states or {},
        Parallel(tp=config.tp, tp_rank=tp_rank, pp=len(stages or "1"), pp_rank=len(stages or "1") - 1),
        pages,
        dict.fromkeys(kv_caches, "CPU_ATTN vec") | (writers or {}),
        is_dim_first=is_dim_first,
        of_stages=lambda own: [*(stages or [own])[:-1], own],
    )
    for region in found.shared.regions:
        os.close(region)
    return found


# -- kinds ----------------------------------------------------------------------------------------------------------------


def test_the_scheduler_knows_each_group_by_its_page_its_window_or_its_state():
    chunked = ChunkedLocalAttentionSpec(TOKENS, DIM)
    groups = [cache_group(FULL, "l.0"), cache_group(WINDOW, "l.1"), cache_group(MambaSpec("GDN_ATTN", spares=3), "l.2")]
    groups.append(cache_group(chunked, "l.3"))
    found = page_groups(CacheConfig(BLOCKS, groups), is_opaque=True)
    assert found == (
        PageGroup(TOKENS, unit_tokens=TOKENS),
        PageGroup(TOKENS, window=40, unit_tokens=TOKENS),
        PageGroup(2048, is_state=True, spares=3),
        PageGroup(TOKENS, unit_tokens=TOKENS, chunk=64),
    )
    assert [held_back([group]) for group in found] == [0, 1, 1, 1]
    assert page_groups(CacheConfig(BLOCKS, groups[1:2]), is_opaque=False)[0].unit_tokens == 1


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (SinkFullAttentionSpec(TOKENS, DIM), "SinkFullAttentionSpec"),
        (MambaSpec("LINEAR"), "LINEAR"),
        (MambaSpec("MAMBA2", "all"), "--mamba-cache-mode align"),
        (MambaSpec("MAMBA2", replicated=True), "every rank has whole"),
    ],
)
def test_a_kind_that_was_not_tried_is_refused_by_the_name_of_its_layer(spec, named):
    with pytest.raises(ArgumentError, match=named):
        page_groups(CacheConfig(BLOCKS, [cache_group(spec, "model.layers.5.attn")]), is_opaque=True)


def test_layers_of_a_draft_are_told_from_those_of_the_model_by_their_names():
    # A draft model, heads that vLLM numbers by themselves or after the model's layers, and the model itself.
    assert is_draft("mtp.layers.0.self_attn.attn", 4)
    assert is_draft("draft_model.model.layers.0.self_attn.attn", 4)
    assert is_draft("model.layers.4.self_attn.attn", 4)
    assert not is_draft("model.layers.3.self_attn.attn", 4)


# -- layouts and places -----------------------------------------------------------------------------------------------------


def test_groups_of_windows_are_caches_of_their_own_and_overlay_each_other():
    _, attention = allocation()
    names = {f"l.{number}": attention(number % 2) for number in range(6)}
    groups = [cache_group(WINDOW, "l.0", "l.3"), cache_group(FULL, "l.2", "l.5"), cache_group(WINDOW, "l.1", "l.4")]
    found = described(engine(heads=1), groups, names)
    assert [(cache.name, cache.model.layers) for cache in found.shared.layout.caches] == [
        ("kv", 2),
        ("window", 2),
        ("window-2", 2),
    ]
    assert [cache.groups for cache in found.groups] == [(1,), (0,), (2,)]
    # l.2 and l.5; l.0 and l.3; l.1 and l.4.
    offsets = [[plane.offset // (BLOCKS * PAGE_BYTES) for plane in each.planes] for each in found.shared.geometries]
    assert offsets == [[0, 1], [0, 1], [1, 0]]
    assert found.content == "CPU_ATTN vec torch.float32"


def test_layers_are_in_the_order_of_their_numbers_and_errors_name_them():
    _, attention = allocation()
    names = {"m.layers.10.attn": attention(2), "m.layers.2.attn": attention(1), "m.layers.1.attn": attention(0)}
    (geometry,) = described(engine(heads=1, layers=11), [cache_group(FULL, *names)], names).shared.geometries
    assert [plane.offset for plane in geometry.planes] == [0, BLOCKS * PAGE_BYTES, 2 * BLOCKS * PAGE_BYTES]
    names["m.layers.10.attn"] = torch.zeros((BLOCKS, 1, TOKENS, DIM))
    with pytest.raises(LayoutError, match=r"layer m\.layers\.10\.attn has the shape .* and that of m\.layers\.1\.attn"):
        described(engine(heads=1, layers=11), [cache_group(FULL, *names)], names)


def gated(*, is_dim_first, key_heads=2, heads=4, width=4, rows=3, layer=0):
    """Return a layer's state, and the rank's sections of a conv state: heads and elements of each."""
    tensor, _ = allocation()
    channels = (2 * key_heads + heads) * width
    conv = tensor(layer, (channels, rows) if is_dim_first else (rows, channels), torch.bfloat16)
    return conv, tensor(layer, (heads, width, width), torch.float32, 2 * rows * channels)


@pytest.mark.parametrize("is_dim_first", [False, True])
def test_each_section_of_a_conv_state_is_a_plane_whose_heads_lie_where_vllm_has_them(is_dim_first):
    tp, rank, width, rows = 2, 1, 4, 3
    state = gated(is_dim_first=is_dim_first)
    # A rank's q, k and v are 2, 2 and 4 heads, of 4, 4 and 8.
    found = described(
        engine(tp=tp),
        [cache_group(MambaSpec("GDN_ATTN"), "l.0")],
        {},
        {"l.0": state},
        is_dim_first=is_dim_first,
        tp_rank=rank,
    )
    conv, ssm = found.shared.layout.caches
    assert [plane.heads for plane in conv.model.planes] == [4, 4, 8]
    assert ssm.model.planes == (Plane(8, width * width * 4),)
    assert (conv.order, ssm.order) == (PageOrder.SLOT, PageOrder.SLOT)
    # Written by its place, each element is found where vLLM reads it.
    geometry, block = found.shared.geometries[0], 4
    raw = state[0].untyped_storage()
    data = torch.empty(0, dtype=torch.uint8).set_(raw, 0, (raw.nbytes(),))
    first = 0
    for number, plane in enumerate(conv.model.planes):
        place = geometry.planes[number]
        for head in range(plane.heads // tp):
            for row in range(plane.rows):
                begin = place.offset + block * place.page_stride + row * place.token_stride + head * place.head_stride
                data[begin : begin + plane.row_bytes] = number * 64 + head * 4 + row + 1
            channels = slice(first + head * width, first + (head + 1) * width)
            seen = state[0][block, channels].T if is_dim_first else state[0][block, :, channels]
            codes = seen.contiguous().view(torch.uint8)[:, 0].tolist()
            assert codes == [number * 64 + head * 4 + (0 if is_dim_first else row) + 1 for row in range(rows)]
        first += plane.heads // tp * width
    assert "conv DS" in found.content if is_dim_first else "conv SD" in found.content


def test_sections_that_every_rank_has_are_told_from_split_ones_by_the_models_config():
    tensor, _ = allocation()
    # x of 4 heads of 8, B and C of one group of 16 each.
    state = tensor(0, (3, 4 * 8 + 2 * 16), torch.float32), tensor(0, (4, 8, 16), torch.float32, 2048)
    groups = [cache_group(MambaSpec("MAMBA2"), "l.0")]

    def heads(tp, **text):
        found = described(engine(tp=tp, **text), groups, {}, {"l.0": state})
        return [plane.heads for plane in found.shared.layout.caches[0].model.planes]

    assert heads(1) == [4, 1, 1]
    assert heads(2, n_groups=1) == [8, 1, 1]
    assert heads(2, mamba_n_groups=2) == [8, 2, 2]
    with pytest.raises(ArgumentError, match="mamba_n_groups"):
        heads(2)


def test_a_state_without_heads_is_divided_by_groups_of_channels():
    tensor, _ = allocation()
    groups = [cache_group(MambaSpec("MAMBA1", "align"), "l.0")]
    state = tensor(0, (3, 128), torch.float32), tensor(0, (128, 4), torch.float32, 3 * 128 * 4)
    conv, ssm = described(engine(tp=2), groups, {}, {"l.0": state}).shared.layout.caches
    assert conv.model.planes == (Plane(4, 64 * 4, 3),)
    assert ssm.model.planes == (Plane(4, 64 * 4 * 4),)
    odd = tensor(0, (3, 96), torch.float32), tensor(0, (96, 4), torch.float32, 3 * 96 * 4)
    with pytest.raises(ArgumentError, match="96 channels"):
        described(engine(tp=2), groups, {}, {"l.0": odd})


@pytest.mark.parametrize(
    ("counts", "page_layers", "repeats"),
    [((2, 2, 2), 2, (1, 1, 1)), ((2, 2, 1), 2, (1, 1, 1)), ((2, 1, 1), 1, (2, 1, 1)), ((3,), 3, (1,))],
)
def test_a_page_of_states_has_the_layers_of_a_group_or_one_layer_if_groups_are_unequal(counts, page_layers, repeats):
    tensor, _ = allocation()
    names = iter(f"l.{number}" for number in range(9))
    groups = [cache_group(MambaSpec("MAMBA2"), *(next(names) for _ in range(count))) for count in counts]
    states = {
        name: (tensor(at, (3, 12), torch.float32), tensor(at, (1, 4, 4), torch.float32, 2048))
        for group in groups
        for at, name in enumerate(group.layer_names)
    }
    found = described(engine(), groups, {}, states)
    assert [cache.page_size for cache in found.shared.layout.caches] == [page_layers] * 2
    assert [cache.repeats for cache in found.groups] == [repeats] * 2
    named = found.groups[0].tokens(0, [GroupPages((10 + index,), 0, 99) for index in range(len(counts))])
    # Each layer's page is the one of its group.
    pages = [named.pages[layer // page_layers] for layer in range(sum(counts))]
    assert pages == [10 + index for index, count in enumerate(counts) for _ in range(count)]


def test_index_keys_are_caches_beside_the_latents_of_their_group_which_each_rank_has_whole():
    tensor, _ = allocation()
    latents, keys = tensor(0, (1, TOKENS, DIM), torch.bfloat16), tensor(1, (1, TOKENS, DIM), torch.uint8)
    names, tensors = {}, {}
    for layer in ("l.0", "mtp.layers.0"):
        names |= {f"{layer}.attn": MLAAttentionSpec(TOKENS, DIM)}
        names |= {f"{layer}.indexer.k_cache": MLAAttentionSpec(TOKENS, DIM, role="INDEXER")}
        tensors |= {f"{layer}.attn": latents, f"{layer}.indexer.k_cache": keys}
    group = cache_group(FULL, *names)
    group.kv_cache_spec = SimpleNamespace(block_size=TOKENS, kv_cache_specs=names)
    config = engine(tp=2)
    config.speculative_config = SimpleNamespace(draft_model_config=config.model_config)
    writers = {name: "INDEXER" for name in names if "indexer" in name}
    found = described(config, [group], tensors, writers=writers, tp_rank=1)
    caches = ["kv", "index", "draft", "draft-index"]
    assert [(cache.name, cache.model.kv_heads) for cache in found.shared.layout.caches] == [
        (name, 1) for name in caches
    ]
    assert [cache.groups for cache in found.groups] == [(0,)] * 4
    assert found.content.startswith("kv: CPU_ATTN vec torch.bfloat16; index: INDEXER torch.uint8; draft: CPU_ATTN")
    with pytest.raises(ArgumentError, match="index is written by INDEXER"):
        described(config, [group], tensors, pages="tokens", writers=writers)


def test_caches_that_others_write_are_named_one_by_one_and_have_no_pages_of_tokens():
    _, attention = allocation()
    groups = [cache_group(FULL, "l.0"), cache_group(WINDOW, "l.1")]
    tensors, writers = {"l.0": attention(0), "l.1": attention(0)}, {"l.1": "CPU_ATTN amx"}
    found = described(engine(heads=1), groups, tensors, writers=writers)
    assert found.content == "kv: CPU_ATTN vec torch.float32; window: CPU_ATTN amx torch.float32"
    with pytest.raises(ArgumentError, match="window is written by CPU_ATTN amx"):
        described(engine(heads=1), groups, tensors, pages="tokens", writers=writers)


def test_elements_of_one_byte_are_named_by_vllms_option_since_their_tensors_do_not():
    def content(name):
        config = engine(heads=1)
        config.cache_config = SimpleNamespace(cache_dtype=name)
        tensor = torch.zeros((BLOCKS, 1, TOKENS, 2 * DIM), dtype=torch.uint8)
        return described(config, [cache_group(FULL, "l.0")], {"l.0": tensor}).content

    assert content("fp8") == content("fp8_e4m3") == "CPU_ATTN vec fp8_e4m3"
    assert content("fp8_e5m2") == "CPU_ATTN vec fp8_e5m2"


def test_heads_that_ranks_may_share_are_refused_where_layers_have_other_numbers_of_them():
    _, attention = allocation()
    groups = [cache_group(FULL, "l.0"), cache_group(WINDOW, "l.1")]
    tensors = {"l.0": attention(0), "l.1": attention(1)}
    with pytest.raises(ArgumentError, match=r"l\.0 .* 4 or, by swa_num_key_value_heads, 8"):
        described(engine(tp=8, heads=4, num_key_value_heads=4, swa_num_key_value_heads=8), groups, tensors)
    found = described(engine(tp=8, heads=4, num_key_value_heads=4), groups, tensors)
    assert [cache.model.kv_heads for cache in found.shared.layout.caches] == [4, 4]


def test_a_model_without_attention_has_its_states_alone_whatever_the_pages():
    found = described(
        engine(), [cache_group(MambaSpec("GDN_ATTN"), "l.0")], {}, {"l.0": gated(is_dim_first=False)}, pages="tokens"
    )
    assert [cache.name for cache in found.shared.layout.caches] == ["conv", "ssm"]


def test_layers_that_share_a_cache_are_refused():
    _, attention = allocation()
    with pytest.raises(ArgumentError, match=r"l\.0 and l\.1 share"):
        described(engine(heads=1), [cache_group(FULL, "l.0", "l.1")], {"l.0": attention(0), "l.1": attention(0)})


def test_a_state_whose_block_has_gaps_is_refused():
    conv, ssm = gated(is_dim_first=False)
    with pytest.raises(LayoutError, match="without gaps"):
        described(engine(), [cache_group(MambaSpec("GDN_ATTN"), "l.0")], {}, {"l.0": (conv[:, :, :-4], ssm)})


def counts(full, windowed):
    return {"kv": full, "window": windowed}


def test_each_cache_of_a_pipeline_stage_has_the_layers_that_follow_those_of_earlier_stages():
    _, attention = allocation()
    # The last stage, of layers 6 to 8 of nine.
    groups = [cache_group(FULL, "l.6"), cache_group(WINDOW, "l.7", "l.8")]
    tensors = {name: attention(at) for at, name in enumerate(["l.6", "l.7", "l.8"])}
    found = described(engine(heads=1, layers=9), groups, tensors, stages=[counts(2, 1), counts(1, 2), {}]).shared.layout
    assert [(cache.name, cache.stage_layers, cache.layers) for cache in found.caches] == [
        ("kv", (2, 1, 1), range(3, 4)),
        ("window", (1, 2, 2), range(3, 5)),
    ]
    with pytest.raises(ArgumentError, match="stage 0 has no layer of cache 'window'"):
        described(engine(heads=1, layers=9), groups, tensors, stages=[{"kv": 3}, counts(1, 2), {}])
    # A stage without layers of a group says so, too.
    with pytest.raises(ArgumentError, match="stage 1 has no layer of cache 'kv'"):
        described(engine(heads=1, layers=9), [cache_group(FULL), groups[1]], tensors, stages=[counts(1, 1), {}])


def test_a_pipeline_stage_counts_the_layers_of_index_keys_apart_from_the_latents_of_their_group():
    tensor, _ = allocation()
    names = {f"l.{layer}.attn": MLAAttentionSpec(TOKENS, DIM) for layer in (2, 3)}
    names["l.3.indexer.k_cache"] = MLAAttentionSpec(TOKENS, DIM, role="INDEXER")
    tensors = {name: tensor(at, (1, TOKENS, DIM), torch.bfloat16) for at, name in enumerate(names)}
    group = cache_group(FULL, *names)
    group.kv_cache_spec = SimpleNamespace(block_size=TOKENS, kv_cache_specs=names)
    found = described(engine(layers=4), [group], tensors, stages=[{"kv": 2, "index": 1}, {}]).shared.layout
    assert [(cache.name, cache.stage_layers) for cache in found.caches] == [("kv", (2, 2)), ("index", (1, 1))]


# -- pages ------------------------------------------------------------------------------------------------------------------


def test_a_page_that_kernels_see_in_parts_is_named_by_its_parts():
    _, attention = allocation(parts=2)
    found = described(engine(heads=1), [cache_group(FullAttentionSpec(2 * TOKENS, DIM), "l.0")], {"l.0": attention(0)})
    (cache,) = found.groups
    assert (cache.parts, cache.page_size) == (2, TOKENS)
    # Tokens 48 to 99 of blocks of 32 tokens, the second to the fourth of a sequence.
    assert cache.tokens(0, [GroupPages((7, 4, 5), 48, 99)]) == CacheTokens(0, (15, 8, 9, 10), 48, 99)
    # Windows begin with a page of vLLM's, so that both sides must have equal ones.
    assert found.content == "CPU_ATTN vec torch.float32 in 2 parts"


def test_a_cache_without_tokens_here_names_no_page():
    empty = [GroupPages((), 99, 99)] * 3
    assert CacheGroups((1, 2), (3, 1)).tokens(1, empty) == CacheTokens(1, (), 99, 99)
    assert CacheGroups((2,)).tokens(1, empty) == CacheTokens(1, (), 99, 99)
