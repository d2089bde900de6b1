"""Decides AgentsReady and Progressing, and counts the agents for the status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longshore_operator import kinds
from longshore_operator.decide import keep
from longshore_operator.decide.drift import differs
from longshore_operator.decide.verdict import Verdict, some, verdict
from longshore_operator.observe import Agent, Observed
from longshore_operator.reasons import ConditionType
from longshore_operator.render.wanted import is_ours
from longshore_operator.world import ChildKey
from longshore_wire.manifest import UpdateType

Body = dict[str, Any]
# Of one agent's reasons in a condition's message, which may name five agents. `/readyz` has the whole text.
_OWN_WORDS_CHARACTERS_MAX = 400
_READY, _PROGRESSING = ConditionType.AGENTS_READY, ConditionType.PROGRESSING


@dataclass(frozen=True, slots=True)
class Counts:
    """Agents of a deployment, as its DaemonSets count them."""

    desired: int = 0
    ready: int = 0
    updated: int = 0

    def status(self) -> Body:
        """Return these counts as a part of the status."""
        return {
            "desired": self.desired,
            "ready": self.ready,
            "updated": self.updated,
            "summary": f"{self.ready}/{self.desired}",
        }


@dataclass(frozen=True, slots=True)
class Rollout:
    """Progress of all DaemonSets.

    Attributes:
        current: they are those of the current spec.
        known: their controller has observed their newest generations.
        on_delete: agents of an older spec stay until somebody deletes their pods.
    """

    counts: Counts
    current: bool
    known: bool
    on_delete: bool = False


def look(observed: Observed, wanted: Sequence[Body]) -> Rollout:
    """Return the progress of the agents' rollout.

    Args:
        wanted: the DaemonSets of the current spec; empty if there are none, as with an invalid spec.
    """
    ours = {
        child.name: body
        for child, body in observed.children.items()
        if child.kind == kinds.DAEMON_SET.name and is_ours(body, observed.uid)
    }
    states = [body.get("status") or {} for body in ours.values()]
    counts = Counts(
        desired=sum(int(status.get("desiredNumberScheduled", 0)) for status in states),
        ready=sum(int(status.get("numberReady", 0)) for status in states),
        updated=sum(keep.updated_count(observed, body) for body in ours.values()),
    )
    names_wanted = {body["metadata"]["name"] for body in wanted}
    return Rollout(
        counts,
        current=bool(wanted)
        and names_wanted == ours.keys()
        and all(_same(observed, body, ours[body["metadata"]["name"]]) for body in wanted),
        known=all(
            int(status.get("observedGeneration", 0)) >= int(body["metadata"].get("generation", 0))
            for status, body in zip(states, ours.values(), strict=True)
        ),
        on_delete=any(body["spec"]["updateStrategy"]["type"] == UpdateType.ON_DELETE.value for body in wanted),
    )


def _same(observed: Observed, wanted: Body, found: Body) -> bool:
    child = ChildKey(kinds.DAEMON_SET.name, found["metadata"]["name"])
    settled = observed.settled.get(child) == found["metadata"]["resourceVersion"]
    return settled or not differs(wanted, found)


def judge_agents(
    observed: Observed,
    rollout: Rollout,
    selectors: str,
    *,
    can_work: bool,
    keys_wait: str = "",
    held: Sequence[str] = (),
) -> Verdict:
    """Return AgentsReady.

    Args:
        keys_wait: why new keys wait; empty if they do not.
        held: changes that wait for the end of a pause.
    """
    counts = rollout.counts
    if not can_work:
        return verdict(_READY, "SpecNotApplied", f"{counts.ready} agents are ready, by an older spec or none")
    if observed.refusal is not None:
        return verdict(_READY, "ChildRefused", f"{observed.refusal.child}: {observed.refusal.message}")
    if observed.failure:
        return verdict(_READY, "RequestsFail", observed.failure)
    if held:
        return verdict(_READY, "Paused", f"spec.paused is true, so this waits: {some(held)}")
    if not rollout.current or not rollout.known:
        return verdict(_READY, "AgentsUpdating", f"agents of generation {observed.generation} are being started")
    if keys_wait:
        return verdict(_READY, "AgentsUpdating", keys_wait)
    if counts.desired == 0:
        return verdict(_READY, "NoNodes", f"no node is picked by {selectors}")
    if counts.ready < counts.desired or counts.updated < counts.desired:
        text = f"{counts.ready} of {counts.desired} agents are ready, {counts.updated} run generation {observed.generation}"
        unwell = _unwell(observed)
        if unwell:
            return verdict(_READY, "AgentsNotReady", f"{text}: {some(unwell)}")
        if rollout.on_delete and counts.ready == counts.desired:
            return verdict(_READY, "AgentsOutdated", f"{text}, and agents.updateStrategy is OnDelete")
        return verdict(_READY, "AgentsUpdating", text)
    return verdict(_READY, "AllAgentsReady", f"{counts.desired} agents are ready")


def _unwell(observed: Observed) -> list[str]:
    """Return the agents that are not ready although they are neither starting nor ending."""
    return [
        f"{agent.pod.node or agent.pod.name} ({agent.pod.trouble or _own_words(agent) or 'not ready'})"
        for agent in observed.agents
        if not (agent.pod.ready or agent.pod.starting or agent.pod.ending)
    ]


def _own_words(agent: Agent) -> str:
    """Return the agent's own reasons for not being ready; empty if it gives none."""
    said = "; ".join(agent.report.unready) if agent.report is not None else ""
    return said if len(said) <= _OWN_WORDS_CHARACTERS_MAX else f"{said[:_OWN_WORDS_CHARACTERS_MAX]}…"


def judge_progress(rollout: Rollout, compatible: Verdict, agents: Verdict, *, paused: bool = False) -> Verdict:
    """Return Progressing."""
    if paused:
        return verdict(_PROGRESSING, "Paused", "spec.paused is true: only the status is written")
    blocking = {"ChildRefused", "RequestsFail", "NoNodes", "AgentsNotReady", "AgentsOutdated"}
    if not compatible.holds or agents.reason in blocking:
        return verdict(_PROGRESSING, "Blocked", f"{agents.reason if compatible.holds else compatible.reason}")
    if agents.holds:
        return verdict(_PROGRESSING, "Settled", f"{rollout.counts.desired} agents run the current spec")
    return verdict(_PROGRESSING, "RollingOut", agents.message)


def role_counts(
    agents: tuple[Agent, ...],
    nodes: Mapping[str, Mapping[str, str]] | None,
    selector: Mapping[str, str],
    configs: Mapping[str, str],
) -> Body:
    """Return nodes, readyAgents and updatedAgents of one role, without the counts that need unreadable nodes.

    Args:
        configs: the digests that current agents carry, by the roles of their nodes.
    """
    if nodes is None:
        return {}
    picked = {name for name, labels in nodes.items() if selector.items() <= labels.items()}
    there = [agent.pod for agent in agents if agent.pod.node in picked]
    return {
        "nodes": len(picked),
        "readyAgents": sum(pod.ready for pod in there),
        "updatedAgents": sum(pod.config == configs.get(pod.roles) and not pod.ending for pod in there),
    }
