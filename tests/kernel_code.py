"""Compiles the kernels for a kind of GPU, without the GPU, and reads the result. Runs in a `KernelProcess`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longshore_agent.kernels import copy_kernel, device_digest
from longshore_agent.kernels.device_grid import Tile, Tuning
from longshore_agent.kernels.device_kernel import ArgumentBlock

# H100 and H200.
TARGET = GPUTarget("cuda", 90, 32)
ACCESS = re.compile(r"\b(?:ld|st)\.(?:global|shared|local)[\w.:]*")
PARAMETER = re.compile(r"\.param \.(\w+) ")
BITS = {"i64": 64, "i32": 32}


KERNELS: dict[str, tuple[Any, Any]] = {
    "copy": (copy_kernel, copy_kernel.copy_kernel),
    "digest": (device_digest, device_digest.digest_kernel),
}


def _types(kernel: str) -> list[str]:
    """Return the types of the kernel's non-constant arguments, as passed to the driver."""
    counts = KERNELS[kernel][0].ARGUMENTS
    return [kind for kind, count in zip(("i64", "i32", "i64"), counts, strict=True) for _ in range(count)]


def _compiled(tile: Tile, tuning: Tuning, kernel: str) -> Any:
    module, function = KERNELS[kernel]
    fixed = module.constants(tile, tuning)
    values = [name for name in function.arg_names if name not in fixed]
    signature = dict(zip(values, _types(kernel), strict=True)) | dict.fromkeys(fixed, "constexpr")
    in_order = {name: signature[name] for name in function.arg_names}
    source = ASTSource(function, in_order, constexprs=fixed)
    return triton.compile(source, target=TARGET, options={"num_warps": tuning.warps})


def memory_instructions(tile: Tile, tuning: Tuning, kernel: str = "copy") -> Counter[str]:
    """Count each kind of load and store in the kernel's machine-independent code, which has no loop."""
    return Counter(ACCESS.findall(_compiled(tile, tuning, kernel).asm["ptx"]))


def parameters(tile: Tile, tuning: Tuning, kernel: str = "copy") -> tuple[list[int], list[int], int]:
    """Bits of each of the kernel's parameters, those of what we write for the driver, and how many places we give it."""
    code = _compiled(tile, tuning, kernel).asm["ptx"]
    header = code[code.index(".visible .entry") :].split(")", 1)[0]
    bits = [int(kind[1:]) for kind in PARAMETER.findall(header)]
    counts = KERNELS[kernel][0].ARGUMENTS
    places = len(ArgumentBlock(*counts).fill(*range(sum(counts))))
    return bits, [BITS[kind] for kind in _types(kernel)], places


def annotated_types(kernel: str = "copy") -> tuple[list[str], list[str]]:
    """Return the types in the kernel's signature, which Triton's public launch uses, and those passed to the driver."""
    values = [param for param in KERNELS[kernel][1].params if not param.is_constexpr]
    assert all(param.do_not_specialize for param in values)
    return [param.annotation_type for param in values], _types(kernel)
