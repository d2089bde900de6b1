"""Defines a copy: its two sides, the interface of all copiers, and the checks that the sides fit each other.

Called by the pipeline; `cpu_copy` and `device_copier` implement `Copier`. Gather, scatter and direct copy differ only in
their sides: an engine's pages (`View`) or staging memory (`Slab`). A row is one head of one token (with
PageOrder.OPAQUE, one blob of one page; with PageOrder.SLOT, one row of a head): the longest piece that every layout keeps
whole. A slab is a pool with one page: [planes, rows, heads, row bytes] without gaps, K of each chosen layer, then V of
each. A copy has a part for each section of the layout; a slab has them one behind the other. A submitted copy has not ended
until its ticket has passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.digest import Digests
from longshore_agent.memory.host_memory import StagingRange
from longshore_agent.memory.pools import KVPool, PlaneGroup, PoolSection
from longshore_wire.slabs import SealedTrailer

Bytes = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]

Made = TypeVar("Made")


class Slab(NamedTuple):
    """A packed side in staging memory: [planes, rows, heads, row bytes] as the other side chooses, without gaps.

    Attributes:
        memory: the staging buffer.
        offset_bytes: of the first row in `memory`, a multiple of 64 unless it is a piece of a slab.
        payload_bytes: of all rows; the trailer begins at the next multiple of 64.
    """

    memory: StagingRange
    offset_bytes: int
    payload_bytes: int


class Part(NamedTuple):
    """The pages of one section on one side of a copy, and tokens [first, end) in them, or rows of a slot."""

    view: View
    tokens: tuple[int, int]


Parts = tuple[Part, ...]


class Copy(NamedTuple):
    """Some pages of one or both sides, part by part. At most one side is packed; if none is, both have the same parts.

    All parts of a side are of one pool and have one array of pages.

    Attributes:
        source, target: of one model, with equally many layers and heads.
        trailer: to be written behind a packed target, after its payload.
        accepts: checks the 64 bytes behind a packed source, as they were before its payload was read.
        digest_key: of the digests of each side that is pages; see `digest` for what is read. Empty: compute none.
    """

    source: Parts | Slab
    target: Parts | Slab
    trailer: SealedTrailer | None = None
    accepts: Callable[[bytes], bool] | None = None
    digest_key: bytes = b""

    def parts(self) -> list[tuple[View | Slab, View | Slab, tuple[int, int]]]:
        """Return source, target and tokens of each part. Each has its own piece of a slab."""
        source, target = self.source, self.target
        if isinstance(source, Slab):
            assert not isinstance(target, Slab), "one side is packed at most"
            if len(target) == 1:
                return [(source, target[0].view, target[0].tokens)]
            return [(piece, *part) for piece, part in zip(_pieces(source, target), target, strict=True)]
        if isinstance(target, Slab):
            if len(source) == 1:
                return [(source[0].view, target, source[0].tokens)]
            return [
                (view, piece, tokens) for piece, (view, tokens) in zip(_pieces(target, source), source, strict=True)
            ]
        return [(near.view, far.view, near.tokens) for near, far in zip(source, target, strict=True)]


def _pieces(slab: Slab, parts: Parts) -> list[Slab]:
    """Return the piece of a slab that each part has."""
    lengths = [view.payload_bytes(tokens) for view, tokens in parts]
    begins = accumulate(lengths, initial=slab.offset_bytes)
    return [Slab(slab.memory, *each) for each in zip(begins, lengths, strict=False)]


class Ticket(Protocol):
    """One submitted copy. Its memory stays held until `end`."""

    @property
    def digests(self) -> Digests:
        """The digests that the copy was to compute. Read them after `end`."""

    def passed(self) -> bool:
        """Whether the copy has ended. Raises DeviceError if the device has failed or hangs."""

    def end(self) -> bool:
        """Release the memory. Call it once, after the copy has passed.

        Returns:
            False: `accepts` has refused the trailer. A GPU has copied the payload nevertheless, a CPU has not.
        """


class Copier(Protocol):
    """Copies between an engine's pages and staging memory, or between the pages of two ranks."""

    def prepare_pool(self, pool: KVPool, *, direct: bool) -> None:
        """Prepare a pool before its registration, so that its slabs need not wait. Takes seconds on a GPU.

        Args:
            direct: its pages may also be copied to those of other ranks.
        """

    def prepare_pages(self, pool: KVPool, pages: Pages, *, to_write: bool, direct: bool) -> None:
        """Prepare the pages of a room, so that its slabs need not wait.

        Args:
            pages: [n] int32, the same array object as in the room's views.
            to_write: True: copies write these pages; False: copies read them.
            direct: for copies from pages to pages.
        Raises:
            LongshoreError: they are not pages of that pool.
        """

    def wait(self, limit_s: float) -> None:
        """Wait until no copy runs. Raises DeviceError if one still runs after `limit_s`."""

    def submit(self, copy: Copy) -> Ticket | None:
        """Begin a copy.

        Returns:
            None: nothing has begun, since another thread compiles the kernel. Submit the copy again later.
        Raises:
            PoolError: an engine has unregistered its pages.
            MemoryLostError: an engine has truncated its memory.
            ShapeError, LongshoreError: the sides do not fit each other; names the argument. Nothing has begun.
            DeviceError: the device refuses it.
        """

    def digest(self, parts: Parts, key: bytes) -> Ticket:
        """Begin to read pages; its ticket's `digests.source` are theirs. Raises as `submit`."""


