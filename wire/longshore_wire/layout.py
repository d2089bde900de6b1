"""Layouts: how a model's KV cache is distributed over an engine's ranks, and placed in one rank's memory.

Used by engines (through the client), agents and the operator. Pure values; knows no tensor library.
Head and layer indexes are global (of the model) unless a name says `local`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache

import msgspec

from longshore_wire.errors import LayoutError
from longshore_wire.names import Labelled, is_instance_name

# Limits on a peer's declarations. The largest known models stay below a tenth of each.
LAYERS_MAX = 4096
HEADS_MAX = 4096
HEAD_DIM_MAX = 65536
PAGE_SIZE_MAX = 65536
TP_MAX = 1024
PP_MAX = 128
DP_MAX = 1024
# Ranks of one replica. Limits the pairs of a plan (about ranks times stages) that a peer can make us compute.
RANKS_MAX = 2048
# Messages carry page ids as int32.
PAGE_COUNT_MAX = 2**31 - 1
ELEMENT_BYTES = (1, 2, 4)
BLOB_BYTES_MAX = 1 << 32
# A worker meets few layouts of several caches.
_LAYOUTS_KEPT_MAX = 256
# Caches of one rank: kinds of memory of a model, of which the known ones have up to five.
CACHES_MAX = 16


class PageOrder(IntEnum):
    """Order of the dimensions inside one page of one layer's K or V."""

    NHD = 0  # [token, head, dim]
    HND = 1  # [head, token, dim]
    OPAQUE = 2  # [head, bytes]: one blob per page and head (K and V together); tokens cannot be split


class Attention(IntEnum):
    """The kind of one entry of the cache."""

    HEADS = 0  # MHA, GQA and MQA: K and V per head
    LATENT = 1  # MLA: one latent per token, no heads to split


class TargetMemory(Labelled):
    """The memory of an engine's pages. Prefill's are always DEVICE."""

    DEVICE = 0  # of the engine's device, which may be the CPU
    HOST = 1  # host memory beside the device's


class ModelShape(msgspec.Struct, frozen=True, array_like=True):
    """The part of a layout that must be equal on both sides of a transfer.

    With Attention.LATENT `kv_heads` is 1 and `head_dim` is the length of the latent with its rotary part.
    """

    layers: int
    kv_heads: int
    head_dim: int  # elements
    element_bytes: int
    attention: Attention = Attention.HEADS

    @property
    def kinds(self) -> int:
        """Entries of one head of one token in one layer: K and V, or the latent alone."""
        return 1 if self.attention is Attention.LATENT else 2

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in K (or V) of one layer."""
        return self.head_dim * self.element_bytes


class Parallel(msgspec.Struct, frozen=True, array_like=True):
    """One rank's place in its engine instance. `tp` is the attention TP: the ranks that share a replica's heads."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    dp: int = 1
    dp_rank: int = 0


