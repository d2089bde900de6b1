"""Judges the conditions of a DisaggDeployment, as its operator wrote them. Pure."""

from __future__ import annotations

from typing import Any

from longshore_cli.check.lines import Line, State, error, ok, warning
from longshore_spec.condition_reasons import is_good, remedy

_PAGE = "docs/reference/conditions.md"
# Reasons that pass by themselves, or wait for engines that someone starts later.
PASSING = frozenset({
    "AgentsUpdating", "EnginesMissing", "RanksMissing", "PeersConnecting", "NodesShared", "RollingOut", "Paused",
    "AgentsOutdated",
})  # fmt: skip

Body = dict[str, Any]


def lines(section: str, body: Body, *, paused: bool) -> list[Line]:
    """Return a line for each condition, and on a spec that is paused."""
    status = body.get("status") or {}
    found = status.get("conditions") or ()
    if not found:
        way_out = "see whether an operator serves this namespace"
        return [
            error(section, "conditions", "no operator has written a status yet", way_out, "docs/how-to/kubernetes.md")
        ]
    said = [_line(section, condition) for condition in found]
    seen, generation = status.get("observedGeneration", 0), body["metadata"].get("generation", 0)
    if seen < generation:
        text = f"the status describes generation {seen} of the spec, which is at {generation}"
        said.append(warning(section, "generation", text, "wait, or see the operator's log", f"{_PAGE}#progressing"))
    if paused:
        text = "spec.paused is true: nothing is created, changed or deleted"
        said.append(warning(section, "paused", text, "set spec.paused to false", f"{_PAGE}#progressing"))
    return said


def state_of(condition: Body) -> State:
    """Return how bad a condition is."""
    kind, status, reason = (condition.get(name, "") for name in ("type", "status", "reason"))
    if is_good(kind, status, reason):
        return State.OK
    return State.WARNING if status == "Unknown" or reason in PASSING else State.ERROR


def _line(section: str, condition: Body) -> Line:
    kind, status, reason = (condition.get(name, "") for name in ("type", "status", "reason"))
    state = state_of(condition)
    said = condition.get("message") or ""
    text = f"{kind} is {status}, {reason}{f': {said}' if said else ''}"
    if state is State.OK:
        return ok(section, kind, text)
    make = error if state is State.ERROR else warning
    way_out = remedy(kind, reason) or f"as the page says of the reason {reason}"
    return make(section, kind, text, way_out, f"{_PAGE}#{kind.lower()}")
