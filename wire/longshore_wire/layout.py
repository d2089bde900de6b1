"""Layouts: how a model's KV cache is distributed over an engine's ranks, and placed in one rank's memory.

Used by engines (through the client), agents and the operator. Pure values; knows no tensor library.
Head and layer indexes are global (of the model) unless a name says `local`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec

from longshore_wire.errors import LayoutError
from longshore_wire.names import Labelled, is_instance_name

# Limits on a peer's declarations. The largest known models stay below a tenth of each.
LAYERS_MAX = 4096
HEADS_MAX = 4096
HEAD_DIM_MAX = 65536
# Planes of a layer: K and V, or the sections of a recurrent state.
PLANES_MAX = 16
ROWS_MAX = 65536
# Each plane of each page of a slot is a copy of its own. Real states have up to 20.
SLOT_PARTS_MAX = 512
ROW_BYTES_MAX = 1 << 30
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
    SLOT = 3  # [row, head, bytes] of each plane: no tokens, but one recurrent state of a sequence


class Attention(IntEnum):
    """The kind of one entry of the cache."""

    HEADS = 0  # MHA, GQA and MQA: K and V per head
    LATENT = 1  # MLA: one latent per token, no heads to split


class TargetMemory(Labelled):
    """The memory of an engine's pages. Prefill's are always DEVICE."""

    DEVICE = 0  # of the engine's device, which may be the CPU
    HOST = 1  # host memory beside the device's


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """What each layer of a cache has of one kind: K, V, a latent, or a section of a recurrent state.

    Heads are split over tensor parallel ranks. With fewer heads than ranks, ranks hold replicas.

    Attributes:
        heads: of the whole model.
        row_bytes: of one head of one token; with PageOrder.SLOT of one row of a head.
        rows: with PageOrder.SLOT, rows of a head; otherwise 1.
    """

    heads: int
    row_bytes: int
    rows: int = 1


class ModelShape(msgspec.Struct, frozen=True, array_like=True):
    """The part of a cache's layout that must be equal on both sides of a transfer. `kv` and `latent` make the usual ones."""

    layers: int
    planes: tuple[Plane, ...]
    element_bytes: int

    @classmethod
    def kv(cls, layers: int, kv_heads: int, head_dim: int, element_bytes: int) -> ModelShape:
        """Return the shape of K and V of MHA, GQA or MQA. `head_dim` is in elements."""
        return cls.of(Attention.HEADS, layers, kv_heads, head_dim, element_bytes)

    @classmethod
    def latent(cls, layers: int, width: int, element_bytes: int) -> ModelShape:
        """Return the shape of latents of MLA. `width` is in elements, with the rotary part."""
        return cls.of(Attention.LATENT, layers, 1, width, element_bytes)

    @classmethod
    def of(cls, attention: Attention, layers: int, kv_heads: int, head_dim: int, element_bytes: int) -> ModelShape:
        """Return the shape of a model with this attention: one plane a layer with LATENT, otherwise K and V."""
        planes = (Plane(kv_heads, head_dim * element_bytes),) * (1 if attention is Attention.LATENT else 2)
        return cls(layers, planes, element_bytes)

    @property
    def attention(self) -> Attention:
        """LATENT if a layer has one plane, otherwise HEADS."""
        return Attention.LATENT if len(self.planes) == 1 else Attention.HEADS

    @property
    def kinds(self) -> int:
        """Planes of a layer: K and V, or the latent alone."""
        return len(self.planes)

    @property
    def kv_heads(self) -> int:
        """Heads of the first plane."""
        return self.planes[0].heads

    @property
    def head_bytes(self) -> int:
        """Bytes of one row of the first plane: of one head of one token in K."""
        return self.planes[0].row_bytes

    @property
    def head_dim(self) -> int:
        """Elements of one row of the first plane."""
        return self.head_bytes // self.element_bytes


class Section(NamedTuple):
    """One or two equal planes of a layer, such as K and V, that one copy moves. Kernels of GPUs address no more.

    Attributes:
        first: index of the first of them.
        kinds: how many there are.
        heads, row_bytes, rows: of each, as `Plane`. With PageOrder.OPAQUE a row is a blob.
    """

    first: int
    kinds: int
    heads: int
    row_bytes: int
    rows: int

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one unit in all of these planes."""
        return self.kinds * self.rows * self.row_bytes


class Parallel(msgspec.Struct, frozen=True, array_like=True):
    """One rank's place in its engine instance. `tp` is the attention TP: the ranks that share a replica's heads."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    dp: int = 1
    dp_rank: int = 0


