"""Simulates nodes by KWOK: their pods become Running and Ready without a process. Called by fixtures and the benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping

import yaml  # type: ignore[import-untyped, unused-ignore]

from controlplane import binaries
from controlplane.cluster import ControlPlane
from controlplane.ports import HOST, free_port
from controlplane.processes import Process
from controlplane.waiting import until

# KWOK's program contains no stages. These files of its module make nodes Ready, and start and end pods.
_STAGES = ("node/fast/node-initialize", "pod/fast/pod-ready", "pod/fast/pod-complete", "pod/fast/pod-delete")
# Without leases nodes become NotReady. KWOK renews after a quarter of this, well below the grace period in `cluster`.
_LEASE_S = 120
NODES_READY_LIMIT_S = 300.0
_ALLOCATABLE = {"cpu": "192", "memory": "2Ti", "ephemeral-storage": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}


def start_kwok(plane: ControlPlane, pod_network: str = "10.128.0.0/10") -> Process:
    """Start KWOK, which simulates nodes of `add_nodes` and their pods. Pods get addresses of `pod_network`."""
    folder = binaries.module_folder("kwok", "sigs.k8s.io/kwok") / "kustomize" / "stage"
    stages = plane.folder / "kwok-stages.yaml"
    stages.write_text("\n---\n".join((folder / f"{stage}.yaml").read_text() for stage in _STAGES))
    return plane.run(
        "kwok",
        str(binaries.find("kwok")),
        f"--config={stages}",
        f"--kubeconfig={plane.kubeconfig}",
        f"--node-lease-duration-seconds={_LEASE_S}",
        "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        f"--cidr={pod_network}",
        "--node-ip=10.99.255.1",
        f"--server-address={HOST}:{free_port()}",
    )


def add_nodes(plane: ControlPlane, labels_by_name: Mapping[str, Mapping[str, str]]) -> None:
    """Create nodes with these labels and wait until all of them are Ready."""
    nodes = [_node(name, labels) for name, labels in labels_by_name.items()]
    plane.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes}))
    until(lambda: set(labels_by_name) <= ready_nodes(plane), f"{len(nodes)} nodes Ready", limit_s=NODES_READY_LIMIT_S)


def remove_node(plane: ControlPlane, name: str) -> None:
    """Delete a node. The controller-manager deletes its pods."""
    plane.kubectl("delete", "node", name, "--wait=true")


def ready_nodes(plane: ControlPlane) -> set[str]:
    """Return the names of the nodes that are Ready."""
    path = '{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status} {end}'
    pairs = plane.kubectl("get", "nodes", f"-o=jsonpath={path}").split()
    return {pair.partition("=")[0] for pair in pairs if pair.endswith("=True")}


def _node(name: str, labels: Mapping[str, str]) -> dict[str, object]:
    own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {**own, **labels},
            "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
        },
        "status": {"allocatable": _ALLOCATABLE, "capacity": _ALLOCATABLE},
    }


def read_manifests(text: str) -> list[dict[str, object]]:
    """Return the documents of a YAML text that are not empty."""
    return [document for document in yaml.safe_load_all(text) if document]
