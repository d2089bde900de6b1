"""Judges the agents' pods of a deployment, as the API server shows them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from longshore_cli.check import conditions
from longshore_cli.check.lines import Line, error, ok, some, warning
from longshore_cli.cluster import AgentPod
from longshore_cli.words import count
from longshore_spec import names

_AGENTS = "docs/runbooks.md#longshoreagentnotready"
_STARTS = "docs/troubleshooting.md#the-agent-does-not-start"
_KEYS = "docs/how-to/new-keys.md"
KEYS_ANNOTATION = "longshore.dev/keys"
# What a kubelet says of a container whose image it does not have.
_IMAGE_REASONS = frozenset({
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable",
})  # fmt: skip
# Characters of one pod's cause in a message.
_CAUSE_MAX = 300

Body = dict[str, Any]


def lines(
    section: str,
    deployment: Body,
    agents: Sequence[AgentPod],
    warnings: Mapping[str, str],
    explained: Collection[str] = (),
) -> list[Line]:
    """Return what is said of a deployment's pods.

    Args:
        warnings: the newest warning event on each pod that is not ready and on each DaemonSet, by uid of the first, and by
            name of the second.
        explained: names of pods whose own pages say why they are not ready.
    """
    namespace = deployment["metadata"]["namespace"]
    explained = {*explained, *(agent.name for agent in agents if _image_trouble(agent))}
    said = [_images(section, namespace, agents), _ready(section, deployment, agents, warnings, explained)]
    said += [_restarts(section, namespace, agents), _keys(section, deployment, agents)]
    return [line for line in said if line is not None]


def _containers(agent: AgentPod) -> list[Body]:
    status = agent.body.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _image_trouble(agent: AgentPod) -> str:
    for container in _containers(agent):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _IMAGE_REASONS:
            # Between two attempts the kubelet puts `Back-off pulling image …: ErrImagePull: ` before the cause.
            cause = (waiting.get("message") or waiting["reason"]).rpartition("ErrImagePull: ")[2]
            return _cut(f"{container['image']}: {cause}")
    return ""


def _cut(text: str) -> str:
    return text if len(text) <= _CAUSE_MAX else f"{text[: _CAUSE_MAX - 1]}…"


def _images(section: str, namespace: str, agents: Sequence[AgentPod]) -> Line | None:
    bad = {agent.name: cause for agent in agents if (cause := _image_trouble(agent))}
    if bad:
        causes = some(bad.values())
        nodes = some(agent.node for agent in agents if agent.name in bad)
        text = f"{count(len(bad), 'pod')} cannot get an image on {nodes}: {causes}"
        way_out = f"correct the image or its pull Secret (agent.image, agent.pullSecrets, spec.agents.image); kubectl -n {namespace} describe pod {min(bad)}"
        return error(section, "images", text, way_out, _AGENTS)
    there = sum(any(container.get("imageID") for container in _containers(agent)) for agent in agents)
    return ok(section, "images", f"{there} of {count(len(agents), 'pod')} have got their images") if there else None


def _ready(
    section: str, deployment: Body, agents: Sequence[AgentPod], warnings: Mapping[str, str], explained: Collection[str]
) -> Line | None:
    """Return the line on pods that are missing or not ready; None: another line has the cause."""
    status, name = deployment.get("status") or {}, deployment["metadata"]["name"]
    desired = (status.get("agents") or {}).get("desired", len(agents))
    ready = sum(agent.ready for agent in agents)
    text = f"{ready} of {count(desired, 'agent')} are ready"
    reason = conditions.why(deployment, "AgentsReady")
    waiting = [agent for agent in agents if not agent.ready and agent.name not in explained]
    # Any other reason says why there are no pods.
    missing = max(0, desired - len(agents)) if reason in {"", *conditions.OF_PODS} else 0
    if agents and ready == len(agents) >= desired:
        return ok(section, "pods", text)
    if not waiting and not missing:
        # Without conditions no operator has looked yet, as their line says.
        if agents or reason or not status.get("conditions"):
            return None
        return error(
            section, "pods", "there is no agent", "see AgentsReady", "docs/reference/conditions.md#agentsready"
        )
    causes = [next(_causes(agent, warnings), "") for agent in waiting]
    sets = (f"{name}-agent", *(f"{name}-agent-{role}" for role in names.ROLES))
    owners = [_cut(warnings[each]) for each in sets if each in warnings]
    if reason == "AgentsNotReady" and not explained and not any(causes) and not owners:
        return None
    said = [
        f"{agent.node or agent.name}: {_cut(cause or _phase(agent))}"
        for agent, cause in zip(waiting, causes, strict=True)
    ]
    ways_out = [f"describe pods -l {names.DEPLOYMENT_LABEL}={name}"] if waiting else []
    if missing:
        said.append(f"{missing} without a pod{f' ({some(owners)})' if owners else ''}")
        ways_out.append(f"describe daemonsets -l {names.DEPLOYMENT_LABEL}={name}")
    way_out = "; ".join(f"kubectl -n {deployment['metadata']['namespace']} {each}" for each in ways_out)
    return error(section, "pods", f"{text}: {some(said)}", way_out, _AGENTS)


def _phase(agent: AgentPod) -> str:
    return str(agent.body.get("status", {}).get("phase") or "not ready")


def _causes(agent: AgentPod, warnings: Mapping[str, str]) -> Iterator[str]:
    """Yield what is known of a pod that is not ready, the most exact first."""
    for container in _containers(agent):
        waiting = container.get("state", {}).get("waiting") or {}
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
        if waiting.get("reason") == "CrashLoopBackOff" or ended.get("exitCode"):
            yield f"{container['name']} ended with {ended.get('exitCode')} ({ended.get('reason', 'no reason')})"
        if waiting.get("reason") in {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}:
            yield f"{waiting['reason']}: {waiting.get('message', '')}"
    for condition in agent.body.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield f"{condition.get('reason', '')}: {condition.get('message', '')}"
    if told := warnings.get(agent.body["metadata"]["uid"], ""):
        yield told


def _restarts(section: str, namespace: str, agents: Sequence[AgentPod]) -> Line | None:
    found, first = [], ""
    for agent in agents:
        for container in _containers(agent):
            if number := container.get("restartCount", 0):
                last = container.get("lastState", {}).get("terminated") or {}
                why = f", last: {last['reason']} ({last.get('exitCode')})" if last.get("reason") else ""
                first = first or f"{agent.name} -c {container['name']}"
                found.append(f"{container['name']} on {agent.node} {count(number, 'time')}{why}")
    if not found:
        return ok(section, "restarts", "no container of an agent was restarted") if agents else None
    way_out = f"kubectl -n {namespace} logs {first} --previous; OOMKilled: raise the memory of agents.resources"
    return warning(section, "restarts", f"containers were restarted: {some(found)}", way_out, _STARTS)


def _keys(section: str, deployment: Body, agents: Sequence[AgentPod]) -> Line | None:
    keys = (deployment.get("status") or {}).get("keys") or {}
    if not keys.get("secret"):
        return None
    # The Secret's name ends in the fingerprint that pods carry.
    current = keys["secret"].rpartition("-")[2]
    carried = {
        agent.node: (agent.body["metadata"].get("annotations") or {}).get(KEYS_ANNOTATION, "") for agent in agents
    }
    old = {node: found for node, found in carried.items() if found != current}
    previous = keys.get("previous") or ""
    if strange := {node: found for node, found in old.items() if found != previous.rpartition("-")[2]}:
        text = f"the agents on {some(strange)} have keys ({some(strange.values())}) that no agent of revision {keys.get('revision')} accepts"
        return error(
            section,
            "keys",
            text,
            "delete their pods: the DaemonSet makes new ones",
            "docs/runbooks.md#longshorekeysdiffer",
        )
    if old:
        text = f"the agents on {some(old)} still have the previous keys, of Secret {previous}"
        return warning(
            section, "keys", text, "wait for the rollout; with updateStrategy OnDelete delete their pods", _KEYS
        )
    more = f"; those of Secret {previous} are accepted until the next revision" if previous else ""
    return ok(section, "keys", f"all agents have the keys of revision {keys.get('revision')}{more}") if agents else None
