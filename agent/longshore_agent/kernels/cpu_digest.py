"""Computes digests of pages in host memory; see `digest` for their definition.

Called by `cpu_copy`. Its loop is compiled like that of copies, and reads each row once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from longshore_agent.kernels.compiled_loop import compiled_loop
from longshore_agent.kernels.copier import Bytes, Numbers, Strides, View, row_segments
from longshore_agent.kernels.digest import BLOCK_BYTES, BLOCK_WORDS, LINE_BYTES, MIX, Words, blocks_of, expanded
from longshore_agent.memory.pools import PlaneGroup


def _hashed(name: str, line: str, key: str, sums: str, align: int) -> str:
    """Return the lines that add the `nh` of a line to eight sums. They define the value `name`."""
    return f"""  %{name}.words = load <16 x i32>, ptr {line}, align {align}
  %{name}.key = load <16 x i32>, ptr {key}, align 8
  %{name}.added = add <16 x i32> %{name}.words, %{name}.key
  %{name}.pairs = bitcast <16 x i32> %{name}.added to <8 x i64>
  %{name}.low = and <8 x i64> %{name}.pairs, splat (i64 4294967295)
  %{name}.high = lshr <8 x i64> %{name}.pairs, splat (i64 32)
  %{name}.products = mul <8 x i64> %{name}.low, %{name}.high
  %{name} = add <8 x i64> {sums}, %{name}.products"""


# Loops: plane, segment, then token and head, the one with the shorter stride inside, then block and line. A segment is three
# numbers: its offset from the plane, the number of its first row in the sequence, and its rows.
_MODULE = f"""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.vector.reduce.add.v8i64(<8 x i64>)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @digest(ptr %planes, i64 %plane_count, ptr %segments, i64 %segment_count, i64 %token_stride,
                    i64 %head_stride, i64 %heads, i64 %row_bytes, i64 %blocks, ptr %key, ptr %found) {{
entry:
  %padded = alloca <8 x i64>, align 64
  %seed_at = getelementptr i64, ptr %key, i64 {BLOCK_WORDS}
  %step_at = getelementptr i64, ptr %key, i64 {BLOCK_WORDS + 1}
  %seed = load i64, ptr %seed_at
  %step = load i64, ptr %step_at
  %heads_outside = icmp sgt i64 %head_stride, %token_stride
  %outer_stride = select i1 %heads_outside, i64 %head_stride, i64 %token_stride
  %inner_stride = select i1 %heads_outside, i64 %token_stride, i64 %head_stride
  %four_tokens = shl i64 %token_stride, 2
  %ahead = select i1 %heads_outside, i64 4096, i64 %four_tokens
  %row_step = mul i64 %blocks, %step
  %outer_step = select i1 %heads_outside, i64 0, i64 %row_step
  %inner_step = select i1 %heads_outside, i64 %row_step, i64 0
  %outer_found = select i1 %heads_outside, i64 1, i64 0
  %inner_found = select i1 %heads_outside, i64 0, i64 1
  br label %plane
plane:
  %p = phi i64 [ 0, %entry ], [ %p1, %plane_end ]
  %plane_at = getelementptr i64, ptr %planes, i64 %p
  %plane_address = load i64, ptr %plane_at
  %first_found = mul i64 %p, %heads
  br label %segment
segment:
  %s = phi i64 [ 0, %plane ], [ %s1, %segment_end ]
  %fields = mul i64 %s, 3
  %f0 = getelementptr i64, ptr %segments, i64 %fields
  %f1 = getelementptr i64, ptr %f0, i64 1
  %f2 = getelementptr i64, ptr %f0, i64 2
  %offset = load i64, ptr %f0
  %first_row = load i64, ptr %f1
  %rows = load i64, ptr %f2
  %outer_count = select i1 %heads_outside, i64 %heads, i64 %rows
  %inner_count = select i1 %heads_outside, i64 %rows, i64 %heads
  %first_address = add i64 %plane_address, %offset
  %skipped = mul i64 %first_row, %row_step
  %first_place = add i64 %seed, %skipped
  br label %outer
outer:
  %o = phi i64 [ 0, %segment ], [ %o1, %outer_end ]
  %outer_address = phi i64 [ %first_address, %segment ], [ %outer_address1, %outer_end ]
  %outer_place = phi i64 [ %first_place, %segment ], [ %outer_place1, %outer_end ]
  %outer_at = phi i64 [ %first_found, %segment ], [ %outer_at1, %outer_end ]
  br label %inner
inner:
  %i = phi i64 [ 0, %outer ], [ %i1, %row_end ]
  %address = phi i64 [ %outer_address, %outer ], [ %address1, %row_end ]
  %row_place = phi i64 [ %outer_place, %outer ], [ %row_place1, %row_end ]
  %at = phi i64 [ %outer_at, %outer ], [ %at1, %row_end ]
  br label %block
block:
  %done = phi i64 [ 0, %inner ], [ %done1, %block_end ]
  %place = phi i64 [ %row_place, %inner ], [ %place1, %block_end ]
  %sum = phi i64 [ 0, %inner ], [ %sum1, %block_end ]
  %left = sub i64 %row_bytes, %done
  %is_short = icmp ult i64 %left, {BLOCK_BYTES}
  %bytes = select i1 %is_short, i64 %left, i64 {BLOCK_BYTES}
  %whole = and i64 %bytes, {-LINE_BYTES}
  %block_address = add i64 %address, %done
  %any_whole = icmp ne i64 %whole, 0
  br i1 %any_whole, label %line, label %rest
line:
  %b = phi i64 [ 0, %block ], [ %b1, %line ]
  %many = phi <8 x i64> [ zeroinitializer, %block ], [ %many1, %line ]
  %line_address = add i64 %block_address, %b
  %line_at = inttoptr i64 %line_address to ptr
  %later_address = add i64 %line_address, %ahead
  %later_at = inttoptr i64 %later_address to ptr
  call void @llvm.prefetch.p0(ptr %later_at, i32 0, i32 1, i32 1)
  %key_at = getelementptr i8, ptr %key, i64 %b
{_hashed("many1", "%line_at", "%key_at", "%many", 1)}
  %b1 = add i64 %b, {LINE_BYTES}
  %more_lines = icmp ult i64 %b1, %whole
  br i1 %more_lines, label %line, label %rest
rest:
  %before = phi <8 x i64> [ zeroinitializer, %block ], [ %many1, %line ]
  %rest_bytes = sub i64 %bytes, %whole
  %any_rest = icmp ne i64 %rest_bytes, 0
  br i1 %any_rest, label %padding, label %block_end
padding:
  store <8 x i64> zeroinitializer, ptr %padded, align 64
  %rest_address = add i64 %block_address, %whole
  %rest_at = inttoptr i64 %rest_address to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %padded, ptr %rest_at, i64 %rest_bytes, i1 false)
  %rest_key_at = getelementptr i8, ptr %key, i64 %whole
{_hashed("after", "%padded", "%rest_key_at", "%before", 64)}
  br label %block_end
block_end:
  %all = phi <8 x i64> [ %before, %rest ], [ %after, %padding ]
  %nh = call i64 @llvm.vector.reduce.add.v8i64(<8 x i64> %all)
  %x0 = add i64 %nh, %place
  %y0 = lshr i64 %x0, 32
  %x1 = xor i64 %x0, %y0
  %x2 = mul i64 %x1, {MIX - (1 << 64)}
  %y2 = lshr i64 %x2, 32
  %x3 = xor i64 %x2, %y2
  %x4 = mul i64 %x3, {MIX - (1 << 64)}
  %y4 = lshr i64 %x4, 32
  %x5 = xor i64 %x4, %y4
  %sum1 = add i64 %sum, %x5
  %done1 = add i64 %done, {BLOCK_BYTES}
  %place1 = add i64 %place, %step
  %more_blocks = icmp slt i64 %done1, %row_bytes
  br i1 %more_blocks, label %block, label %row_end
row_end:
  %found_at = getelementptr i64, ptr %found, i64 %at
  %old = load i64, ptr %found_at
  %new = add i64 %old, %sum1
  store i64 %new, ptr %found_at
  %i1 = add i64 %i, 1
  %address1 = add i64 %address, %inner_stride
  %row_place1 = add i64 %row_place, %inner_step
  %at1 = add i64 %at, %inner_found
  %more_inner = icmp slt i64 %i1, %inner_count
  br i1 %more_inner, label %inner, label %outer_end
outer_end:
  %o1 = add i64 %o, 1
  %outer_address1 = add i64 %outer_address, %outer_stride
  %outer_place1 = add i64 %outer_place, %outer_step
  %outer_at1 = add i64 %outer_at, %outer_found
  %more_outer = icmp slt i64 %o1, %outer_count
  br i1 %more_outer, label %outer, label %segment_end
segment_end:
  %s1 = add i64 %s, 1
  %more_segments = icmp slt i64 %s1, %segment_count
  br i1 %more_segments, label %segment, label %plane_end
plane_end:
  %p1 = add i64 %p, 1
  %more_planes = icmp slt i64 %p1, %plane_count
  br i1 %more_planes, label %plane, label %end
end:
  ret void
}}

