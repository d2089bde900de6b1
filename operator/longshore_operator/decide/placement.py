"""Decides which nodes must run an agent, as the DaemonSet controller and the scheduler do, and which are left out and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longshore_operator import names
from longshore_operator.world import Node
from longshore_spec.taints import Taint, keeping_out

Body = dict[str, Any]
# Taints of a node that is not ready. It is left out as such, not for its taint.
_DOWN = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})


@dataclass(frozen=True, slots=True)
class Placed:
    """The nodes of one role.

    Attributes:
        expected: they must run an agent.
        tainted: the others that the selector picks, with a taint that the agents do not tolerate.
        staying: expected ones whose agent runs, and which a taint keeps from getting another one.
        down: the others that the selector picks, which are not ready.
    """

    role: str
    selector: str
    expected: frozenset[str] = frozenset()
    tainted: Mapping[str, str] = field(default_factory=dict)
    staying: Mapping[str, str] = field(default_factory=dict)
    down: frozenset[str] = frozenset()


def place(
    role: str,
    labels: Mapping[str, str],
    nodes: Mapping[str, Node],
    daemon_sets: Sequence[Body],
    running: Collection[str] = (),
) -> Placed:
    """Return the nodes of a role.

    Args:
        labels: the role's selector.
        daemon_sets: those that the spec renders to; with none, for example of an invalid spec, taints are unknown.
        running: nodes with an agent that is not ending.
    """
    pods = [
        body["spec"]["template"]["spec"]
        for body in daemon_sets
        if body["metadata"]["labels"][names.ROLES_LABEL] in {role, names.BOTH}
    ]
    expected, tainted, staying, down = set(), {}, {}, set()
    for name, node in nodes.items():
        if not labels.items() <= node.labels.items():
            continue
        pod = next((pod for pod in pods if _matches(pod, node)), None)
        if pods and pod is None:
            continue
        if not node.ready or any(taint.key in _DOWN for taint in node.taints):
            down.add(name)
        elif pods and (taint := _kept_out(pod or {}, node, runs=name in running)) is not None:
            tainted[name] = str(taint)
        else:
            expected.add(name)
            if pods and (taint := _kept_out(pod or {}, node, runs=False)) is not None:
                staying[name] = str(taint)
    shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "every node"
    return Placed(role, shown, frozenset(expected), tainted, staying, frozenset(down))


def _kept_out(pod: Body, node: Node, *, runs: bool) -> Taint | None:
    if not node.taints:
        return None
    return keeping_out(node.taints, pod.get("tolerations") or [], host_network=bool(pod.get("hostNetwork")), runs=runs)


def _matches(pod: Body, node: Node) -> bool:
    """Whether the pod's node selector and required node affinity admit a node."""
    if not (pod.get("nodeSelector") or {}).items() <= node.labels.items():
        return False
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(
        all(_holds(entry, node.labels) for entry in term.get("matchExpressions") or [])
        for term in required.get("nodeSelectorTerms") or []
    )


def _holds(expression: Body, labels: Mapping[str, str]) -> bool:
    found, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return found in values
        case "NotIn":
            return found not in values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
    bound = int(values[0]) if values and values[0].lstrip("-").isdigit() else None
    if found is None or bound is None or not found.lstrip("-").isdigit():
        return False
    return int(found) > bound if expression["operator"] == "Gt" else int(found) < bound
