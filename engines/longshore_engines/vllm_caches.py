"""Describes vLLM's groups of layers as caches: their layouts, their tensors, and the groups that their pages come from.

Called by `vllm.LongshoreConnector`. It reads attributes of vLLM's configuration and does not import vLLM. vLLM allots pages by
group, and a model has one group for each kind of layer, or several if it has more layers of one kind than of another. The groups
overlay each other in one allocation, in which a page belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from longshore_client.errors import ArgumentError
from longshore_engines.handover import token_content
from longshore_engines.requests import PageGroup
from longshore_engines.rooms import CacheGroups
from longshore_engines.tensors import (
    CacheShape,
    KVTensor,
    PageFormat,
    SharedCaches,
    SlotCache,
    layer_number,
    share,
    state_slots,
    whole_heads,
)
from longshore_engines.vllm_checks import is_index, page_format, specs_of
from longshore_wire.layout import Parallel

_FULL, _WINDOW, _STATE = "kv", "window", "state"
# Caches of layers whose group has others: keys by which a layer selects tokens, and layers of a draft.
INDEX, DRAFT, DRAFT_INDEX = "index", "draft", "draft-index"
# The kinds of vLLM's specs that were tried, by their class.
_KINDS = {
    "FullAttentionSpec": _FULL,
    "MLAAttentionSpec": _FULL,
    "SlidingWindowSpec": _WINDOW,
    "ChunkedLocalAttentionSpec": _WINDOW,
    "MambaSpec": _STATE,
}
_ORDER = (_FULL, _WINDOW, INDEX, DRAFT, DRAFT_INDEX)
# In both modes of vLLM a sequence's last page, before those for speculation, is its running state. In `align` the prefix cache
# keeps states, too, at the ends of blocks.
_STATE_MODES = ("none", "align")
# vLLM's names of one type.
_SYNONYMS = {"fp8": "fp8_e4m3"}
# What models call the number of groups that share B and C of a Mamba2 state.
_STATE_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


class Caches(NamedTuple):
    """The caches of one rank.

    Attributes:
        shared: their layouts and memory.
        groups: of each cache.
        content: the meaning of a page's bytes beyond the layout.
    """

    shared: SharedCaches
    groups: tuple[CacheGroups, ...]
    content: str


def kind_of(group: Any) -> str:
    """Return what the layers of a group keep.

    Raises:
        ArgumentError: it was not tried; names it.
    """
    kinds = set()
    for name, spec in specs_of(group).items():
        kind = _KINDS.get(type(spec).__name__)
        if kind is None:
            raise ArgumentError(f"layer {name} has a cache of the kind {type(spec).__name__}, which is not moved yet")
        if kind == _STATE:
            _check_state(name, spec)
        kinds.add(kind)
    if len(kinds) != 1:
        raise ArgumentError(f"a group has layers of the kinds {', '.join(sorted(kinds))}: one is known")
    return kinds.pop()


def _check_state(name: str, spec: Any) -> None:
    if spec.mamba_type.name not in _SHAPES:
        raise ArgumentError(
            f"layer {name} has a state of the kind {spec.mamba_type.name}: only those of {', '.join(sorted(_SHAPES))} are moved"
        )
    if spec.mamba_cache_mode not in _STATE_MODES:
        raise ArgumentError(
            f"mamba_cache_mode is {spec.mamba_cache_mode!r}: only {', '.join(_STATE_MODES)} are tried; start with "
            "--mamba-cache-mode align"
        )
    if getattr(spec, "tp_replicated", False):
        raise ArgumentError(f"layer {name} has a state that every rank has whole, which is not moved yet")


def page_groups(kv_cache_config: Any, *, is_opaque: bool) -> tuple[PageGroup, ...]:
    """Return vLLM's groups, as its scheduler allots their pages.

    Raises:
        ArgumentError: as `kind_of`.
    """
    found = []
    for group in kv_cache_config.transfer_groups:
        kind, spec = kind_of(group), next(iter(specs_of(group).values()))
        size = group.kv_cache_spec.block_size
        if kind == _STATE:
            found.append(PageGroup(size, is_state=True, spares=spec.num_speculative_blocks))
        else:
            # Specs of all tokens name windows, too, where vLLM allots all tokens to windowed layers.
            own = spec if kind == _WINDOW else None
            window, chunk = (getattr(own, name, None) or 0 for name in ("sliding_window", "attention_chunk_size"))
            found.append(PageGroup(size, window, size if is_opaque else 1, chunk=chunk))
    return tuple(found)


def held_back(groups: Sequence[PageGroup]) -> int:
    """Return how many of a prompt's last tokens prefill must not compute; see `RequestBook.shortened`."""
    return int(not all(group.is_whole for group in groups))


def is_draft(name: str, layers: int) -> bool:
    """Return whether a layer is of the draft of a model of `layers` layers, by its name."""
    return name.startswith(("draft_model.", "mtp.")) or layer_number(name) >= layers


