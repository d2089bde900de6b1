"""Tells which taint keeps an agent's pod from a node, as the scheduler does. Pure. Called by the operator and `longshore check`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# The DaemonSet controller gives these tolerations to its pods.
_OWN_TOLERATIONS = (
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
)
_HOST_NETWORK_TOLERATION = ("node.kubernetes.io/network-unavailable", "NoSchedule")
_KEEPING_OUT = frozenset({"NoSchedule", "NoExecute"})


class Taint(NamedTuple):
    """One taint of a node."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


def of_node(node: Mapping[str, Any]) -> tuple[Taint, ...]:
    """Return the taints of a node, given as the API server's JSON."""
    listed = node.get("spec", {}).get("taints") or ()
    return tuple(Taint(entry["key"], entry.get("value") or "", entry["effect"]) for entry in listed)


def keeping_out(
    taints: Iterable[Taint], tolerations: Iterable[Mapping[str, Any]], *, host_network: bool, runs: bool = False
) -> Taint | None:
    """Return the first taint that keeps a DaemonSet's pod with these tolerations from a node; None: it may run there.

    Args:
        runs: it runs there already, so that only a taint with NoExecute ends it.
        tolerations: those of the pod template, to which the DaemonSet controller adds its own.
        host_network: the pod runs in the node's network.
    """
    own = [*_OWN_TOLERATIONS, *([_HOST_NETWORK_TOLERATION] if host_network else [])]
    given, effects = list(tolerations), {"NoExecute"} if runs else _KEEPING_OUT
    return next(
        (
            taint
            for taint in taints
            if taint.effect in effects
            and (taint.key, taint.effect) not in own
            and not any(_tolerates(entry, taint) for entry in given)
        ),
        None,
    )


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    if toleration.get("effect") not in {None, "", taint.effect}:
        return False
    key = toleration.get("key") or ""
    if toleration.get("operator") == "Exists":
        return key in {"", taint.key}
    return bool(key == taint.key) and (toleration.get("value") or "") == taint.value
