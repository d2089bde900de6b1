"""Caches the objects and reports from watches and polls, for `observe`. No I/O; used by the loop's thread only.

Objects arrive in any order. An object older than the cached one is ignored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longshore_operator import kinds, names
from longshore_operator.kinds import Kind
from longshore_operator.served import Served
from longshore_spec import taints
from longshore_spec.names import INJECT_LABEL, ROLES
from longshore_spec.status import AgentStatus
from longshore_spec.taints import Taint

Body = dict[str, Any]
_HOST_NAME_MAX = 63


class Key(NamedTuple):
    """One deployment."""

    namespace: str
    name: str

    def about(self, reason: str = "") -> dict[str, str]:
        """Return the fields of a log line on this deployment."""
        fields = {"deployment": f"{self.namespace}/{self.name}"}
        return fields | {"reason": reason} if reason else fields


class ChildKey(NamedTuple):
    """One child in a deployment's namespace."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """The cached part of a node. `ready` is its condition."""

    labels: Mapping[str, str]
    taints: tuple[Taint, ...] = ()
    ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The cached part of any pod.

    Attributes:
        node: empty: none yet.
        trouble: why it is not ready, if the kubelet or scheduler reports a cause.
        starting: its containers are starting for the first time, without a failure so far.
        created: RFC 3339.
    """

    key: Key
    uid: str
    name: str
    node: str
    trouble: str = ""
    starting: bool = False
    ending: bool = False
    created: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod(Pod):
    """The cached part of an engine's pod.

    Attributes:
        role: `prefill` or `decode`.
        host: the host name that its engines see.
    """

    role: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPod(Pod):
    """The cached part of an agent's pod.

    Attributes:
        roles: the roles of its node, as names of groups.
        config, keys, template: digests of the config, the keys and the pod template that it was started with.
        unprobed_since: when its containers started (RFC 3339) if no probe has found it ready since; else empty.
    """

    address: str
    http_port: int
    ready: bool
    config: str
    roles: str = names.BOTH
    keys: str = ""
    template: str = ""
    unprobed_since: str = ""


@dataclass(frozen=True, slots=True)
class Poll:
    """An agent's last report and its time (monotonic seconds). Without a report, the time of the first failed poll."""

    answered_s: float
    report: AgentStatus | None


