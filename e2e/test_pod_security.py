"""Tests with the real admission controller that our pods pass the Pod Security levels that docs and NOTES name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import CHART, LEVEL_LABEL, ROOT, Deployments, enforce, rendered_chart, to_text
from example_pods import Body, pod_of, pods

LEVELS = ("privileged", "baseline", "restricted")
pytestmark = pytest.mark.usefixtures("operator")


def refused(plane: ControlPlane, namespace: str, pod: Body, level: str) -> list[str]:
    """Return the violations that a namespace of this level reports for a pod."""
    enforce(plane, namespace, level)
    own = {**pod, "metadata": {**pod["metadata"], "name": "tried", "namespace": namespace}}
    done = plane.try_kubectl("create", "--dry-run=server", "-f", "-", stdin=to_text(own))
    if done.returncode == 0:
        return []
    found = re.search(rf'violates PodSecurity "{level}:latest": (.*)', done.stderr)
    assert found, done.stderr
    return re.split(r"\), ", found[1])


def agent(deployments: Deployments, **agents: Any) -> Body:
    """Return the pod that the DaemonSet controller makes for the operator on a prefill node."""
    deployments.apply(agents=agents)
    name = "llama-agent-prefill"
    until(lambda: deployments.get("ds", name), "the agents' DaemonSet")
    return pod_of(deployments.get("ds", name))


def rules(found: list[str]) -> list[str]:
    """Return the names of the broken rules, without the details that follow them."""
    return [entry.partition(" (")[0] for entry in found]


def test_agents_break_one_rule_of_the_baseline_by_the_folder_of_their_socket(
    plane: ControlPlane, namespace: str, deployments: Deployments
) -> None:
    pod = agent(deployments)
    assert refused(plane, namespace, pod, "privileged") == []
    assert refused(plane, namespace, pod, "baseline") == ['hostPath volumes (volume "run")']


@pytest.mark.parametrize("file", ["engine/pods.yaml", "vllm/pods.yaml"])
def test_engines_break_one_rule_of_the_baseline_by_the_folder_of_the_socket(
    plane: ControlPlane, namespace: str, file: str
) -> None:
    for pod in pods(file, namespace).values():
        assert refused(plane, namespace, pod, "privileged") == []
        assert refused(plane, namespace, pod, "baseline") == ['hostPath volumes (volume "longshore")']


def test_the_examples_engine_is_restricted_but_for_that_folder(plane: ControlPlane, namespace: str) -> None:
    for pod in pods("engine/pods.yaml", namespace).values():
        assert rules(refused(plane, namespace, pod, "restricted")) == ["restricted volume types"]
        without = copy.deepcopy(pod)
        without["spec"]["volumes"] = [{"name": "longshore", "emptyDir": {}}, *pod["spec"]["volumes"][1:]]
        assert refused(plane, namespace, without, "restricted") == []


def test_the_operator_and_its_tests_are_restricted(plane: ControlPlane, namespace: str) -> None:
    objects = rendered_chart("-n", namespace, "--set=test.verify.deployment=llama")
    made = [body for body in objects if body["kind"] in {"Deployment", "Job"}]
    assert [body["kind"] for body in made] == ["Deployment", "Job", "Job"]
    for body in made:
        pod = pod_of(body)
        # Their accounts are not installed here.
        pod["spec"].pop("serviceAccountName", None)
        assert refused(plane, namespace, pod, "restricted") == []


def test_the_page_and_the_notes_name_the_level_that_deployments_need() -> None:
    needed = f"{LEVEL_LABEL}=privileged"
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    assert needed in notes and needed in page
