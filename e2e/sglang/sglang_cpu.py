"""Gives SGLang what it lacks on CPUs for MLA, for sliding windows and for data parallel attention. SGLang loads it in every
process of an engine under test, as a plug-in.

With plain torch SGLang computes the attention of a prompt from K and V, but reads the latents from its cache for them, whose
rows are longer. Where E2E_SGLANG_LATENT is set, it computes from the latents, as it does for each token that follows.

It keeps layers with a window in a pool of their own, whose rows have other numbers, and with plain torch it reads them by the
numbers of the other pool. Here it reads them by their own.
"""

from __future__ import annotations

import os
from typing import Any

SWITCH = "E2E_SGLANG_LATENT"


def register() -> None:
    """Add what is missing, and choose the computation."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def exchanged(output: Any, given: Any, group_name: str) -> None:
        # SGLang's operator is for GPUs alone.
        parallel_state._groups[group_name]()._all_to_all_single(output, given)

    parallel_state.reg_all_to_all_single = exchanged
    # The length of a sequence that pads a replica's batch.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: 1
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, _by_rows_of_windows(getattr(TorchNativeAttnBackend, name)))
    if os.environ.get(SWITCH):
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

        AttentionBackendRegistry.register("torch_native", _from_latents)


def _by_rows_of_windows(original: Any) -> Any:
    def run(
        backend: Any, query: Any, output: Any, keys: Any, values: Any, rows: Any, *arguments: Any, **named: Any
    ) -> Any:
        if named["sliding_window_size"] is not None and backend.use_sliding_window_kv_pool:
            rows = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
        return original(backend, query, output, keys, values, rows, *arguments, **named)

    return run


def _from_latents(_attention: Any, _batch: Any) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