def _stage(layers: int, stages: int, rank: int, split: tuple[int, ...] | None) -> range:
    """Return the layers of one pipeline stage."""
    if split is not None:
        before = sum(split[:rank])
        return range(before, before + split[rank])
    share, extra = divmod(layers, stages)
    first = rank * share + min(rank, extra)
    return range(first, first + share + (1 if rank < extra else 0))


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
    page_size: int  # tokens; of a slot, layers that one page id covers
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
        parallel = self.parallel
        if parallel.pp == 1 and self.stage_layers is None:
            return range(self.model.layers)
        return _stage(self.model.layers, parallel.pp, parallel.pp_rank, self.stage_layers)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The planes of a layer, grouped."""
        if self.order is PageOrder.OPAQUE:
            return (Section(0, 1, self.model.kv_heads, self.opaque_bytes, 1),)
        return _sections(self.model.planes, joined=self.order is not PageOrder.SLOT)

    @property
    def heads(self) -> range:
        """Global indexes of this rank's heads in the first section. With more ranks than heads, ranks hold replicas."""
        return self.heads_of(self.model.kv_heads)

    def heads_of(self, heads: int) -> range:
        """Return the global indexes of this rank's heads of a plane with so many."""
        tp, rank = self.parallel.tp, self.parallel.tp_rank
        if heads % tp == 0:
            share = heads // tp
            return range(rank * share, (rank + 1) * share)
        head = rank // (tp // heads)
        return range(head, head + 1)

    @property
    def replicas(self) -> int:
        """Number of ranks of a TP group that hold each head of the first section."""
        return max(1, self.parallel.tp // self.model.kv_heads)

    def shared_head_counts(self, heads: int) -> tuple[int, ...]:
        """Return the possible numbers of a plane's heads that this rank shares with a rank of any TP size, descending.

        Args:
            heads: of the plane.
        """
        own = self.heads_of(heads)
        counts = {
            min(own.stop, first + share) - max(own.start, first)
            for share in range(1, heads + 1)
            if heads % share == 0
            for first in range(own.start // share * share, own.stop, share)
        }
        return tuple(sorted(counts, reverse=True))

    @property
    def plane_count(self) -> int:
        """Number of planes in this rank's pool; PoolGeometry defines their order."""
        return len(self.layers) * sum(section.kinds for section in self.sections)

    @property
    def unit_tokens(self) -> int:
        """Tokens of one indivisible unit: one, or a whole page if its content is opaque. Of a slot, a unit is one layer."""
        return self.page_size if self.order is PageOrder.OPAQUE else 1

    @property
    def opaque_bytes(self) -> int:
        """Bytes of one blob: one page of one head in one layer, with PageOrder.OPAQUE."""
        return self.blob_bytes or self.page_size * sum(plane.row_bytes for plane in self.model.planes)

    def page_rows(self, section: Section) -> int:
        """Return the rows of one head in a page."""
        if self.order is PageOrder.SLOT:
            return section.rows
        return 1 if self.order is PageOrder.OPAQUE else self.page_size

    def pages_of(self, first_token: int, end_token: int) -> tuple[int, int]:
        """Return the number of the first page that holds tokens [first, end), and how many pages do.

        A slot's pages are those of its layers, for any tokens.
        """
        if self.order is PageOrder.SLOT:
            return 0, -(-len(self.layers) // self.page_size) if first_token < end_token else 0
        first = first_token // self.page_size
        return first, -(-end_token // self.page_size) - first if first_token < end_token else 0

    @property
    def pages_text(self) -> str:
        """Name what a page holds, in texts."""
        return f"pages of {self.page_size} {'layers' if self.order is PageOrder.SLOT else 'tokens'}"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and heads of this rank; for opaque pages its share of the page, rounded up.

        A slot has as many a layer.
        """
        return -(-self.rank_unit_bytes // self.unit_tokens)

    @property
    def largest_unit_bytes(self) -> int:
        """Bytes of one unit of the cache with the largest, in all layers and heads of this rank."""
        return max(cache.rank_unit_bytes for cache in self.caches)

    @property
    def rank_unit_bytes(self) -> int:
        """Bytes of one unit in all layers and heads of this rank; of a slot, of its heads in one layer."""
        layers = 1 if self.order is PageOrder.SLOT else len(self.layers)
        return layers * sum(len(self.heads_of(section.heads)) * section.head_bytes for section in self.sections)

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
        _check_model(self.model, self.order)
        _check_parallel(self.parallel, self.model)
        _between("page_size", self.page_size, 1, PAGE_SIZE_MAX)
        _check_layers(self)
        if self.order is PageOrder.SLOT:
            _check_slot(self)
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


@lru_cache(_LAYOUTS_KEPT_MAX)
def _sections(planes: tuple[Plane, ...], *, joined: bool) -> tuple[Section, ...]:
    found: list[Section] = []
    for number, plane in enumerate(planes):
        if joined and found and found[-1].kinds == 1 and planes[number - 1] == plane:
            found[-1] = found[-1]._replace(kinds=2)
        else:
            found.append(Section(number, 1, plane.heads, plane.row_bytes, plane.rows))
    return tuple(found)


def _check_model(model: ModelShape, order: PageOrder) -> None:
    _between("model.layers", model.layers, 1, LAYERS_MAX)
    if model.element_bytes not in ELEMENT_BYTES:
        raise LayoutError(f"model.element_bytes is {model.element_bytes}: use one of {ELEMENT_BYTES}")
    if not 1 <= len(model.planes) <= PLANES_MAX:
        raise LayoutError(f"model.planes has {len(model.planes)}: give 1 to {PLANES_MAX}")
    for index, plane in enumerate(model.planes):
        name = f"model.planes[{index}]"
        _between(f"{name}.heads", plane.heads, 1, HEADS_MAX)
        _between(f"{name}.row_bytes", plane.row_bytes, 1, ROW_BYTES_MAX)
        _between(f"{name}.rows", plane.rows, 1, ROWS_MAX if order is PageOrder.SLOT else 1)
        if plane.row_bytes % model.element_bytes:
            raise LayoutError(
                f"{name}.row_bytes is {plane.row_bytes}: give a multiple of model.element_bytes, {model.element_bytes}"
            )
        if order is PageOrder.OPAQUE and plane.heads != model.kv_heads:
            raise LayoutError(f"{name}.heads is {plane.heads} and order is OPAQUE: a blob has heads {model.kv_heads}")


def _check_slot(layout: KVLayout) -> None:
    parts = -(-layout.model.layers // layout.page_size) * len(layout.model.planes)
    if parts > SLOT_PARTS_MAX:
        raise LayoutError(
            f"page_size is {layout.page_size} and order is SLOT: {layout.model.layers} layers of {len(layout.model.planes)} planes "
            f"lie in {parts} pieces, at most {SLOT_PARTS_MAX} are allowed: let a page id cover more layers"
        )


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
    for index, plane in enumerate(model.planes):
        if plane.heads % parallel.tp and parallel.tp % plane.heads:
            raise LayoutError(
                f"parallel.tp is {parallel.tp} and model.planes[{index}].heads is {plane.heads}: one must divide the other"
            )
    if parallel.pp > model.layers:
        raise LayoutError(f"parallel.pp is {parallel.pp}: a model of {model.layers} layers has at most as many stages")


def _between(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LayoutError(f"{field} is {value}: give a number from {low} to {high}")


class PlaneGeometry(msgspec.Struct, frozen=True, array_like=True):
    """The place of one plane of pages in a pool: one layer's K, V, or both together.

    The bytes of local head h of token t of page p begin at
    `offset + p * page_stride + t * token_stride + h * head_stride`; the elements of a row follow without gaps, or
    `element_stride` apart if that is not 0 (a transposed plane; in CPU memory only).
    With PageOrder.OPAQUE token_stride is 0 and `head_stride` is the layout's `opaque_bytes`. With PageOrder.SLOT t is a row
    of a head. All in bytes.
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

    Planes: the first plane of each local layer, then the second of each, such as K and then V. With PageOrder.OPAQUE there
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
        layer_count = len(layout.layers)
        section_of = [section for section in layout.sections for _ in range(section.kinds * layer_count)]
        for index, (plane, section) in enumerate(zip(self.planes, section_of, strict=True)):
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
            span_bytes = _plane_span(index, plane, section, self.page_count, layout)
            if plane.offset + span_bytes > self.region_bytes[plane.region]:
                raise LayoutError(
                    f"planes[{index}] ends at byte {plane.offset + span_bytes}: "
                    f"region {plane.region} has {self.region_bytes[plane.region]} bytes"
                )


def _plane_span(index: int, plane: PlaneGeometry, section: Section, page_count: int, layout: KVLayout) -> int:
    """Return the bytes from a plane's offset to the end of its last entry; LayoutError if entries overlap."""
    span_bytes = layout.model.element_bytes if plane.element_stride else section.row_bytes
    dimensions = _dimensions(plane, section, page_count, layout)
    for name, stride, count in sorted(dimensions, key=lambda entry: entry[1]):
        if count == 1:
            continue
        if stride < span_bytes:
            raise LayoutError(f"planes[{index}].{name} is {stride}: entries of {span_bytes} bytes would overlap")
        span_bytes += (count - 1) * stride
    return span_bytes


def _dimensions(
    plane: PlaneGeometry, section: Section, page_count: int, layout: KVLayout
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, stride in bytes, entries) of each strided dimension."""
    yield "page_stride", plane.page_stride, page_count
    yield "head_stride", plane.head_stride, len(layout.heads_of(section.heads))
    if plane.element_stride:
        yield "element_stride", plane.element_stride, section.row_bytes // layout.model.element_bytes
    yield "token_stride", plane.token_stride, layout.page_rows(section)
