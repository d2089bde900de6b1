"""Copies rows from one view to another on a CPU. Gather, scatter and direct copy are this one operation.

Called by the pipeline's threads. `copy_rows` checks the arguments and joins rows that are adjacent on both sides.
`copy_addresses` is a loop that is compiled for this processor at its first use, and checks nothing.

Why a compiled loop and not a tensor library: rows are short (one head is 64 to 512 bytes) and not adjacent, and their
copy is limited by ordinary stores, which first read the line that they overwrite. Streaming stores do not. Neither
torch nor numpy has them for strided copies. Measured in docs/design/2026-11-23-copies.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.compiled_loop import compiled_loop, loop_address
from longshore_agent.kernels.copier import (
    Copy,
    Numbers,
    Pages,
    Parts,
    PlaneRows,
    Slab,
    Strides,
    Ticket,
    View,
    check_fit,
    plane_rows,
    slab_view,
)
from longshore_agent.kernels.cpu_digest import Interleaved, ViewDigests, compile_digest_loops, copy_and_digest
from longshore_agent.kernels.digest import NO_DIGESTS, READ_BACK_EVERY, Digests, joined
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_wire.slabs import TRAILER_BYTES, SealedTrailer, aligned, slab_bytes


class _Over:
    """The ticket of a copy that ended inside `submit`."""

    def __init__(self, *, accepted: bool, digests: Digests = NO_DIGESTS) -> None:
        self._accepted = accepted
        self.digests = digests

    def passed(self) -> bool:
        """Return True."""
        return True

    def end(self) -> bool:
        """Return whether the trailer was accepted. The memory is already released."""
        return self._accepted


_REFUSED = _Over(accepted=False)


class CpuCopier:
    """Copies in the submitting thread; see `copier.Copier`. Used by any number of threads."""

    def __init__(self) -> None:
        """Compile the loop."""
        compile_loop()

    def prepare_pool(self, pool: KVPool, *, direct: bool) -> None:
        """Do nothing: one compiled loop serves all pools."""

    def prepare_pages(self, pool: KVPool, pages: Pages, *, to_write: bool, direct: bool) -> None:
        """Do nothing: page ids are read from the host's memory."""

    def wait(self, limit_s: float) -> None:
        """Return: a copy has ended when `submit` returns."""

    def submit(self, copy: Copy) -> Ticket:
        """Copy; see `copier.Copier.submit`. If `accepts` refuses the trailer of a packed source, nothing is copied."""
        source, target = copy.source, copy.target
        if isinstance(source, Slab) and copy.accepts is not None:
            trailer_offset_bytes = source.offset_bytes + aligned(source.payload_bytes)
            if not copy.accepts(_buffer_of(source).bytes_at(trailer_offset_bytes, TRAILER_BYTES)):
                return _REFUSED
        tail, end = b"", None
        if copy.trailer is not None:
            if not isinstance(target, Slab):
                raise ShapeError("trailer needs a slab as the target")
            length_bytes = slab_bytes(target.payload_bytes)
            end = _buffer_of(target).view(target.offset_bytes, length_bytes)[target.payload_bytes :]
            tail = _tail(copy.trailer, target.payload_bytes, length_bytes)
        found = [
            copy_digested(_view_of(near, far, tokens), _view_of(far, near, tokens), tokens, copy.digest_key)
            for near, far, tokens in copy.parts()
        ]
        if end is not None:
            end[:] = np.frombuffer(tail, dtype=np.uint8)
        return _Over(accepted=True, digests=found[0] if len(found) == 1 else joined(found))

    def digest(self, parts: Parts, key: bytes) -> Ticket:
        """Read the pages; see `copier.Copier.digest`."""
        return _Over(accepted=True, digests=Digests(b"".join(digest_rows(*part, key) for part in parts)))


def _buffer_of(slab: Slab) -> StagingBuffer:
    assert isinstance(slab.memory, StagingBuffer), "a CPU's slab"
    return slab.memory