define internal void @part(ptr %part, i64 %plane, i64 %heads, i64 %row_bytes, i64 %blocks, ptr %key) {{
entry:
  %is_wanted = icmp ne ptr %part, null
  br i1 %is_wanted, label %wanted, label %end
wanted:
  %f1 = getelementptr i64, ptr %part, i64 1
  %f2 = getelementptr i64, ptr %part, i64 2
  %f3 = getelementptr i64, ptr %part, i64 3
  %f4 = getelementptr i64, ptr %part, i64 4
  %f5 = getelementptr i64, ptr %part, i64 5
  %planes = load ptr, ptr %part
  %segments = load ptr, ptr %f1
  %segment_count = load i64, ptr %f2
  %token_stride = load i64, ptr %f3
  %head_stride = load i64, ptr %f4
  %all_found = load ptr, ptr %f5
  %plane_at = getelementptr i64, ptr %planes, i64 %plane
  %skipped = mul i64 %plane, %heads
  %found = getelementptr i64, ptr %all_found, i64 %skipped
  call void @digest(ptr %plane_at, i64 1, ptr %segments, i64 %segment_count, i64 %token_stride, i64 %head_stride,
                    i64 %heads, i64 %row_bytes, i64 %blocks, ptr %key, ptr %found)
  br label %end
end:
  ret void
}}

