"""Judges the conditions of a DisaggDeployment, as its operator wrote them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from longshore_cli.check.lines import Line, State, error, ok, warning
from longshore_spec.condition_reasons import is_good, remedy

_PAGE = "docs/reference/conditions.md"
# Reasons that pass by themselves, or wait for engines that someone starts later.
PASSING = frozenset({
    "AgentsUpdating", "EnginesMissing", "RanksMissing", "PeersConnecting", "NodesShared", "RollingOut", "Paused",
    "AgentsOutdated",
})  # fmt: skip
# Ready and Progressing follow from the first of these that is not good.
_CAUSES = ("Compatible", "AgentsReady")
_FOLLOWING = frozenset({"Ready", "Progressing"})
# Reasons that say what findings of agents say, with the codes of these.
_OF_FINDINGS = {
    "EnginesRefused": frozenset({"EngineRefused"}),
    "PeersLost": frozenset({"PeerLost", "PeerRefused"}),
    "WireNotAllowed": frozenset({"PeerWireNotAllowed"}),
    "WireUnknown": frozenset({"WireUnknown"}),
}
# Reasons of AgentsReady that say of pods what the pods show.
OF_PODS = frozenset({"AgentsNotReady", "AgentsUpdating"})

Body = dict[str, Any]


def lines(section: str, body: Body, *, paused: bool, told: bool = False, codes: Collection[str] = ()) -> list[Line]:
    """Return a line for each condition, and on a spec that is paused. A condition that repeats another line has none.

    Args:
        told: lines on pods or their pages say why agents are not ready.
        codes: of the agents' findings, which have lines.
    """
    status = body.get("status") or {}
    found = status.get("conditions") or ()
    if not found:
        way_out = "see whether an operator serves this namespace"
        return [
            error(section, "conditions", "no operator has written a status yet", way_out, "docs/how-to/kubernetes.md")
        ]
    said = _lines(section, found, paused=paused, told=told, codes=codes)
    seen, generation = status.get("observedGeneration", 0), body["metadata"].get("generation", 0)
    if seen < generation:
        text = f"the status describes generation {seen} of the spec, which is at {generation}"
        said.append(warning(section, "generation", text, "wait, or see the operator's log", f"{_PAGE}#progressing"))
    if paused and why(body, "AgentsReady") != "Paused":
        text = "spec.paused is true: nothing is created, changed or deleted"
        said.append(warning(section, "paused", text, "set spec.paused to false", f"{_PAGE}#progressing"))
    return said


def why(body: Body, kind: str) -> str:
    """Return the reason of a condition that is not good; empty: it is good, or not there."""
    found = (body.get("status") or {}).get("conditions") or ()
    return next((each["reason"] for each in found if each["type"] == kind and state_of(each) is not State.OK), "")


def state_of(condition: Body) -> State:
    """Return how bad a condition is."""
    kind, status, reason = (condition.get(name, "") for name in ("type", "status", "reason"))
    if is_good(kind, status, reason):
        return State.OK
    return State.WARNING if status == "Unknown" or reason in PASSING else State.ERROR


def _lines(section: str, found: Sequence[Body], *, paused: bool, told: bool, codes: Collection[str]) -> list[Line]:
    untrue = {each["type"]: each for each in found if state_of(each) is not State.OK}
    cause = next((kind for kind in _CAUSES if kind in untrue), "")
    left_out = _left_out(untrue, cause, paused=paused, told=told)
    left_out |= {kind for kind, each in untrue.items() if _OF_FINDINGS.get(each["reason"], frozenset()) & set(codes)}
    followed_by_error = any(state_of(untrue[kind]) is State.ERROR for kind in left_out & _FOLLOWING)
    said = []
    by_words: dict[tuple[str, ...], list[str]] = {}
    for kind in [each for each in untrue if each not in left_out]:
        by_words.setdefault(_words(untrue[kind]), []).append(kind)
    for each in found:
        kind = each["type"]
        kinds = by_words.get(_words(each), [kind]) if kind in untrue else [kind]
        if kind not in left_out and kind == kinds[0]:
            state = State.ERROR if kind == cause and followed_by_error else state_of(each)
            said.append(_line(section, kinds, each, state))
    return said


def _left_out(untrue: Mapping[str, Body], cause: str, *, paused: bool, told: bool) -> set[str]:
    """Return the conditions that repeat another line."""
    repeating = set(_FOLLOWING) if cause else set()
    if paused:
        repeating.add("Progressing")
    reason = untrue.get("AgentsReady", {}).get("reason")
    if (reason == "SpecNotApplied" and cause == "Compatible") or (told and reason in OF_PODS):
        repeating.add("AgentsReady")
    return repeating & untrue.keys()


def _words(condition: Body) -> tuple[str, ...]:
    return tuple(str(condition.get(name, "")) for name in ("status", "reason", "message"))


def _line(section: str, kinds: Sequence[str], condition: Body, state: State) -> Line:
    kind, (status, reason, said) = kinds[0], _words(condition)
    text = f"{', '.join(kinds)} {'is' if len(kinds) == 1 else 'are'} {status}, {reason}{f': {said}' if said else ''}"
    if state is State.OK:
        return ok(section, kind, text)
    make = error if state is State.ERROR else warning
    nothing = "wait: it passes by itself" if reason in PASSING else f"as the page says of the reason {reason}"
    way_out = remedy(kind, reason) or nothing
    return make(section, kind, text, way_out, f"{_PAGE}#{kind.lower()}")
