"""A minimal fake of the part of vLLM 0.32 that the connector imports, since vLLM itself cannot be installed with our torch.

`installed` makes `import vllm` find it. e2e/vllm tests the connector with the real vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import ClassVar

OURS = ("longshore_engines.vllm", "longshore_engines.vllm_stats")


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Status(Enum):
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()


class Connector:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_cache_config = kv_cache_config
        self._connector_metadata = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, metadata):
        self._connector_metadata = metadata

    def _get_connector_metadata(self):
        return self._connector_metadata


@dataclass
class TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class Stats:
    data: dict = field(default_factory=dict)


class Metrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._counter_cls, self._histogram_cls = metric_types["counter"], metric_types["histogram"]
        self._labelnames, self.per_engine_labelvalues = labelnames, per_engine_labelvalues


class FullAttentionSpec:
    """The spec of K and V."""

    def __init__(self, block_size, head_size):
        self.block_size, self.head_size = block_size, head_size


class SlidingWindowSpec(FullAttentionSpec):
    """The spec of K and V of layers with a window."""

    sliding_window = 40


class CacheConfig:
    """The part of vLLM's cache configuration that the connector reads."""

    def __init__(self, num_blocks, groups):
        self.num_blocks, self.transfer_groups = num_blocks, groups

    def select_transfer_block_ids(self, block_ids):
        assert len(block_ids) == len(self.transfer_groups)
        return tuple(block_ids)


def cache_group(spec, *names):
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)


class Layer:
    isa = "vec"

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: "CPU_ATTN")


class Factory:
    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name, module, kind):
        cls.registered[name] = module, kind


CONTENT = {
    "vllm": {},
    "vllm.config": {"get_layers_from_vllm_config": lambda config, kind, names: dict.fromkeys(names, Layer())},
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": Factory},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": Connector,
        "KVConnectorHandshakeMetadata": object,
        "KVConnectorMetadata": object,
        "KVConnectorRole": Role,
        "KVConnectorTransferResults": TransferResults,
        "KVConnectorWorkerMetadata": object,
        "SupportsHMA": type("SupportsHMA", (), {}),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorPromMetrics": Metrics,
        "KVConnectorStats": Stats,
    },
    "vllm.distributed.parallel_state": {
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_pp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1),
    },
    "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": Layer},
    "vllm.model_executor.layers.mamba.abstract": {"MambaBase": type("MambaBase", (Layer,), {})},
    "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: False},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(P2P="p2p")},
    "vllm.v1.metrics.utils": {
        "create_metric_per_engine": lambda metric, values: {
            index: metric.labels(*labels) for index, labels in values.items()
        }
    },
    "vllm.v1.request": {"RequestStatus": Status},
}


@contextmanager
def installed(version: str = "0.32.0") -> Iterator[None]:
    """During the block `import vllm` finds the fake; afterwards no module that used it is left."""
    before = dict(sys.modules)
    for name, content in CONTENT.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(content)
    vars(sys.modules["vllm"])["__version__"] = version
    try:
        yield
    finally:
        for name in list(sys.modules):
            if name in OURS or (name.partition(".")[0] == "vllm" and name not in before):
                del sys.modules[name]
