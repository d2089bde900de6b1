"""Measures how fast kernels can write another GPU's memory, which limits the direct copy, and a plain copy's rate.

    python benchmarks/nvlink_limit_gpu.py

Kernels copy one contiguous gibibyte from the first GPU to the second: by loads and stores with every cache hint that Triton
has, and by the tensor memory accelerator. The program fails unless the bytes arrive. Needs two GPUs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from gather_scatter_gpu import copy_words

LENGTH_BYTES = 1 << 30
REPETITIONS = 12
PROCESSORS = 132


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def copy_tiles(
    source: tl.tensor, target: tl.tensor, row_count: tl.tensor, rows: tl.constexpr, columns: tl.constexpr
) -> None:
    """Copy tiles by the tensor memory accelerator, one tile a program."""
    near = tl.make_tensor_descriptor(source, [row_count, columns], [columns, 1], [rows, columns])
    far = tl.make_tensor_descriptor(target, [row_count, columns], [columns, 1], [rows, columns])
    for index in tl.range(tl.program_id(0), row_count // rows, tl.num_programs(0), num_stages=4):
        far.store([index * rows, 0], near.load([index * rows, 0]))


class Elsewhere:
    """Memory of the other device. Triton accepts tensors of its own device only, but takes an address."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.dtype = memory.dtype
        self._memory = memory

    def data_ptr(self) -> int:
        """Return its address."""
        return self._memory.data_ptr()


def measure(name: str, near: torch.Tensor, far: torch.Tensor, job: Callable[[], object]) -> None:
    """Run, check, and print the median rate."""
    far.zero_()
    torch.cuda.synchronize(far.device)
    job()
    torch.cuda.synchronize(near.device)
    assert torch.equal(far.cpu(), near.cpu()), f"{name}: wrong bytes"
    samples = []
    for _ in range(REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        job()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end))
    found = statistics.median(samples)
    print(f"{name:44} {found:.3f} ms {LENGTH_BYTES / found / 1e6:6.1f} GB/s", flush=True)


def main() -> None:
    """Print the table."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        raise SystemExit("fewer than two CUDA devices: this benchmark needs two")
    torch.cuda.set_device(0)
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device="cuda:0"))
    count = LENGTH_BYTES // 8
    near = torch.randint(-(2**62), 2**62, (count,), device="cuda:0", dtype=torch.int64)
    far = torch.zeros(count, device="cuda:1", dtype=torch.int64)
    # torch's first copy between two devices enables peer access, which the kernels need.
    far.copy_(near)
    there = Elsewhere(far)
    measure("plain copy", near, far, lambda: far.copy_(near, non_blocking=True))
    for (words, warps), hint in itertools.product(((2048, 4), (8192, 8)), ("", ".cs", ".wt", ".cg")):
        grid = (count // words,)
        measure(
            f"stores{hint}, {words * 8} bytes a program, {warps} warps",
            near,
            far,
            lambda grid=grid, words=words, hint=hint, warps=warps: copy_words[grid](  # type: ignore[misc]
                near, there, count, words, hint, num_warps=warps
            ),
        )
    for rows, columns in ((8, 256), (16, 256), (32, 128), (64, 64)):
        measure(
            f"tensor memory accelerator, {rows} x {columns * 8} bytes",
            near,
            far,
            lambda rows=rows, columns=columns: copy_tiles[2 * PROCESSORS,](  # type: ignore[misc]
                near, there, count // columns, rows, columns, num_warps=4
            ),
        )


if __name__ == "__main__":
    main()