def _view_of(side: View | Slab, other: View | Slab, tokens: tuple[int, int]) -> View:
    if isinstance(side, View):
        return side
    assert isinstance(other, View), "one side is packed at most"
    return slab_view(_buffer_of(side).view(side.offset_bytes, side.payload_bytes), other, tokens)


# A slab of at most this size is still in the L2 cache when the transport reads it. A larger one bypasses the cache.
_CACHED_BYTES_MAX = 2 << 20


def copy_rows(source: View, target: View, tokens: tuple[int, int], trailer: SealedTrailer | None = None) -> int:
    """Copy tokens [first, end) of a sequence. Releases the GIL.

    Page sizes and orders may differ; opaque pages are copied whole, and both sides must have the same ones. Other
    tokens, heads and layers of the target keep their bytes.

    Args:
        source, target: of one model, with equally many layers and heads, and with pages for all tokens. No page of the
            target may repeat.
        tokens: (first, end), unaligned at both ends; with PageOrder.OPAQUE the first is aligned.
        trailer: written behind a slab, at the aligned end of its payload; the gap is zeroed.
    Returns:
        The size of the payload in bytes.
    Raises:
        ShapeError: the arguments do not fit each other; names one; nothing was written.
        LongshoreError: a page is out of range or repeated; names its index; nothing was written.
        PoolError: a pool is unregistered.
        MemoryLostError: an engine has truncated its memory; bytes may be missing.
    """
    payload = source.payload_bytes(tokens)
    tail = b""
    if trailer is not None:
        if target.slab is None:
            raise ShapeError("trailer needs a slab as the target")
        tail = _tail(trailer, payload, target.slab.size)
    copy_digested(source, target, tokens, b"")
    if tail:
        assert target.slab is not None
        target.slab[payload : payload + len(tail)] = np.frombuffer(tail, dtype=np.uint8)
    return payload


def copy_digested(source: View, target: View, tokens: tuple[int, int], key: bytes) -> Digests:
    """As `copy_rows`; return the digests of the sides that are pages, see `digest` for what is read.

    Args:
        key: of the digests; empty: compute none.
    """
    with source.in_use(), target.in_use():
        check_fit(source, target, tokens)
        chosen = source.rows(tokens)
        source.check_pages(chosen, unique=False)
        target.check_pages(chosen, unique=True)
        payload = source.payload_bytes(tokens)
        # Pages need not be in our cache: an engine reads them, in another process and later.
        stream = target.slab is None or payload > _CACHED_BYTES_MAX
        sums = _Sums(source, target, tokens, key) if key else None
        for rows in plane_rows(source, target, tokens):
            _copy_planes(rows, stream=stream, digests=None if sums is None else sums.interleaved(rows))
    return NO_DIGESTS if sums is None else sums.digests()


# Numbers copies, so that each reads other planes again than the last one.
_TURNS = itertools.count()


class _Sums:
    """The digests of one copy; see `digest` for what is read."""

    def __init__(self, source: View, target: View, tokens: tuple[int, int], key: bytes) -> None:
        self._source, self._target, self._key = source, target, key
        self._read, self._written = (ViewDigests(view, tokens, key) for view in (source, target))
        # Rows of elements come head by head, so their planes are not copied one after another.
        self._by_plane = not any(group.element_stride for view in (source, target) for group in view.planes)
        # The planes of the target that are read again.
        self._again = np.full(source.plane_count, fill_value=not self._by_plane)
        self._turn = next(_TURNS)
        if not self._by_plane:
            self._read.compute()

    def interleaved(self, rows: PlaneRows) -> Interleaved | None:
        """Return the digests to compute while these planes are copied."""
        if not self._by_plane:
            return None
        count = len(rows.source_planes)
        planes = (rows.first, rows.first + count)
        written = None if self._target.slab is not None else self._written.part(*planes)
        every = min(READ_BACK_EVERY, count)
        turn = self._turn % every
        self._again[planes[0] + turn : planes[1] : every] = True
        return Interleaved(self._read.part(*planes), written, (every, turn), self._source, self._key)

    def digests(self) -> Digests:
        """Return the digests of the sides that are pages, after the copy."""
        if self._target.slab is not None:
            return Digests(self._read.found.tobytes())
        if not self._by_plane:
            self._written.compute()
        found = np.where(self._again[:, None], self._written.found, self._read.found)
        return Digests(self._read.found.tobytes() if self._source.slab is None else b"", found.tobytes())


