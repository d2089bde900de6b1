"""What Triton's compiler makes of the device kernels for one GPU, without having it. Runs in a `KernelProcess`."""

from __future__ import annotations

import re
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longshore_agent.kernels.device_grid import Tile, Tuning
from longshore_agent.kernels.device_rows import constants
from longshore_agent.kernels.gather.triton_kernel import gather_kernel
from longshore_agent.kernels.scatter.triton_kernel import scatter_kernel

KERNELS = {"gather": gather_kernel, "scatter": scatter_kernel}
TYPES = {"planes": "*i64", "pages": "*i32", "slab": "*u8"} | {f"word_{index}": "i64" for index in range(8)}
# H100 and H200.
TARGET = GPUTarget("cuda", 90, 32)
ACCESS = re.compile(r"\b(?:ld|st)\.(?:global|shared|local)[\w.:]*")


def memory_instructions(operation: str, tile: Tile, tuning: Tuning) -> Counter[str]:
    """How often each load and store stands in the machine-independent code of a kernel; there is no loop in it."""
    kernel = KERNELS[operation]
    fixed = constants(tile, tuning)
    signature = {name: "constexpr" if name in fixed else TYPES.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=fixed)
    code = triton.compile(source, target=TARGET, options={"num_warps": tuning.warps}).asm["ptx"]
    return Counter(ACCESS.findall(code))
