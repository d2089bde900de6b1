"""Defines the operator's metrics. `health` serves them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# A reconcile without writes takes less than 1 ms. One that waits for the API server takes up to its time limit.
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """Metrics of one operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "longshore_operator_reconcile_seconds",
            "Duration of one reconcile of a deployment, with its writes.",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._errors = Counter(
            "longshore_operator_reconcile_errors",
            "Failed reconciles by class: api, conflict, not_found, refused, unavailable, internal.",
            ["error"],
            registry=self.registry,
        )
        self._lag = Gauge(
            "longshore_operator_watch_lag_seconds",
            "How long a watch has missed an object that a list shows; 0: none is missing.",
            ["kind"],
            registry=self.registry,
        )
        self._leader = Gauge(
            "longshore_operator_leader", "1 on the replica that holds the Lease.", registry=self.registry
        )
        self._calls = Gauge(
            "longshore_operator_api_calls",
            "Requests to the API server since the start, by verb and kind, without watches.",
            ["verb", "kind"],
            registry=self.registry,
        )
        self._queue = Gauge(
            "longshore_operator_queue_length", "Deployments that wait to be reconciled.", registry=self.registry
        )
        self._left = Gauge(
            "longshore_operator_left_deployments",
            "Deployments that are left to the operator of another release.",
            registry=self.registry,
        )
        self._silent = Gauge(
            "longshore_operator_silent_agents",
            "Agents that were ready once and did not answer when last asked.",
            registry=self.registry,
        )

    def reconciled(self, seconds: float) -> None:
        """Count one reconcile."""
        self._seconds.observe(seconds)

    def failed(self, error: str) -> None:
        """Count a failed reconcile."""
        self._errors.labels(error).inc()

    def show(
        self,
        *,
        leader: bool,
        queue_length: int,
        silent_count: int,
        left_count: int,
        lags_s: dict[str, float],
        calls: dict[tuple[str, str], int],
    ) -> bytes:
        """Return all metrics in Prometheus text format."""
        self._leader.set(int(leader))
        self._queue.set(queue_length)
        self._silent.set(silent_count)
        self._left.set(left_count)
        for kind, lag_s in lags_s.items():
            self._lag.labels(kind).set(lag_s)
        for (verb, kind), count in calls.items():
            self._calls.labels(verb, kind).set(count)
        return generate_latest(self.registry)


def reference() -> str:
    """Return the table of metrics as Markdown."""
    rows = [
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type} | {family.documentation} |"
        for family in Metrics().registry.collect()
    ]
    return "\n".join(["| metric | type | meaning |", "|---|---|---|", *rows])
