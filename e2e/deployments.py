"""Paths of the tree's manifests, and deployments for tests."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from controlplane import binaries
from controlplane.cluster import ControlPlane
from controlplane.waiting import until

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
CHART = ROOT / "charts" / "longshore"
_RENDER_LIMIT_S = 120.0
# The release with which this one must work: the first whose operator tolerates another CRD, of commit cc01b6ed. Its chart is as
# Helm packed it, and its operator's packages are as git archived them. Beside them are values of older charts.
BASELINE_FOLDER = ROOT / "e2e" / "baseline"
BASELINE_CHART = BASELINE_FOLDER / "longshore-0.1.0.tgz"
CRD = ROOT / "crds" / "disaggdeployments.longshore.dev.yaml"

LEVEL_LABEL = "pod-security.kubernetes.io/enforce"

Body = dict[str, Any]

# The kind that the Prometheus operator would bring.
MONITORS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "PodMonitor", "plural": "podmonitors"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


def manifest(namespace: str, name: str = "llama", **spec: object) -> Body:
    """Return a valid deployment; `spec` replaces whole sections."""
    base: Body = {
        "model": {"attention": "GQA", "layers": 80, "kvHeads": 8, "headDim": 128, "dtype": "bfloat16"},
        "prefill": {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "prefill"}},
        "decode": {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "decode"}},
    }
    return {
        "apiVersion": "longshore.dev/v1alpha1",
        "kind": "DisaggDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": base | spec,
    }


def baseline_tree(folder: Path) -> Path:
    """Write the operator's packages of the baseline into a folder and return it."""
    with tarfile.open(BASELINE_FOLDER / "operator.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def baseline_definition() -> str:
    """Return the text of the baseline's CRD."""
    with tarfile.open(BASELINE_CHART) as archive:
        found = archive.extractfile(f"longshore/files/{CRD.name}")
        assert found is not None
        return found.read().decode()


def rendered_chart(*arguments: str) -> list[Body]:
    """Return the objects of the chart's release `longshore`, rendered with these arguments of `helm template`.

    Raises:
        CalledProcessError: Helm refuses them.
    """
    command = [str(binaries.find("helm")), "template", "longshore", str(CHART), "--kube-version=1.34.4", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_RENDER_LIMIT_S)
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def to_text(document: object) -> str:
    """Return the text of a document for kubectl."""
    return json.dumps(document)


def install_definition(plane: ControlPlane) -> None:
    """Install the CRD and wait until its objects are served."""
    plane.kubectl("create", "-f", str(CRD))
    # `kubectl wait` fails on an object that has no conditions yet.
    path = '-o=jsonpath={.status.conditions[?(@.type=="Established")].status}'
    until(lambda: plane.kubectl("get", "crd", CRD.stem, path) == "True", "the definition is served")


def enforce(plane: ControlPlane, namespace: str, level: str) -> None:
    """Have a namespace enforce a Pod Security level; return once the API server does. It reads labels by a watch."""
    plane.kubectl("label", "namespace", namespace, "--overwrite", f"{LEVEL_LABEL}={level}")
    container = {"name": "a", "image": "b", "securityContext": {"privileged": True}}
    metadata = {"name": "canary", "namespace": namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}

    def enforced() -> str:
        done = plane.try_kubectl("create", "--dry-run=server", "-f", "-", stdin=to_text(pod))
        refusal = re.search(r'violates PodSecurity "(\w+):', done.stderr)
        return refusal[1] if refusal else done.stderr or "privileged"

    until(lambda: enforced() == level, f"{namespace} enforces {level}")


def permitted(plane: ControlPlane, namespace: str, user: str, *right: str) -> bool:
    """Whether the API server knows that a user has a right: verb, resource and options of `kubectl auth can-i`.

    It reads roles and bindings by a watch.
    """
    return plane.try_kubectl("auth", "can-i", *right, f"--as={user}", "-n", namespace).stdout.strip() == "yes"


class Deployments:
    """The deployments of one namespace, read and changed by kubectl."""

    def __init__(self, plane: ControlPlane, namespace: str, http_port: int) -> None:
        self.plane = plane
        self.namespace = namespace
        self.http_port = http_port

    def apply(self, name: str = "llama", **spec: object) -> None:
        """Apply a valid deployment with some sections of its spec replaced."""
        agents: Any = spec.pop("agents", {})
        body = manifest(self.namespace, name, agents={"httpPort": self.http_port, **agents}, **spec)
        self.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=to_text(body))

    def get(self, kind: str, name: str) -> Body:
        """Return an object. Raises AssertionError if it does not exist."""
        return dict(json.loads(self.plane.kubectl("get", kind, name, "-n", self.namespace, "-o", "json")))

    def list(self, kind: str, *arguments: str) -> list[Body]:
        """Return the objects of a kind."""
        return list(
            json.loads(self.plane.kubectl("get", kind, "-n", self.namespace, "-o", "json", *arguments))["items"]
        )

    def names(self, kinds: str = "ds,cm,svc,sa,netpol,secret,pod") -> set[str]:
        """Return the objects of these kinds as kind/name, without those that every namespace has."""
        found = self.plane.kubectl("get", kinds, "-n", self.namespace, "-o", "name").split()
        return {name for name in found if not name.endswith(("/default", "/kube-root-ca.crt"))}

    def condition(self, kind: str, name: str = "llama") -> Body:
        """Return a condition of a deployment; empty if there is none yet."""
        listed = self.get("dgdep", name).get("status", {}).get("conditions", [])
        return next((entry for entry in listed if entry["type"] == kind), {})

    def wait_reason(self, kind: str, reason: str, name: str = "llama", limit_s: float = 150.0, about: str = "") -> Body:
        """Return a condition as soon as it has this reason for the current generation and its message says `about`."""

        def look() -> Body:
            body = self.get("dgdep", name)
            found: Body = next((c for c in body.get("status", {}).get("conditions", []) if c["type"] == kind), {})
            assert found, body.get("status")
            assert (found["reason"], found["observedGeneration"]) == (reason, body["metadata"]["generation"]), found
            assert about in found["message"], found
            return found

        return until(look, f"{kind} of {name} is {reason} {about}".rstrip(), limit_s)

    def ours(self, kind: str, name: str = "llama") -> Sequence[Body]:
        """Return the children of a kind that are not being deleted."""
        found = self.list(kind, "-l", f"longshore.dev/deployment={name}")
        return [body for body in found if "deletionTimestamp" not in body["metadata"]]

    def pods(self, name: str = "llama") -> Sequence[Body]:
        """Return the agents' pods that are not being deleted."""
        return self.ours("pods", name)

    def patch_status(self, pod: str, status: Body) -> None:
        """Change the status of a pod, as its kubelet does."""
        arguments = ("patch", "pod", pod, "-n", self.namespace, "--subresource=status", "-p")
        self.plane.kubectl(*arguments, json.dumps({"status": status}))

    def lives(self) -> dict[str, str]:
        """Return the uid of each node's agent. Raises AssertionError if a node has two, or an agent has none yet."""
        pods = self.pods()
        assert all("nodeName" in pod["spec"] for pod in pods)
        found = {pod["spec"]["nodeName"]: pod["metadata"]["uid"] for pod in pods}
        assert len(found) == len(pods), [pod["metadata"]["name"] for pod in pods]
        return found

    def events(self, reason: str) -> Sequence[Body]:
        """Return the operator's events with this reason."""
        return [entry for entry in self.list("events") if entry["reason"] == reason]