@dataclass(slots=True)
class World:
    """All observed state.

    Attributes:
        settled: versions of children that an apply leaves unchanged.
        left: deployments that another operator serves.
        served: what the CRD has, as the API server publishes it.
    """

    deployments: dict[Key, Body] = field(default_factory=dict)
    children: dict[Key, dict[ChildKey, Body]] = field(default_factory=lambda: defaultdict(dict))
    pods: dict[str, AgentPod] = field(default_factory=dict)
    engine_pods: dict[Key, dict[str, EnginePod]] = field(default_factory=lambda: defaultdict(dict))
    nodes: dict[str, Node] = field(default_factory=dict)
    polls: dict[str, Poll] = field(default_factory=dict)
    settled: dict[tuple[Key, ChildKey], str] = field(default_factory=dict)
    left: set[Key] = field(default_factory=set)
    served: Served = field(default_factory=Served)
    # Versions that watches delivered, by kind and uid. `watches` compares them with lists.
    delivered: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    _pods_of: dict[Key, set[str]] = field(default_factory=lambda: defaultdict(set))
    _pods_on: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _engine_pod_keys: dict[str, Key] = field(default_factory=dict)

    def take(self, kind: Kind, body: Body, *, deleted: bool) -> set[Key]:
        """Store an object from a watch; return the deployments that it concerns."""
        metadata = body["metadata"]
        if deleted:
            self.delivered[kind.name].pop(metadata["uid"], None)
        else:
            self.delivered[kind.name][metadata["uid"]] = metadata["resourceVersion"]
        if kind is kinds.DEPLOYMENT:
            return self._take_deployment(body, deleted)
        if kind is kinds.POD:
            return self._take_pod(body, deleted)
        if kind is kinds.ENGINE_POD:
            return self._take_engine_pod(body, deleted)
        if kind is kinds.NODE:
            return self._take_node(body, deleted)
        return self.take_child(kind, body, deleted=deleted)

    def is_new(self, body: Body) -> bool:
        """Whether a deployment's spec differs from the cached one."""
        known = self.deployments.get(Key(body["metadata"]["namespace"], body["metadata"]["name"]))
        one = body["metadata"]
        other = None if known is None else known["metadata"]
        return other is None or (one["uid"], one["generation"]) != (other["uid"], other["generation"])

    def take_child(self, kind: Kind, body: Body, *, deleted: bool = False) -> set[Key]:
        """Store a child from a watch or from the response to a write."""
        metadata = body["metadata"]
        deployment = metadata.get("labels", {}).get(names.DEPLOYMENT_LABEL)
        if deployment is None:
            return set()
        key, child = Key(metadata["namespace"], deployment), ChildKey(kind.name, metadata["name"])
        known = self.children[key].get(child)
        if known is not None and is_older(body, known):
            return set()
        if deleted:
            self.children[key].pop(child, None)
            self.settled.pop((key, child), None)
            if not self.children[key]:
                del self.children[key]
        else:
            slim = {name: value for name, value in metadata.items() if name != "managedFields"}
            self.children[key][child] = {**body, "kind": kind.name, "metadata": slim}
        return {key}

    def take_status(self, key: Key, body: Body) -> None:
        """Store a deployment from the response to a write of its status."""
        known = self.deployments.get(key)
        if known is not None and not is_older(body, known):
            self.deployments[key] = body

    def pods_of(self, key: Key) -> list[AgentPod]:
        """Return the agents' pods of a deployment, sorted by name."""
        return sorted((self.pods[uid] for uid in self._pods_of.get(key, ())), key=lambda pod: pod.name)

    def neighbours(self, key: Key) -> dict[Key, set[str]]:
        """Return the other deployments with agents on the same nodes, and those nodes."""
        found: dict[Key, set[str]] = defaultdict(set)
        for pod in self.pods_of(key):
            for uid in self._pods_on.get(pod.node, ()):
                other = self.pods[uid].key
                if other != key and other in self.deployments:
                    found[other].add(pod.node)
        return dict(found)

    def answered(self, uid: str, poll: Poll) -> Key | None:
        """Store an agent's answer; return the deployment if the answer is new."""
        pod, before = self.pods.get(uid), self.polls.get(uid)
        if pod is None:
            return None
        self.polls[uid] = poll
        return pod.key if before is None or before.report != poll.report else None

    def _take_deployment(self, body: Body, deleted: bool) -> set[Key]:
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        near = set(self.neighbours(key))
        if deleted:
            self.deployments.pop(key, None)
        elif key not in self.deployments or not is_older(body, self.deployments[key]):
            self.deployments[key] = body
        return {key} | near

    def _take_pod(self, body: Body, deleted: bool) -> set[Key]:
        pod = read_pod(body)
        if pod is None:
            return set()
        before = self.pods.get(pod.uid)
        near = set(self.neighbours(pod.key)) if before is None or deleted else set()
        if before is not None:
            self._pods_on[before.node].discard(pod.uid)
        if deleted:
            self.pods.pop(pod.uid, None)
            self.polls.pop(pod.uid, None)
            self._forget(pod, before)
            return {pod.key} | near
        self.pods[pod.uid] = pod
        self._pods_of[pod.key].add(pod.uid)
        self._pods_on[pod.node].add(pod.uid)
        if pod == before:
            return set()
        return {pod.key} | (set(self.neighbours(pod.key)) if before is None or before.node != pod.node else set())

    def _take_engine_pod(self, body: Body, deleted: bool) -> set[Key]:
        uid, pod = body["metadata"]["uid"], None if deleted else read_engine_pod(body)
        # The label of a pod can be changed.
        was = self._engine_pod_keys.pop(uid, None)
        before = None if was is None else self.engine_pods[was].pop(uid)
        if was is not None and not self.engine_pods[was]:
            del self.engine_pods[was]
        if pod is not None:
            self._engine_pod_keys[uid] = pod.key
            self.engine_pods[pod.key][uid] = pod
        return {found.key for found in (before, pod) if found is not None and before != pod}

    def _forget(self, pod: AgentPod, before: AgentPod | None) -> None:
        for index, name in ((self._pods_of, pod.key), (self._pods_on, (before or pod).node)):
            index[name].discard(pod.uid)  # type: ignore[index]
            if not index[name]:  # type: ignore[index]
                del index[name]  # type: ignore[arg-type]

    def _take_node(self, body: Body, deleted: bool) -> set[Key]:
        name, node = body["metadata"]["name"], read_node(body)
        if self.nodes.get(name) == node and not deleted:
            return set()
        if deleted:
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = node
        return set(self.deployments)


def is_older(body: Body, than: Body) -> bool:
    """Whether `body` is an older version of the same object. Versions of one object are increasing numbers."""
    one, other = body["metadata"], than["metadata"]
    if one["uid"] != other["uid"]:
        return str(one.get("creationTimestamp", "")) < str(other.get("creationTimestamp", ""))
    return int(one["resourceVersion"]) < int(other["resourceVersion"])


def read_node(body: Body) -> Node:
    """Return the cached part of a node."""
    return Node(
        labels=dict(body["metadata"].get("labels") or {}),
        taints=taints.of_node(body),
        ready=all(
            entry["status"] == "True"
            for entry in (body.get("status") or {}).get("conditions") or ()
            if entry["type"] == "Ready"
        ),
    )


