"""`longshore dump` against a real API server: with all rights and with few. The proxy and logs do not reach these simulated pods."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from controlplane.cluster import ControlPlane
from deployments import CHART, Deployments, to_text
from operator_process import OperatorProcess
from test_chart import helm
from test_check import LIMIT_S, kubeconfig_of

pytestmark = pytest.mark.usefixtures("nodes")
SECRET = "s3cr3t-9f8e7d6c5b4a"
ENV = [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "value": f"authorization=Bearer {SECRET}-1"}]


def dumped(kubeconfig: Path, path: Path, *words: str) -> tuple[str, dict[str, str]]:
    """Return what one run has printed, and the files below the bundle's folder."""
    command = [sys.executable, "-m", "longshore_cli.main", "dump", "--kubeconfig", str(kubeconfig), "-o", str(path)]
    done = subprocess.run([*command, *words], check=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stderr == "", done.stderr
    found = {}
    with tarfile.open(path) as archive:
        for entry in archive:
            member = archive.extractfile(entry)
            assert member is not None, entry.name
            found[entry.name.partition("/")[2]] = member.read().decode()
    return done.stdout, found


def with_secrets(plane: ControlPlane, namespace: str) -> None:
    """Create objects of a user, each with a secret where such objects have them."""
    labels = {"longshore.dev/deployment": "llama"}
    container = {"name": "engine", "image": "engine:1", "args": [f"--api-key={SECRET}-2"]}
    container["env"] = [{"name": "HF_TOKEN", "value": f"{SECRET}-3"}]
    bodies = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "labels": labels}, "stringData": {"k": f"{SECRET}-4"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own", "labels": labels}, "data": {"k": f"{SECRET}-5"}},
        {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "engine", "labels": {"longshore.dev/inject": "llama.prefill"}},
            "spec": {"containers": [container], "nodeName": "prefill-0", "automountServiceAccountToken": False},
        },
    ]  # fmt: skip
    plane.kubectl(
        "apply", "-n", namespace, "-f", "-", stdin=to_text({"apiVersion": "v1", "kind": "List", "items": bodies})
    )


def test_a_dump_has_what_can_be_read_and_no_secret(
    plane: ControlPlane, namespace: str, deployments: Deployments, tmp_path: Path
) -> None:
    done = helm(plane, "install", "longshore", str(CHART), "-n", namespace, "--set=mode=namespaced,crds.install=false")
    assert done.returncode == 0, done.stderr
    with OperatorProcess(plane, namespace, watch_namespace=namespace, lease_name="longshore-operator"):
        deployments.apply(agents={"env": ENV})
        deployments.wait_reason("Ready", "Ready")
        with_secrets(plane, namespace)
        path = tmp_path / "found.tar.gz"
        words = ("llama", "-n", namespace, "--operator-namespace", namespace)
        said, found = dumped(plane.kubeconfig, path, *words)
    assert SECRET.encode() not in gzip.decompress(path.read_bytes())
    here, operator = f"namespaces/{namespace}", f"operators/{namespace}/longshore-operator"
    kinds = ("disaggdeployments", "daemonsets", "configmaps", "services", "serviceaccounts", "networkpolicies")
    assert found.keys() >= {
        *("README.txt", "versions.json", "nodes.json", "status.json", "check.json", f"{operator}/deployment.json"),
        *(f"{here}/{kind}.json" for kind in (*kinds, "agent-pods", "engine-pods", "events")),
    }
    (daemon_set, *_) = json.loads(found[f"{here}/daemonsets.json"])
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    assert ENV[0] | {"value": "(removed)"} in container["env"]
    maps = json.loads(found[f"{here}/configmaps.json"])
    assert {each["metadata"]["name"] for each in maps} == {"llama-agent", "llama-engine-prefill", "llama-engine-decode"}
    pods = json.loads(found[f"{here}/agent-pods.json"])
    assert len(pods) == 3
    # These pods are simulated: each one's log and pages are named as missing.
    missing = found["README.txt"].partition("Not read:\n")[2]
    for pod in pods:
        assert f"{here}/agents/{pod['metadata']['name']}/log.txt: " in missing
        assert (
            f"{here}/agents/{pod['metadata']['name']}/status.json, rooms.json, metrics.txt: the agent in pod {namespace}/"
            in missing
        )
    assert {"AgentsReady", "pages"} <= {line["check"] for line in json.loads(found["check.json"])}
    assert json.loads(found["status.json"])["deployments"][0]["ready"] == "True"
    assert said.startswith(f"wrote {path}: ") and "README.txt in it says why" in said


def test_a_dump_of_a_user_with_few_rights_names_what_is_missing(
    plane: ControlPlane, namespace: str, deployments: Deployments, operator: OperatorProcess, tmp_path: Path
) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    rule = {"apiGroups": ["longshore.dev"], "resources": ["disaggdeployments"], "verbs": ["list"]}
    user = kubeconfig_of(plane, namespace, tmp_path, rule)
    _, found = dumped(user, tmp_path / "found.tar.gz")
    assert f"namespaces/{namespace}/disaggdeployments.json" in found and "check.json" in found
    missing = found["README.txt"].partition("Not read:\n")[2]
    for kind in ("daemonsets", "configmaps", "agent-pods", "events"):
        assert f"namespaces/{namespace}/{kind}.json: " in missing
    assert missing.count("forbidden") >= 8 and "nodes.json: nodes is forbidden" in missing
    # The rights of a ServiceAccount are bound to its token, which the file must not have.
    assert json.loads(user.read_text())["users"][0]["user"]["token"] not in str(found)