def digest_rows(view: View, tokens: tuple[int, int], key: bytes) -> bytes:
    """Return the digests of tokens [first, end), as `Digests.source`. Raises as `copy_rows`."""
    with view.in_use():
        check_fit(view, view, tokens)
        view.check_pages(view.rows(tokens), unique=False)
        sums = ViewDigests(view, tokens, key)
        sums.compute()
    return sums.found.tobytes()


def _tail(trailer: SealedTrailer, payload: int, length_bytes: int) -> bytes:
    """Return gap and trailer to write behind the payload of a slab. A zeroed gap sends no byte of an older slab."""
    if trailer.payload_bytes != payload:
        raise ShapeError(f"trailer.payload_bytes is {trailer.payload_bytes}: the payload has {payload} bytes")
    if length_bytes < slab_bytes(payload):
        raise ShapeError(f"trailer needs a slab of {slab_bytes(payload)} bytes as the target")
    return bytes(aligned(payload) - payload) + trailer.data


def _copy_planes(rows: PlaneRows, *, stream: bool, digests: Interleaved | None) -> None:
    _, target_planes, segments, _, target, heads, _ = rows
    if heads == 1:
        rows.join_tokens()
    if stream:
        bits = int(np.bitwise_or.reduce(target_planes)) | int(np.bitwise_or.reduce(segments[:, 1]))
        bits |= int(np.bitwise_or.reduce(segments[:, 3])) | target.token | (target.head if heads > 1 else 0)
        stream = bits % LINE_BYTES == 0
    copy_addresses(rows, stream=stream, digests=digests)


# A streaming store writes one cache line. Rows and strides of other sizes are copied by memcpy.
LINE_BYTES = 64

# Rows that are copied together, a line of each in turn. A CPU prefetches within a page, and so in four pages at a time.
_STREAMS = 4


def _each(template: str) -> str:
    """Return the lines of `template` for each of the rows that are copied together."""
    return "".join(template.replace("#", str(row)) for row in range(_STREAMS))


# A long row is cut into units of at most a memory page, which can be copied together. Shorter units cost more than they
# gain.
_UNIT_BYTES_MAX = 4096
_UNIT_BYTES_MIN = 512

_STEPS = _each(
    """  %source_apart.# = mul i64 %source_group, #
  %target_apart.# = mul i64 %target_group, #
  %from.# = add i64 %many_from, %source_apart.#
  %to.# = add i64 %many_to, %target_apart.#
  %source_pointer.# = inttoptr i64 %from.# to ptr
  %target_pointer.# = inttoptr i64 %to.# to ptr
  %value.# = load <16 x i32>, ptr %source_pointer.#, align 1
  store <16 x i32> %value.#, ptr %target_pointer.#, align 64, !nontemporal !0
"""
)