def read_pod(body: Body) -> AgentPod | None:
    """Return the cached part of a pod, or None if it is no agent's."""
    metadata, status = body["metadata"], body.get("status") or {}
    deployment = metadata.get("labels", {}).get(names.DEPLOYMENT_LABEL)
    if deployment is None:
        return None
    ready = _is_ready(status)
    common = _common(body, Key(metadata["namespace"], deployment))
    return AgentPod(
        **common,
        address=status.get("podIP") or "",
        http_port=_http_port(body),
        ready=ready and not metadata.get("deletionTimestamp"),
        config=(metadata.get("annotations") or {}).get(names.CONFIG_ANNOTATION, ""),
        roles=metadata["labels"].get(names.ROLES_LABEL, names.BOTH),
        keys=(metadata.get("annotations") or {}).get(names.KEYS_ANNOTATION, ""),
        template=(metadata.get("annotations") or {}).get(names.TEMPLATE_ANNOTATION, ""),
        unprobed_since="" if ready or common["trouble"] else _unprobed_since(status),
    )


def read_engine_pod(body: Body) -> EnginePod | None:
    """Return the cached part of an engine's pod; None if its label names no role, or if it has ended as it should."""
    metadata, spec = body["metadata"], body.get("spec") or {}
    deployment, _, role = metadata.get("labels", {}).get(INJECT_LABEL, "").rpartition(".")
    if not deployment or role not in ROLES or (body.get("status") or {}).get("phase") == "Succeeded":
        return None
    common = _common(body, Key(metadata["namespace"], deployment))
    # The kubelet cuts a pod's name to what a host name may have.
    host = spec.get("hostname") or metadata["name"][:_HOST_NAME_MAX].rstrip("-.")
    return EnginePod(**common, role=role, host=common["node"] if spec.get("hostNetwork") else host)


def _common(body: Body, key: Key) -> dict[str, Any]:
    """Return the arguments of `Pod`."""
    metadata, status = body["metadata"], body.get("status") or {}
    ready = _is_ready(status)
    trouble = "" if ready else _trouble(status)
    return {
        "key": key,
        "uid": metadata["uid"],
        "name": metadata["name"],
        "node": (body.get("spec") or {}).get("nodeName") or _wanted_node(body),
        "trouble": trouble,
        "starting": not ready and not trouble and _is_starting(status),
        "ending": bool(metadata.get("deletionTimestamp")),
        "created": str(metadata.get("creationTimestamp") or ""),
    }


def _is_ready(status: Body) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())


def _wanted_node(body: Body) -> str:
    """Return the node that the DaemonSet controller chose for a pod that is not scheduled yet."""
    affinity = ((body.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or []
    for field_ in (field_ for term in terms for field_ in term.get("matchFields") or []):
        if field_.get("key") == "metadata.name" and field_.get("values"):
            return str(field_["values"][0])
    return ""


def _http_port(body: Body) -> int:
    ports = (
        port
        for container in (body.get("spec") or {}).get("containers") or ()
        if container["name"] == names.CONTAINER
        for port in container.get("ports") or ()
    )
    return next((int(port["containerPort"]) for port in ports if port.get("name") == "http"), 0)


def _is_starting(status: Body) -> bool:
    """Whether a container starts for the first time: not started or before its startup probe, and never restarted."""
    states = status.get("containerStatuses") or ()
    if any(state.get("restartCount") for state in states):
        return False
    return not states or any(
        "running" not in (state.get("state") or {}) or state.get("started") is False for state in states
    )


def _unprobed_since(status: Body) -> str:
    """Return when the containers started, if the pod has been unready since and none was restarted; else an empty text."""
    states = status.get("containerStatuses") or ()
    starts = [str(((state.get("state") or {}).get("running") or {}).get("startedAt") or "") for state in states]
    unready = next(
        (c.get("lastTransitionTime") or "" for c in status.get("conditions") or () if c["type"] == "Ready"), ""
    )
    if not unready or not all(starts) or any(state.get("restartCount") for state in states):
        return ""
    return max(starts, default="") if unready < min(starts, default="") else ""


def _trouble(status: Body) -> str:
    """Return why a pod is not ready in the kubelet's or the scheduler's words; empty if they give no cause."""
    if status.get("phase") == "Failed":
        return ": ".join(filter(None, (status.get("reason") or "Failed", status.get("message", ""))))
    groups = ("initContainerStatuses", "containerStatuses")
    states: list[Body] = [state for group in groups for state in status.get(group) or ()]
    for state in states:
        waiting = (state.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in {None, "PodInitializing", "ContainerCreating"}:
            return "; ".join(filter(None, (_worded(waiting), _end(state))))
    for state in states:
        if not state.get("ready") and (end := _end(state)):
            return end
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _worded(condition)
    return ""


def _worded(entry: Body) -> str:
    return ": ".join(filter(None, (entry.get("reason", ""), entry.get("message", ""))))


def _end(state: Body) -> str:
    """Return how a container ended last, for example OOMKilled; empty if it did not, or ended as it should."""
    ends = [(state.get(name) or {}).get("terminated") for name in ("state", "lastState")]
    end: Body = next(filter(None, ends), {})
    if not end or end.get("exitCode") == 0:
        return ""
    return f"it ended with {end.get('reason') or 'Error'}, exit code {end.get('exitCode')}"
