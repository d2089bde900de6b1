"""Describes an engine's KV tensors as a layout and a pool, and shares their memory with the agent.

Called by an engine's connector once, after it has allocated its cache. Imports no tensor library: it uses only methods
of a tensor. Sharing moves a CPU tensor's bytes, so raw pointers that were taken before are invalid.
"""

from __future__ import annotations

import enum
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from longshore_client.cuda import device_name, device_region
from longshore_client.errors import ArgumentError
from longshore_client.memory import CPUTensor, torch_region
from longshore_wire.engine_messages import DeviceRegion
from longshore_wire.errors import LayoutError
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, Plane, PlaneGeometry, PoolGeometry

_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
# What models call the number of KV heads, of all layers or of some.
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_DIMENSIONS = ("block", "head", "token", "content")


class Device(Protocol):
    """The part of `torch.device` that is used here."""

    @property
    def type(self) -> str:
        """Return "cpu" or "cuda"."""


class KVTensor(CPUTensor, Protocol):
    """The part of `torch.Tensor` that is used here: [blocks, heads, tokens, content] of one layer."""

    @property
    def shape(self) -> Sequence[int]:
        """Return the number of entries of each dimension."""

    @property
    def device(self) -> Device:
        """Return the device that holds the memory."""

    @property
    def dtype(self) -> object:
        """Return the type of an element, such as torch.float32."""

    def stride(self) -> Sequence[int]:
        """Return the stride of each dimension, in elements."""

    def data_ptr(self) -> int:
        """Return the address of the first element."""


class PageFormat(enum.Enum):
    """The meaning of the bytes of one head of one block: [tokens, content] of an engine's tensor.

    Pages in the formats with tokens fit engines with other page sizes and orders; a blob fits its own kind alone.
    """

    BLOB = enum.auto()  # unknown, or of no use to other engines: moved whole
    TOKEN_ROWS = enum.auto()  # of each token its K, then its V; or its latent
    TRANSPOSED_KEYS = enum.auto()  # K with adjacent tokens, [head_dim, tokens]; then V, [tokens, head_dim]


class CacheShape(NamedTuple):
    """The properties of an engine's cache that its tensors do not show."""

    layers: int  # of the whole model
    kv_heads: int  # of the whole model
    head_dim: int
    parallel: Parallel
    stage_layers: tuple[int, ...] | None = None
    is_latent: bool = False  # MLA: one latent a token, of any length, and no heads to split
    name: str = "kv"


class RowCache(NamedTuple):
    """A cache whose tensors have a row for each token: page p is the rows from p * page_size on.

    Attributes:
        tensors: each [tokens, heads, elements] without gaps; K of each local layer, then V of each, as `PoolGeometry` has its
            planes. For latents one a layer.
    """

    tensors: Sequence[KVTensor]
    layout: KVLayout


class SlotCache(NamedTuple):
    """A cache of recurrent states: the tensor of each local layer, [blocks, ...] with a block's bytes adjacent, and the layout.

    In a block the rows follow each other, in each row the planes, and in each plane its heads.
    """

    tensors: Sequence[KVTensor]
    layout: KVLayout


# Of what a layer keeps of a sequence: the last tokens' channels, which it convolves, and its recurrent state.
CONV, SSM = "conv", "ssm"