class View(msgspec.Struct, frozen=True, eq=False):
    """One side of a copy. Made by `pool_view`, `remote_view` or `slab_view`.

    Attributes:
        pages: [n] int32; `pages[i]` holds rows [first_row + i * page_rows, first_row + (i + 1) * page_rows) of the
            sequence.
        page_rows: rows of one head in a page.
        first_row: of the sequence, where `pages` begins.
        row_tokens: tokens of a row: 1, or those of a page with PageOrder.OPAQUE. With PageOrder.SLOT rows count as tokens.
        row_bytes: bytes of a row.
        element_bytes: bytes of an element of a row; a blob is one element. A plane may keep elements apart.
        layers, heads: chosen ones, counted from the first local one.
        planes: groups of the chosen planes. `first` counts from the first chosen plane; addresses are of the first local
            head at page 0.
        plane_count: of the chosen layers.
        pool: the pool of the pages; None: a slab, or another process's pages.
        slab: the memory of a slab; None: pages.
        section: of the pool.
    """

    pages: Pages
    page_rows: int
    first_row: int
    row_tokens: int
    row_bytes: int
    element_bytes: int
    layers: range
    heads: range
    planes: tuple[PlaneGroup, ...]
    plane_count: int
    pool: KVPool | None = None
    slab: Bytes | None = None
    section: int = 0

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.page_rows * self.row_tokens

    @property
    def first_page(self) -> int:
        """The number of page `pages[0]` in the sequence."""
        return self.first_row // self.page_rows

    @property
    def own_pool(self) -> KVPool:
        """The pool of a `pool_view`."""
        assert self.pool is not None
        return self.pool

    def of(self, pages: Pages, first_page: int) -> View:
        """Return this view with other pages; `pages[0]` is page number `first_page` of the sequence."""
        return msgspec.structs.replace(self, pages=pages, first_row=first_page * self.page_rows)

    def rows(self, tokens: tuple[int, int]) -> tuple[int, int]:
        """Return the rows [first, end) of one head that hold these tokens."""
        return tokens[0] // self.row_tokens, -(-tokens[1] // self.row_tokens)

    def payload_bytes(self, tokens: tuple[int, int]) -> int:
        """Return the bytes of all chosen rows of these tokens."""
        first, end = self.rows(tokens)
        return self.plane_count * (end - first) * len(self.heads) * self.row_bytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the memory during a copy. Raises as `KVPool.in_use`."""
        if self.pool is None:
            yield
        else:
            with self.pool.in_use():
                yield

    def check_pages(self, rows: tuple[int, int], *, unique: bool) -> None:
        """Check the page ids of these rows, if the pool is known; see `KVPool.check_pages`."""
        if self.pool is not None:
            begin, end = rows[0] - self.first_row, rows[1] - self.first_row
            self.pool.check_pages(self.pages[begin // self.page_rows : -(-end // self.page_rows)], unique=unique)


def pool_view(pool: KVPool, pages: Pages, first_page: int, layers: range, heads: range, section: int = 0) -> View:
    """Return the view of a section of a pool's pages; `pages[0]` is page number `first_page` of the sequence.

    Raises:
        ShapeError: the pool lacks some of the layers or heads, or `pages` is not [n] int32; names the argument.
    """
    return _pages_view(pool.sections[section], pool.layer_count, pages, first_page, layers, heads, pool, section)


def remote_view(
    section: PoolSection, layer_count: int, pages: Pages, first_page: int, layers: range, heads: range
) -> View:
    """Return the view of a section's pages at addresses of another process. See `pool_view`; page ids are not checked.

    Args:
        section: of `pool_sections`, with those addresses.
        layer_count: of the rank that has the pages.
    """
    return _pages_view(section, layer_count, pages, first_page, layers, heads)


def slab_view(slab: Bytes, like: View, tokens: tuple[int, int]) -> View:
    """Return the view of a slab with the chosen layers and heads of `like` for tokens [first, end).

    Raises:
        ShapeError: the slab is not contiguous bytes, or too short.
    """
    if slab.dtype != np.uint8 or slab.ndim != 1 or not slab.flags.c_contiguous:
        raise ShapeError(f"slab is {slab.dtype} {slab.shape}: pass contiguous bytes (uint8, one dimension)")
    first, end = like.rows(tokens)
    head_count = len(like.heads)
    token_bytes = head_count * like.row_bytes
    plane_bytes = (end - first) * token_bytes
    if slab.size < like.plane_count * plane_bytes:
        raise ShapeError(f"slab has {slab.size} bytes: the rows take {like.plane_count * plane_bytes}")
    addresses = slab.ctypes.data + np.arange(like.plane_count, dtype=np.int64) * plane_bytes
    return View(
        pages=np.zeros(1, dtype=np.int32),
        page_rows=end - first,
        first_row=first,
        row_tokens=like.row_tokens,
        row_bytes=like.row_bytes,
        element_bytes=like.element_bytes,
        layers=range(len(like.layers)),
        heads=range(head_count),
        planes=(PlaneGroup(0, addresses, plane_bytes, token_bytes, like.row_bytes),),
        plane_count=like.plane_count,
        slab=slab,
    )


def check_fit(source: View, target: View, tokens: tuple[int, int]) -> None:
    """Raise ShapeError unless both sides hold as many rows of the same size for these tokens."""
    check_tokens(tokens, source.row_tokens)
    if len(source.layers) != len(target.layers) or len(source.heads) != len(target.heads):
        raise ShapeError(
            f"layers {source.layers} and heads {source.heads} at the source, {target.layers} and {target.heads} at the "
            "target: give as many on both sides"
        )
    one = (source.row_bytes, source.row_tokens, source.plane_count)
    if one != (target.row_bytes, target.row_tokens, target.plane_count):
        raise ShapeError(
            f"rows of {source.row_bytes} and {target.row_bytes} bytes: both sides hold one model in pages that fit"
        )
    for name, side in (("source", source), ("target", target)):
        first, end = side.rows(tokens)
        last = side.first_row + len(side.pages) * side.page_rows
        if not side.first_row <= first < end <= last:
            raise ShapeError(
                f"{name}.pages holds rows {side.first_row} to {last} of the sequence: rows {first} to {end} are wanted"
            )


def _segments(source: View, target: View, rows: tuple[int, int]) -> Numbers:
    """Cut rows where a page of either side ends. Returns [m, 5]: source page, slot, target page, slot, row count."""
    first, end = rows
    source_ends, target_ends = _page_ends(source, rows), _page_ends(target, rows)
    inner = source_ends if source_ends.size else target_ends
    if source_ends.size and target_ends.size:
        inner = np.union1d(source_ends, target_ends)
    edges = np.concatenate([[first], inner, [end]])
    begin = edges[:-1]
    found = np.empty((len(begin), 5), dtype=np.int64)
    for column, side in ((0, source), (2, target)):
        numbers, found[:, column + 1] = np.divmod(begin - side.first_row, side.page_rows)
        found[:, column] = side.pages[numbers]
    found[:, 4] = np.diff(edges)
    return found


def _page_ends(view: View, rows: tuple[int, int]) -> Numbers:
    """Return the rows inside `rows` at which a page begins."""
    first, end = rows
    next_page = first - (first - view.first_row) % view.page_rows + view.page_rows
    return np.arange(next_page, end, view.page_rows, dtype=np.int64)


def row_segments(view: View, rows: tuple[int, int]) -> Numbers:
    """Cut rows where a page ends. Returns [m, 4]: page, slot, number of the first row in the sequence, row count."""
    edges = np.concatenate([[rows[0]], _page_ends(view, rows), [rows[1]]])
    found = np.empty((len(edges) - 1, 4), dtype=np.int64)
    numbers, found[:, 1] = np.divmod(edges[:-1] - view.first_row, view.page_rows)
    found[:, 0] = view.pages[numbers]
    found[:, 2] = edges[:-1]
    found[:, 3] = np.diff(edges)
    return found


class Strides(NamedTuple):
    """Bytes from one token, and from one head, to the next."""

    token: int
    head: int


class PlaneRows(NamedTuple):
    """The rows of a copy in p consecutive planes with equal strides.

    Attributes:
        source_planes, target_planes: [p] addresses to which offsets are added.
        segments: [m, 4], C-contiguous: offset at the source, offset at the target, tokens, bytes of a row.
        source, target: strides on either side.
        heads: rows of a token; 1 if the heads of a token are adjacent on both sides, and therefore one row. If the elements
            of a row are apart on a side, a row is one element of one head, and `heads` are the elements of that head.
        first: number of the first of these planes, counted from the first chosen one.
    """

    source_planes: Numbers
    target_planes: Numbers
    segments: Numbers
    source: Strides
    target: Strides
    heads: int
    first: int = 0

    def join_tokens(self) -> None:
        """Make one row of the tokens of each segment, if they are adjacent on both sides."""
        if self.source.token == self.target.token == self.segments[0, 3]:
            self.segments[:, 3] *= self.segments[:, 2]
            self.segments[:, 2] = 1


def plane_rows(source: View, target: View, tokens: tuple[int, int]) -> Iterator[PlaneRows]:
    """Yield the rows of `tokens` for all groups of planes that both sides have. Checks nothing."""
    found = _segments(source, target, source.rows(tokens))
    for here in source.planes:
        for there in target.planes:
            first = max(here.first, there.first)
            end = min(here.first + len(here.addresses), there.first + len(there.addresses))
            if first >= end:
                continue
            source_page, source_slot, target_page, target_slot, counts = found.T
            segments = np.empty((len(found), 4), dtype=np.int64)
            segments[:, 0] = source_page * here.page_stride + source_slot * here.token_stride
            segments[:, 1] = target_page * there.page_stride + target_slot * there.token_stride
            segments[:, 2] = counts
            rows = PlaneRows(
                here.addresses[first - here.first : end - here.first] + source.heads.start * here.head_stride,
                there.addresses[first - there.first : end - there.first] + target.heads.start * there.head_stride,
                segments,
                Strides(here.token_stride, here.head_stride),
                Strides(there.token_stride, there.head_stride),
                len(source.heads),
                first,
            )
            if here.element_stride or there.element_stride:
                yield from _element_rows(rows, here, there, source.row_bytes, source.element_bytes)
                continue
            adjacent = here.head_stride == there.head_stride == source.row_bytes
            segments[:, 3] = source.row_bytes * (rows.heads if adjacent else 1)
            yield rows._replace(heads=1) if adjacent else rows


def _element_rows(
    rows: PlaneRows, here: PlaneGroup, there: PlaneGroup, row_bytes: int, element_bytes: int
) -> Iterator[PlaneRows]:
    """Yield each head's rows, with one row for each element, for planes whose elements are apart on a side."""
    source, target = (Strides(group.token_stride, group.element_stride or element_bytes) for group in (here, there))
    rows.segments[:, 3] = element_bytes
    for head in range(rows.heads):
        yield PlaneRows(
            rows.source_planes + head * here.head_stride,
            rows.target_planes + head * there.head_stride,
            rows.segments.copy(),
            source,
            target,
            row_bytes // element_bytes,
            rows.first,
        )


