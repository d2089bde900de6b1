"""Copies rows between pages and a slab on a CPU: one call for all planes, compiled for this processor when it is first used.

Called by `gather.launch` and `scatter.launch` with addresses that `slab` has checked; knows no pools, pages or tokens.

Why a compiled loop and not a tensor library: rows are short (one head is 64 to 512 bytes) and lie apart, and what
limits their copy is that an ordinary store first reads the line that it overwrites. Streaming stores do not. Neither
torch nor numpy has them for strided copies. Measured in docs/design/2026-11-21-cpu-kernels.md.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

# What a streaming store writes at once: a line of the cache. Rows and strides of other sizes are copied by memcpy.
LINE_BYTES = 64

Numbers = npt.NDArray[np.int64]

# Loops: plane, segment, token, head. A segment is four numbers: its offset in the plane's pages, its offset in the
# plane's part of the slab, its tokens, and the bytes of a row. Rows of a segment follow each other in the slab.
_FUNCTION = """
define void @{name}(ptr %planes, i64 %plane_count, i64 %slab, i64 %slab_stride, ptr %segments, i64 %segment_count,
                    i64 %token_stride, i64 %head_stride, i64 %heads, i64 %stream) {{
entry:
  %streams = icmp ne i64 %stream, 0
  %any_plane = icmp sgt i64 %plane_count, 0
  br i1 %any_plane, label %plane, label %end
plane:
  %p = phi i64 [ 0, %entry ], [ %p1, %plane_end ]
  %pages_at = getelementptr i64, ptr %planes, i64 %p
  %pages = load i64, ptr %pages_at
  %part_offset = mul i64 %p, %slab_stride
  %part = add i64 %slab, %part_offset
  br label %segment
segment:
  %s = phi i64 [ 0, %plane ], [ %s1, %segment_end ]
  %fields = shl i64 %s, 2
  %f0 = getelementptr i64, ptr %segments, i64 %fields
  %f1 = getelementptr i64, ptr %f0, i64 1
  %f2 = getelementptr i64, ptr %f0, i64 2
  %f3 = getelementptr i64, ptr %f0, i64 3
  %page_offset = load i64, ptr %f0
  %row_offset = load i64, ptr %f1
  %tokens = load i64, ptr %f2
  %bytes = load i64, ptr %f3
  %first = add i64 %pages, %page_offset
  %packed = add i64 %part, %row_offset
  br label %token
token:
  %t = phi i64 [ 0, %segment ], [ %t1, %token_end ]
  %near_token = phi i64 [ %packed, %segment ], [ %near_next, %token_end ]
  %token_offset = mul i64 %t, %token_stride
  %far_token = add i64 %first, %token_offset
  br label %head
head:
  %h = phi i64 [ 0, %token ], [ %h1, %row_end ]
  %near = phi i64 [ %near_token, %token ], [ %near_next, %row_end ]
  %head_offset = mul i64 %h, %head_stride
  %far = add i64 %far_token, %head_offset
  %near_next = add i64 %near, %bytes
  %far_pointer = inttoptr i64 %far to ptr
  %near_pointer = inttoptr i64 %near to ptr
  br i1 %streams, label %line, label %plain
plain:
  call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {source}, i64 %bytes, i1 false)
  br label %row_end
line:
  %b = phi i64 [ 0, %head ], [ %b1, %line ]
  %from = getelementptr i8, ptr {source}, i64 %b
  %to = getelementptr i8, ptr {target}, i64 %b
  %value = load <16 x i32>, ptr %from, align 1
  store <16 x i32> %value, ptr %to, align 64, !nontemporal !0
  %b1 = add i64 %b, 64
  %more_lines = icmp ult i64 %b1, %bytes
  br i1 %more_lines, label %line, label %row_end
row_end:
  %h1 = add i64 %h, 1
  %more_heads = icmp slt i64 %h1, %heads
  br i1 %more_heads, label %head, label %token_end
token_end:
  %t1 = add i64 %t, 1
  %more_tokens = icmp slt i64 %t1, %tokens
  br i1 %more_tokens, label %token, label %segment_end
segment_end:
  %s1 = add i64 %s, 1
  %more_segments = icmp slt i64 %s1, %segment_count
  br i1 %more_segments, label %segment, label %plane_end
plane_end:
  %p1 = add i64 %p, 1
  %more_planes = icmp slt i64 %p1, %plane_count
  br i1 %more_planes, label %plane, label %fence
fence:
  ; Streaming stores are not ordered with what follows; whoever is told of the copy must see it.
  fence seq_cst
  br label %end
end:
  ret void
}}
"""
_MODULE = (
    "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\n"
    + _FUNCTION.format(name="gather", target="%near_pointer", source="%far_pointer")
    + _FUNCTION.format(name="scatter", target="%far_pointer", source="%near_pointer")
    + "!0 = !{i32 1}\n"
)


def copy(
    operation: str,
    planes: Numbers,
    slab: int,
    slab_stride: int,
    segments: Numbers,
    token_stride: int,
    head_stride: int,
    heads: int,
    *,
    stream: bool,
) -> None:
    """Copy all rows of all planes. Nothing is checked: a wrong address ends the process. Releases the GIL.

    Args:
        operation: `gather` copies pages to the slab, `scatter` the slab to pages.
        planes: [p] addresses of the planes' pages.
        slab, slab_stride: address of the first plane's part of the slab, and bytes from one plane's part to the next.
        segments: [s, 4], s >= 1, C-contiguous: offset in the pages, offset in the part, tokens (>= 1), bytes of a row (>= 1).
        token_stride, head_stride: in the pages, bytes.
        heads: rows of a token, >= 1.
        stream: use streaming stores; every address that is written, and every row, must be a multiple of LINE_BYTES.
    """
    _compiled()[operation](
        planes.ctypes.data,
        len(planes),
        slab,
        slab_stride,
        segments.ctypes.data,
        len(segments),
        token_stride,
        head_stride,
        heads,
        int(stream),
    )


def prepare() -> None:
    """Compile now (some 50 ms) and not in the first transfer."""
    _compiled()


@functools.cache
def _compiled() -> dict[str, Callable[..., None]]:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(_MODULE), machine)
    engine.finalize_object()
    # The engine owns the code; it lives as long as this cache, which is as long as the process.
    _ENGINES.append(engine)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)
    return {name: kind(engine.get_function_address(name)) for name in ("gather", "scatter")}


_ENGINES: list[object] = []