define void @interleaved(ptr %copy, ptr %source_planes, ptr %target_planes, i64 %plane_count, ptr %segments,
                         i64 %segment_count, i64 %source_token, i64 %source_head, i64 %target_token, i64 %target_head,
                         i64 %copy_heads, i64 %stream, ptr %source, ptr %target, i64 %every, i64 %turn, i64 %heads,
                         i64 %row_bytes, i64 %blocks, ptr %key) {{
entry:
  br label %plane
plane:
  %p = phi i64 [ 0, %entry ], [ %p1, %plane ]
  %place = urem i64 %p, %every
  %is_turn = icmp eq i64 %place, %turn
  %target_now = select i1 %is_turn, ptr %target, ptr null
  %source_at = getelementptr i64, ptr %source_planes, i64 %p
  %target_at = getelementptr i64, ptr %target_planes, i64 %p
  call void @part(ptr %source, i64 %p, i64 %heads, i64 %row_bytes, i64 %blocks, ptr %key)
  call void %copy(ptr %source_at, ptr %target_at, i64 1, ptr %segments, i64 %segment_count, i64 %source_token,
                  i64 %source_head, i64 %target_token, i64 %target_head, i64 %copy_heads, i64 %stream)
  call void @part(ptr %target_now, i64 %p, i64 %heads, i64 %row_bytes, i64 %blocks, ptr %key)
  %p1 = add i64 %p, 1
  %more = icmp slt i64 %p1, %plane_count
  br i1 %more, label %plane, label %end
end:
  ret void
}}
"""


class Part(NamedTuple):
    """What the loop reads to digest consecutive planes: their addresses, segments, strides, and where their digests go.

    Attributes:
        fields: [6] int64, the addresses of the others and their counts, as the loop reads them.
        kept: the arrays that `fields` points to.
    """

    fields: Numbers
    kept: tuple[Numbers, Numbers, Words]


class ViewDigests:
    """The digests of a view's rows. It finds them by the view's own pages, not by the addresses that a copy uses.

    Attributes:
        found: [planes, heads].
    """

    def __init__(self, view: View, tokens: tuple[int, int], key: bytes) -> None:
        """Compute nothing yet. The caller has checked that the view's pages hold `tokens`."""
        self._view, self._key = view, key
        self._segments = row_segments(view, view.rows(tokens))
        self.found: Words = np.zeros((view.plane_count, len(view.heads)), dtype=np.uint64)

    def part(self, first: int, end: int) -> Part:
        """Return what the loop needs for planes [first, end), which have equal strides, and no elements apart."""
        for group in self._view.planes:
            if group.first <= first < end <= group.first + len(group.addresses):
                addresses = group.addresses[first - group.first : end - group.first]
                planes = addresses + self._view.heads.start * group.head_stride
                segments, found = self._segments_in(group), self.found[first:end]
                places = (planes.ctypes.data, segments.ctypes.data, len(segments))
                fields = np.array([*places, group.token_stride, group.head_stride, found.ctypes.data], dtype=np.int64)
                return Part(fields, (planes, segments, found))
        raise AssertionError(f"planes {first} to {end} have unequal strides")

    def compute(self) -> None:
        """Compute the digests of all planes. Releases the GIL."""
        for group in self._view.planes:
            found = self.found[group.first : group.first + len(group.addresses)]
            planes = group.addresses + self._view.heads.start * group.head_stride
            segments, heads, row_bytes = self._segments_in(group), found.shape[1], self._view.row_bytes
            if not group.element_stride:
                strides = Strides(group.token_stride, group.head_stride)
                digest_addresses(planes, segments, strides, heads, row_bytes, self._key, found)
                continue
            for plane, sums in zip(planes.tolist(), found, strict=True):
                for offset, number, count in segments.tolist():
                    rows = self._joined(plane + offset, count, group)
                    one = np.array([[0, number, count]], dtype=np.int64)
                    begin = np.array([rows.ctypes.data], dtype=np.int64)
                    strides = Strides(heads * row_bytes, row_bytes)
                    digest_addresses(begin, one, strides, heads, row_bytes, self._key, sums[None, :])

    def _segments_in(self, group: PlaneGroup) -> Numbers:
        pages, slots, numbers, counts = self._segments.T
        return np.column_stack([pages * group.page_stride + slots * group.token_stride, numbers, counts])

    def _joined(self, address: int, count: int, group: PlaneGroup) -> Bytes:
        """Return a copy of rows whose elements are apart, [count, heads, row bytes]."""
        view = self._view
        shape = (count, len(view.heads), view.row_bytes // view.element_bytes, view.element_bytes)
        strides = (group.token_stride, group.head_stride, group.element_stride, 1)
        length_bytes = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(memory, shape, strides))


