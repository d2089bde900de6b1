"""Joins what a cluster says of a deployment with the reports of its agents, and names the worst of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from longshore_cli.agent_report import Report
from longshore_cli.status.serving import Serving
from longshore_spec.condition_reasons import is_good
from longshore_spec.status import RoomStatus, Severity

# Ready follows from these, which say why.
_CAUSES = ("Compatible", "AgentsReady")


class Condition(msgspec.Struct, frozen=True):
    """One condition of a DisaggDeployment."""

    type: str
    status: str
    reason: str = ""
    message: str = ""

    @property
    def good(self) -> bool:
        """Whether it says that all is well."""
        return is_good(self.type, self.status, self.reason)


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """One agent.

    Attributes:
        name: its node, else its address.
        roles: `prefill`, `decode`, both, or empty if nothing tells.
        pod, pod_restarts: without a cluster empty and 0.
        silent: why it does not answer; empty: it does, and `report` is there.
    """

    name: str
    roles: tuple[str, ...] = ()
    pod: str = ""
    pod_restarts: int = 0
    silent: str = ""
    report: Report | None = None

    @property
    def ready(self) -> bool:
        """Whether it answers, and says that engines may use it."""
        return self.report is not None and self.report.ready

    def faults(self) -> list[str]:
        """Return what is wrong with it, the worst first; no warnings."""
        if self.report is None:
            return [f"is silent: {self.silent}"]
        return [str(finding) for finding in self.report.findings if finding.severity is not Severity.WARNING]


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment with its agents.

    Attributes:
        ready: status of the condition Ready; without a cluster, whether all agents are ready.
        engines_registered, engines_expected: instances; None: the deployment expects no number.
        gb_per_s: sent now by all agents, or received if that is more: some may be silent. None: not known yet.
        worst: the worst fact, empty if all is well.
        operator: whether one serves it; None: without a cluster.
    """

    namespace: str
    name: str
    ready: str
    reason: str = ""
    agents_ready: int
    agents_wanted: int
    engines_registered: int
    engines_expected: int | None = None
    rooms_open: int
    gb_per_s: float | None = None
    worst: str = ""
    operator: Serving | None = None
    conditions: tuple[Condition, ...] = ()
    agents: tuple[Agent, ...] = ()

    @property
    def full_name(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    @property
    def well(self) -> bool:
        """Whether it is Ready and all its agents answer."""
        return self.ready == "True" and not any(agent.silent for agent in self.agents)


def of_cluster(body: Mapping[str, Any], agents: Sequence[Agent], operator: Serving | None = None) -> Deployment:
    """Return the facts of a DisaggDeployment and its agents."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    conditions = tuple(msgspec.convert(status.get("conditions") or [], list[Condition]))
    verdict = next((each for each in conditions if each.type == "Ready"), Condition("Ready", "Unknown"))
    roles = ("prefill", "decode")
    wanted = [(spec.get(role) or {}).get("instances") for role in roles]
    counted = status.get("agents") or {}
    return _finished(
        Deployment(
            namespace=metadata["namespace"],
            name=metadata["name"],
            ready=verdict.status,
            reason=verdict.reason,
            agents_ready=int(counted.get("ready") or 0),
            agents_wanted=int(counted.get("desired") or 0),
            engines_registered=sum(int((status.get(role) or {}).get("instances") or 0) for role in roles),
            engines_expected=sum(each or 0 for each in wanted) if any(wanted) else None,
            rooms_open=0,
            operator=operator,
            conditions=conditions,
            agents=tuple(agents),
        )
    )


def of_agents(agents: Sequence[Agent]) -> list[Deployment]:
    """Return the facts of agents without a cluster, by the deployments that they name."""
    groups: dict[str, list[Agent]] = {}
    for agent in agents:
        groups.setdefault(agent.report.deployment if agent.report else "", []).append(agent)
    # A silent agent does not say to which one it belongs.
    silent = groups.pop("", [])
    first = next(iter(groups), "")
    groups[first] = groups.get(first, []) + silent
    found = []
    for full_name, members in groups.items():
        namespace, _, name = full_name.rpartition("/")
        instances = [each for agent in members if agent.report for each in agent.report.instances if each.complete]
        ready_count = sum(agent.ready for agent in members)
        found.append(
            _finished(
                Deployment(
                    namespace=namespace,
                    name=name or "(no deployment)",
                    ready="True" if ready_count == len(members) else "False",
                    agents_ready=ready_count,
                    agents_wanted=len(members),
                    engines_registered=len({each.instance for each in instances}),
                    rooms_open=0,
                    agents=tuple(members),
                )
            )
        )
    return found


def oldest_room(agent: Agent) -> RoomStatus | None:
    """Return the oldest open room of an agent; None: none is open."""
    rooms = [room for worker in (agent.report.workers if agent.report else ()) for room in worker.oldest_rooms]
    return max(rooms, key=lambda room: room.age_s, default=None)


def _finished(found: Deployment) -> Deployment:
    reports = [agent.report for agent in found.agents if agent.report]
    workers = [worker for report in reports for worker in report.workers]
    sent = [worker.sent_gb_per_s for worker in workers if worker.sent_gb_per_s is not None]
    received = [worker.received_gb_per_s for worker in workers if worker.received_gb_per_s is not None]
    return msgspec.structs.replace(
        found,
        rooms_open=sum(worker.rooms_open for worker in workers),
        gb_per_s=max(sum(sent), sum(received)) if sent or (reports and not workers) else None,
        worst=next(_faults(found), ""),
    )


def _faults(found: Deployment) -> Iterator[str]:
    """Yield what is wrong with a deployment, the worst first."""
    if found.operator is not None and found.operator.state == "off":
        yield f"{found.operator.text}: conditions may be old"
    untrue = [each for each in found.conditions if not each.good]
    causes = [each for each in untrue if each.type in _CAUSES] or [each for each in untrue if each.type == "Ready"]
    for each in causes:
        yield f"{each.type}: {each.reason}: {each.message}"
    if found.ready == "Unknown" and not found.conditions:
        yield "Ready: Unknown: no operator has served it"
    for agent in found.agents:
        if agent.silent:
            yield f"agent on {agent.name} is silent: {agent.silent}"
    for agent in found.agents:
        for text in agent.faults():
            yield f"agent on {agent.name}: {text}"
    for each in untrue:
        yield f"{each.type}: {each.reason}: {each.message}"
    for agent in found.agents:
        for finding in agent.report.findings if agent.report else ():
            if finding.severity is Severity.WARNING:
                yield f"agent on {agent.name}: {finding}"
