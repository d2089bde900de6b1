"""Tests with a real API server which rights `longshore verify` needs, and what it says without them.

No kubelet runs the agents' pods here, so that no program starts in them; e2e/cluster moves the bytes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from controlplane.certificates import write_kubeconfig
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import manifest, permitted, rendered_chart, to_text

from longshore_cli.main import main

NAME = "longshore-operator-verify"
EXEC = ("create", "pods", "--subresource=exec")


def agent(role: str) -> dict[str, Any]:
    """Return the pod of an agent, whose node does not exist."""
    labels = {"longshore.dev/deployment": "llama", "longshore.dev/roles": role}
    spec = {"nodeName": f"node-{role}", "containers": [{"name": "agent", "image": "longshore-agent:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"llama-{role}", "labels": labels}, "spec": spec}


def user(namespace: str) -> str:
    """Return the name of the Job's ServiceAccount as a user."""
    return f"system:serviceaccount:{namespace}:{NAME}"


@pytest.fixture
def account(plane: ControlPlane, namespace: str) -> Iterator[Path]:
    """A kubeconfig of the Job's ServiceAccount with the chart's rights for it, and a deployment with two agents."""
    objects = rendered_chart("-n", namespace, "--set=test.verify.deployment=llama")
    made = [body for body in objects if body["metadata"]["name"] == NAME]
    for body in made:
        if body["kind"] != "Job":
            plane.kubectl("apply", "-f", "-", stdin=to_text(body))
    plane.kubectl("apply", "-f", "-", stdin=to_text(manifest(namespace)))
    ready = to_text({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}})
    for role in ("prefill", "decode"):
        plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=to_text(agent(role)))
        plane.kubectl("patch", "pod", f"llama-{role}", "-n", namespace, "--subresource=status", "-p", ready)
    until(lambda: permitted(plane, namespace, user(namespace), *EXEC), "the role is bound")
    token = plane.kubectl("create", "token", NAME, "-n", namespace)
    certificate = base64.b64encode(plane.authority.certificate_path.read_bytes()).decode()
    cluster = {"server": plane.server, "certificate-authority-data": certificate}
    yield write_kubeconfig(plane.folder / f"{namespace}-verify.kubeconfig", cluster, {"token": token})
    plane.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0")
    plane.kubectl("delete", "dgdep", "--all", "-n", namespace)


def test_the_rights_of_the_chart_reach_the_agents_pods_and_no_more(
    plane: ControlPlane, namespace: str, account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", "llama", "--kubeconfig", str(account), "-n", namespace]
    assert main(words) == 1
    out = capsys.readouterr().out
    # The API server accepts the request, and finds no node to which to pass it on.
    assert f"node-prefill: no program can be started in pod {namespace}/llama-prefill: " in out
    assert f"node-decode: no program can be started in pod {namespace}/llama-decode: " in out
    assert "orbidden" not in out
    assert out.splitlines()[-1] == "0 of 1 pairs moved every byte right; 1 untested"
    for what in (("delete", "pods"), ("get", "secrets"), ("create", "pods"), ("patch", "disaggdeployments")):
        assert not permitted(plane, namespace, user(namespace), *what), what


def test_a_user_who_may_not_exec_is_told_which_right_to_ask_for(
    plane: ControlPlane, namespace: str, account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    role = yaml.safe_load(plane.kubectl("get", "role", NAME, "-n", namespace, "-o", "yaml"))
    role["rules"] = [rule for rule in role["rules"] if rule["resources"] != ["pods/exec"]]
    plane.kubectl("replace", "-n", namespace, "-f", "-", stdin=to_text(role))
    until(lambda: not permitted(plane, namespace, user(namespace), *EXEC), "the right is gone")
    assert main(["verify", "llama", "--kubeconfig", str(account), "-n", namespace]) == 1
    out = capsys.readouterr().out
    assert "AUTHENTICATION: node-prefill: " in out
    assert re.search(r'cannot (get|create) resource "pods/exec"', out), out
    assert f"ask for the right to create and get pods/exec in {namespace}" in out
    assert main(["verify", "none", "--kubeconfig", str(account), "-n", namespace]) == 1
    assert f"namespace {namespace} has no DisaggDeployment none: it has llama" in capsys.readouterr().err


def test_an_agent_that_is_not_ready_is_named_and_a_deployment_without_agents_too(
    plane: ControlPlane, namespace: str, account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = to_text({"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
    plane.kubectl("patch", "pod", "llama-decode", "-n", namespace, "--subresource=status", "-p", late)
    words = ["verify", "llama", "--kubeconfig", str(account), "-n", namespace]
    assert main(words) == 1
    assert "node-decode: pod llama-decode is not ready: `kubectl describe pod llama-decode` says why" in (
        capsys.readouterr().out
    )
    plane.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0")
    assert main(words) == 1
    assert "there is no agent for prefill: `kubectl describe dgdep` says why" in capsys.readouterr().err