def check_tokens(tokens: tuple[int, int], row_tokens: int) -> None:
    """Raise ShapeError unless tokens [first, end) are not empty and begin at a row."""
    if not 0 <= tokens[0] < tokens[1]:
        raise ShapeError(f"tokens is {tokens}: give 0 <= first < end")
    if tokens[0] % row_tokens:
        raise ShapeError(f"tokens is {tokens}: opaque pages cannot be split, begin at a multiple of {row_tokens}")


def _pages_view(
    section: PoolSection,
    layer_count: int,
    pages: Pages,
    first_page: int,
    layers: range,
    heads: range,
    pool: KVPool | None = None,
    number: int = 0,
) -> View:
    if pages.dtype != np.int32 or pages.ndim != 1:
        raise ShapeError(f"pages is {pages.dtype} {pages.shape}: give int32 ids in one dimension")
    for name, chosen, count in (("layers", layers, layer_count), ("heads", heads, section.heads)):
        if chosen.step != 1 or not 0 <= chosen.start < chosen.stop <= count:
            raise ShapeError(f"{name} is {chosen}: give a range within [0, {count}), not empty, of step 1")
    groups = section.groups
    return View(
        pages=pages,
        page_rows=section.page_rows,
        first_row=first_page * section.page_rows,
        row_tokens=section.row_tokens,
        row_bytes=section.row_bytes,
        element_bytes=section.element_bytes,
        layers=layers,
        heads=heads,
        planes=tuple(groups if len(layers) == layer_count else _planes(groups, layer_count, section.kinds, layers)),
        plane_count=section.kinds * len(layers),
        pool=pool,
        section=number,
    )


