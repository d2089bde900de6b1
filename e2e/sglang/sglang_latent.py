"""Lets SGLang run MLA on CPUs. SGLang loads it in every process of an engine under test, as a plug-in.

With plain torch SGLang computes the attention of a prompt from K and V, but reads the latents from its cache for them, whose
rows are longer. Where E2E_SGLANG_LATENT is set, it computes from the latents, as it does for each token that follows.
"""

from __future__ import annotations

import os
from typing import Any

SWITCH = "E2E_SGLANG_LATENT"


def register() -> None:
    """Choose the computation."""
    if os.environ.get(SWITCH):
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

        AttentionBackendRegistry.register("torch_native", _from_latents)


def _from_latents(_attention: Any, _batch: Any) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
