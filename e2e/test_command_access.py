"""How the command finds a cluster, and what it says to users who may not read it or who name what is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from controlplane.certificates import write_kubeconfig
from controlplane.cluster import ControlPlane
from controlplane.ports import HOST, free_port
from controlplane.waiting import until
from deployments import Deployments, permitted

from longshore_cli.main import main

READER = "reader-of-pods"


def said(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 1) -> str:
    """Return the one line that `longshore rooms` prints when it fails."""
    assert main(["rooms", *(str(word) for word in words)]) == status
    out, error = capsys.readouterr()
    assert out == ""
    [line] = error.splitlines()
    return line.removeprefix("longshore rooms: ")


def test_the_namespace_is_that_of_the_context_unless_given(
    plane: ControlPlane, namespace: str, deployments: Deployments, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.loads(plane.kubeconfig.read_text())
    config["contexts"].append({"name": "ours", "context": config["contexts"][0]["context"] | {"namespace": namespace}})
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    way_out = f"`kubectl describe dgdep -n {namespace}` says why"
    for words in (("--context", "ours"), ("-n", namespace)):
        line = said(capsys, "--kubeconfig", path, *words)
        assert line == f"namespace {namespace} has no pods of agents: {way_out}"
    line = said(capsys, "llama", "--kubeconfig", path, "--context", "ours")
    assert line == f"namespace {namespace} has no DisaggDeployment llama: it has none: give -n NAMESPACE"
    deployments.apply()
    line = said(capsys, "mistral", "--kubeconfig", path, "--context", "ours")
    assert line == f"namespace {namespace} has no DisaggDeployment mistral: it has llama"
    # Nothing serves the namespace, so the deployment has no agents.
    line = said(capsys, "llama", "--kubeconfig", path, "--context", "ours")
    assert line == f"DisaggDeployment llama has no pods of agents: {way_out}"
    line = said(capsys, "--kubeconfig", path, "--context", "theirs")
    assert "theirs" in line and line.endswith("set KUBECONFIG, or give --kubeconfig and --context")


def test_a_user_is_told_which_right_is_missing(
    plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = plane.authority.kubeconfig(READER, plane.server, READER)
    line = said(capsys, "--kubeconfig", kubeconfig, "-n", namespace)
    assert f'User "{READER}" cannot list resource "pods"' in line and line.endswith(": ask for this right")

    plane.kubectl("-n", namespace, "create", "role", READER, "--verb=get,list", "--resource=pods")
    plane.kubectl("-n", namespace, "create", "rolebinding", READER, f"--role={READER}", f"--user={READER}")
    # One who may not list deployments is told at least that this one is not there.
    plane.kubectl("-n", namespace, "create", "role", "getter", "--verb=get", "--resource=disaggdeployments")
    plane.kubectl("-n", namespace, "create", "rolebinding", "getter", "--role=getter", f"--user={READER}")
    for right in (("list", "pods"), ("get", "disaggdeployments.longshore.dev")):
        until(lambda right=right: permitted(plane, namespace, READER, *right), "the roles are bound")
    line = said(capsys, "llama", "--kubeconfig", kubeconfig, "-n", namespace)
    assert line.endswith("has no DisaggDeployment llama: correct the name, or give -n NAMESPACE")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "agent-0", "labels": {"longshore.dev/deployment": "llama"}},
        "spec": {
            "containers": [{"name": "agent", "image": "none", "ports": [{"name": "http", "containerPort": 9470}]}]
        },
    }
    plane.kubectl("-n", namespace, "create", "-f", "-", stdin=json.dumps(pod))
    line = said(capsys, "--kubeconfig", kubeconfig, "-n", namespace)
    assert "pods/proxy" in line and line.endswith(f": ask for the right to get pods/proxy in {namespace}")
    # With the right, the API server says why it cannot reach the pod, which runs nowhere.
    line = said(capsys, "--kubeconfig", plane.kubeconfig, "-n", namespace)
    assert line.startswith(f"the agent in pod {namespace}/agent-0 cannot be reached: ")


def test_a_cluster_that_is_away_or_that_refuses_the_user_is_named(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = f"https://{HOST}:{free_port()}"
    away = write_kubeconfig(tmp_path / "away", {"server": server}, {})
    assert said(capsys, "--kubeconfig", away).startswith(f"the API server {server} cannot be reached: ")
    authority = json.loads(plane.kubeconfig.read_text())["clusters"][0]["cluster"]
    stranger = write_kubeconfig(tmp_path / "stranger", authority, {"token": "of-another-cluster"})
    line = said(capsys, "--kubeconfig", stranger)
    assert line == f"{plane.server} does not accept the credentials of the kubeconfig: log in again"
    broken = tmp_path / "broken"
    broken.write_text("clusters: [")
    assert said(capsys, "--kubeconfig", broken).endswith("set KUBECONFIG, or give --kubeconfig and --context")


def test_addresses_and_a_deployment_are_not_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "llama", "--agent", "http://127.0.0.1:1", status=2)
    assert line == "--agent names agents without a cluster: leave out the deployment, or --agent"
    line = said(capsys, "--token-file", "token", status=2)
    assert line == "--token-file and --authority are for agents without a cluster: give --agent"


def test_a_kubeconfig_that_trusts_any_certificate_makes_no_warnings(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    config = json.loads(plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"] = {"server": plane.server, "insecure-skip-tls-verify": True}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "longshore_cli.main", "rooms", "--kubeconfig", str(path), "-n", namespace]
    (line,) = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
    assert line.startswith(f"longshore rooms: namespace {namespace} has no pods of agents")