class _Attention(NamedTuple):
    """A cache with tokens: its layers in order, all of one group."""

    kind: str
    group: int
    names: tuple[str, ...]


def caches_of(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, KVTensor],
    states: Mapping[str, Sequence[KVTensor]],
    parallel: Parallel,
    pages: str,
    writers: Mapping[str, str],
    *,
    is_dim_first: bool,
    of_stages: Callable[[dict[str, int]], list[dict[str, int]]],
) -> Caches:
    """Share this rank's memory, and describe it.

    Args:
        kv_caches: as vLLM registers them.
        states: the parts of each layer's state: [blocks, rows, channels], or [blocks, channels, rows] with `is_dim_first`, and
            [blocks, heads, ...].
        pages: the connector's option.
        writers: of each layer with tokens, see `vllm_checks.PAGE_FORMATS`.
        of_stages: returns the argument of each pipeline stage's call, in order: its number of layers in each cache with tokens.
    Raises:
        ArgumentError, LayoutError: they cannot be moved; names the layer and its property.
    """
    groups = kv_cache_config.transfer_groups
    # A pipeline stage may have no layer of a group.
    kinds = [kind_of(group) if group.layer_names else "" for group in groups]
    model = vllm_config.model_config
    layers = model.get_total_num_hidden_layers()
    attention = _attention(groups, kinds, layers)
    stages = of_stages({name: len(cache.names) for name, cache in attention.items()})
    _check_stages(stages)
    tensors, sources, written = [], [], {}
    for name, cache in attention.items():
        spec = specs_of(groups[cache.group])[cache.names[0]]
        own = {layer: kv_caches[layer] for layer in cache.names}
        _check_apart(own)
        first = own[cache.names[0]]
        counts = [stage[name] for stage in stages]
        is_of_draft = cache.kind in {DRAFT, DRAFT_INDEX}
        owner = vllm_config.speculative_config.draft_model_config if is_of_draft else model
        total, fields = int(owner.get_total_num_kv_heads()), vars(owner.hf_text_config)
        is_latent = type(spec).__name__ == "MLAAttentionSpec"
        heads = 1 if is_latent else whole_heads(cache.names[0], first.shape[1], parallel.tp, total, fields)
        shape = CacheShape(
            sum(counts),
            heads,
            spec.head_size,
            parallel,
            tuple(counts) if len(stages) > 1 else None,
            is_latent=is_latent,
            name=name,
        )
        tensors.append((own, shape))
        parts = first.shape[0] // kv_cache_config.num_blocks
        sources.append(CacheGroups((cache.group,), page_size=first.shape[2], parts=parts))
        # The option is not of index keys, which have a type of their own.
        element = str(first.dtype) if is_index(spec) else _element(first, vllm_config)
        writer = f"{writers[cache.names[0]]} {element}"
        written[name] = f"{writer} in {parts} parts" if parts > 1 else writer
    slots, repeats, texts = _slots(vllm_config, groups, kinds, states, parallel, is_dim_first=is_dim_first)
    named = tuple(group for group, kind in enumerate(kinds) if kind == _STATE)
    sources += [CacheGroups(named, repeats) for _ in slots]
    form = PageFormat.BLOB
    if tensors:
        form = page_format(pages, writers[next(iter(attention.values())).names[0]])
        element = _element(next(iter(tensors[0][0].values())), vllm_config)
        texts.insert(0, _content(form, written, element, is_latent=tensors[0][1].is_latent))
    return Caches(share(tensors, form, slots), tuple(sources), "; ".join(texts))


def _element(tensor: KVTensor, vllm_config: Any) -> str:
    """Name the type of a cache's elements. vLLM's tensors of one byte do not say it."""
    if tensor.element_size() > 1:
        return str(tensor.dtype)
    name = str(vllm_config.cache_config.cache_dtype)
    return _SYNONYMS.get(name, name)


def _content(form: PageFormat, written: Mapping[str, str], element: str, *, is_latent: bool) -> str:
    """Return the meaning of the bytes of caches with tokens.

    Args:
        written: by cache, the backend that writes it, and the type of its elements.
        element, is_latent: of the first cache.
    """
    (first_name, first), *_ = written.items()
    other = next((name for name, text in written.items() if text != first), None)
    if form is PageFormat.BLOB:
        return first if other is None else "; ".join(f"{name}: {text}" for name, text in written.items())
    if other is not None:
        raise ArgumentError(
            f"{other} is written by {written[other]} and {first_name} by {first}: pages of tokens need one kind; use pages: opaque"
        )
    return f"vLLM's latents of {element}" if is_latent else token_content(element)


