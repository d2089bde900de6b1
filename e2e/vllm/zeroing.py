"""The connector with switches for tests. vLLM loads it in every process of an engine under test.

While the file that E2E_VLLM_ZERO names exists, a rank overwrites the received KV of a request with zeros. The tokens
must then differ from those of a single engine. Otherwise the tests would prove nothing about the transfer.

While the file that E2E_VLLM_HOLD names exists, an engine stands still after a step that offers a chunk, but not the last
one, up to the token that the file names or beyond.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from longshore_engines.handover import Claim, Offer
from longshore_engines.vllm import LongshoreConnector

ZERO, HOLD = "E2E_VLLM_ZERO", "E2E_VLLM_HOLD"
LOOK_S = 0.01


class ZeroingConnector(LongshoreConnector):
    """The connector under test with the switches."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._zero, self._hold = (Path(os.environ[name]) for name in (ZERO, HOLD))
        self._caches: list[Any] = []
        self._claimed: dict[str, list[int]] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the addresses of the blocks."""
        super().register_kv_caches(kv_caches)
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        """Keep the target blocks of each request."""
        for order in self._get_connector_metadata().orders:
            if isinstance(order, Claim):
                self._claimed[order.request_id] = list(order.pages)
        super().start_load_kv(forward_context, **named)

    def wait_for_save(self) -> None:
        """Stand still if the file exists, and more chunks follow."""
        super().wait_for_save()
        orders = self._get_connector_metadata().orders
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
            pages = self._claimed.pop(request_id, [])
            if pages and self._zero.exists():
                for cache in self._caches:
                    cache[pages] = 0
        return results
