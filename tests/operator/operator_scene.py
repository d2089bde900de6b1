"""Provides scenes for the operator's pure parts: deployments, children and agents, as from the API server."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import status_scene

from longshore_agent.status.findings import findings
from longshore_agent.status.snapshot import WorkerSnapshot
from longshore_operator import kinds, names
from longshore_operator.decide.decision import Decision, decide
from longshore_operator.kinds import Kind
from longshore_operator.observe import Moment, Observed, observe
from longshore_operator.render.wanted import ImageChoice, MpsDirectory
from longshore_operator.world import Key, Poll, World
from longshore_spec.findings import KINDS
from longshore_spec.names import INJECT_LABEL
from longshore_spec.permission import Allowed
from longshore_spec.status import (
    AgentStatus,
    EngineStatus,
    Finding,
    InstanceStatus,
    LayoutStatus,
    PeerStatus,
    RankStatus,
)

Body = dict[str, Any]
# An administrator who allows everything.
MPS = MpsDirectory("/run/nvidia/mps/nvidia.com/gpu/pipe", "/mps/nvidia.com/gpu/pipe")
ALLOWED = Allowed(
    image=True,
    host_network=True,
    host_ipc=True,
    no_network_policy=True,
    annotations=("*",),
    capabilities=("IPC_LOCK",),
    csi_drivers=("*",),
    host_paths=("/dev/infiniband",),
    priority_classes=("*",),
    se_linux_types=("*",),
    tolerations=("*",),
    variables=("*",),
)
IMAGES = ImageChoice("agent:1", "IfNotPresent", operator_image="operator:1", allowed=ALLOWED, mps=MPS)
KEY = Key("team", "llama")
NOW_S = 1000.0


class Nobody:
    """An API without requests, and a mutex that is not held."""

    def check(self) -> None:
        """Say nothing."""


class Scene:
    """One world with one deployment; `settle` simulates the API server and the DaemonSet controller."""

    def __init__(self, **spec: Any) -> None:
        self.world = World()
        self._version = 0
        self.put_deployment(KEY, **spec)
        self.body = self.world.deployments[KEY]
        self.body["status"] = {"keys": {"revision": 1, "secret": "llama-keys-0123", "accepted": ["k" * 40]}}

    def put_deployment(self, key: Key, generation: int = 1, **spec: Any) -> None:
        base: Body = {
            "model": {"attention": "GQA", "layers": 80, "kvHeads": 8, "headDim": 128, "dtype": "bfloat16"},
            "prefill": {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"role": "prefill"}},
            "decode": {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"role": "decode"}},
        }
        metadata = {"name": key.name, "namespace": key.namespace, "generation": generation}
        self.put(
            kinds.DEPLOYMENT,
            {
                "apiVersion": "longshore.dev/v1alpha1",
                "kind": "DisaggDeployment",
                "metadata": metadata,
                "spec": base | spec,
            },
        )

    def put(self, kind: Kind, body: Body, *, deleted: bool = False) -> set[Key]:
        """Have a watch deliver an object."""
        self._version += 1
        body["metadata"] = {"uid": f"{kind.name}-{body['metadata']['name']}"} | body["metadata"]
        body["metadata"]["resourceVersion"] = str(self._version)
        return self.world.take(kind, body, deleted=deleted)

    def observe(self, *, sees_nodes: bool = True, now_s: float = NOW_S, **more: Any) -> Observed:
        moment = Moment(now_s, "2026-01-01T00:00:00Z", 30.0)
        found = observe(self.world, KEY, moment, sees_nodes=sees_nodes, **more)
        assert found is not None
        return found

    def decide(self, images: ImageChoice = IMAGES, **more: Any) -> Decision:
        return decide(self.observe(**more), images)

    def reasons(self, **more: Any) -> dict[str, str]:
        """Return the reason of each decided condition; that of the status if it is unchanged."""
        status = self.decide(**more).status or self.body["status"]
        return {entry["type"]: entry["reason"] for entry in status["conditions"]}

    def message(self, condition: str, **more: Any) -> str:
        status = self.decide(**more).status or self.body["status"]
        return str(next(entry["message"] for entry in status["conditions"] if entry["type"] == condition))

    def apply(self) -> None:
        """Apply the decision, as the API server would."""
        for kind, body in self.decide().apply:
            made = copy.deepcopy(body)
            made["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}
            if kind is kinds.DAEMON_SET:
                made["status"] = {}
            self.put(kind, made)

    def count(self, desired: int, ready: int, updated: int) -> None:
        """Have the DaemonSet controller count agents, as many as it can in the first DaemonSet."""
        sets = [body for child, body in self.world.children[KEY].items() if child.kind == "DaemonSet"]
        for number, body in enumerate(sets):
            body["status"] = {
                "observedGeneration": 1,
                "desiredNumberScheduled": 0 if number else desired,
                "numberReady": 0 if number else ready,
                "updatedNumberScheduled": 0 if number else updated,
            }

    def write_status(self) -> None:
        """Write the decided status."""
        status = self.decide().status
        if status is not None:
            self.body["status"] = status

    def configs(self, annotation: str = names.CONFIG_ANNOTATION) -> dict[str, str]:
        """The digests of the DaemonSets that were applied, by the roles of their nodes."""
        templates = [
            body["spec"]["template"]["metadata"]
            for child, body in self.world.children.get(KEY, {}).items()
            if child.kind == "DaemonSet"
        ]
        return {entry["labels"][names.ROLES_LABEL]: entry["annotations"][annotation] for entry in templates}

    def put_node(self, name: str, role: str, *taints: str, ready: bool = True) -> None:
        """Add a node. A taint is `key=value:effect`."""
        parts = [(key, *rest.split(":")) for key, _, rest in (entry.partition("=") for entry in taints)]
        spec = {"taints": [{"key": key, "value": value, "effect": effect} for key, value, effect in parts]}
        status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
        self.put(kinds.NODE, {"metadata": {"name": name, "labels": {"role": role}}, "spec": spec, "status": status})

    def put_agent(
        self,
        node: str,
        *,
        key: Key = KEY,
        ready: bool = True,
        trouble: str = "",
        starting: bool = False,
        said: AgentStatus | None = None,
        age_s: float = 1.0,
        asked: bool = True,
        keys: str = "",
        roles: str | None = None,
        config: str | None = None,
        created: str = "2026-01-01T00:00:00Z",
        template: str | None = None,
        started: str = "",
        unready: str = "",
    ) -> None:
        """Add an agent on a node. Without `said` a poll `age_s` ago got no answer, or (not `asked`) it was not polled yet.

        Args:
            roles, config, template: None for those of the node's role and of its DaemonSet.
            started, unready: when its container started, and when the pod's readiness last changed.
        """
        found = self.world.nodes.get(node)
        roles = roles or (found.labels.get("role", names.BOTH) if found is not None else names.BOTH)
        if config is None:
            config = self.configs().get(roles, "")
        if template is None:
            template = self.configs(names.TEMPLATE_ANNOTATION).get(roles, "")
        state = {"waiting": {"reason": trouble}} if trouble else {"running": {"startedAt": started}}
        containers = [{"state": state, "started": not starting, "restartCount": 0}]
        name = f"{key.name}-{node}"
        self.put(
            kinds.POD,
            {
                "metadata": {
                    "name": name,
                    "namespace": key.namespace,
                    "labels": {names.DEPLOYMENT_LABEL: key.name, names.ROLES_LABEL: roles},
                    "annotations": {
                        names.KEYS_ANNOTATION: keys,
                        names.CONFIG_ANNOTATION: config,
                        names.TEMPLATE_ANNOTATION: template,
                    },
                    "creationTimestamp": created,
                },
                "spec": {"nodeName": node, "containers": []},
                "status": {
                    "podIP": "10.0.0.1",
                    "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": unready}],
                    "containerStatuses": containers,
                },
            },
        )
        if asked:
            self.world.answered(f"Pod-{name}", Poll(NOW_S - age_s, said))

    def put_engine_pod(
        self, name: str, label: str, state: Body | None = None, *, deleted: bool = False, **status: Any
    ) -> set[Key]:
        """Have a watch deliver the pod of an engine, whose container has this state."""
        metadata = {"name": name, "namespace": KEY.namespace, "labels": {INJECT_LABEL: label}}
        containers = [] if state is None else [{"restartCount": 0, "started": "running" in state["state"]} | state]
        body = {"metadata": metadata, "spec": {"nodeName": "a"}, "status": {"containerStatuses": containers} | status}
        return self.put(kinds.ENGINE_POD, body, deleted=deleted)


def settled(**spec: Any) -> Scene:
    """A deployment whose two agents run."""
    scene = Scene(**spec)
    scene.put_node("a", "prefill")
    scene.put_node("b", "decode")
    scene.apply()
    scene.count(2, 2, 2)
    for node in ("a", "b"):
        scene.put_agent(node, asked=False)
    return scene


def said(
    *instances: InstanceStatus,
    peers: tuple[PeerStatus, ...] = (),
    workers: tuple[WorkerSnapshot, ...] | None = None,
    **more: Any,
) -> AgentStatus:
    """Return what an agent says, with what it finds wrong.

    Args:
        workers: the default is one with an engine of each instance and these peers.
    """
    if workers is None:
        engines = tuple(engine(entry.instance, *entry.roles) for entry in instances)
        workers = (status_scene.worker("w", engines=engines, peers=peers),) if instances or peers else ()
    fields = {"deployment": "team/llama", "instances": instances, "self_test": status_scene.PASSED} | more
    snapshot = status_scene.agent(*workers, **fields)
    return snapshot.status(findings(snapshot, status_scene.RULES)).without_measures()


def finds(code: str, text: str) -> AgentStatus:
    """Return what an agent with this finding says."""
    kind = KINDS[code]
    found = (Finding(code, kind.severity, text, kind.remedy, kind.link),)
    return msgspec.structs.replace(said(), findings=found)


def engine(name: str, *roles: str) -> EngineStatus:
    return EngineStatus(name, 0, roles, LAYOUT)


def instance(name: str, *roles: str, complete: bool = True, host: str | None = None) -> InstanceStatus:
    ranks = () if host is None else (RankStatus(0, "10.0.0.1:1", "1", host=host),)
    return InstanceStatus(name, roles, LAYOUT, ranks, complete=complete)


def peer(name: str = "d", wire: str = "NVLink", state: str = "attached", **more: Any) -> PeerStatus:
    return PeerStatus(name, 0, 0, state, wire, "1", **more)


LAYOUT = LayoutStatus.of(status_scene.layout(1))
PREFILL = instance("p", "source")
DECODE = instance("d", "target")
