"""Tests AgentsReady on a real API server: missing, tainted or failed nodes, and pods that cannot be created or started."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
from agent_responder import AgentResponder, report
from controlplane.cluster import ControlPlane
from controlplane.nodes import add_nodes, remove_node
from controlplane.waiting import until
from deployments import Deployments, to_text

pytestmark = pytest.mark.usefixtures("operator", "nodes")

TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


@pytest.fixture
def node(plane: ControlPlane, namespace: str) -> Iterator[str]:
    """A node for decode that belongs to this test."""
    name = f"{namespace}-0"
    add_nodes(plane, {name: {"longshore.dev/role": namespace}})
    yield name
    remove_node(plane, name)


def decode_on(role: str) -> dict[str, Any]:
    return {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"longshore.dev/role": role}}


def taint(plane: ControlPlane, node: str, *taints: dict[str, str]) -> None:
    plane.kubectl("patch", "node", node, "--type=merge", "-p", to_text({"spec": {"taints": list(taints)}}))


def said(deployments: Deployments, reason: str, *words: str) -> None:
    """Wait until AgentsReady has this reason and these words in its message, and Ready has the same status."""

    def look() -> bool:
        message = deployments.wait_reason("AgentsReady", reason, limit_s=0)["message"]
        assert all(word in message for word in words), message
        return True

    until(look, f"{reason}: {words}")
    expected = "True" if reason == "AllAgentsReady" else "False"
    assert deployments.condition("Ready")["status"] == expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_without_nodes_is_not_ready_and_named(deployments: Deployments, role: str) -> None:
    deployments.apply(**{role: decode_on("nobody")})
    said(deployments, "NoNodes", f"no node is picked by {role} (longshore.dev/role=nobody)")
    until(lambda: deployments.events("NoNodes"), "an event")


def test_a_role_whose_only_node_goes_off_is_not_ready_and_the_node_is_named(
    plane: ControlPlane, deployments: Deployments, node: str
) -> None:
    deployments.apply(decode=decode_on(deployments.namespace))
    deployments.wait_reason("Ready", "Ready")
    # KWOK would make it Ready again.
    plane.kubectl("annotate", "node", node, "kwok.x-k8s.io/node-")
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    off = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "off", "lastTransitionTime": now}
    plane.kubectl("patch", "node", node, "--subresource=status", "-p", to_text({"status": {"conditions": [off]}}))
    said(
        deployments, "NodesNotReady", f"no node of decode (longshore.dev/role={deployments.namespace}) is ready: {node}"
    )
    assert deployments.get("dgdep", "llama")["status"]["decode"]["summary"] == "0/0 TP1"


def test_tainted_nodes_are_counted_as_the_scheduler_does(
    plane: ControlPlane, deployments: Deployments, node: str
) -> None:
    taint(plane, node, TAINT)
    decode = decode_on(deployments.namespace)
    deployments.apply(decode=decode)
    said(deployments, "NodesTainted", "nodes are picked by decode", f"{node} (nvidia.com/gpu=present:NoSchedule)")
    add_nodes(plane, {f"{node}1": {"longshore.dev/role": deployments.namespace}})
    said(deployments, "AllAgentsReady", f"without an agent: {node} (tainted")
    assert deployments.get("dgdep", "llama")["status"]["decode"]["summary"] == "1/1 TP1"
    deployments.apply(decode=decode, agents={"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]})
    until(lambda: deployments.get("dgdep", "llama")["status"]["decode"]["summary"] == "2/2 TP1", "both run agents")
    deployments.wait_reason("Ready", "Ready")
    remove_node(plane, f"{node}1")


def test_a_taint_of_a_node_whose_agent_runs_leaves_the_deployment_ready_until_the_agent_ends(
    plane: ControlPlane, deployments: Deployments, node: str
) -> None:
    """As an autoscaler taints a node that it wants to empty, or an administrator before maintenance."""
    deployments.apply(decode=decode_on(deployments.namespace))
    since = deployments.wait_reason("Ready", "Ready")["lastTransitionTime"]
    taint(plane, node, {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"})
    said(deployments, "AllAgentsReady", f"no new one start: {node} (karpenter.sh/disrupted:NoSchedule)")
    plane.kubectl("cordon", node)
    deployments.apply(decode=decode_on(deployments.namespace), transfer={"chunkTokens": 4096})
    ready = deployments.wait_reason("Ready", "Ready")
    assert ready["lastTransitionTime"] == since
    assert deployments.get("dgdep", "llama")["status"]["decode"]["summary"] == "1/1 TP1"
    assert deployments.condition("Progressing")["reason"] == "Settled"
    [pod] = [pod for pod in deployments.pods() if pod["spec"]["nodeName"] == node]
    plane.kubectl("delete", "pod", pod["metadata"]["name"], "-n", deployments.namespace)
    said(deployments, "NodesTainted", f"{node} (karpenter.sh/disrupted:NoSchedule)")


def test_a_taint_that_evicts_agents_is_told(plane: ControlPlane, deployments: Deployments, node: str) -> None:
    deployments.apply(decode=decode_on(deployments.namespace))
    deployments.wait_reason("Ready", "Ready")
    taint(plane, node, {"key": "maintenance", "effect": "NoExecute"})
    said(deployments, "NodesTainted", f"{node} (maintenance:NoExecute)")


QUOTA = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": {"hard": {"pods": "0"}}}


def test_pods_over_a_quota_are_told_in_the_words_of_the_cluster(plane: ControlPlane, deployments: Deployments) -> None:
    quota = QUOTA | {"metadata": {"name": "tight", "namespace": deployments.namespace}}
    plane.kubectl("create", "-f", "-", stdin=to_text(quota))
    until(lambda: "hard" in deployments.get("resourcequota", "tight").get("status", {}), "the quota is in force")
    deployments.apply()
    said(deployments, "AgentsNotReady", "no pod on", "FailedCreate", "exceeded quota: tight")
    deployments.wait_reason("Progressing", "Blocked")
    until(lambda: deployments.events("AgentsNotReady"), "an event")
    plane.kubectl("delete", "resourcequota", "tight", "-n", deployments.namespace)
    # The DaemonSet controller retries with growing intervals; an edit makes it retry at once.
    deployments.apply(transfer={"backend": "Mooncake"})
    deployments.wait_reason("Ready", "Ready")


def test_pods_that_pod_security_refuses_are_told(plane: ControlPlane, deployments: Deployments) -> None:
    label = "pod-security.kubernetes.io/enforce=baseline"
    plane.kubectl("label", "namespace", deployments.namespace, label)
    deployments.apply()
    said(deployments, "AgentsNotReady", "violates PodSecurity", "hostPath volumes")


def test_a_runtime_class_that_does_not_exist_is_told(deployments: Deployments) -> None:
    deployments.apply(agents={"runtimeClassName": "no-such-class"})
    said(deployments, "AgentsNotReady", 'RuntimeClass "no-such-class" not found')


def patch(
    deployments: Deployments, pod: dict[str, Any], state: dict[str, Any], last: dict[str, Any] | None = None
) -> None:
    """Have the kubelet report a container that is not ready."""
    container = {"name": "agent", "image": "x", "imageID": "", "ready": False, "started": False, "state": state}
    container |= {"restartCount": 1, "lastState": last} if last else {"restartCount": 0}
    status = {"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [container]}
    deployments.patch_status(pod["metadata"]["name"], status)


WAITING = {"waiting": {"reason": "ContainerCreating"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x": manifest unknown'}}


@pytest.mark.parametrize(
    ("state", "last", "words"),
    [
        (BACK_OFF, KILLED, ("CrashLoopBackOff: back-off 10s", "it ended with OOMKilled, exit code 137")),
        ({"running": {}}, KILLED, ("it ended with OOMKilled, exit code 137",)),
        (PULL, None, ("ImagePullBackOff", "manifest unknown")),
    ],
)
def test_how_a_container_ended_or_why_it_waits_is_told(
    deployments: Deployments, state: dict[str, Any], last: dict[str, Any] | None, words: tuple[str, ...]
) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    pod = deployments.pods()[0]
    patch(deployments, pod, state, last)
    said(deployments, "AgentsNotReady", pod["spec"]["nodeName"], *words)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("FailedMount", 'MountVolume.SetUp failed for volume "keys": secret "x" not found'),
        ("FailedCreatePodSandBox", "Failed to create pod sandbox: no runtime for nvidia is configured"),
    ],
)
def test_a_pod_that_cannot_start_is_told_in_the_kubelets_words(
    deployments: Deployments, reason: str, message: str
) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    pod = deployments.pods()[0]
    patch(deployments, pod, WAITING)
    created = dt.datetime.fromisoformat(pod["metadata"]["creationTimestamp"])

    def warned() -> bool:
        """The kubelet repeats its warning while the problem lasts."""
        now = dt.datetime.now(dt.UTC)
        # The operator reports a failed start only after 15 s.
        assert (now - created).total_seconds() > 16
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        involved = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")} | {
            "kind": "Pod",
            "apiVersion": "v1",
        }
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{pod['metadata']['name']}.1", "namespace": deployments.namespace},
            "involvedObject": involved,
            "type": "Warning",
            "reason": reason,
            "message": message,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 3,
        }
        deployments.plane.kubectl("create", "-f", "-", stdin=to_text(body))
        return True

    until(warned, "the pod is old enough")
    said(deployments, "AgentsNotReady", f"{reason}: {message}")


def test_an_agent_that_reports_an_older_config_is_not_taken_for_a_current_one(
    deployments: Deployments, responder: AgentResponder
) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    pod = next(pod for pod in deployments.pods() if pod["spec"]["nodeName"] == "decode-0")
    address = pod["status"]["podIP"]
    responder.answers[address] = report() | {"config": {"prefill": "0" * 16, "decode": "0" * 16}}
    said(deployments, "AgentsOutdated", "agents report another config than their pods' on decode-0")
    status = deployments.get("dgdep", "llama")["status"]
    assert (status["prefill"]["updatedAgents"], status["decode"]["updatedAgents"]) == (2, 0)
    digest = pod["metadata"]["annotations"]["longshore.dev/config"]
    responder.answers[address] = report() | {"config": {"prefill": "0" * 16, "decode": digest}}
    deployments.wait_reason("Ready", "Ready")