def _attention(groups: Sequence[Any], kinds: Sequence[str], layers: int) -> dict[str, _Attention]:
    """Return the caches with tokens by their names: those of the model in full, its windows, then those of its draft."""
    found = []
    for index, (group, kind) in enumerate(zip(groups, kinds, strict=True)):
        if kind in {_STATE, ""}:
            continue
        by_kind: dict[str, list[str]] = {}
        for name in sorted(group.layer_names, key=layer_number):
            of_model, of_draft = (INDEX, DRAFT_INDEX) if is_index(specs_of(group)[name]) else (kind, DRAFT)
            by_kind.setdefault(of_draft if is_draft(name, layers) else of_model, []).append(name)
        found += [_Attention(each, index, tuple(names)) for each, names in by_kind.items()]
    found.sort(key=lambda cache: (_ORDER.index(cache.kind), cache.group))
    numbers = [sum(other.kind == cache.kind for other in found[:at]) for at, cache in enumerate(found)]
    return {
        f"{cache.kind}-{number + 1}" if number else cache.kind: cache
        for number, cache in zip(numbers, found, strict=True)
    }


def _check_stages(stages: Sequence[Mapping[str, int]]) -> None:
    """Raise ArgumentError unless each pipeline stage has layers in each cache."""
    names = dict.fromkeys(name for stage in stages for name in stage)
    for number, counts in enumerate(stages):
        missing = next((name for name in names if name not in counts), None)
        if missing is not None:
            raise ArgumentError(f"pipeline stage {number} has no layer of cache {missing!r}: use fewer stages")


def _check_apart(tensors: Mapping[str, KVTensor]) -> None:
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        other = seen.setdefault(tensor.data_ptr(), name)
        if other != name:
            raise ArgumentError(f"layers {other} and {name} share one cache, which is not moved yet")


# -- recurrent states -------------------------------------------------------------------------------------------------


class _StateShape(NamedTuple):
    """Of all ranks: the heads of a state, and the sections of its conv state, heads and channels of each."""

    heads: int
    sections: list[tuple[int, int]]


def _gated_delta(channels: int, state: Sequence[int], tp: int, config: Any) -> _StateShape:  # noqa: ARG001
    """Return the shape of a state whose conv state has q, k and v."""
    heads, width, key_width = state
    keys = ((channels - heads * width) // 2 // key_width * tp, key_width)
    return _StateShape(heads * tp, [keys, keys, (heads * tp, width)])


def _mamba1(channels: int, state: Sequence[int], tp: int, config: Any) -> _StateShape:  # noqa: ARG001
    """Return the shape of a state without heads, whose channels are independent."""
    heads, others = divmod(channels, _CHANNELS)
    if others:
        raise ArgumentError(f"a rank has {channels} channels of a state: a multiple of {_CHANNELS} is known")
    return _StateShape(heads * tp, [(heads * tp, _CHANNELS)])


def _mamba2(channels: int, state: Sequence[int], tp: int, config: Any) -> _StateShape:
    """Return the shape of a state whose conv state has x, B and C."""
    heads, width, size = state
    local = (channels - heads * width) // 2 // size
    groups = local * tp
    if local == 1 and tp > 1:
        given = next((value for name in _STATE_GROUPS if (value := getattr(config, name, None))), None)
        if given is None:
            raise ArgumentError(
                f"the model's config has none of {', '.join(_STATE_GROUPS)}: whether ranks share B and C of a state is not known"
            )
        groups = min(given, tp)
    return _StateShape(heads * tp, [(heads * tp, width), (groups, size), (groups, size)])


# What ranks divide of a state without heads: this many channels together.
_CHANNELS = 64
_SHAPES = {"GDN_ATTN": _gated_delta, "MAMBA1": _mamba1, "MAMBA2": _mamba2}


def _slots(
    vllm_config: Any,
    groups: Sequence[Any],
    kinds: Sequence[str],
    states: Mapping[str, Sequence[KVTensor]],
    parallel: Parallel,
    *,
    is_dim_first: bool,
) -> tuple[list[SlotCache], tuple[int, ...], list[str]]:
    """Return the caches of recurrent states, how often each group's page is named, and the meaning of their bytes."""
    by_group = [
        sorted(group.layer_names, key=layer_number) for group, kind in zip(groups, kinds, strict=True) if kind == _STATE
    ]
    if not by_group:
        return [], (), []
    counts = [len(names) for names in by_group]
    # A page of the slot is one of vLLM's, or one layer if vLLM's have unequal numbers of layers.
    is_even = all(count == counts[0] for count in counts[:-1]) and counts[-1] <= counts[0]
    names = [name for group in by_group for name in group]
    spec = next(specs_of(group)[names[0]] for group in groups if names[0] in group.layer_names)
    conv, state = ([states[name][part] for name in names] for part in range(2))
    channels = conv[0].shape[1 if is_dim_first else 2]
    config = vllm_config.model_config.hf_text_config
    heads, sections = _SHAPES[spec.mamba_type.name](channels, state[0].shape[1:], parallel.tp, config)
    order = "DS" if is_dim_first else "SD"
    text = (
        f"states of {spec.mamba_type.name} in groups of {', '.join(map(str, counts))}: conv {order} {conv[0].dtype}, "
        f"ssm {state[0].dtype}"
    )
    slots = state_slots(conv, state, heads, sections, parallel, counts[0] if is_even else 1, is_dim_first=is_dim_first)
    return slots, (1,) * len(counts) if is_even else tuple(counts), [text]
