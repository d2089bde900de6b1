"""Objects of an API server and pages of agents, as `longshore check` reads them. Used by its tests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import status_scene

from longshore_agent.status.findings import findings
from longshore_agent.status.snapshot import WorkerSnapshot
from longshore_cli import operator_deployments
from longshore_cli.agent_report import report_of
from longshore_cli.analyze.definition import parse
from longshore_cli.check import before
from longshore_cli.check.before import Before, Subject, Tried
from longshore_cli.check.lines import Line
from longshore_cli.check.pages import Reached
from longshore_cli.cluster import AgentPod, DeniedError
from longshore_cli.operator_deployments import Operator
from longshore_spec import manifest
from longshore_spec import status as structs
from longshore_spec.definition import ANNOTATION, digest
from longshore_spec.manifest import Spec
from longshore_spec.status import NodeFacts

ROOT = Path(__file__).parents[2]
CRD_TEXT = (ROOT / "crds" / "disaggdeployments.longshore.dev.yaml").read_text(encoding="utf-8")
RELEASE = "0.1.0"
SPACE, NAME = "team", "llama"
SECTION = f"{SPACE}/{NAME}"
NO_RIGHT = DeniedError('nodes is forbidden: User "u" cannot list resource "nodes": ask for this right')
FACTS = NodeFacts(memlock_bytes=None, descriptors=1 << 20, memory_limit_bytes=1 << 30, shared_memory_bytes=1 << 26)

Body = dict[str, Any]


def states(lines: Sequence[Line], check: str) -> list[str]:
    """Return the states of a check's lines."""
    return [line.state.value for line in lines if line.check == check]


def only(lines: Sequence[Line], check: str) -> Line:
    """Return the only line of a check."""
    (found,) = [line for line in lines if line.check == check]
    return found


def deployment(**spec: Any) -> Body:
    base: Body = {
        "model": {"attention": "GQA", "layers": 80, "kvHeads": 8, "headDim": 128, "dtype": "bfloat16"},
        "prefill": {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"role": "prefill"}},
        "decode": {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"role": "decode"}},
    }
    for name, section in spec.items():
        base[name] = {**base.get(name, {}), **section} if isinstance(section, dict) else section
    return {
        "apiVersion": "longshore.dev/v1alpha1",
        "kind": "DisaggDeployment",
        "metadata": {"name": NAME, "namespace": SPACE, "generation": 1},
        "spec": base,
    }


def spec_of(**spec: Any) -> Spec:
    return manifest.read(deployment(**spec)).spec


@functools.cache
def _definition() -> Body:
    found: Body = parse(CRD_TEXT)
    return found


