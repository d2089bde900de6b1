"""The connector with a switch for negative controls; loaded by vLLM in every process of an engine under test.

While the file that E2E_VLLM_ZERO names exists, a rank overwrites with zeros what has just arrived for a request. The tokens
must then differ from those of one engine alone: if they did not, the tests would prove nothing about what was moved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from longshore_engines.handover import Claim
from longshore_engines.vllm import LongshoreConnector

SWITCH = "E2E_VLLM_ZERO"


class ZeroingConnector(LongshoreConnector):
    """See the module."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._switch = Path(os.environ[SWITCH])
        self._caches: list[Any] = []
        self._claimed: dict[str, list[int]] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Remember where the blocks are."""
        super().register_kv_caches(kv_caches)
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        """Remember which blocks a request's KV goes to."""
        for order in self._get_connector_metadata().orders:
            if isinstance(order, Claim):
                self._claimed[order.request_id] = list(order.pages)
        super().start_load_kv(forward_context, **named)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Zero what has arrived, if told to."""
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving or ():
            pages = self._claimed.pop(request_id, [])
            if pages and self._switch.exists():
                for cache in self._caches:
                    cache[pages] = 0
        return results
