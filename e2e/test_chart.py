"""The chart on a real API server: both modes install, with exactly the rights that the operator needs."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from controlplane import binaries
from controlplane.certificates import write_kubeconfig
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import CHART, CRD, Deployments, permitted
from operator_process import OperatorProcess

HELM_LIMIT_S = 180.0
MODES = ("cluster", "namespaced")
pytestmark = pytest.mark.usefixtures("nodes")


def helm(plane: ControlPlane, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The result of a call of Helm."""
    return subprocess.run(
        [binaries.find("helm"), f"--kubeconfig={plane.kubeconfig}", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=HELM_LIMIT_S,
        env=os.environ
        | {"HELM_CACHE_HOME": str(plane.folder / "helm"), "HELM_CONFIG_HOME": str(plane.folder / "helm")},
    )


@pytest.fixture(params=MODES)
def release(request: pytest.FixtureRequest, plane: ControlPlane, namespace: str) -> Iterator[str]:
    """The mode of a release in the test's namespace, which enforces the restricted profile for the operator's pod."""
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    done = helm(
        plane,
        "install",
        "longshore",
        str(CHART),
        "-n",
        namespace,
        f"--set=mode={request.param}",
        "--set=crds.install=false",
    )
    assert done.returncode == 0, done.stderr
    assert "kubectl wait" in done.stdout and "helm test longshore" in done.stdout
    assert "pod-security.kubernetes.io/enforce=privileged" in done.stdout
    # Agents share a folder of the node with engines: their pods need more than the restricted profile.
    plane.kubectl("label", "namespace", namespace, "--overwrite", "pod-security.kubernetes.io/enforce=privileged")
    yield str(request.param)
    helm(plane, "uninstall", "longshore", "-n", namespace, "--wait")


@pytest.fixture
def account(plane: ControlPlane, namespace: str, release: str) -> Path:
    """A kubeconfig of the operator's ServiceAccount."""
    token = plane.kubectl("create", "token", "longshore-operator", "-n", namespace)
    certificate = base64.b64encode(plane.authority.certificate_path.read_bytes()).decode()
    cluster = {"server": plane.server, "certificate-authority-data": certificate}
    return write_kubeconfig(plane.folder / f"{namespace}.kubeconfig", cluster, {"token": token})


@pytest.mark.shows("value.mode")
def test_the_rights_of_either_mode_are_enough(
    plane: ControlPlane, namespace: str, release: str, account: Path, deployments: Deployments
) -> None:
    watched = namespace if release == "namespaced" else ""
    settings = {"watch_namespace": watched, "lease_name": "longshore-operator"}
    with OperatorProcess(plane, namespace, account, **settings) as running:
        deployments.apply()
        deployments.wait_reason("Ready", "Ready")
        deployments.apply(agents={"networkPolicy": False, "allowOpenDataPath": True, "keysRevision": 2})
        deployments.wait_reason("Ready", "Ready")
        assert deployments.get("dgdep", "llama")["status"]["keys"]["revision"] == 2
        until(lambda: not deployments.list("networkpolicies", "-l", "longshore.dev/deployment"), "no NetworkPolicy")
        assert deployments.events("Ready")
        log = running.process.log_path.read_text().splitlines()
        # Namespaces of other tests may be ending.
        assert [line for line in log if "orbidden" in line and "is being terminated" not in line] == []
        role = ["--role", "longshore.dev/role=decode"]
        tried = subprocess.run(
            [sys.executable, "-m", "longshore_operator.try_out", f"--namespace={namespace}", *role],
            check=False,
            capture_output=True,
            text=True,
            timeout=HELM_LIMIT_S,
            env=os.environ | {"KUBECONFIG": str(plane.kubeconfig)},
        )
        assert tried.returncode == 0, tried.stdout + tried.stderr


def test_secrets_can_be_made_and_not_read(plane: ControlPlane, namespace: str, release: str) -> None:
    who = f"system:serviceaccount:{namespace}:longshore-operator"

    def may(verb: str, kind: str, where: str) -> bool:
        return permitted(plane, where, who, verb, kind)

    # The API server learns of new rights by its own watches.
    until(lambda: may("create", "secrets", namespace), "the role is bound")
    assert [
        verb for verb in ("get", "list", "watch", "update", "patch", "delete") if may(verb, "secrets", namespace)
    ] == []
    if release == "cluster":
        until(lambda: may("create", "daemonsets", "default"), "the cluster's role is bound")
    else:
        assert not may("create", "daemonsets", "default")
    assert not may("create", "pods", namespace) and not may("patch", "nodes", namespace)


def test_the_operators_pod_keeps_to_the_restricted_profile(plane: ControlPlane, namespace: str, release: str) -> None:
    def made() -> bool:
        path = "{.status.replicas}"
        return plane.kubectl("get", "deployment", "longshore-operator", "-n", namespace, f"-o=jsonpath={path}") == "1"

    until(made, "the pod was admitted")


def test_the_notes_say_how_to_remove_what_a_release_leaves(
    plane: ControlPlane, namespace: str, release: str, account: Path, deployments: Deployments
) -> None:
    watched = namespace if release == "namespaced" else ""
    with OperatorProcess(plane, namespace, account, watch_namespace=watched, lease_name="longshore-operator"):
        deployments.apply()
        deployments.wait_reason("Ready", "Ready")
    notes = helm(plane, "get", "notes", "longshore", "-n", namespace).stdout
    assert helm(plane, "uninstall", "longshore", "-n", namespace, "--wait").returncode == 0
    assert len(deployments.pods()) == len(deployments.ours("ds")) + 1
    commands = [line.split()[1:] for line in notes.splitlines() if line.startswith("  kubectl") and " delete " in line]
    # Other tests need the definition and their own deployments.
    assert commands.pop() == ["delete", "crd", CRD.stem]
    for words in commands:
        plane.kubectl(*(word.replace("--all-namespaces", f"--namespace={namespace}") for word in words))
    until(lambda: deployments.names("dgdep,ds,cm,svc,sa,netpol,secret,pod,lease") == set(), "nothing is left")


@pytest.fixture
def second_namespace(plane: ControlPlane, namespace: str) -> Iterator[str]:
    plane.kubectl("create", "namespace", f"{namespace}-b")
    yield f"{namespace}-b"
    plane.try_kubectl("delete", "namespace", f"{namespace}-b", "--wait=false")


def definition(plane: ControlPlane) -> dict[str, Any]:
    return dict(json.loads(plane.kubectl("get", "crd", CRD.stem, "-o", "json")))


def test_releases_install_over_a_definition_that_is_not_theirs(
    plane: ControlPlane, namespace: str, second_namespace: str
) -> None:
    """The CRD was created by kubectl, by another release, or by a release that was uninstalled since."""
    before = definition(plane)["metadata"]
    assert "app.kubernetes.io/managed-by" not in before["labels"]
    releases = [("longshore", namespace), ("longshore", second_namespace), ("other", second_namespace)]
    for name, where in releases:
        done = helm(plane, "install", name, str(CHART), "-n", where, "--set=mode=namespaced")
        assert done.returncode == 0, done.stderr
        assert f"kubectl apply --server-side --force-conflicts -f crds/{CRD.name}" in done.stdout
    assert definition(plane)["metadata"]["labels"] == before["labels"]
    done = helm(plane, "upgrade", "longshore", str(CHART), "-n", namespace, "--set=mode=namespaced")
    assert done.returncode == 0, done.stderr
    for name, where in releases:
        assert helm(plane, "uninstall", name, "-n", where).returncode == 0
    assert definition(plane)["metadata"]["uid"] == before["uid"]


def test_a_release_keeps_its_own_definition_up_to_date(plane: ControlPlane, namespace: str) -> None:
    """Helm adopts a CRD with the release's labels, as if Helm had created it."""
    plane.kubectl("label", "crd", CRD.stem, "app.kubernetes.io/managed-by=Helm", "longshore.dev/test=old")
    owner = (f"meta.helm.sh/release-namespace={namespace}", "meta.helm.sh/release-name=longshore")
    plane.kubectl("annotate", "crd", CRD.stem, *owner)
    try:
        done = helm(plane, "install", "longshore", str(CHART), "-n", namespace, "--set=mode=namespaced")
        assert done.returncode == 0, done.stderr
        assert "was not changed" not in done.stdout
        manifest = helm(plane, "get", "manifest", "longshore", "-n", namespace).stdout
        assert "kind: CustomResourceDefinition" in manifest
        assert helm(plane, "uninstall", "longshore", "-n", namespace).returncode == 0
        assert definition(plane)
    finally:
        plane.kubectl("label", "crd", CRD.stem, "app.kubernetes.io/managed-by-", "longshore.dev/test-")
        plane.kubectl("annotate", "crd", CRD.stem, *(f"{entry.partition('=')[0]}-" for entry in owner))


def test_users_get_their_rights_by_a_role_of_either_mode(plane: ControlPlane, namespace: str, release: str) -> None:
    role = (
        f"--clusterrole={namespace}-longshore-operator-edit"
        if release == "cluster"
        else "--role=longshore-operator-edit"
    )
    plane.kubectl("create", "rolebinding", "ann", role, "--user=ann", "-n", namespace)
    plane.kubectl("create", "rolebinding", "bob", "--clusterrole=edit", "--user=bob", "-n", namespace)

    until(lambda: permitted(plane, namespace, "ann", "create", "dgdep"), "the role is bound")
    # `edit` has no rights on deployments, also when the API server knows that it is bound.
    until(lambda: permitted(plane, namespace, "bob", "create", "configmaps"), "the other role is bound")
    assert not permitted(plane, namespace, "bob", "create", "dgdep")


@pytest.mark.parametrize("mode", MODES)
def test_the_chart_is_clean_and_its_definition_is_the_trees(plane: ControlPlane, mode: str) -> None:
    linted = helm(plane, "lint", "--strict", str(CHART), f"--set=mode={mode}")
    assert linted.returncode == 0, linted.stdout
    rendered = helm(
        plane,
        "template",
        "longshore",
        str(CHART),
        f"--set=mode={mode},podMonitor.enabled=true",
        "--kube-version=1.34.4",
    )
    assert rendered.returncode == 0, rendered.stderr
    documents = [entry for entry in yaml.safe_load_all(rendered.stdout) if entry]
    definition = next(entry for entry in documents if entry["kind"] == "CustomResourceDefinition")
    assert definition == yaml.safe_load(CRD.read_text())
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    kinds = {entry["kind"] for entry in documents}
    assert {"Deployment", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "Job"} <= kinds


def test_an_unknown_value_is_refused(plane: ControlPlane) -> None:
    done = helm(plane, "template", "longshore", str(CHART), "--set=replica=2")
    assert done.returncode != 0
    assert "replica" in done.stderr
