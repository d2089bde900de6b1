"""Compiles a loop in LLVM's language for this processor. Called by `cpu_copy` and `cpu_digest`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def compiled_loop(module: str, name: str, argument_count: int) -> Callable[..., None]:
    """Compile a function that takes 64-bit numbers and returns nothing. Takes some 50 ms. A call releases the GIL.

    Args:
        module: text of the module that defines it.
        name: of the function.
    """
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * argument_count)(loop_address(module, name))


@functools.cache
def loop_address(module: str, name: str) -> int:
    """Return the address of a compiled function."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(module), machine)
    engine.finalize_object()
    # The engine owns the code, so keep it as long as the process.
    _ENGINES.append(engine)
    return int(engine.get_function_address(name))


_ENGINES: list[object] = []