def definition(**spec: Any) -> Body:
    """The CRD as the API server has it, with changes below `spec`."""
    found = copy.deepcopy(_definition())
    found["spec"] = {**found["spec"], "conversion": {"strategy": "None"}, **spec}
    found["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
    return found


def operator(**changes: Any) -> Operator:
    container = {"name": "operator", "env": [{"name": "LONGSHORE_LEASE_NAME", "value": "longshore-operator"}]}
    body = {
        "metadata": {
            "name": "longshore-operator",
            "namespace": "longshore-system",
            "labels": {"app.kubernetes.io/version": RELEASE},
            "annotations": {ANNOTATION: digest(_definition()["spec"])},
        },
        "spec": {"replicas": 1, "template": {"spec": {"containers": [container]}}},
        "status": {"availableReplicas": 1, "conditions": [{"type": "Available", "status": "True"}]},
    }
    return operator_deployments.of(body)._replace(**changes)


def node(name: str, role: str, **allocatable: str) -> Body:
    return {
        "metadata": {"name": name, "labels": {"role": role}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "8", "memory": "32Gi", **allocatable},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


NODES = (node("p-0", "prefill"), node("p-1", "prefill"), node("d-0", "decode"))


def namespace(level: str = "") -> Body:
    return {"metadata": {"name": SPACE, "labels": {before.ENFORCE: level} if level else {}}}


def answers(**changes: Any) -> Before:
    """A cluster on which everything is well before an installation."""
    found = Before(
        release=RELEASE,
        mode="cluster",
        namespace="longshore-system",
        own=None,
        version={"gitVersion": "v1.34.4"},
        rights=dict.fromkeys(before.wanted("cluster", "longshore-system"), True),
        definition=None,
        operators=[],
        nodes=NODES,
        runtime_classes=[],
        namespaces={SPACE: Tried(namespace(), "")},
        subjects=[Subject(SPACE, NAME, spec_of())],
    )
    return found._replace(**changes)


def pod(node_name: str, *, ready: bool = True, keys: str = "abcd", roles: str = "prefill", **status: Any) -> AgentPod:
    name = f"{NAME}-agent-{node_name}"
    container = {
        "name": "agent", "image": "longshore-agent:0.1.0", "imageID": "sha256:1", "restartCount": 0, "state": {"running": {}},
    }  # fmt: skip
    body = {
        "metadata": {"name": name, "namespace": SPACE, "uid": f"uid-{node_name}", "annotations": {"longshore.dev/keys": keys}},
        "spec": {"nodeName": node_name},
        "status": {"phase": "Running", "containerStatuses": [container], **status},
    }  # fmt: skip
    return AgentPod(SPACE, name, node_name, NAME, roles, 9470, ready, body)


def served(body: Body | None = None, **status: Any) -> Body:
    """A deployment whose operator says that all is well, with changes of its status."""
    found = deployment() if body is None else body
    kinds = ("Ready", "Compatible", "AgentsReady", "EnginesConnected", "PeersConnected", "TransportVerified")
    conditions = [{"type": kind, "status": "True", "reason": "Fine", "message": "all is well"} for kind in kinds]
    conditions += [{"type": kind, "status": "False", "reason": "Settled"} for kind in ("NodesShared", "Progressing")]
    return found | {
        "status": {
            "observedGeneration": 1,
            "conditions": conditions,
            "agents": {"desired": 2, "ready": 2},
            "keys": {"revision": 1, "secret": "llama-keys-abcd"},
            **status,
        }
    }


def engine(instance: str, rank: int = 0) -> structs.EngineStatus:
    layout = structs.LayoutStatus.of(status_scene.layout(1))
    return structs.EngineStatus(instance=instance, rank=rank, roles=("source",), layout=layout)


def peer(instance: str, wire: str = "SharedMemory", **changes: Any) -> structs.PeerStatus:
    fields: Body = {"instance": instance, "dp_rank": 0, "rank": 0, "state": "attached", "wire": wire, "epoch": "1"}
    return structs.PeerStatus(**fields | changes)


def worker(name: str, wire: str = "SharedMemory", to: str = "other", **changes: Any) -> WorkerSnapshot:
    fields: Body = {"engines": (engine(name),), "peers": (peer(to, wire),), "data_path": "Filtered"}
    return status_scene.worker(f"{name}/0", **fields | changes)


RULES = msgspec.structs.replace(status_scene.RULES, mps=True, staging_bytes=4 << 30)


def page(*workers: WorkerSnapshot, **changes: Any) -> Body:
    """What an agent answers on `/v1/status`, made by its own types and judged by itself."""
    fields: Body = {"version": RELEASE, "node_facts": FACTS, "self_test": status_scene.PASSED}
    snapshot = status_scene.agent(*workers, **fields | changes)
    body: Body = msgspec.to_builtins(snapshot.status(findings(snapshot, RULES)))
    return body


def reached(*pages: Body | Exception) -> list[Reached]:
    """Agents on nodes n-0, n-1 and so on."""
    reports = [one if isinstance(one, Exception) else report_of("agent", one) for one in pages]
    return [Reached(pod(f"n-{index}"), one) for index, one in enumerate(reports)]
