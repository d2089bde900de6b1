"""Divides a deployment's nodes into groups by the roles that pick them: one DaemonSet each. Pure.

Called by the operator and the command line. No node is in two groups, so that engines of one node have one agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longshore_spec import names
from longshore_spec.manifest import Spec

Labels = Mapping[str, str]
Expressions = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes that the same roles pick.

    Attributes:
        roles: names.PREFILL, names.DECODE or names.BOTH.
        terms: a node is in the group if all expressions (key, operator, value) of one term hold.
    """

    roles: str
    terms: tuple[Expressions, ...]

    @property
    def role_names(self) -> tuple[str, ...]:
        """The roles one by one."""
        return role_names(self.roles)

    def affinity(self) -> dict[str, Any]:
        """Return the pods' affinity; empty if every node is in the group."""
        if not all(self.terms):
            return {}
        terms = [
            {"matchExpressions": [{"key": key, "operator": verb, "values": [value]} for key, verb, value in term]}
            for term in self.terms
        ]
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def role_names(roles: str) -> tuple[str, ...]:
    """Return the roles of a group one by one."""
    return names.ROLES if roles == names.BOTH else (roles,)


def groups(spec: Spec) -> tuple[Group, ...]:
    """Return the groups that the selectors allow to have nodes."""
    prefill, decode = spec.prefill.node_selector, spec.decode.node_selector
    if any(decode.get(key, value) != value for key, value in prefill.items()):
        # A label has one value, so that no node is picked by both.
        return Group(names.PREFILL, (_all_of(prefill),)), Group(names.DECODE, (_all_of(decode),))
    found = (
        Group(names.PREFILL, _without(prefill, decode)),
        Group(names.DECODE, _without(decode, prefill)),
        Group(names.BOTH, (_all_of({**prefill, **decode}),)),
    )
    return tuple(group for group in found if group.terms)


def _all_of(labels: Labels) -> Expressions:
    return tuple((key, "In", value) for key, value in sorted(labels.items()))


def _without(labels: Labels, other: Labels) -> tuple[Expressions, ...]:
    """Return terms for the nodes with all of `labels` that lack a label of `other`. A node without the key lacks it."""
    more = sorted(other.items() - labels.items())
    return tuple((*_all_of(labels), (key, "NotIn", value)) for key, value in more)
