"""Judges installed operators: their Deployment, their Lease, and which of them serves a namespace. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from longshore_cli.check.lines import Line, error, ok, unread, warning
from longshore_wire import definition, names

SELECTOR = "app.kubernetes.io/part-of=longshore,app.kubernetes.io/component=operator"
_SECTION = "operator"
_INSTALL = "docs/how-to/kubernetes.md"
_LEADING = "docs/runbooks.md#longshoreoperatornotleading"

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


class Lease(NamedTuple):
    """The Lease of an operator.

    Attributes:
        body: None if there is none.
        renewed: it was renewed lately, by our clock or before our eyes.
    """

    body: Body | None
    renewed: bool


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


def age_s(lease: Body, now: dt.datetime) -> float:
    """Return the seconds since a Lease was renewed, by this machine's clock; infinite if it never was."""
    renewed = lease["spec"].get("renewTime")
    return float("inf") if not renewed else (now - dt.datetime.fromisoformat(renewed)).total_seconds()


def lines(
    found: Sequence[Operator] | Exception,
    leases: dict[tuple[str, str], Lease | Exception],
    namespaces: Iterable[str],
    release: str,
) -> list[Line]:
    """Return what is said of the operators that serve these namespaces.

    Args:
        found: all operators, or why they cannot be read.
        leases: by namespace and name of the Lease.
        release: the version of this command.
    """
    if isinstance(found, Exception):
        return [unread(_SECTION, "operator", found)]
    said = []
    for namespace in sorted(set(namespaces)):
        if not any(operator.serves(namespace) for operator in found):
            where = f"namespace {namespace}" if namespace else "this cluster"
            others = f": {', '.join(str(one) for one in found)} serves other namespaces" if found else ""
            way_out = "install the chart, and give --operator-namespace if the operator is in another namespace"
            said.append(error(_SECTION, "operator", f"no operator serves {where}{others}", way_out, _INSTALL))
    for operator in found:
        if any(operator.serves(namespace) for namespace in namespaces):
            said += [_available(operator), _version(operator, release)]
            # Without a replica nobody can hold it.
            if _replicas(operator):
                said.append(_lease(operator, leases[operator.namespace, operator.lease]))
    return said


def _replicas(operator: Operator) -> int:
    return int(operator.body["spec"].get("replicas", 1))


def _available(operator: Operator) -> Line:
    status = operator.body.get("status") or {}
    wanted = _replicas(operator)
    available = status.get("availableReplicas") or 0
    told = {entry["type"]: entry for entry in status.get("conditions") or ()}
    is_up = told.get("Available", {}).get("status") == "True"
    if not wanted:
        text = f"operator {operator} is scaled to 0 replicas: agents run on, and nothing judges or changes them"
        way_out = f"kubectl -n {operator.namespace} scale deployment {operator.name} --replicas=1"
        return error(_SECTION, "available", text, way_out, _LEADING)
    text = f"operator {operator} has {available} of {wanted} replicas available"
    if available >= wanted and is_up:
        return ok(_SECTION, "available", text)
    reasons = [told[name].get("message", "") for name in ("ReplicaFailure", "Available", "Progressing") if name in told]
    way_out = f"kubectl -n {operator.namespace} describe pods -l app.kubernetes.io/name=longshore-operator"
    make = warning if available else error
    cause = next(filter(None, reasons), "")
    return make(_SECTION, "available", f"{text}{f': {cause}' if cause else ''}", way_out, _LEADING)


def _version(operator: Operator, release: str) -> Line:
    if operator.version == release:
        return ok(_SECTION, "version", f"operator {operator} is of release {release}, as this command")
    text = f"operator {operator} is of release {operator.version or 'unknown'}, and this command of release {release}"
    way_out = "install the command of the operator's release, or upgrade the operator"
    return warning(_SECTION, "version", text, way_out, "docs/how-to/kubernetes.md#upgrade-and-roll-back")


def _lease(operator: Operator, lease: Lease | Exception) -> Line:
    name = f"Lease {operator.namespace}/{operator.lease}"
    way_out = f"kubectl -n {operator.namespace} logs deployment/{operator.name}"
    if isinstance(lease, Exception):
        return unread(_SECTION, "lease", lease)
    if lease.body is None:
        return error(_SECTION, "lease", f"{name} is not there: no replica leads", way_out, _LEADING)
    holder = lease.body["spec"].get("holderIdentity") or ""
    if not holder:
        return error(_SECTION, "lease", f"nobody holds {name}", way_out, _LEADING)
    if not lease.renewed:
        return error(_SECTION, "lease", f"{holder} holds {name} and does not renew it", way_out, _LEADING)
    return ok(_SECTION, "lease", f"{holder} holds {name} and renews it")
