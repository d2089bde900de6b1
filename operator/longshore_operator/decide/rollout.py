"""Decides AgentsReady and Progressing, and counts the agents for the status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longshore_operator import kinds, names
from longshore_operator.decide import keep, unwell
from longshore_operator.decide.drift import differs
from longshore_operator.decide.placement import Placed
from longshore_operator.decide.verdict import Verdict, some, verdict
from longshore_operator.observe import Agent, Observed
from longshore_operator.render.wanted import is_ours
from longshore_operator.world import ChildKey
from longshore_spec.condition_reasons import ConditionType
from longshore_spec.manifest import UpdateType

Body = dict[str, Any]
# Reasons of a role that no node can serve.
_LACKING = {"NoNodes", "NodesTainted", "NodesNotReady"}
_READY, _PROGRESSING = ConditionType.AGENTS_READY, ConditionType.PROGRESSING


@dataclass(frozen=True, slots=True)
class Counts:
    """Agents of a deployment."""

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
        lacking: a reason and a text for each role that no node can serve.
        left_out: nodes that a selector picks and that get no agent, with the cause.
        staying: nodes whose agents a taint lets run, and not come again.
        no_pod: the nodes without a pod; empty if nodes are unknown.
        stale: the nodes whose agents report another config than their pods were made for.
        uids: those of the DaemonSets.
        on_delete: agents of an older spec stay until a user deletes their pods.
    """

    counts: Counts
    current: bool
    known: bool
    lacking: tuple[tuple[str, str], ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    staying: Mapping[str, str] = field(default_factory=dict)
    no_pod: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()
    uids: tuple[str, ...] = ()
    on_delete: bool = False


def look(observed: Observed, wanted: Sequence[Body], placed: Sequence[Placed], configs: Mapping[str, str]) -> Rollout:
    """Return the progress of the agents' rollout.

    Args:
        wanted: the DaemonSets of the current spec; empty if there are none, as with an invalid spec.
        placed: the nodes of each role; empty if the spec is invalid.
        configs: the digests that current agents have, by the roles of their nodes.
    """
    ours = {
        child.name: body
        for child, body in observed.children.items()
        if child.kind == kinds.DAEMON_SET.name and is_ours(body, observed.uid)
    }
    states = [body.get("status") or {} for body in ours.values()]
    names_wanted = {body["metadata"]["name"] for body in wanted}
    counted = Counts(
        desired=sum(int(status.get("desiredNumberScheduled", 0)) for status in states),
        ready=sum(int(status.get("numberReady", 0)) for status in states),
        updated=sum(keep.updated_count(observed, body) for body in ours.values()),
    )
    expected = frozenset(node for role in placed for node in role.expected)
    there = {agent.pod.node for agent in observed.agents if not agent.pod.ending}
    return Rollout(
        _own_counts(observed, placed, configs, counted) if observed.nodes is not None and placed else counted,
        current=bool(wanted)
        and names_wanted == ours.keys()
        and all(_same(observed, body, ours[body["metadata"]["name"]]) for body in wanted),
        known=all(
            int(status.get("observedGeneration", 0)) >= int(body["metadata"].get("generation", 0))
            for status, body in zip(states, ours.values(), strict=True)
        ),
        lacking=tuple(_lacking(observed, placed, ours.values())),
        left_out=_left_out(placed),
        staying={node: taint for role in placed for node, taint in role.staying.items()},
        no_pod=expected - there,
        stale=frozenset(
            agent.pod.node
            for agent in observed.agents
            if agent.pod.config == configs.get(agent.pod.roles) and not runs_current(agent, configs)
        ),
        uids=tuple(body["metadata"]["uid"] for body in ours.values()),
        on_delete=any(body["spec"]["updateStrategy"]["type"] == UpdateType.ON_DELETE.value for body in wanted),
    )


def _serving(observed: Observed, placed: Placed) -> list[Agent]:
    """Return the agents of one role. A node that has changed its role may still have an agent of the other one."""
    return [
        agent
        for agent in observed.agents
        if agent.pod.node in placed.expected and agent.pod.roles in (placed.role, names.BOTH) and not agent.pod.ending
    ]


def _own_counts(observed: Observed, placed: Sequence[Placed], configs: Mapping[str, str], counted: Counts) -> Counts:
    """Return the counts of agents on the nodes that must have one. An agent counts only if its DaemonSet counts it, too."""
    there = [agent for role in placed for agent in _serving(observed, role)]
    return Counts(
        desired=len({node for role in placed for node in role.expected}),
        ready=min(counted.ready, len({agent.pod.node for agent in there if agent.pod.ready})),
        updated=min(counted.updated, len({agent.pod.node for agent in there if runs_current(agent, configs)})),
    )


def runs_current(agent: Agent, configs: Mapping[str, str]) -> bool:
    """Whether an agent runs the current config, by its report, or else by its pod's digest."""
    reported = agent.report.config if agent.report is not None else {}
    running = names.config_digest(reported, agent.pod.roles) if reported else agent.pod.config
    return running == configs.get(agent.pod.roles)


def _lacking(observed: Observed, placed: Sequence[Placed], ours: Iterable[Body]) -> Iterator[tuple[str, str]]:
    for role in placed:
        name = f"{role.role} ({role.selector})"
        if observed.nodes is None:
            sets = [
                body for body in ours if body["metadata"]["labels"].get(names.ROLES_LABEL) in {role.role, names.BOTH}
            ]
            if not any((body.get("status") or {}).get("desiredNumberScheduled") for body in sets):
                yield "NoNodes", f"no node is picked by {name}, or none without a taint that agents do not tolerate"
        elif not role.expected and role.down:
            yield "NodesNotReady", f"no node of {name} is ready: {some(role.down)}"
        elif not role.expected and role.tainted:
            nodes = some(f"{node} ({taint})" for node, taint in role.tainted.items())
            yield "NodesTainted", f"nodes are picked by {name} but tainted: {nodes}"
        elif not role.expected:
            yield "NoNodes", f"no node is picked by {name}"


def _left_out(placed: Sequence[Placed]) -> dict[str, str]:
    found: dict[str, str] = {}
    for role in placed:
        found |= {node: f"tainted {taint}" for node, taint in role.tainted.items()}
        found |= dict.fromkeys(role.down, "not ready")
    return found


def _same(observed: Observed, wanted: Body, found: Body) -> bool:
    child = ChildKey(kinds.DAEMON_SET.name, found["metadata"]["name"])
    settled = observed.settled.get(child) == found["metadata"]["resourceVersion"]
    return settled or not differs(wanted, found)


def judge_agents(
    observed: Observed,
    rollout: Rollout,
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
    if rollout.lacking:
        return verdict(_READY, rollout.lacking[0][0], "; ".join(text for _, text in rollout.lacking))
    left_out = some(f"{node} ({cause})" for node, cause in rollout.left_out.items())
    note = f"; without an agent: {left_out}" if left_out else ""
    if rollout.staying:
        nodes = some(f"{node} ({taint})" for node, taint in rollout.staying.items())
        note += f"; taints let these agents run and no new one start: {nodes}"
    if counts.ready < counts.desired or counts.updated < counts.desired:
        return _judge_unready(observed, rollout, note)
    return verdict(_READY, "AllAgentsReady", f"{counts.desired} agents are ready{note}")


def _judge_unready(observed: Observed, rollout: Rollout, note: str) -> Verdict:
    counts = rollout.counts
    text = f"{counts.ready} of {counts.desired} agents are ready, {counts.updated} run generation {observed.generation}"
    found = unwell.missing(observed, rollout.no_pod, rollout.uids) + unwell.agents(observed, rollout.left_out)
    if found:
        return verdict(_READY, "AgentsNotReady", f"{text}: {some(found)}{note}")
    if counts.ready == counts.desired and rollout.on_delete:
        return verdict(_READY, "AgentsOutdated", f"{text}, and agents.updateStrategy is OnDelete{note}")
    if counts.ready == counts.desired and rollout.stale:
        nodes = some(rollout.stale)
        return verdict(
            _READY, "AgentsOutdated", f"{text}: agents report another config than their pods' on {nodes}{note}"
        )
    return verdict(_READY, "AgentsUpdating", f"{text}{note}")


def judge_progress(rollout: Rollout, compatible: Verdict, agents: Verdict, *, paused: bool = False) -> Verdict:
    """Return Progressing."""
    if paused:
        return verdict(_PROGRESSING, "Paused", "spec.paused is true: only the status is written")
    blocking = {"ChildRefused", "RequestsFail", "AgentsNotReady", "AgentsOutdated"} | _LACKING
    if not compatible.holds or agents.reason in blocking:
        return verdict(_PROGRESSING, "Blocked", f"{agents.reason if compatible.holds else compatible.reason}")
    if agents.holds:
        return verdict(_PROGRESSING, "Settled", f"{rollout.counts.desired} agents run the current spec")
    return verdict(_PROGRESSING, "RollingOut", agents.message)


def role_counts(observed: Observed, placed: Placed, configs: Mapping[str, str]) -> Body:
    """Return nodes, readyAgents and updatedAgents of one role; nothing if nodes are unreadable."""
    if observed.nodes is None:
        return {}
    there = _serving(observed, placed)
    return {
        "nodes": len(placed.expected),
        "readyAgents": len({agent.pod.node for agent in there if agent.pod.ready}),
        "updatedAgents": len({agent.pod.node for agent in there if runs_current(agent, configs)}),
    }
