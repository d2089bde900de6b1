"""Gives SGLang what it lacks on CPUs for MLA and for data parallel attention. SGLang loads it in every process of an engine under
test, as a plug-in.

With plain torch SGLang computes the attention of a prompt from K and V, but reads the latents from its cache for them, whose
rows are longer. Where E2E_SGLANG_LATENT is set, it computes from the latents, as it does for each token that follows.
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
    if os.environ.get(SWITCH):
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

        AttentionBackendRegistry.register("torch_native", _from_latents)


def _from_latents(_attention: Any, _batch: Any) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
