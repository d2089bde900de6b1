"""Connects vLLM to Longshore, which moves a prompt's KV from a prefill engine to a decode engine.

vLLM loads it in its scheduler's process and in each worker's (`kv_connector_module_path`). It translates between vLLM's
calls and `requests.RequestBook` (scheduler) or `rooms.RankRooms` (worker), and decides nothing itself.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from longshore_client.errors import ArgumentError, ClientClosed, WaitTimeout
from longshore_engines.agents import registered
from longshore_engines.handover import WANTS_DECODE, Offer, Order, Prompt
from longshore_engines.requests import RequestBook
from longshore_engines.rooms import RankRooms
from longshore_engines.vllm_caches import caches_of, held_back, page_groups
from longshore_engines.vllm_checks import OPAQUE, check_engine, check_version, is_pooled, roles_of, setting
from longshore_engines.vllm_stats import LongshoreMetrics, LongshoreStats
from longshore_wire.engine_messages import Endpoint, Half
from longshore_wire.layout import Parallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from longshore_client.client import Client

# All ranks of an engine register at about the same time; the slowest may still be moving its cache to shared memory.
SIBLINGS_TIMEOUT_S = 120.0
# Pause of a step without model work. While blocks are lent, vLLM makes step after step; without the pause its processes
# would take the cores from the agent. A request that comes during the pause waits at most that long.
EMPTY_STEP_PAUSE_S = 0.001
_DONE_STATUS = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})

_log = logging.getLogger("vllm.longshore")


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not installed where types are checked
    """From the scheduler to the workers, in every step; `is_empty`: the step computes nothing."""

    orders: tuple[Order, ...]
    is_empty: bool


@dataclass
class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc] # as above
    """From a worker to the scheduler, in every step.

    Attributes:
        endpoint: if it has changed.
        away: a rank is away.
        answered: the requests whose asks are answered.
        lost: the rooms of prompts that have failed.
    """

    endpoint: Endpoint | None
    away: bool
    answered: frozenset[str] = frozenset()
    lost: frozenset[int] = frozenset()

    def aggregate(self, other: RankReport) -> RankReport:
        """Return both reports as one."""
        return RankReport(
            other.endpoint or self.endpoint,
            self.away or other.away,
            self.answered | other.answered,
            self.lost | other.lost,
        )


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc] # as above
    """From a worker to the scheduler, once: this rank's registration."""

    endpoint: Endpoint | None
    roles: tuple[Half, ...]
    content: str


class LongshoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # as above
    """See the module. Options come from `kv_connector_extra_config`, see docs/how-to/vllm.md.

    Raises:
        ArgumentError: from the constructor: this engine has a property that cannot be served; names it.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._setting = setting(self._kv_transfer_config.kv_connector_extra_config)
        check_version(vllm_version, allow_untested=self._setting.allow_untested_version)
        check_engine(vllm_config, kv_cache_config, vllm_version)
        self._roles = roles_of(self._kv_transfer_config)
        self._book: RequestBook | None = None
        self._client: Client | None = None
        self._rooms: RankRooms | None = None
        self._stats = LongshoreStats()
        self._endpoint: Endpoint | None = None
        self._on_device = False
        self._content = ""
        self._answered: set[str] = set()
        self._lost: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            groups = page_groups(kv_cache_config, is_opaque=self._setting.pages == OPAQUE)
            self._book = RequestBook(
                groups,
                self._roles,
                recompute_after_s=self._setting.recompute_after_s,
                held_back=held_back(groups),
            )

    # -- scheduler -------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Take a request before it gets blocks."""
        assert self._book is not None
        if not isinstance(request.kv_transfer_params, dict | None):
            # A client's `vllm_xargs` reach here unchecked, and a text would end the engine, in vLLM's own code, too.
            _log.warning("request %s: kv_transfer_params is no mapping, and ignored", request.request_id)
            request.kv_transfer_params = None
        self._book.arrived(request.request_id, request.kv_transfer_params)
        count = self._book.shortened(request.kv_transfer_params)
        if count and not _shorten(request, count):
            # Decode computes it whole.
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), WANTS_DECODE: False}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens after `num_computed_tokens` that will be loaded; None: ask again."""
        assert self._book is not None
        found = self._book.matched(
            request.request_id,
            request.kv_transfer_params,
            request.num_prompt_tokens,
            num_computed_tokens,
            time.monotonic(),
            has_ids=request.prompt_embeds is None,
        )
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Open the room of a prompt that decode wants, or order the load of a request's tokens into its blocks."""
        assert self._book is not None
        self._book.allocated(
            request.request_id,
            request.kv_transfer_params,
            self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids()),
            _prompt_of(request),
            num_external_tokens,
        )

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """Return the orders for the workers, with offers of what this step computes."""
        assert self._book is not None
        for request_id in scheduler_output.preempted_req_ids or ():
            self._book.preempted(request_id)
        scheduled = scheduler_output.num_scheduled_tokens
        computing = [request_id for request_id in self._book.computing if request_id in scheduled]
        if computing:
            cached = scheduler_output.scheduled_cached_reqs
            before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            before |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
            for request_id in computing:
                blocks = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                pages = self._kv_cache_config.select_transfer_block_ids(blocks)
                self._book.computed(request_id, pages, before[request_id] + scheduled[request_id])
        return StepOrders(self._book.take_orders(), is_empty=not scheduled)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        """Return no group: vLLM clears new blocks before they are loaded, since a load need not fill its last one."""
        return ()

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a request's blocks are offered, and the parameters for decode if it can have them."""
        assert self._book is not None
        return self._book.finished(
            request.request_id,
            request.kv_transfer_params,
            request.num_prompt_tokens,
            complete=request.status in _DONE_STATUS,
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for an engine whose layers are all in one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """Return whether a step is needed without a request, since workers get orders only in steps."""
        return self._book is not None and self._book.has_orders

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the workers' reports to the request book."""
        assert self._book is not None
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self._book.heard(report.endpoint, time.monotonic(), away=report.away)
            self._book.answered(report.answered)
            self._book.lost(report.lost)
        self._book.received(connector_output.finished_recving or ())
        self._book.sent(connector_output.finished_sending or ())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], RankHandshake]) -> None:
        """Take the roles and the endpoint from the workers' registrations."""
        assert self._book is not None
        for handshake in metadata.values():
            if not isinstance(handshake, RankHandshake):
                raise ArgumentError(
                    f"vLLM's MultiConnector passes on a {type(handshake).__name__} of another connector: name LongshoreConnector "
                    "before the connectors that also hand KV to other engines"
                )
            self._book.introduced(handshake.roles, handshake.content)
            self._book.heard(handshake.endpoint, time.monotonic())

    # -- worker ----------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> Any:
        """Return a context that allocates the cache, or None for vLLM's own.

        What vLLM allocates for sleep mode no other process can map. So the cache is allocated as without it, and stays while the
        engine sleeps.
        """
        if not is_pooled(self._vllm_config):
            return None
        import torch

        self._pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pool)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Share this rank's cache with the agent; called once, before anything is computed."""
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase, list(kv_caches))
        states = {name: layers[name].kv_cache for name in kv_caches if isinstance(layers[name], MambaBase)}
        for name, layer in layers.items():
            # Otherwise vLLM would set all scales to 1 in its first step, those that have come, too.
            make_scales = getattr(getattr(layer, "impl", None), "_ensure_scale_caches", None)
            if make_scales is not None and self._vllm_config.cache_config.cache_dtype.endswith("_per_token_head"):
                make_scales(kv_caches[name])
        writers = {name: _written_by(layers[name]) for name in kv_caches if name not in states}
        found = caches_of(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            states,
            _parallel(self._vllm_config),
            self._setting.pages,
            writers,
            is_dim_first=bool(states) and is_conv_state_dim_first(),
            of_stages=_of_stages,
        )
        shared, self._content = found.shared, found.content
        self._on_device = shared.device != "cpu"
        try:
            self._client, self._roles = registered(
                self._setting.socket,
                self._kv_transfer_config.engine_id,
                shared,
                self._roles,
                self._setting.connect_s,
                _log,
            )
            for index, geometry in enumerate(shared.geometries):
                self._client.register_pool(index, geometry, shared.regions)
        finally:
            for region in shared.regions:
                if isinstance(region, int):
                    os.close(region)
        parallel = shared.layout.parallel
        self._rooms = RankRooms(
            self._client,
            self._setting.limit_s,
            asks=parallel.tp_rank == 0 and parallel.pp_rank == 0,
            caches=found.groups,
        )

    def get_handshake_metadata(self) -> RankHandshake | None:
        """Return this rank's registration. If it offers KV, wait until all ranks of this engine are registered."""
        if self._client is None:
            return None
        if Half.SOURCE in self._roles:
            self._endpoint = self._client.endpoint(SIBLINGS_TIMEOUT_S)
        return RankHandshake(self._endpoint, self._roles, self._content)

    def handle_preemptions(self, kv_connector_metadata: StepOrders) -> None:
        """Wait until no process uses the blocks of preempted prompts, since this step may write to them."""
        if self._rooms is not None:
            self._rooms.take_back(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Do nothing: the orders of a step begin behind its model work."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Do nothing: blocks are offered in place."""

    def wait_for_save(self) -> None:
        """Begin the scheduler's orders. The device may still compute what they offer, so they wait for it elsewhere."""
        orders = self._get_connector_metadata().orders
        if sys.exception() is not None:
            # The model's work has failed, and vLLM calls this on its way out.
            orders = tuple(order for order in orders if not isinstance(order, Offer))
        if orders and self._rooms is not None:
            self._rooms.carry_out(orders, self._fence())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests whose blocks belong to the engine again."""
        results = KVConnectorTransferResults()
        if self._rooms is not None:
            ended = self._rooms.poll(EMPTY_STEP_PAUSE_S if self._get_connector_metadata().is_empty else 0.0)
            self._answered |= ended.answered
            self._lost |= ended.lost
            for transfer in ended.transfers:
                self._stats.add(transfer)
            results.finished_sending = ended.sent
            results.finished_recving = ended.received
            results.failed_recving = ended.failed
        return results

    def build_connector_worker_meta(self) -> RankReport | None:
        """Return this step's report on this rank's agent for the scheduler."""
        if self._client is None:
            return None
        changed, away = None, False
        try:
            found = self._client.endpoint(0)
        except (WaitTimeout, ClientClosed):
            away = True
        else:
            changed, self._endpoint = found if found != self._endpoint else None, found
        answered, self._answered = self._answered, set()
        lost, self._lost = self._lost, set()
        return RankReport(changed, away, frozenset(answered), frozenset(lost))

    def get_kv_connector_stats(self) -> LongshoreStats | None:
        """Return the counts since the last call."""
        return None if self._stats.is_empty() else self._stats.take()

    def shutdown(self) -> None:
        """Leave the agent."""
        if self._rooms is not None:
            self._rooms.close()
            self._rooms = None

    def _fence(self) -> Callable[[], None] | None:
        if not self._on_device:
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    # -- both ------------------------------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003
        """Return the layout in which the bytes of a block's head are adjacent."""
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LongshoreStats:
        """Return counts from their plain data."""
        return LongshoreStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> LongshoreMetrics:
        """Return the object that puts the counts on vLLM's Prometheus page."""
        return LongshoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _prompt_of(request: Any) -> Prompt:
    """Return a request's prompt with all that vLLM's own prefix cache tells prompts apart by."""
    adapter = request.lora_request
    return Prompt(
        request.num_prompt_tokens,
        request.prompt_token_ids if request.prompt_embeds is None else None,
        adapter.lora_name if adapter is not None else "",
        request.cache_salt or "",
        tuple(feature.identifier for feature in request.mm_features),
    )


def _shorten(request: Any, count: int) -> bool:
    """Take the last `count` tokens from a new request's prompt; False: that is not possible.

    Its answer has one token, which nobody needs: with a second one, vLLM would move its window or state on.
    """
    ids = request.prompt_token_ids
    has_others = ids is None or request.prompt_embeds is not None
    # What asks for the logarithms of its prompt's probabilities is computed whole, at prefill and at decode. A session goes on
    # with another prompt, in the same state.
    if has_others or len(ids) <= count or request.resumable or request.get_skip_reading_prefix_cache():
        return False
    # Other requests of this process may have the same list.
    request.prompt_token_ids = ids[:-count]
    del request._all_token_ids[-count:]  # noqa: SLF001 -- as vLLM's own connectors do
    request.num_prompt_tokens -= count
    request.max_tokens = 1
    return True


def _parallel(vllm_config: Any) -> Parallel:
    parallel = vllm_config.parallel_config
    return Parallel(
        tp=parallel.tensor_parallel_size,
        tp_rank=get_tensor_model_parallel_rank(),
        pp=parallel.pipeline_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        dp=parallel.data_parallel_size,
        dp_rank=parallel.data_parallel_rank,
    )


def _written_by(layer: Any) -> str:
    """Return the attention backend that writes a layer's pages, and its instruction set if that changes their order."""
    return f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}".strip()


def _of_stages(own: dict[str, int]) -> list[dict[str, int]]:
    """Return the argument of each pipeline stage's call, in order. Every stage must call this."""
    group = get_pp_group()
    if group.world_size == 1:
        return [own]
    import torch

    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found
