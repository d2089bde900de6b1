"""Judges installed operators: their Deployment, their Lease, and which of them serves a namespace. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from longshore_cli.check.lines import Line, State, error, ok, unread, warning
from longshore_cli.operator_deployments import Operator

_SECTION = "operator"
_INSTALL = "docs/how-to/kubernetes.md"
_LEADING = "docs/runbooks.md#longshoreoperatornotleading"

Body = dict[str, Any]


class Lease(NamedTuple):
    """The Lease of an operator.

    Attributes:
        body: None if there is none.
        renewed: it was renewed lately, by our clock or before our eyes.
    """

    body: Body | None
    renewed: bool


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
            available = _available(operator)
            lease = _lease(operator, leases[operator.namespace, operator.lease])
            said += [available, _version(operator, release)]
            # Without an available replica nobody can hold it.
            if available.state is not State.ERROR or (lease.state is not State.ERROR and _replicas(operator)):
                said.append(lease)
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
    # With a quota, for example, there is no pod that could tell.
    kind = "replicasets" if "ReplicaFailure" in told else "pods"
    way_out = f"kubectl -n {operator.namespace} describe {kind} -l app.kubernetes.io/name=longshore-operator"
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
