"""Finds the operators of a cluster: their Deployments, and the Leases that the leading replicas renew. Judges only a Lease's age.

Called by `check` and `status`.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, NamedTuple
from urllib.parse import quote

from longshore_cli.cluster import Cluster, DeniedError
from longshore_spec import definition
from longshore_wire import names

_SELECTOR = "app.kubernetes.io/part-of=longshore,app.kubernetes.io/component=operator"
_APPS = "/apis/apps/v1"
# Where the documentation installs the chart.
NAMESPACE = "longshore-system"

Body = dict[str, Any]


class Operator(NamedTuple):
    """The Deployment of one release's operator.

    Attributes:
        version: of its chart's app.
        watched: the only namespace that it serves; empty: all.
        lease: the name of its Lease, in its namespace.
        definition: the digest of the CRD that it expects; empty: its chart does not tell.
        runtime_class: of agents whose deployment names none.
    """

    namespace: str
    name: str
    version: str
    watched: str
    lease: str
    definition: str
    runtime_class: str
    body: Body

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def serves(self, namespace: str) -> bool:
        """Whether it serves deployments of a namespace; of any for an empty one."""
        return not namespace or self.watched in {"", namespace}

    @property
    def lease_path(self) -> str:
        """Where the API server has its Lease."""
        return f"/apis/coordination.k8s.io/v1/namespaces/{quote(self.namespace)}/leases/{quote(self.lease)}"


def of(body: Body) -> Operator:
    """Return the operator of a Deployment."""
    metadata = body["metadata"]
    containers = body["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "") for one in containers for entry in one.get("env") or ()}
    return Operator(
        namespace=metadata["namespace"],
        name=metadata["name"],
        version=(metadata.get("labels") or {}).get("app.kubernetes.io/version", ""),
        watched=given.get(f"{names.ENVIRONMENT_PREFIX}WATCH_NAMESPACE", ""),
        lease=given.get(f"{names.ENVIRONMENT_PREFIX}LEASE_NAME", metadata["name"]),
        definition=(metadata.get("annotations") or {}).get(definition.ANNOTATION, ""),
        runtime_class=given.get(f"{names.ENVIRONMENT_PREFIX}AGENT_RUNTIME_CLASS", ""),
        body=body,
    )


def installed(cluster: Cluster, namespace: str) -> list[Operator]:
    """Return the operators of all namespaces; of one, if the user may list no others. Raises ClusterError."""
    query = {"labelSelector": _SELECTOR}
    try:
        found = cluster.listed(f"{_APPS}/deployments", query)
    except DeniedError:
        found = cluster.listed(f"{_APPS}/namespaces/{quote(namespace)}/deployments", query)
        # If that namespace has none, one may be where the user may not look.
        if not found:
            raise
    return [of(body) for body in found]


def age_s(lease: Body, now: dt.datetime) -> float:
    """Return the seconds since a Lease was renewed, by this machine's clock; infinite if it never was."""
    renewed = lease["spec"].get("renewTime")
    return float("inf") if not renewed else (now - dt.datetime.fromisoformat(renewed)).total_seconds()