def _planes(groups: Sequence[PlaneGroup], layer_count: int, kinds: int, layers: range) -> Iterator[PlaneGroup]:
    """Yield the planes of some layers in their order."""
    number = 0
    for kind in range(kinds):
        first, end = kind * layer_count + layers.start, kind * layer_count + layers.stop
        for group in groups:
            begin, stop = max(first, group.first), min(end, group.first + len(group.addresses))
            if begin < stop:
                addresses = group.addresses[begin - group.first : stop - group.first]
                yield group._replace(first=number + begin - first, addresses=addresses)
        number += end - first


class IdentityCache(Generic[Made]):
    """Caches values by the identity of the objects that they were made of, such as a page list's copy on a device.

    It keeps the most recently used ones, at most `count_max`. Used in one thread or under a lock. Equal objects are
    different keys: comparing lists would take as long as the cache saves.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # The cache keeps the objects, too, so that no other object gets their identity.
        self._values: OrderedDict[tuple[int, ...], tuple[tuple[object, ...], Made]] = OrderedDict()

    def get(self, make: Callable[[], Made], *origins: object) -> Made:
        """Return the value of these objects. If it is not cached, call `make` and pass on its errors."""
        key = tuple(map(id, origins))
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = (origins, make())
            if len(self._values) > self._count_max:
                self._values.popitem(last=False)
        elif len(self._values) == self._count_max:
            # The order matters only once the cache is full.
            self._values.move_to_end(key)
        return found[1]
