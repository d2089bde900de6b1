"""Tests agents' pods on a real API server: they have the users' settings, and settings that are not allowed are refused."""

from __future__ import annotations

import json

import pytest
import yaml
from controlplane.waiting import until
from deployments import ROOT, Deployments, to_text
from operator_process import Start

pytestmark = pytest.mark.usefixtures("nodes")

AGENTS = {
    "gpuAccess": "CDI",
    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
    "labels": {"team": "inference"},
    "env": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}, {"name": "LONGSHORE_LOG_LEVEL", "value": "debug"}],
    "priorityClassName": "system-node-critical",
    "resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "1Gi"}},
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "seLinuxOptions": {"level": "s0:c1"}},
    "volumes": [
        {"name": "conf", "configMap": {"name": "topology", "optional": True}},
        {"name": "token", "secret": {"secretName": "token", "optional": True}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "all", "projected": {"sources": [{"configMap": {"name": "topology", "optional": True}}]}},
        {"name": "info", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "verbs", "hostPath": {"path": "/dev/infiniband"}},
    ],
    "volumeMounts": [{"name": "verbs", "mountPath": "/dev/infiniband"}],
}


def test_agents_run_with_the_settings_of_their_pods(deployments: Deployments, start: Start) -> None:
    start()
    deployments.apply(agents=AGENTS)
    deployments.wait_reason("Ready", "Ready")
    for pod in deployments.pods():
        metadata, spec = pod["metadata"], pod["spec"]
        assert metadata["annotations"].items() >= AGENTS["annotations"].items()
        assert metadata["annotations"]["cdi.k8s.io/longshore-agent"] == "nvidia.com/gpu=all"
        assert metadata["labels"]["team"] == "inference"
        assert spec["priorityClassName"] == "system-node-critical"
        agent = spec["containers"][0]
        assert {entry["name"]: entry.get("value") for entry in agent["env"]}["UCX_NET_DEVICES"] == "mlx5_0:1"
        assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert {volume["name"] for volume in AGENTS["volumes"]} <= {volume["name"] for volume in spec["volumes"]}
        assert {"name": "verbs", "mountPath": "/dev/infiniband"} in agent["volumeMounts"]
        assert "nvidia.com/gpu" in {entry.get("key") for entry in spec["tolerations"]}
    # The server normalises these fields, which is no drift.
    versions = [body["metadata"]["resourceVersion"] for body in deployments.ours("ds")]
    deployments.apply(agents=AGENTS | {"keysRevision": 1}, transfer={"chunkTokens": 4096})
    deployments.wait_reason("Ready", "Ready")
    generations = [body["metadata"]["generation"] for body in deployments.ours("ds")]
    assert generations == [1, 1], versions


def test_pods_can_be_guaranteed_and_pass_a_quota_of_memory(deployments: Deployments, start: Start) -> None:
    names = ("requests.memory", "limits.memory", "requests.cpu", "limits.cpu")
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "all", "namespace": deployments.namespace},
        "spec": {"hard": dict.fromkeys(names, "1000Gi")},
    }
    deployments.plane.kubectl("create", "-f", "-", stdin=to_text(quota))
    start()
    deployments.apply(agents={"guaranteed": True, "resources": {"limits": {"cpu": 2}}})
    deployments.wait_reason("Ready", "Ready")
    assert {pod["status"]["qosClass"] for pod in deployments.pods()} == {"Guaranteed"}


def test_the_example_for_gpu_nodes_becomes_agents(deployments: Deployments, start: Start) -> None:
    """The simulated nodes have no NIC, and the responder uses other ports.

    So the pods stay pending, for these reasons only.
    """
    example = ROOT / "examples" / "gpu-nodes.yaml"
    values = [line.removeprefix("# ") for line in example.read_text().splitlines() if line.startswith("#   ")]
    start(allow=json.dumps(yaml.safe_load("\n".join(values))["allow"]))
    deployments.plane.kubectl("apply", "-n", deployments.namespace, "-f", str(example))
    deployments.wait_reason("Compatible", "PlanMade", "llama-70b")
    found = until(lambda: len(both := deployments.ours("ds", "llama-70b")) == 2 and both, "both DaemonSets")
    by_role = {body["metadata"]["labels"]["longshore.dev/roles"]: body["spec"] for body in found}
    devices = {
        role: {entry["name"]: entry.get("value") for entry in spec["template"]["spec"]["containers"][0]["env"]}
        for role, spec in by_role.items()
    }
    assert devices["prefill"]["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert devices["decode"]["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"
    for spec in by_role.values():
        resources = spec["template"]["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["limits"]["memory"] == "16640Mi"
        assert spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == "10%"


ASKED = {
    "spec.agents.image": {"image": "attacker/root:1"},
    "spec.agents.hostNetwork": {"hostNetwork": True, "allowOpenDataPath": True},
    "spec.agents.hostIPC": {"hostIPC": True},
    "spec.agents.networkPolicy": {"networkPolicy": False, "allowOpenDataPath": True},
    "spec.agents.securityContext.capabilities.add": {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
    "spec.agents.securityContext.seLinuxOptions.type": {
        "securityContext": {"seLinuxOptions": {"type": "container_engine_t"}}
    },
    "spec.agents.volumes: hostPath": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]},
    "spec.agents.volumes: csi": {
        "volumes": [
            {"name": "root", "csi": {"driver": "hostpath.csi.k8s.io", "volumeAttributes": {"path": "/"}}},
        ]
    },
    "spec.agents.env: NIXL_PLUGIN_DIR": {"env": [{"name": "NIXL_PLUGIN_DIR", "value": "/mnt/plug"}]},
    "spec.agents.env: NVIDIA_VISIBLE_DEVICES": {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
    "spec.agents.annotations: cdi.k8s.io/x": {"annotations": {"cdi.k8s.io/x": "vendor.com/device=all"}},
    "spec.agents.annotations: container.apparmor": {
        "annotations": {"container.apparmor.security.beta.kubernetes.io/agent": "unconfined"}
    },
    "spec.agents.priorityClassName": {"priorityClassName": "system-node-critical"},
    "spec.agents.tolerations: every taint": {"tolerations": [{"operator": "Exists"}]},
}


def test_what_the_administrator_does_not_allow_is_refused_by_its_field(deployments: Deployments, start: Start) -> None:
    one = start(allow="")
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    before = deployments.lives()
    for path, agents in ASKED.items():
        deployments.apply(agents=agents)
        found = deployments.wait_reason("Compatible", "NotAllowed")
        assert found["message"].startswith(path), found
        assert "ask for the chart's value allow." in found["message"]
        assert deployments.condition("Ready")["status"] == "False"
    assert deployments.lives() == before
    assert {pod["spec"]["containers"][0]["image"] for pod in deployments.pods()} == {"longshore-agent:0.1.0"}
    assert [event for event in deployments.events("NotAllowed") if event["type"] == "Warning"]
    one.process.stop()
    start()
    deployments.apply(agents=ASKED["spec.agents.image"])
    deployments.wait_reason("Compatible", "PlanMade")

    def images() -> set[str]:
        pods = deployments.pods()
        return {container["image"] for pod in pods for container in pod["spec"]["initContainers"]}

    assert images() == {"longshore-operator:0.1.0"}
