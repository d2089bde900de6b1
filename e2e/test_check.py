"""`longshore check` against a real API server: before and after an installation, and with few rights.

The API server's proxy does not go to the loopback addresses of these pods, so the agents' pages are tested in `cluster/`.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from controlplane.certificates import write_kubeconfig
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import (
    CHART,
    CRD,
    Deployments,
    enforce,
    install_definition,
    manifest,
    permitted,
    rendered_chart,
    to_text,
)
from operator_process import OperatorProcess
from test_chart import helm

from longshore_cli.check import before
from longshore_cli.main import main

LIMIT_S = 150.0
pytestmark = pytest.mark.usefixtures("nodes")
Body = dict[str, Any]


class Checked:
    """What one run of the command said, by check."""

    def __init__(self, kubeconfig: Path, *words: str) -> None:
        command = [sys.executable, "-m", "longshore_cli.main", "check", "--kubeconfig", str(kubeconfig), "-o", "json"]
        done = subprocess.run([*command, *words], check=False, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.stderr == "", done.stderr
        self.status = done.returncode
        self.lines: list[Body] = json.loads(done.stdout)

    def state(self, check: str, section: str = "") -> str:
        """Return the state of a check; empty if it was not made."""
        return " ".join(line["state"] for line in self._of(check, section))

    def message(self, check: str, section: str = "") -> str:
        return " ".join(line["message"] for line in self._of(check, section))

    def bad(self) -> list[tuple[str, str]]:
        """Return the checks with an error, and their messages."""
        return [(line["check"], line["message"]) for line in self.lines if line["state"] == "error"]

    def _of(self, check: str, section: str) -> list[Body]:
        return [line for line in self.lines if line["check"] == check and section in line["section"]]


@pytest.fixture
def bare(plane: ControlPlane) -> Iterator[None]:
    """The cluster without our definition, which comes back for other tests."""
    plane.kubectl("delete", "crd", CRD.stem, "--wait=true")
    yield
    install_definition(plane)


def file(folder: Path, *documents: Body) -> str:
    """Return the path of a file of manifests."""
    path = folder / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return str(path)


@pytest.mark.usefixtures("bare")
def test_an_empty_cluster_can_be_installed_on(
    plane: ControlPlane, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = file(tmp_path, manifest(namespace))
    found = Checked(plane.kubeconfig, "--pre", "-f", given)
    assert (found.status, found.bad()) == (0, [])
    assert "the chart installs it" in found.message("crd")
    assert "2 nodes of 2 with the label longshore.dev/role=prefill" in found.message("nodes.prefill")
    after = Checked(plane.kubeconfig, "-n", namespace)
    assert (after.status, {check for check, _ in after.bad()}) == (1, {"operator", "crd"})
    assert main(["status", "--kubeconfig", str(plane.kubeconfig)]) == 1
    line = f"{plane.server} serves no DisaggDeployment of v1alpha1: install the chart, or see `longshore check`"
    assert capsys.readouterr().err == f"longshore status: {line}\n"


def test_nodes_and_namespaces_that_do_not_suit_are_named(plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    plane.kubectl("taint", "node", "decode-0", "team=other:NoSchedule")
    enforce(plane, namespace, "restricted")
    prefill = {
        "tensorParallel": 4,
        "pageSize": 64,
        "ranksPerNode": 16,
        "nodeSelector": {"longshore.dev/role": "prefill"},
    }
    nowhere = {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "nowhere"}}
    agents = {"gpuAccess": "Runtime", "resources": {"limits": {"rdma/hca": 1}}}
    given = file(
        tmp_path, manifest(namespace, "one", prefill=prefill, agents=agents), manifest(namespace, "two", decode=nowhere)
    )
    try:
        found = Checked(plane.kubeconfig, "--pre", "-f", given)
        with_level = Checked(plane.kubeconfig, "--pre", "-n", namespace)
        enforce(plane, namespace, "privileged")
        admitted = Checked(plane.kubeconfig, "--pre", "-n", namespace)
    finally:
        plane.kubectl("taint", "node", "decode-0", "team-")
    assert found.status == 1
    assert "decode-0 tainted with team=other:NoSchedule" in found.message("nodes.decode", "/one")
    assert "no node has the label longshore.dev/role=nowhere" in found.message("nodes.decode", "/two")
    assert "prefill-0 (8), prefill-1 (8) offer fewer nvidia.com/gpu than 16 ranks" in found.message(
        "gpus.prefill", "/one"
    )
    assert "prefill-0, prefill-1 offer fewer than the 1 rdma/hca" in found.message("devices.prefill", "/one")
    assert "RuntimeClass nvidia is not there" in found.message("runtimeclass", "/one")
    for one in (found, with_level):
        assert one.state("podsecurity") == "error" and 'violates PodSecurity "restricted' in one.message("podsecurity")
        assert "ask for this right" not in one.message("podsecurity")
    assert admitted.state("podsecurity") == "ok"
    # A dry run keeps no pod.
    assert plane.kubectl("get", "pods", "-n", namespace, "-o", "name") == ""


def kubeconfig_of(plane: ControlPlane, namespace: str, folder: Path, *rules: Body) -> Path:
    """Return a kubeconfig of a new ServiceAccount with these rights in the namespace."""
    plane.kubectl("create", "serviceaccount", "checker", "-n", namespace)
    role: Body = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "checker"}}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "checker"}
    subject = {"kind": "ServiceAccount", "name": "checker", "namespace": namespace}
    binding = role | {"kind": "RoleBinding", "roleRef": reference, "subjects": [subject]}
    both = {"apiVersion": "v1", "kind": "List", "items": [role | {"rules": list(rules)}, binding]}
    plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=to_text(both))
    user = f"system:serviceaccount:{namespace}:checker"
    for rule in rules:
        (group,), (resource,), (verb,) = rule["apiGroups"], rule["resources"], rule["verbs"]
        kind = resource if resource == "*" else f"{resource}.{group}"
        until(lambda kind=kind, verb=verb: permitted(plane, namespace, user, verb, kind), "the role is bound")
    token = plane.kubectl("create", "token", "checker", "-n", namespace)
    certificate = base64.b64encode(plane.authority.certificate_path.read_bytes()).decode()
    cluster = {"server": plane.server, "certificate-authority-data": certificate}
    return write_kubeconfig(folder / f"{uuid.uuid4().hex}.kubeconfig", cluster, {"token": token}, namespace)


def test_what_a_user_may_not_do_or_read_is_said_and_is_no_ok(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    given = file(tmp_path, manifest(namespace))
    user = kubeconfig_of(
        plane, namespace, tmp_path, {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["create"]}
    )
    found = Checked(user, "--pre", "-f", given, "--operator-namespace", namespace)
    assert found.status == 1
    missing = found.message("namespace", "rights")
    assert found.state("namespace", "rights") == "error" and "create serviceaccounts" in missing
    assert "create deployments" not in missing
    assert found.state("cluster", "rights") == "error" and "clusterroles" in found.message("cluster", "rights")
    for check in ("crd", "nodes", "podsecurity"):
        assert found.state(check) == "warning", check
        assert "not checked: " in found.message(check)
    after = Checked(user)
    assert (after.state("list"), after.state("operator")) == ("warning", "warning")
    assert (after.status, Checked(user, "--strict").status) == (0, 1)


def test_the_owner_of_a_namespace_can_install_the_chart_for_it(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    user = kubeconfig_of(plane, namespace, tmp_path, {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]})
    words = ("--pre", "--operator-namespace", namespace)
    assert Checked(user, *words).state("cluster", "rights") == "error"
    # One may be in a namespace where this user may not look.
    nowhere = Checked(user, "--operator-namespace", namespace)
    assert (nowhere.state("operator"), "at the cluster scope" in nowhere.message("operator")) == ("warning", True)
    found = Checked(user, *words, "--mode", "namespaced")
    assert (found.status, found.state("namespace", "rights")) == (0, "ok")
    assert "watchNodes=false" in str(found.lines)
    done = helm(
        plane, "install", "longshore", str(CHART), "-n", namespace, f"--kubeconfig={user}",
        "--set=mode=namespaced,watchNodes=false,crds.install=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["cluster", "namespaced"])
def test_the_rights_to_ask_for_are_those_of_the_charts_objects(mode: str) -> None:
    made = {
        (body["apiVersion"].rpartition("/")[0], _plural(body["kind"]))
        for body in rendered_chart(f"--set=mode={mode}", "--no-hooks")
    }
    asked = {(right.group, right.resource) for right in before.wanted(mode, "x") if right.verb == "create"}
    # Helm's record of the release, and `--create-namespace`.
    assert asked - {("", "secrets"), ("", "namespaces")} == made


def _plural(kind: str) -> str:
    return f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"


def test_a_release_is_checked_with_its_definition_lease_and_deployment(
    plane: ControlPlane, namespace: str, deployments: Deployments
) -> None:
    done = helm(plane, "install", "longshore", str(CHART), "-n", namespace, "--set=mode=namespaced,crds.install=false")
    assert done.returncode == 0, done.stderr
    words = ("-n", namespace, "--operator-namespace", namespace)
    missing = Checked(plane.kubeconfig, *words)
    assert "no replica leads" in missing.message("lease")
    assert missing.state("crd") == "ok" and "what the operator expects" in missing.message("crd")
    settings = {"watch_namespace": namespace, "lease_name": "longshore-operator"}
    with OperatorProcess(plane, namespace, **settings) as running:
        deployments.apply()
        deployments.wait_reason("Ready", "Ready")
        found = Checked(plane.kubeconfig, "llama", *words)
        # The agents' addresses are loopback ones, to which the API server's proxy does not go.
        assert [check for check, _ in found.bad()] == ["pages"], found.bad()
        assert f"{running.identity} holds Lease {namespace}/longshore-operator" in found.message("lease")
        assert found.state("Ready") == found.state("pods") == found.state("keys") == "ok"
        assert "3 of 3 agents are ready" in found.message("pods")
        assert found.state("EnginesConnected") == "warning"
        other = Checked(plane.kubeconfig, "nobody", *words)
        assert (other.status, "it has llama" in other.message("list")) == (1, True)
    held = Checked(plane.kubeconfig, *words)
    assert (held.state("lease"), "nobody holds" in held.message("lease")) == ("error", True)
    _change_definition(plane)
    try:
        changed = Checked(plane.kubeconfig, *words)
        assert changed.state("crd") == "error" and "expects content" in changed.message("crd")
    finally:
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))


def test_a_quota_is_one_error_that_leads_to_the_daemon_sets(
    plane: ControlPlane, deployments: Deployments, operator: OperatorProcess
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "2"}}}
    plane.kubectl("apply", "-n", deployments.namespace, "-f", "-", stdin=to_text(quota))
    deployments.apply()
    deployments.wait_reason("AgentsReady", "AgentsNotReady", about="exceeded quota")
    found = Checked(plane.kubeconfig, "llama", "-n", deployments.namespace)
    # The process has no Deployment, and the proxy does not go to the agents that run.
    errors = [line for line in found.lines if line["state"] == "error" and line["check"] not in {"operator", "pages"}]
    (line,) = errors
    assert (line["check"], "exceeded quota: q" in line["message"]) == ("pods", True)
    assert line["way_out"] == (
        f"kubectl -n {deployments.namespace} describe daemonsets -l longshore.dev/deployment=llama"
    )


def _change_definition(plane: ControlPlane) -> None:
    """Add a short name, as another release might."""
    patch = [{"op": "add", "path": "/spec/names/shortNames/-", "value": "dd"}]
    plane.kubectl("patch", "crd", CRD.stem, "--type=json", "-p", json.dumps(patch))
