"""The connector with switches for tests. vLLM loads it in every process of an engine under test.

While the file that E2E_VLLM_ZERO names exists, a rank overwrites the received KV of a request with zeros. The tokens
must then differ from those of a single engine. Otherwise the tests would prove nothing about the transfer.
E2E_VLLM_ZERO_DRAFT does so for the layers of a draft model alone.

While the folder that E2E_VLLM_KEEP names exists, each rank writes the bytes of a room's blocks into it: of a prompt that is
offered, and of one that has come.

While the file that E2E_VLLM_HOLD names exists, an engine stands still after a step that offers a chunk, but not the last
one, up to the token that the file names or beyond.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from longshore_engines.handover import Claim, Offer
from longshore_engines.vllm import LongshoreConnector

ZERO, ZERO_DRAFT, HOLD, KEEP = "E2E_VLLM_ZERO", "E2E_VLLM_ZERO_DRAFT", "E2E_VLLM_HOLD", "E2E_VLLM_KEEP"
LOOK_S = 0.01


class ZeroingConnector(LongshoreConnector):
    """The connector under test with the switches."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        paths = (Path(os.environ[name]) for name in (ZERO, ZERO_DRAFT, HOLD, KEEP))
        self._zero, self._zero_draft, self._hold, self._keep = paths
        self._caches: list[Any] = []
        self._drafts: list[Any] = []
        self._claimed: dict[str, Claim] = {}
        self._offered: dict[int, dict[int, int]] = {}  # by room, blocks by the number of their first token

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the addresses of the blocks."""
        super().register_kv_caches(kv_caches)
        self._caches = list(kv_caches.values())
        self._drafts = [tensor for name, tensor in kv_caches.items() if name.startswith("draft_model.")]

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
                blocks = self._offered.setdefault(order.room, {})
                size = self._caches[0].shape[2]
                blocks |= {order.first_token // size + index: page for index, page in enumerate(order.pages)}
                if order.last:
                    self._write("offered", order.room, list(self._offered.pop(order.room).values()))
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
            pages = list(claim.pages)
            self._write("received", claim.room, pages)
            zeroed = self._caches if self._zero.exists() else self._drafts if self._zero_draft.exists() else []
            for cache in zeroed if pages else ():
                cache[pages] = 0
        return results

    def _write(self, kind: str, room: int, pages: list[int]) -> None:
        """Write blocks, [layer, block, head, token, content] in float32, if the folder exists."""
        if self._keep.is_dir() and pages:
            rank = get_tensor_model_parallel_rank()
            kept = torch.stack([cache[pages] for cache in self._caches]).float()
            part = self._keep / f"{kind}-{room}-{rank}.part"
            with part.open("wb") as file:
                np.save(file, kept.numpy())
            part.rename(part.with_suffix(".npy"))
