"""Counts ended transfers in vLLM's own statistics: from the ranks through the scheduler to its log and Prometheus page.

Made by `vllm.LongshoreConnector`. The metrics' names begin with `vllm:longshore_`.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from longshore_engines.rooms import Transfer
from longshore_wire.engine_messages import Half

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BYTES = tuple(2**exponent for exponent in range(12, 37, 2))


class LongshoreStats(KVConnectorStats):  # type: ignore[misc] # vLLM is not installed where types are checked
    """Transfers of one interval. A list has a number for each transfer and rank; concatenate lists to add ranks."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        self.data: dict[str, Any] = {
            "load_seconds": [],
            "load_bytes": [],
            "hand_out_seconds": [],
            "failed_loads": 0,
            "failed_hand_outs": 0,
        }

    def add(self, transfer: Transfer) -> None:
        """Count one ended transfer."""
        target = transfer.half is Half.TARGET
        if transfer.failure:
            self.data["failed_loads" if target else "failed_hand_outs"] += 1
        elif target:
            self.data["load_seconds"].append(transfer.duration_s)
            self.data["load_bytes"].append(transfer.bytes_moved)
        else:
            self.data["hand_out_seconds"].append(transfer.duration_s)

    def take(self) -> LongshoreStats:
        """Return the counts and reset them."""
        taken = copy.copy(self)
        self.reset()
        return taken

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> LongshoreStats:
        """Add another rank's counts to these; return these."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values that vLLM logs for an interval."""
        seconds = self.data["load_seconds"]
        return {
            "Loads": len(seconds),
            "Avg load time (ms)": round(1e3 * sum(seconds) / len(seconds), 3) if seconds else 0,
            "MB loaded": round(sum(self.data["load_bytes"]) / 1e6, 3),
            "Hand-outs": len(self.data["hand_out_seconds"]),
            "Failed loads": self.data["failed_loads"],
            "Failed hand-outs": self.data["failed_hand_outs"],
        }


class LongshoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc] # as above
    """The counts on vLLM's Prometheus page."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._load_seconds = self._made(
            self._histogram_cls, "load_time_seconds", "From the order to load KV to the last byte of a rank.", _SECONDS
        )
        self._load_bytes = self._made(self._histogram_cls, "load_bytes", "KV bytes that one rank has loaded.", _BYTES)
        self._hand_out_seconds = self._made(
            self._histogram_cls,
            "hand_out_time_seconds",
            "From a prompt's end to the time at which a rank's blocks are its own again.",
            _SECONDS,
        )
        self._failed_loads = self._made(self._counter_cls, "failed_loads", "Loads of a rank that failed.")
        self._failed_hand_outs = self._made(
            self._counter_cls,
            "failed_hand_outs",
            "Prompts of a rank that no decode engine took, or that failed during the transfer.",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts to the page."""
        for name, metric in (
            ("load_seconds", self._load_seconds),
            ("load_bytes", self._load_bytes),
            ("hand_out_seconds", self._hand_out_seconds),
        ):
            for value in transfer_stats_data[name]:
                metric[engine_idx].observe(value)
        self._failed_loads[engine_idx].inc(transfer_stats_data["failed_loads"])
        self._failed_hand_outs[engine_idx].inc(transfer_stats_data["failed_hand_outs"])

    def _made(self, kind: Any, name: str, meaning: str, buckets: tuple[float, ...] | None = None) -> Any:
        more = {} if buckets is None else {"buckets": buckets}
        metric = kind(name=f"vllm:longshore_{name}", documentation=meaning, labelnames=self._labelnames, **more)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)