# Loops: plane, segment, token, head. A segment is four numbers: its offset from the source's plane, its offset from the
# target's plane, its tokens, and the bytes of a row. With streaming stores, the tokens of a segment are divided among
# _STREAMS groups of adjacent tokens (`group` tokens each, the loops named `many`); the remaining tokens come last.
_MODULE = (
    """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @copy(ptr %source_planes, ptr %target_planes, i64 %plane_count, ptr %segments, i64 %segment_count,
                  i64 %source_token, i64 %source_head, i64 %target_token, i64 %target_head, i64 %heads, i64 %stream) {
entry:
  %streams = icmp ne i64 %stream, 0
  br label %plane
plane:
  %p = phi i64 [ 0, %entry ], [ %p1, %plane_end ]
  %source_at = getelementptr i64, ptr %source_planes, i64 %p
  %target_at = getelementptr i64, ptr %target_planes, i64 %p
  %source_plane = load i64, ptr %source_at
  %target_plane = load i64, ptr %target_at
  br label %segment
segment:
  %s = phi i64 [ 0, %plane ], [ %s1, %segment_end ]
  %fields = shl i64 %s, 2
  %f0 = getelementptr i64, ptr %segments, i64 %fields
  %f1 = getelementptr i64, ptr %f0, i64 1
  %f2 = getelementptr i64, ptr %f0, i64 2
  %f3 = getelementptr i64, ptr %f0, i64 3
  %source_offset = load i64, ptr %f0
  %target_offset = load i64, ptr %f1
  %tokens = load i64, ptr %f2
  %bytes = load i64, ptr %f3
  %source_first = add i64 %source_plane, %source_offset
  %target_first = add i64 %target_plane, %target_offset
  %share = udiv i64 %tokens, """
    + str(_STREAMS)
    + """
  %group = select i1 %streams, i64 %share, i64 0
  %source_group = mul i64 %group, %source_token
  %target_group = mul i64 %group, %target_token
  %grouped = mul i64 %group, """
    + str(_STREAMS)
    + """
  %has_groups = icmp ne i64 %group, 0
  br i1 %has_groups, label %many_token, label %rest
many_token:
  %mt = phi i64 [ 0, %segment ], [ %mt1, %many_token_end ]
  %many_source_row = phi i64 [ %source_first, %segment ], [ %many_source_row1, %many_token_end ]
  %many_target_row = phi i64 [ %target_first, %segment ], [ %many_target_row1, %many_token_end ]
  br label %many_head
many_head:
  %mh = phi i64 [ 0, %many_token ], [ %mh1, %many_row_end ]
  %many_source = phi i64 [ %many_source_row, %many_token ], [ %many_source1, %many_row_end ]
  %many_target = phi i64 [ %many_target_row, %many_token ], [ %many_target1, %many_row_end ]
  br label %many_line
many_line:
  %mb = phi i64 [ 0, %many_head ], [ %mb1, %many_line ]
  %many_from = add i64 %many_source, %mb
  %many_to = add i64 %many_target, %mb
"""
    + _STEPS
    + """  %mb1 = add i64 %mb, 64
  %more_many_lines = icmp ult i64 %mb1, %bytes
  br i1 %more_many_lines, label %many_line, label %many_row_end
many_row_end:
  %mh1 = add i64 %mh, 1
  %many_source1 = add i64 %many_source, %source_head
  %many_target1 = add i64 %many_target, %target_head
  %more_many_heads = icmp slt i64 %mh1, %heads
  br i1 %more_many_heads, label %many_head, label %many_token_end
many_token_end:
  %mt1 = add i64 %mt, 1
  %many_source_row1 = add i64 %many_source_row, %source_token
  %many_target_row1 = add i64 %many_target_row, %target_token
  %more_many_tokens = icmp slt i64 %mt1, %group
  br i1 %more_many_tokens, label %many_token, label %rest
rest:
  %any_left = icmp slt i64 %grouped, %tokens
  %source_skipped = mul i64 %grouped, %source_token
  %target_skipped = mul i64 %grouped, %target_token
  %source_rest = add i64 %source_first, %source_skipped
  %target_rest = add i64 %target_first, %target_skipped
  br i1 %any_left, label %token, label %segment_end
token:
  %t = phi i64 [ %grouped, %rest ], [ %t1, %token_end ]
  %source_row = phi i64 [ %source_rest, %rest ], [ %source_row1, %token_end ]
  %target_row = phi i64 [ %target_rest, %rest ], [ %target_row1, %token_end ]
  br label %head
head:
  %h = phi i64 [ 0, %token ], [ %h1, %row_end ]
  %source = phi i64 [ %source_row, %token ], [ %source1, %row_end ]
  %target = phi i64 [ %target_row, %token ], [ %target1, %row_end ]
  %source_pointer = inttoptr i64 %source to ptr
  %target_pointer = inttoptr i64 %target to ptr
  br i1 %streams, label %line, label %plain
plain:
  call void @llvm.memcpy.p0.p0.i64(ptr %target_pointer, ptr %source_pointer, i64 %bytes, i1 false)
  br label %row_end
line:
  %b = phi i64 [ 0, %head ], [ %b1, %line ]
  %from = getelementptr i8, ptr %source_pointer, i64 %b
  %to = getelementptr i8, ptr %target_pointer, i64 %b
  %value = load <16 x i32>, ptr %from, align 1
  store <16 x i32> %value, ptr %to, align 64, !nontemporal !0
  %b1 = add i64 %b, 64
  %more_lines = icmp ult i64 %b1, %bytes
  br i1 %more_lines, label %line, label %row_end
row_end:
  %h1 = add i64 %h, 1
  %source1 = add i64 %source, %source_head
  %target1 = add i64 %target, %target_head
  %more_heads = icmp slt i64 %h1, %heads
  br i1 %more_heads, label %head, label %token_end
token_end:
  %t1 = add i64 %t, 1
  %source_row1 = add i64 %source_row, %source_token
  %target_row1 = add i64 %target_row, %target_token
  %more_tokens = icmp slt i64 %t1, %tokens
  br i1 %more_tokens, label %token, label %segment_end
segment_end:
  %s1 = add i64 %s, 1
  %more_segments = icmp slt i64 %s1, %segment_count
  br i1 %more_segments, label %segment, label %plane_end
plane_end:
  %p1 = add i64 %p, 1
  %more_planes = icmp slt i64 %p1, %plane_count
  br i1 %more_planes, label %plane, label %end
end:
  ; Streaming stores are not ordered with what follows; whoever is told of the copy must see it.
  fence seq_cst
  ret void
}

!0 = !{i32 1}
"""
)