def state_slots(
    conv: Sequence[KVTensor],
    states: Sequence[KVTensor],
    heads: int,
    sections: Sequence[tuple[int, int]],
    parallel: Parallel,
    page_layers: int,
    *,
    is_dim_first: bool,
) -> list[SlotCache]:
    """Return the caches of recurrent states.

    Args:
        conv: of each local layer [blocks, rows, channels], or [blocks, channels, rows] with `is_dim_first`.
        states: of each local layer [blocks, heads or channels, ...].
        heads: of the states of all ranks, or groups of channels that ranks divide.
        sections: of the channels of all ranks, heads and channels of each.
        page_layers: layers of which one page of a slot has the states.
    """
    rows = conv[0].shape[2 if is_dim_first else 1]
    size, state_size = conv[0].element_size(), states[0].element_size()
    planes = tuple(
        Plane(count, width * rows * size) if is_dim_first else Plane(count, width * size, rows)
        for count, width in sections
    )
    state = Plane(heads, math.prod(states[0].shape[1:]) * parallel.tp * state_size // heads)

    def layout(name: str, own: tuple[Plane, ...], element_bytes: int) -> KVLayout:
        return KVLayout(ModelShape(len(conv), own, element_bytes), parallel, page_layers, PageOrder.SLOT, name=name)

    return [
        SlotCache(conv, layout(CONV, planes, size)),
        SlotCache(states, layout(SSM, (state,), state_size)),
    ]


class SharedCaches(NamedTuple):
    """Arguments for `connect` and `Client.register_pool`. The caller closes the descriptors.

    Attributes:
        layout: of all caches.
        geometries: of each cache, whose pages lie in `regions`.
    """

    layout: KVLayout
    geometries: tuple[PoolGeometry, ...]
    regions: tuple[int, ...] | tuple[DeviceRegion, ...]
    device: str


def whole_heads(name: str, local: int, tp: int, total: int, config: Mapping[str, object]) -> int:
    """Return the KV heads of the whole model in a layer.

    Args:
        local: of this rank.
        total: of the model, as its engine says.
        config: the fields of the model's config.
    Raises:
        ArgumentError: one head of each rank may be one that other ranks have, too, and the config has several numbers.
    """
    if tp == 1 or local > 1:
        return local * tp
    others = {
        key: value
        for key, value in config.items()
        if key.endswith(_KV_HEADS) and isinstance(value, int) and value != total
    }
    if others:
        key, value = others.popitem()
        raise ArgumentError(
            f"layer {name} has one KV head on this rank, and the model {total} or, by {key}, {value}: which of them ranks share is "
            "not known here; use a tensor parallel size that is less than the number of KV heads"
        )
    return min(tp, total)


def layer_number(name: str) -> int:
    """Return the layer's index in the model from its name, such as "model.layers.7.self_attn.attn".

    Raises:
        ArgumentError: the name has no number, or several.
    """
    found = _LAYER_NUMBER.findall(name)
    if len(found) != 1:
        raise ArgumentError(f"layer {name!r} has {len(found)} numbers in its name: one says which layer it is")
    return int(found[0])


def layout_of(tensors: Mapping[str, KVTensor], cache: CacheShape, pages: PageFormat = PageFormat.BLOB) -> KVLayout:
    """Return the layout of a rank. Heads can always be split, tokens of a block only in a format with tokens.

    Args:
        tensors: by layer name, in the order of the layers; each [blocks, heads, tokens, content], without gaps inside a
            (block, head).
    Raises:
        LayoutError, ArgumentError: this layout cannot describe the cache; names the layer and its property.
    """
    names = list(tensors)
    if not names:
        raise ArgumentError("there are no KV tensors: a model without attention layers has nothing to move")
    first = tensors[names[0]]
    for name in names:
        _check_tensor(name, tensors[name], names[0], first)
    _, heads, tokens, content = first.shape
    layout = KVLayout(
        ModelShape.latent(cache.layers, content, first.element_size())
        if cache.is_latent
        else ModelShape.kv(cache.layers, cache.kv_heads, cache.head_dim, first.element_size()),
        cache.parallel,
        tokens,
        PageOrder.OPAQUE if pages is PageFormat.BLOB else PageOrder.HND,
        stage_layers=cache.stage_layers,
        name=cache.name,
        blob_bytes=tokens * content * first.element_size() if pages is PageFormat.BLOB else 0,
    )
    layout.check()
    if pages is not PageFormat.BLOB and not cache.is_latent and content != 2 * cache.head_dim:
        raise LayoutError(
            f"layer {names[0]} keeps {content} elements of a token and head: K and V have {2 * cache.head_dim} together"
        )
    if len(names) != len(layout.layers):
        raise LayoutError(
            f"this rank has KV of {len(names)} layers, {names[0]} to {names[-1]}, and should have {len(layout.layers)}: layers that "
            "share or have no KV cannot be moved"
        )
    if heads != len(layout.heads):
        raise LayoutError(
            f"layer {names[0]} has {heads} KV heads on this rank and should have {len(layout.heads)}, "
            f"of {layout.model.kv_heads} with tensor parallel size {cache.parallel.tp}"
        )
    return layout


def share(
    caches: Sequence[tuple[Mapping[str, KVTensor], CacheShape]],
    pages: PageFormat = PageFormat.BLOB,
    slots: Sequence[SlotCache] = (),
) -> SharedCaches:
    """Move CPU tensors to shared memory in place, or get the handles of a GPU's. Call it once, before their first use.

    Args:
        caches: of each, its tensors by layer name, in the order of the layers, and its shape.
        slots: further caches.
    Raises:
        LayoutError, ArgumentError: as `layout_of`, or the memory cannot be shared.
    """
    parts = []
    for tensors, shape in caches:
        layout = layout_of(tensors, shape, pages)
        ordered = list(tensors.values())
        parts.append(
            _Part(ordered, layout, ordered[0].shape[0], functools.partial(_planes, layout=layout, pages=pages))
        )
    return _shared([*parts, *map(_slot_part, slots)])


def _slot_part(slot: SlotCache) -> _Part:
    layout, first = slot.layout, slot.tensors[0]
    layout.check()
    widths = [len(layout.heads_of(plane.heads)) * plane.row_bytes for plane in layout.model.planes]
    row_bytes, rows = sum(widths), layout.model.planes[0].rows
    for index, tensor in enumerate(slot.tensors):
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        inner = [math.prod(shape[at + 1 :]) for at in range(1, len(shape))]
        if (
            shape != tuple(first.shape)
            or list(strides[1:]) != inner
            or inner[0] * shape[1] * tensor.element_size() != (rows * row_bytes)
        ):
            raise LayoutError(
                f"state {index} of cache {layout.name!r} has the shape {shape} and the strides {strides}: a block has "
                f"{rows} rows of {row_bytes} bytes without gaps"
            )

    def planes(blocks: Sequence[_Blocks]) -> tuple[PlaneGeometry, ...]:
        return tuple(
            PlaneGeometry(region, offset + sum(widths[:number]), stride, row_bytes, plane.row_bytes)
            for number, plane in enumerate(layout.model.planes)
            for region, offset, stride in blocks
        )

    return _Part(slot.tensors, layout, first.shape[0], planes)


def share_rows(caches: Sequence[RowCache], slots: Sequence[SlotCache] = ()) -> SharedCaches:
    """Share tensors that have a row for each token, as `share` does.

    Args:
        slots: further caches.
    Raises:
        LayoutError, ArgumentError: a layout cannot describe its tensors, or the memory cannot be shared.
    """
    return _shared([*map(_row_part, caches), *map(_slot_part, slots)])


def _row_part(cache: RowCache) -> _Part:
    tensors, layout = cache
    layout.check()
    heads, elements, page_size = len(layout.heads), layout.model.head_dim, layout.page_size
    for index, tensor in enumerate(tensors):
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if (
            shape[1:] != (heads, elements)
            or stride != (heads * elements, elements, 1)
            or shape != tuple(tensors[0].shape)
        ):
            raise LayoutError(
                f"KV tensor {index} of cache {layout.name!r} has the shape {shape} and the strides {stride}: this rank's layout has "
                f"rows of {heads} heads of {elements} elements without gaps"
            )
    head_bytes = layout.model.head_bytes
    row_bytes = heads * head_bytes

    def planes(blocks: Sequence[_Blocks]) -> tuple[PlaneGeometry, ...]:
        return tuple(
            PlaneGeometry(each.region, each.offset, page_size * row_bytes, row_bytes, head_bytes) for each in blocks
        )

    return _Part(tensors, layout, tensors[0].shape[0] // page_size, planes)


class _Part(NamedTuple):
    """One cache: its tensors in the order of its planes, and the function that places these."""

    ordered: Sequence[KVTensor]
    layout: KVLayout
    page_count: int
    planes: Callable[[Sequence[_Blocks]], tuple[PlaneGeometry, ...]]


def _shared(parts: Sequence[_Part]) -> SharedCaches:
    first = parts[0].ordered[0]
    regions: list[int | DeviceRegion] = []
    region_bytes: list[int] = []
    found: dict[int, int] = {}  # region by the address of its storage
    on_cpu = first.device.type == "cpu"
    try:
        blocks: list[list[_Blocks]] = [[] for _ in parts]
        for number, tensor in ((number, tensor) for number, part in enumerate(parts) for tensor in part.ordered):
            if on_cpu and tensor.untyped_storage().data_ptr() not in found:
                descriptor, _, length_bytes = torch_region(tensor)
                regions.append(descriptor)
                region_bytes.append(length_bytes)
                # Sharing has moved the bytes to this new address.
                found[tensor.untyped_storage().data_ptr()] = len(region_bytes) - 1
            elif not on_cpu and tensor.untyped_storage().data_ptr() not in found:
                regions.append(device_region(_whole(tensor)))
                region_bytes.append(tensor.untyped_storage().nbytes())
                found[tensor.untyped_storage().data_ptr()] = len(region_bytes) - 1
            blocks[number].append(_blocks_of(tensor, found[tensor.untyped_storage().data_ptr()]))
        geometries = tuple(
            PoolGeometry(part.page_count, tuple(region_bytes), part.planes(own))
            for part, own in zip(parts, blocks, strict=True)
        )
        layout = msgspec.structs.replace(parts[0].layout, others=tuple(part.layout for part in parts[1:]))
        layout.check()
        for geometry, part in zip(geometries, parts, strict=True):
            geometry.check(part.layout)
    except BaseException:
        for region in regions:
            if isinstance(region, int):
                os.close(region)
        raise
    device = "cpu" if on_cpu else device_name(first)
    return SharedCaches(layout, geometries, tuple(regions), device)  # type: ignore[arg-type]


class _whole:  # noqa: N801 - reads as the tensor's storage, seen as a tensor
    """A storage with the tensor methods that `device_region` uses."""

    def __init__(self, tensor: KVTensor) -> None:
        self.device = tensor.device
        self._address = tensor.untyped_storage().data_ptr()

    def data_ptr(self) -> int:
        """Return the address of the storage's first byte."""
        return self._address


class _Blocks(NamedTuple):
    """The blocks of one layer in a region. `offset` and `stride` count bytes."""

    region: int
    offset: int
    stride: int


def _blocks_of(tensor: KVTensor, region: int) -> _Blocks:
    size = tensor.element_size()
    return _Blocks(region, tensor.storage_offset() * size, tensor.stride()[0] * size)


def _planes(blocks: Sequence[_Blocks], layout: KVLayout, pages: PageFormat) -> tuple[PlaneGeometry, ...]:
    """Return the planes of all layers in the order of PoolGeometry."""
    if pages is PageFormat.BLOB:
        return tuple(PlaneGeometry(*each, 0, layout.opaque_bytes) for each in blocks)
    row, element = layout.model.head_bytes, layout.model.element_bytes
    half = layout.page_size * row
    if layout.model.kinds == 1:
        return tuple(PlaneGeometry(*each, row, half) for each in blocks)
    if pages is PageFormat.TRANSPOSED_KEYS:
        keys, values = (0, element, 2 * half, layout.page_size * element), (half, row, 2 * half, 0)
    else:
        keys, values = (0, 2 * row, 2 * half, 0), (row, 2 * row, 2 * half, 0)
    return tuple(
        PlaneGeometry(region, offset + shift, stride, *strides)
        for shift, *strides in (keys, values)
        for region, offset, stride in blocks
    )


def _check_tensor(name: str, tensor: KVTensor, first_name: str, first: KVTensor) -> None:
    if len(tensor.shape) != len(_DIMENSIONS):
        raise LayoutError(
            f"the cache of layer {name} has the shape {tuple(tensor.shape)}: only [block, head, token, content] is known, "
            "as attention with K and V per head has it"
        )
    if tuple(tensor.shape) != tuple(first.shape) or tensor.element_size() != first.element_size():
        raise LayoutError(
            f"the cache of layer {name} has the shape {tuple(tensor.shape)} and that of {first_name} "
            f"{tuple(first.shape)}: layers must be alike"
        )
    _, heads, tokens, content = tensor.shape
    _, head_stride, token_stride, content_stride = tensor.stride()
    if (token_stride, content_stride) != (content, 1) or (heads > 1 and head_stride != tokens * content):
        raise LayoutError(
            f"the cache of layer {name} has the strides {tuple(tensor.stride())} for the shape {tuple(tensor.shape)}: the "
            "content of a head of a block must lie together (vLLM calls that layout LBHNC)"
        )
