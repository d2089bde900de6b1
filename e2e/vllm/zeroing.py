"""The connector with switches for tests. vLLM loads it in every process of an engine under test.

While the file that E2E_VLLM_ZERO names exists, a rank overwrites what a request has received with zeros. The tokens must then
differ from those of a single engine. Otherwise the tests would prove nothing about the transfer. A word in the file limits
it to the layers of a draft model ("draft") or to recurrent states ("state").

While the folder that E2E_VLLM_KEEP names exists, each rank writes the bytes of a room's blocks into it: of a prompt that is
offered, and of one that has come.

E2E_VLLM_PLANT plants an error that other connectors had, which a test must find.

vLLM's prefix cache of states copies them by Triton, which vLLM for CPUs lacks: here bytes are copied instead.

E2E_VLLM_STAGES lets vLLM for CPUs have pipeline stages, whose first request would end it.

While the file that E2E_VLLM_HOLD names exists, an engine stands still after a step that offers a chunk, but not the last
one, up to the token that the file names or beyond.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import longshore_engines.vllm
from longshore_engines import vllm_caches
from longshore_engines.handover import Claim, Offer
from longshore_engines.vllm import LongshoreConnector

ZERO, HOLD, KEEP = "E2E_VLLM_ZERO", "E2E_VLLM_HOLD", "E2E_VLLM_KEEP"
DRAFT, STATE = "draft", "state"
LOOK_S = 0.01


# The errors by their names: prefill computes the last token, too, or conv states are split without regard to their sections.
PLANT = os.environ.get("E2E_VLLM_PLANT")
if PLANT == "last token":
    longshore_engines.vllm.held_back = lambda _groups: 0
elif PLANT == "no sections":
    vllm_caches._SHAPES["GDN_ATTN"] = lambda channels, state, tp, _config: (state[0] * tp, [(channels * tp, 1)])


if not HAS_TRITON:

    def _copy(sources: Any, targets: Any, sizes: Any) -> None:
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    mamba_utils.batch_memcpy = _copy


if os.environ.get("E2E_VLLM_STAGES"):
    _gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def _gather_into_made_tensors(self: Any, *arguments: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return _gather(self, *arguments)

    GPUModelRunner.sync_and_gather_intermediate_tensors = _gather_into_made_tensors


class ZeroingConnector(LongshoreConnector):
    """The connector under test with the switches."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._zero, self._hold, self._keep = (Path(os.environ[name]) for name in (ZERO, HOLD, KEEP))
        # By group, the tensors of each layer: one, or the parts of a state.
        self._layers: list[dict[str, tuple[Any, ...]]] = []
        self._claimed: dict[str, Claim] = {}
        self._offered: dict[int, list[dict[int, None]]] = {}  # by room, the blocks of each group

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the addresses of the blocks."""
        super().register_kv_caches(kv_caches)
        layers = get_layers_from_vllm_config(self._vllm_config, MambaBase, list(kv_caches))
        self._layers = [
            {name: tuple(layers[name].kv_cache) if name in layers else (kv_caches[name],) for name in group.layer_names}
            for group in self._kv_cache_config.transfer_groups
        ]

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        """Keep the target blocks of each request."""
        for order in self._get_connector_metadata().orders:
            if isinstance(order, Claim):
                self._claimed[order.request_id] = order
        super().start_load_kv(forward_context, **named)

    def wait_for_save(self) -> None:
        """Stand still if the file exists, and more chunks follow."""
        super().wait_for_save()
        orders = self._get_connector_metadata().orders
        for order in orders:
            if isinstance(order, Offer):
                kept = self._offered.setdefault(order.room, [{} for _ in self._layers])
                for blocks, group in zip(kept, order.groups, strict=True):
                    # The block in which a chunk ends is offered twice.
                    blocks.update(dict.fromkeys(group.pages))
                if order.last:
                    self._write("offered", order.room, [list(blocks) for blocks in self._offered.pop(order.room)])
        offered = max((order.end_token for order in orders if isinstance(order, Offer) and not order.last), default=0)
        while offered >= self._held_from():
            time.sleep(LOOK_S)

    def _held_from(self) -> float:
        try:
            return int(self._hold.read_text())
        except FileNotFoundError:
            return math.inf

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Zero received blocks if the file exists."""
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving or ():
            claim = self._claimed.pop(request_id, None)
            if claim is None:
                continue
            pages = [list(group.pages) for group in claim.groups]
            self._write("received", claim.room, pages)
            if self._zero.exists():
                limit = self._zero.read_text()
                for layers, blocks in zip(self._layers, pages, strict=True):
                    for name, tensors in layers.items():
                        is_meant = not limit or (limit == DRAFT and name.startswith("draft_model."))
                        for tensor in tensors if is_meant or (limit == STATE and len(tensors) > 1) else ():
                            tensor[blocks] = 0
        return results

    def _write(self, kind: str, room: int, pages: list[list[int]]) -> None:
        """Write the blocks of each layer, [block, ...] in float32, if the folder exists; of a state each part."""
        if not self._keep.is_dir() or not any(pages):
            return
        kept = {
            f"{name}.{index}": tensor[blocks].float().cpu().numpy()
            for layers, blocks in zip(self._layers, pages, strict=True)
            for name, tensors in layers.items()
            for index, tensor in enumerate(tensors)
        }
        part = self._keep / f"{kind}-{room}-{get_tensor_model_parallel_rank()}.part"
        with part.open("wb") as file:
            np.savez(file, **kept)
        part.rename(part.with_suffix(".npz"))