def copy_addresses(rows: PlaneRows, *, stream: bool, digests: Interleaved | None = None) -> None:
    """Copy all rows of all planes. Checks nothing: a wrong address ends the process. Releases the GIL.

    Args:
        rows: at least one plane, one segment, and one token and one byte in each segment.
        stream: use streaming stores; every address that is written, and every row, must be a multiple of LINE_BYTES.
        digests: of these planes; None: none.
    """
    source_planes, target_planes, segments, source, target, heads, _ = rows
    if stream and heads == 1 and (unit := _row_unit(segments)):
        segments = np.column_stack([segments[:, :2], segments[:, 3] // unit, np.full(len(segments), unit)])
        source = target = Strides(unit, 0)
    arguments = (
        source_planes.ctypes.data,
        target_planes.ctypes.data,
        len(source_planes),
        segments.ctypes.data,
        len(segments),
        *source,
        *target,
        heads,
        int(stream),
    )
    if digests is None:
        _compiled()(*arguments)
    else:
        copy_and_digest(loop_address(_MODULE, "copy"), arguments, digests)


def _row_unit(segments: Numbers) -> int:
    """Return the best unit in bytes for cutting segments of one long row each; 0: do not cut them."""
    if int(segments[:, 2].max()) > 1:
        return 0
    lengths = int(np.bitwise_or.reduce(segments[:, 3]))
    unit = min(lengths & -lengths, _UNIT_BYTES_MAX)
    return unit if unit >= _UNIT_BYTES_MIN else 0


def compile_loop() -> None:
    """Compile the loops now (some 50 ms each) instead of in the first transfer."""
    _compiled()
    compile_digest_loops()


@functools.cache
def _compiled() -> Callable[..., None]:
    return compiled_loop(_MODULE, "copy", 11)
