"""Reads deployments and the pages of their agents, from a cluster or without one. Called by `command` for each snapshot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from longshore_cli import agents
from longshore_cli.agent_report import Report, report_of, with_rates
from longshore_cli.arguments import ArgumentsError
from longshore_cli.cluster import AgentPod, Body, Cluster
from longshore_cli.metrics_page import MetricsPage
from longshore_cli.status import facts
from longshore_cli.status.facts import Agent, Deployment
from longshore_cli.status.serving import serving
from longshore_cli.status_pages import AgentPageError, AgentPages
from longshore_wire.errors import LongshoreError


class Reader:
    """Reads snapshots. Keeps the last report of each agent, for the rates of the next. Closed by its ExitStack.

    Raises:
        ArgumentsError: the arguments contradict each other.
        ClusterError: no cluster is known.
    """

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._name: str = arguments.deployment
        self._namespace: str | None = "" if arguments.all_namespaces else None
        self._before: dict[str, Report] = {}
        if arguments.all_namespaces and (arguments.agent or arguments.directory or self._name or arguments.namespace):
            raise ArgumentsError(
                "--all-namespaces lists deployments: leave out their name, --namespace, --agent and --directory"
            )
        self._pages = agents.without_cluster(arguments, stack)
        self._cluster = None if self._pages is not None else stack.enter_context(Cluster.connect(arguments))

    def read(self) -> list[Deployment]:
        """Return all deployments that the arguments name, with rates since the last call.

        Raises:
            ClusterError: the API server does not answer, or there is no such deployment.
        """
        if self._cluster is None:
            assert self._pages is not None, "agents or a cluster"
            return facts.of_agents([self._without_pod(*each) for each in self._reports(self._pages)])
        bodies = [self._cluster.deployment(self._name)] if self._name else self._cluster.deployments(self._namespace)
        pods = self._cluster.agents(self._name, self._namespace)
        return self._of_cluster(self._cluster, bodies, pods)

    def _of_cluster(self, cluster: Cluster, bodies: Sequence[Body], pods: Sequence[AgentPod]) -> list[Deployment]:
        running = [pod for pod in pods if _phase(pod) == "Running" and pod.port]
        reports = dict(
            zip(map(_identity, running), self._reports([cluster.pages(pod) for pod in running]), strict=True)
        )
        members: dict[tuple[str, str], list[Agent]] = {}
        for pod in pods:
            found = reports.get(_identity(pod))
            made = _of_pod(pod, found[1] if found else AgentPageError(_absence(pod)))
            members.setdefault((pod.namespace, pod.deployment), []).append(made)
        named = [(body["metadata"]["namespace"], body["metadata"]["name"]) for body in bodies]
        operators = serving(cluster, {namespace for namespace, _ in named})
        return [
            facts.of_cluster(body, members.get(key, ()), operators[key[0]])
            for body, key in zip(bodies, named, strict=True)
        ]

    def _reports(self, pages: Sequence[AgentPages]) -> list[tuple[str, Report | LongshoreError]]:
        """Return name and report of each agent, or why there is none."""
        found = agents.answers(pages, _fetched, agents.PAGES_LIMIT_S)
        named = [(page.name, each) for page, each in zip(pages, found, strict=True)]
        before, self._before = self._before, {name: each for name, each in named if isinstance(each, Report)}
        return [
            (name, with_rates(each, before.get(name)) if isinstance(each, Report) else each) for name, each in named
        ]

    def _without_pod(self, name: str, found: Report | LongshoreError) -> Agent:
        if isinstance(found, Report):
            return Agent(name=found.node or name, roles=found.roles, report=found)
        return Agent(name=name, silent=str(found))


def _fetched(pages: AgentPages) -> Report:
    return report_of(pages.name, pages.status(), MetricsPage(pages.text("/metrics")))


def _of_pod(pod: AgentPod, found: Report | LongshoreError) -> Agent:
    states = pod.body.get("status", {}).get("containerStatuses") or []
    agent = Agent(
        name=pod.node or pod.name,
        roles=("prefill", "decode") if pod.roles == "both" else tuple(filter(None, [pod.roles])),
        pod=pod.name,
        pod_restarts=sum(int(state.get("restartCount") or 0) for state in states),
    )
    if isinstance(found, Report):
        return msgspec.structs.replace(agent, report=found)
    return msgspec.structs.replace(agent, silent=str(found))


def _absence(pod: AgentPod) -> str:
    """Return why a pod cannot be asked."""
    status = pod.body.get("status") or {}
    waiting = [(state.get("state") or {}).get("waiting") or {} for state in status.get("containerStatuses") or []]
    unmet = [each for each in status.get("conditions") or [] if each.get("status") == "False" and each.get("message")]
    told = [f"{each['reason']} {each.get('message', '')}".strip() for each in waiting if each.get("reason")]
    told += [str(each["message"]) for each in unmet]
    if _phase(pod) == "Running":
        return f"its pod {pod.name} declares no HTTP port"
    return f"its pod {pod.name} is {_phase(pod)}" + (f": {told[0]}" if told else "")


def _phase(pod: AgentPod) -> str:
    return str(pod.body.get("status", {}).get("phase") or "Pending")


def _identity(pod: AgentPod) -> tuple[str, str]:
    return pod.namespace, pod.name