def digest_addresses(
    planes: Numbers, segments: Numbers, strides: Strides, heads: int, row_bytes: int, key: bytes, found: Words
) -> None:
    """Add the digests of all rows of p planes to `found`. Checks nothing: a wrong address ends the process.

    Releases the GIL.

    Args:
        planes: [p] addresses.
        segments: [m, 3], C-contiguous: offset from a plane, number of the first row in the sequence, rows.
        found: [p, heads], C-contiguous.
    """
    # The loop reads the key without the GIL, so this frame must hold it.
    words = expanded(key)
    _compiled()(
        planes.ctypes.data,
        len(planes),
        segments.ctypes.data,
        len(segments),
        *strides,
        heads,
        row_bytes,
        blocks_of(row_bytes),
        words.ctypes.data,
        found.ctypes.data,
    )


class Interleaved(NamedTuple):
    """Digests to compute between the planes of a copy.

    Attributes:
        source, target: as many planes as the copy has; None: no digests of the target.
        turns: (every, turn): the target's planes turn, turn + every, and so on have digests.
        like: a view with the heads and rows of both sides.
    """

    source: Part
    target: Part | None
    turns: tuple[int, int]
    like: View
    key: bytes


def copy_and_digest(copy: int, arguments: Sequence[int], digests: Interleaved) -> None:
    """For each plane, digest the source's rows, copy the plane, and digest the target's rows in turns. Checks nothing.

    So the copy reads from the cache what the digest has read from memory. Releases the GIL.

    Args:
        copy: address of the loop of `cpu_copy`.
        arguments: its arguments.
    """
    source, target, turns, like, key = digests
    words = expanded(key)
    _interleaved()(
        copy,
        *arguments,
        source.fields.ctypes.data,
        0 if target is None else target.fields.ctypes.data,
        *turns,
        len(like.heads),
        like.row_bytes,
        blocks_of(like.row_bytes),
        words.ctypes.data,
    )


def compile_digest_loops() -> None:
    """Compile the loops now."""
    _compiled()
    _interleaved()


@functools.cache
def _interleaved() -> Callable[..., None]:
    return compiled_loop(_MODULE, "interleaved", 20)


@functools.cache
def _compiled() -> Callable[..., None]:
    return compiled_loop(_MODULE, "digest", 11)
