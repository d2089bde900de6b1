"""Stands in for sgl_kernel on a machine without CUDA. .ci/install-sglang copies it into SGLang's environment.

SGLang imports these names when SGLANG_USE_CPU_ENGINE is 1, from a build of its kernels that no package index has. Every
name exists. A function that has no body in plain torch here raises NotImplementedError when it is called. No operator
is registered, so SGLang finds no Intel AMX and uses its own torch code for norms, rotary embedding, activation and KV
stores.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.0.0+longshore.stub"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, _width: Any
) -> None:
    """Write each request's newly allocated token slots into its row."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_arguments: Any, **_more: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    absent.__name__ = name
    return absent
