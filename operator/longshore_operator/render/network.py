"""Renders the agents' headless Service, NetworkPolicy and, if switched on, PodMonitor."""

from __future__ import annotations

from longshore_operator import kinds, names
from longshore_operator.render.wanted import Body, Wanted, child

# Prometheus' description of a pod -> label of its series.
_MONITOR_LABELS = {
    "pod_label_longshore_dev_deployment": "deployment",
    "pod_label_longshore_dev_roles": "roles",
    "pod_node_name": "node",
}


def service(wanted: Wanted) -> Body:
    """Return the headless Service. It gives each agent a DNS name, also while it is not ready."""
    port = {"name": "http", "port": wanted.agents.http_port, "targetPort": "http", "protocol": "TCP"}
    spec = {
        "clusterIP": "None",
        "selector": names.selector(wanted.name),
        "ports": [port],
        "publishNotReadyAddresses": True,
    }
    return child(wanted, kinds.SERVICE, {"spec": spec})


def network_policy(wanted: Wanted) -> Body:
    """Return the NetworkPolicy. Agents of this deployment reach each other; all pods reach health and metrics."""
    pods = {"matchLabels": names.selector(wanted.name)}
    status = [{"protocol": "TCP", "port": wanted.agents.http_port}]
    spec = {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": pods}]}, {"ports": status}],
    }
    return child(wanted, kinds.NETWORK_POLICY, {"spec": spec})


def pod_monitor(wanted: Wanted) -> Body:
    """Return the PodMonitor, a kind of the Prometheus operator.

    The chart's dashboard and alerts need the job `longshore-agent` and the labels deployment, roles and node.
    """
    endpoint = {
        "port": "http",
        "path": "/metrics",
        "relabelings": [
            {"sourceLabels": [f"__meta_kubernetes_{source}"], "targetLabel": target}
            for source, target in _MONITOR_LABELS.items()
        ],
    }
    spec = {
        "jobLabel": "app.kubernetes.io/name",
        "selector": {"matchLabels": names.selector(wanted.name)},
        "podMetricsEndpoints": [endpoint],
    }
    return child(wanted, kinds.POD_MONITOR, {"spec": spec}, labels=wanted.agents.pod_monitor_labels)