class KVLayout(msgspec.Struct, frozen=True, array_like=True):
    """One rank's share of its caches: which layers and heads it holds, and how a page is ordered.

    A rank with several caches, such as latents and index keys, has the first in the fields of this layout and the rest in
    `others`, each with its own model, pages and split. All have the place of the first. `caches` returns them alike.

    If the pipeline stages do not split the layers evenly, `stage_layers` declares the split, equal on every rank, so
    that one rank's layout determines all others. `layer_range` declares the layers of one rank only.

    Raises:
        LayoutError: from `check`; names the field, its value and the valid values.
    """

    model: ModelShape
    parallel: Parallel
    page_size: int  # tokens
    order: PageOrder = PageOrder.NHD
    layer_range: tuple[int, int] | None = None  # (first, end); None: `stage_layers` applies
    stage_layers: tuple[int, ...] | None = None  # layers of each stage, in order; None: an even split
    blob_bytes: int = 0  # OPAQUE: size of a blob; 0: that of its K and V alone, see `opaque_bytes`
    name: str = "kv"  # of the cache, in texts
    others: tuple[KVLayout, ...] = ()  # of the rank's other caches

    @property
    def caches(self) -> tuple[KVLayout, ...]:
        """The layout of each cache of this rank, without others."""
        return _caches(self) if self.others else (self,)

    @property
    def layers(self) -> range:
        """Global indexes of this rank's layers. In an even split the first stages take the remainder."""
        if self.layer_range is not None:
            return range(*self.layer_range)
        if self.stage_layers is not None:
            before = sum(self.stage_layers[: self.parallel.pp_rank])
            return range(before, before + self.stage_layers[self.parallel.pp_rank])
        share, extra = divmod(self.model.layers, self.parallel.pp)
        rank = self.parallel.pp_rank
        first = rank * share + min(rank, extra)
        return range(first, first + share + (1 if rank < extra else 0))

    @property
    def heads(self) -> range:
        """Global indexes of this rank's KV heads. With more ranks than heads, ranks hold replicas."""
        heads, tp, rank = self.model.kv_heads, self.parallel.tp, self.parallel.tp_rank
        if heads % tp == 0:
            share = heads // tp
            return range(rank * share, (rank + 1) * share)
        head = rank // (tp // heads)
        return range(head, head + 1)

    @property
    def replicas(self) -> int:
        """Number of ranks of a TP group that hold each head."""
        return max(1, self.parallel.tp // self.model.kv_heads)

    @property
    def shared_head_counts(self) -> tuple[int, ...]:
        """The possible numbers of heads that this rank shares with a rank of any TP size, descending, without repeats."""
        own, total = self.heads, self.model.kv_heads
        counts = {
            min(own.stop, first + share) - max(own.start, first)
            for share in range(1, total + 1)
            if total % share == 0
            for first in range(own.start // share * share, own.stop, share)
        }
        return tuple(sorted(counts, reverse=True))

    @property
    def plane_count(self) -> int:
        """Number of planes in this rank's pool; PoolGeometry defines their order."""
        return len(self.layers) * (1 if self.order is PageOrder.OPAQUE else self.model.kinds)

    @property
    def unit_tokens(self) -> int:
        """Tokens of one indivisible unit: one, or a whole page if its content is opaque."""
        return self.page_size if self.order is PageOrder.OPAQUE else 1

    @property
    def unit_bytes(self) -> int:
        """Bytes of one head of one unit in one layer: K and V of a token (or its latent), or a blob."""
        if self.order is PageOrder.OPAQUE:
            return self.opaque_bytes
        return self.model.kinds * self.model.head_bytes

    @property
    def opaque_bytes(self) -> int:
        """Bytes of one blob: one page of one head in one layer, with PageOrder.OPAQUE."""
        return self.blob_bytes or self.page_size * self.model.kinds * self.model.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and heads of this rank; for opaque pages its share of the page, rounded up."""
        return -(-self.rank_unit_bytes // self.unit_tokens)

    @property
    def largest_unit_bytes(self) -> int:
        """Bytes of one unit of the cache with the largest, in all layers and heads of this rank."""
        return max(cache.rank_unit_bytes for cache in self.caches)

    @property
    def rank_unit_bytes(self) -> int:
        """Bytes of one unit in all layers and heads of this rank."""
        return len(self.layers) * len(self.heads) * self.unit_bytes

    @property
    def rank(self) -> int:
        """This rank's index within its DP replica: pipeline stage major, TP rank minor."""
        return self.parallel.pp_rank * self.parallel.tp + self.parallel.tp_rank

    @property
    def rank_count(self) -> int:
        """Number of ranks in one DP replica of this instance."""
        return self.parallel.tp * self.parallel.pp

    def at(self, rank: int) -> KVLayout:
        """Return the layout of another rank of the same replica.

        Args:
            rank: in [0, rank_count).
        Raises:
            LayoutError: `layer_range` sets this rank's layers, so those of other stages are unknown.
        """
        assert 0 <= rank < self.rank_count, (rank, self.rank_count)
        pp_rank, tp_rank = divmod(rank, self.parallel.tp)
        if self.layer_range is not None and pp_rank != self.parallel.pp_rank:
            raise LayoutError(
                f"layer_range is {self.layer_range} on stage {self.parallel.pp_rank} of parallel.pp {self.parallel.pp}: "
                f"the layers of stage {pp_rank} do not follow from it; give stage_layers, or the layouts of all ranks"
            )
        parallel = msgspec.structs.replace(self.parallel, pp_rank=pp_rank, tp_rank=tp_rank)
        return msgspec.structs.replace(self, parallel=parallel)

    def check(self) -> None:
        """Raise LayoutError if this layout is invalid."""
        if self.others:
            _check_caches(self)
            return
        if not is_instance_name(self.name):
            raise LayoutError(f"name is {self.name[:120]!r}: give a cache a name as an instance has one")
        _check_model(self.model)
        _check_parallel(self.parallel, self.model)
        _between("page_size", self.page_size, 1, PAGE_SIZE_MAX)
        _check_layers(self)
        if self.order is PageOrder.OPAQUE:
            _between("blob_bytes", self.blob_bytes, 0, BLOB_BYTES_MAX)
        elif self.blob_bytes:
            raise LayoutError(f"blob_bytes is {self.blob_bytes} and order is {self.order.name}: only OPAQUE has blobs")


def _split(layout: KVLayout) -> tuple[KVLayout, ...]:
    others = (msgspec.structs.replace(other, parallel=layout.parallel) for other in layout.others)
    return msgspec.structs.replace(layout, others=()), *others


_caches = lru_cache(_LAYOUTS_KEPT_MAX)(_split)


def _check_caches(layout: KVLayout) -> None:
    if len(layout.others) >= CACHES_MAX:
        raise LayoutError(f"others has {len(layout.others)} caches: give at most {CACHES_MAX - 1}")
    nested = next((other for other in layout.others if other.others), None)
    if nested is not None:
        raise LayoutError(f"cache {nested.name[:120]!r} has others: only the layout of a rank has them")
    names = [layout.name, *(other.name for other in layout.others)]
    if len(set(names)) < len(names):
        raise LayoutError(f"caches have the names {', '.join(names)[:120]}: give each its own")
    # `_caches` would keep a layout that may be refused.
    for cache in _split(layout):
        try:
            cache.check()
        except LayoutError as error:
            raise LayoutError(f"cache {cache.name[:120]!r}: {error}") from error


def _check_model(model: ModelShape) -> None:
    _between("model.layers", model.layers, 1, LAYERS_MAX)
    _between("model.kv_heads", model.kv_heads, 1, HEADS_MAX)
    _between("model.head_dim", model.head_dim, 1, HEAD_DIM_MAX)
    if model.element_bytes not in ELEMENT_BYTES:
        raise LayoutError(f"model.element_bytes is {model.element_bytes}: use one of {ELEMENT_BYTES}")
    if model.attention is Attention.LATENT and model.kv_heads != 1:
        raise LayoutError(f"model.kv_heads is {model.kv_heads} and model.attention is LATENT: a latent has 1 head")


def _check_layers(layout: KVLayout) -> None:
    count = layout.model.layers
    if layout.layer_range is not None:
        first, end = layout.layer_range
        if not 0 <= first < end <= count:
            raise LayoutError(f"layer_range is {layout.layer_range}: give 0 <= first < end <= {count}")
    if layout.stage_layers is None:
        return
    if layout.layer_range is not None:
        raise LayoutError("layer_range and stage_layers are both given: give stage_layers, which says more")
    stages = layout.parallel.pp
    if len(layout.stage_layers) != stages or min(layout.stage_layers) < 1 or sum(layout.stage_layers) != count:
        raise LayoutError(
            f"stage_layers is {layout.stage_layers}: give {stages} numbers of 1 or more, whose sum is {count}"
        )


def _check_parallel(parallel: Parallel, model: ModelShape) -> None:
    for name, high in (("tp", TP_MAX), ("pp", PP_MAX), ("dp", DP_MAX)):
        _between(f"parallel.{name}", getattr(parallel, name), 1, high)
        _between(f"parallel.{name}_rank", getattr(parallel, f"{name}_rank"), 0, getattr(parallel, name) - 1)
    if parallel.tp * parallel.pp > RANKS_MAX:
        raise LayoutError(f"parallel.tp is {parallel.tp} and parallel.pp is {parallel.pp}: at most {RANKS_MAX} ranks")
    if model.kv_heads % parallel.tp and parallel.tp % model.kv_heads:
        raise LayoutError(
            f"parallel.tp is {parallel.tp} and model.kv_heads is {model.kv_heads}: one must divide the other"
        )
    if parallel.pp > model.layers:
        raise LayoutError(f"parallel.pp is {parallel.pp}: a model of {model.layers} layers has at most as many stages")


def _between(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LayoutError(f"{field} is {value}: give a number from {low} to {high}")


class PlaneGeometry(msgspec.Struct, frozen=True, array_like=True):
    """The place of one plane of pages in a pool: one layer's K, V, or both together.

    The bytes of local head h of token t of page p begin at
    `offset + p * page_stride + t * token_stride + h * head_stride`; head_dim elements follow without gaps, or
    `element_stride` apart if that is not 0 (a transposed plane; in CPU memory only).
    With PageOrder.OPAQUE token_stride is 0 and `head_stride` is the layout's `opaque_bytes`. All in bytes.
    """

    region: int  # index of the memory region (file descriptor or IPC handle) that the client passed
    offset: int
    page_stride: int
    token_stride: int
    head_stride: int
    element_stride: int = 0


# The fields of PlaneGeometry that count bytes.
PLANE_BYTES = ("offset", "page_stride", "token_stride", "head_stride", "element_stride")


class PoolGeometry(msgspec.Struct, frozen=True, array_like=True):
    """The places of all pages of one rank in the memory regions that its engine shares with the agent.

    Planes: K of each local layer, then V of each local layer. With Attention.LATENT or PageOrder.OPAQUE there
    is one plane a layer.
    """

    page_count: int
    region_bytes: tuple[int, ...]
    planes: tuple[PlaneGeometry, ...]

    def check(self, layout: KVLayout) -> None:
        """Raise LayoutError, naming the field, if pages exceed their region or overlap within a plane.

        Args:
            layout: the checked layout of the rank that has these pages.
        """
        _between("page_count", self.page_count, 1, PAGE_COUNT_MAX)
        if len(self.planes) != layout.plane_count:
            raise LayoutError(f"planes has {len(self.planes)} entries: this rank's layers have {layout.plane_count}")
        for index, plane in enumerate(self.planes):
            if not 0 <= plane.region < len(self.region_bytes):
                raise LayoutError(
                    f"planes[{index}].region is {plane.region}: {len(self.region_bytes)} regions are given"
                )
            for name in PLANE_BYTES:
                _between(f"planes[{index}].{name}", getattr(plane, name), 0, 2**63 - 1)
            strides = (plane.token_stride, plane.element_stride, plane.head_stride)
            if layout.order is PageOrder.OPAQUE and strides != (0, 0, layout.opaque_bytes):
                raise LayoutError(
                    f"planes[{index}].token_stride is {strides[0]}, element_stride is {strides[1]} and head_stride is "
                    f"{strides[2]}: opaque pages have no tokens and elements (give 0) and blobs of blob_bytes "
                    f"({layout.opaque_bytes})"
                )
            span_bytes = _plane_span(index, plane, self.page_count, layout)
            if plane.offset + span_bytes > self.region_bytes[plane.region]:
                raise LayoutError(
                    f"planes[{index}] ends at byte {plane.offset + span_bytes}: "
                    f"region {plane.region} has {self.region_bytes[plane.region]} bytes"
                )


def _plane_span(index: int, plane: PlaneGeometry, page_count: int, layout: KVLayout) -> int:
    """Return the bytes from a plane's offset to the end of its last entry; LayoutError if entries overlap."""
    span_bytes = layout.opaque_bytes if layout.order is PageOrder.OPAQUE else layout.model.head_bytes
    if plane.element_stride:
        span_bytes = layout.model.element_bytes
    for name, stride, count in sorted(_dimensions(plane, page_count, layout), key=lambda entry: entry[1]):
        if count == 1:
            continue
        if stride < span_bytes:
            raise LayoutError(f"planes[{index}].{name} is {stride}: entries of {span_bytes} bytes would overlap")
        span_bytes += (count - 1) * stride
    return span_bytes


def _dimensions(plane: PlaneGeometry, page_count: int, layout: KVLayout) -> Iterator[tuple[str, int, int]]:
    """Yield (name, stride in bytes, entries) of each strided dimension."""
    yield "page_stride", plane.page_stride, page_count
    yield "head_stride", plane.head_stride, len(layout.heads)
    if plane.element_stride:
        yield "element_stride", plane.element_stride, layout.model.head_dim
    if layout.order is not PageOrder.OPAQUE:
        yield "token_stride", plane.token_stride, layout.page_size
