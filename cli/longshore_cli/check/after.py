"""Judges a cluster after an installation: operator, definition, and each deployment with its agents. Pure. Called by `command`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from longshore_cli.check import before, conditions, definition, operators, pages, pods
from longshore_cli.check.lines import Line, State, error, unread, warning
from longshore_cli.check.operators import Lease
from longshore_cli.check.pages import Reached
from longshore_cli.cluster import AgentPod, DeniedError, MissingError
from longshore_cli.operator_deployments import Operator
from longshore_spec import names

Body = dict[str, Any]


class After(NamedTuple):
    """The answers of the cluster. An exception stands for what cannot be read.

    Attributes:
        leases: by namespace and name.
        pods: of agents of all deployments.
        reached: those that run, with their pages.
        warnings: by namespace, the newest warning event by uid of a pod and by name of a DaemonSet.
    """

    version: Body | Exception
    definition: Body | Exception | None
    operators: Sequence[Operator] | Exception
    leases: dict[tuple[str, str], Lease | Exception]
    deployments: Sequence[Body] | Exception
    pods: Sequence[AgentPod] | Exception
    reached: Sequence[Reached]
    warnings: dict[str, dict[str, str]]


def lines(found: After, where: str, own: str) -> list[Line]:
    """Return what is said of a cluster after an installation. Pure.

    Args:
        where: the namespace that is checked; empty: all.
        own: the version of this command.
    """
    bodies = () if isinstance(found.deployments, Exception) else found.deployments
    spaces = {body["metadata"]["namespace"] for body in bodies} or {where}
    said = [before.version(found.version), *operators.lines(found.operators, found.leases, spaces, own)]
    installed = () if isinstance(found.operators, Exception) else found.operators
    serving = [one for one in installed if any(one.serves(space) for space in spaces)]
    if isinstance(found.definition, Exception):
        said.append(unread("definition", "crd", found.definition))
    else:
        said += definition.lines(found.definition, serving, own, before=False)
    link = "docs/how-to/kubernetes.md"
    if found.definition is None:
        return said
    if isinstance(found.deployments, MissingError):
        return [*said, error("deployments", "list", str(found.deployments), "give another NAME or -n NAMESPACE", link)]
    if isinstance(found.deployments, Exception):
        return [*said, unread("deployments", "list", found.deployments)]
    if not bodies:
        text = f"{f'namespace {where}' if where else 'the cluster'} has no {names.KIND}"
        said.append(warning("deployments", "list", text, "apply a manifest, or give -n NAMESPACE or -A", link))
    by_deployment = defaultdict(list)
    for pod in () if isinstance(found.pods, Exception) else found.pods:
        by_deployment[pod.namespace, pod.deployment].append(pod)
    for body in bodies:
        key = body["metadata"]["namespace"], body["metadata"]["name"]
        version_of = next((one.version for one in serving if one.serves(key[0])), "")
        said += _deployment(found, body, by_deployment[key], version_of)
    return said


def _deployment(found: After, body: Body, agents: Sequence[AgentPod], version_of: str) -> list[Line]:
    subject = before.subject(body)
    section = str(subject)
    paused = subject.spec is not None and subject.spec.paused
    if isinstance(found.pods, Exception):
        return [*conditions.lines(section, body, paused=paused), unread(section, "pods", found.pods)]
    reached = [one for one in found.reached if one.agent in agents and not _repeats(one)]
    judged = reached if subject.spec is not None else []
    unready = {one.agent.name for one in judged if not isinstance(one.page, Exception) and one.page.unready}
    said = pods.lines(section, body, agents, found.warnings.get(subject.namespace, {}), unready)
    told = bool(unready) or any(line.state is State.ERROR and line.check in {"images", "pods"} for line in said)
    if subject.spec is not None and reached:
        said += pages.lines(section, subject.spec, reached, version_of)
    codes = {finding.code for one in judged if not isinstance(one.page, Exception) for finding in one.page.findings}
    return [*conditions.lines(section, body, paused=paused, told=told, codes=codes), *said]


def _repeats(one: Reached) -> bool:
    """Whether a page cannot be read because its pod is not ready, as the line on pods says."""
    return isinstance(one.page, Exception) and not isinstance(one.page, DeniedError) and not one.agent.ready
