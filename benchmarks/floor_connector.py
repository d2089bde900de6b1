"""A connector for vLLM that moves nothing: a load ends in the next step. What is left is vLLM's own time.

Its tokens are wrong, since decode's blocks keep what they had. A request with `{"floor": true}` in its transfer parameters
claims its whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not installed where types are checked
    """The requests whose loads begin, and end, in this step."""

    request_ids: tuple[str, ...]


class FloorConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # as above
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._begun: list[str] = []
        self._ended: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Claim the rest of a prompt."""
        wanted = bool((request.kv_transfer_params or {}).get("floor"))
        found = request.num_prompt_tokens - num_computed_tokens if wanted else 0
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002
        """Begin a load."""
        if num_external_tokens:
            request.kv_transfer_params["floor"] = False
            self._begun.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:  # noqa: ARG002
        """Return the loads since the last step."""
        begun, self._begun = tuple(self._begun), []
        return Loads(begun)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        """Lend nothing."""
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether workers must hear of a load."""
        return bool(self._begun)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Do nothing."""

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """End the step's loads."""
        self._ended.update(self._get_connector_metadata().request_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the ended loads."""
        results = KVConnectorTransferResults()
        results.finished_recving, self._ended = self._ended, set()
        return results
