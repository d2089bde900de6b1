"""Says whether an operator serves a namespace now, since without one the conditions of its deployments are old."""

from __future__ import annotations

import datetime as dt

import msgspec

from longshore_cli import operator_deployments
from longshore_cli.cluster import Cluster, ClusterError, MissingError
from longshore_cli.operator_deployments import NAMESPACE, Operator

# Added to the duration of a Lease: clocks of this machine and of the operator's node may differ.
_CLOCKS_S = 30.0


class Serving(msgspec.Struct, frozen=True):
    """An operator's state: `on`, `off`, or `unknown` if the user may not read it; `text` says why it is not on."""

    state: str
    text: str = ""


def serving(cluster: Cluster, namespaces: set[str]) -> dict[str, Serving]:
    """Return the state of the operator of each namespace."""
    try:
        operators = operator_deployments.installed(cluster, NAMESPACE)
    except ClusterError as error:
        return {each: Serving("unknown", str(error)) for each in namespaces}
    needed = [each for each in operators if any(each.serves(namespace) for namespace in namespaces)]
    states = [(each, _state(cluster, each)) for each in needed]
    found = {}
    for namespace in namespaces:
        own = [state for operator, state in states if operator.serves(namespace)]
        nobody = Serving("off", f"no Deployment of an operator serves namespace {namespace}")
        # Of two, one that works is enough.
        found[namespace] = min(own, key=lambda each: ("on", "unknown", "off").index(each.state), default=nobody)
    return found


def _state(cluster: Cluster, operator: Operator) -> Serving:
    if not (operator.body.get("status") or {}).get("readyReplicas"):
        return Serving("off", f"operator {operator} has no ready pod")
    name = f"Lease {operator.namespace}/{operator.lease}"
    try:
        lease = cluster.get(operator.lease_path)
    except MissingError:
        return Serving("off", f"{name} of operator {operator} is not there")
    except ClusterError as error:
        return Serving("unknown", str(error))
    if not lease["spec"].get("holderIdentity"):
        return Serving("off", f"nobody holds {name} of operator {operator}")
    age_s = operator_deployments.age_s(lease, dt.datetime.now(dt.UTC))
    if age_s > float(lease["spec"].get("leaseDurationSeconds") or 0) + _CLOCKS_S:
        return Serving("off", f"{name} of operator {operator} was renewed {age_s:.0f} s ago")
    return Serving("on")
