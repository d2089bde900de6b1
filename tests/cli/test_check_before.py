"""Tests each check of `longshore check --pre`: what makes it ok, a warning and an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import check_scene as scene
import pytest
import yaml
from check_scene import NO_RIGHT, ROOT, SPACE, Body, answers, only, states

from longshore_cli.check import before, definition, nodes
from longshore_cli.check.before import Before, Right, Subject, Tried
from longshore_cli.check.lines import Line, failed
from longshore_cli.cluster import ClusterError


def section(check: str, **changes: Any) -> Line:
    return only(before.lines(answers(**changes)), check)


def test_a_cluster_where_all_is_well_has_no_warning() -> None:
    found = before.lines(answers())
    assert not failed(found, strict=True), found
    assert {line.check for line in found if line.state.value == "skipped"} == {"node"}


def test_the_oldest_version_is_that_of_the_chart() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "longshore" / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={'.'.join(map(str, before.KUBERNETES_MIN))}.0-0"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ({"gitVersion": "v1.29.0"}, "ok"),
        ({"gitVersion": "v1.34.4+k3s1"}, "ok"),
        ({"gitVersion": "v1.28.15"}, "error"),
        ({}, "error"),
        (ClusterError("GET /version: 500"), "warning"),
    ],
)
def test_the_version_of_the_api_server(version: Body | Exception, state: str) -> None:
    assert section("version", version=version).state.value == state


def without(*missing: Right, mode: str = "cluster") -> dict[Right, bool]:
    wanted = before.wanted(mode, "longshore-system")
    assert set(missing) <= set(wanted)
    return {right: right not in missing for right in wanted}


RBAC = "rbac.authorization.k8s.io"
DEPLOYMENTS = Right("create", "apps", "deployments", "longshore-system")
CLUSTER_ROLES = Right("create", RBAC, "clusterroles")
NAMESPACES = Right("create", "", "namespaces")


@pytest.mark.parametrize(
    ("check", "changes", "state", "about"),
    [
        (
            "namespace",
            {"rights": without(DEPLOYMENTS)},
            "error",
            "create deployments.apps in namespace longshore-system",
        ),
        ("cluster", {"rights": without(CLUSTER_ROLES)}, "error", "create clusterroles.rbac"),
        (
            "cluster",
            {"rights": without(CLUSTER_ROLES, mode="namespaced"), "mode": "namespaced"},
            "warning",
            "count nodes",
        ),
        ("crd", {"rights": without(before.DEFINITION)}, "error", "create customresourcedefinitions"),
        ("namespaces", {"rights": without(NAMESPACES)}, "error", "longshore-system is not there"),
        ("rights", {"rights": {DEPLOYMENTS: NO_RIGHT}}, "warning", "not checked: nodes is forbidden"),
    ],
)
def test_a_missing_right_is_named(check: str, changes: Body, state: str, about: str) -> None:
    found = [line for line in before.lines(answers(**changes)) if line.section == "rights" and line.check == check]
    assert [line.state.value for line in found] == [state]
    assert about in found[0].message


def test_rights_on_what_is_there_already_are_not_needed() -> None:
    there = answers(rights=without(before.DEFINITION, NAMESPACES), definition=scene.definition(), own={"metadata": {}})
    assert not failed(before.lines(there), strict=True)


def test_a_user_who_may_not_escalate_is_told_that_the_roles_may_be_refused() -> None:
    escalate, everything = Right("escalate", RBAC, "clusterroles"), Right("*", "*", "*")
    assert section("escalate", rights=without(escalate, everything)).state.value == "warning"
    assert states(before.lines(answers(rights=without(escalate))), "escalate") == []


def changed() -> Body:
    """The CRD without a rule that the release has."""
    found = copy.deepcopy(scene.definition())
    found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["x-kubernetes-validations"].pop()
    return found


def not_served() -> Body:
    versions = copy.deepcopy(scene.definition()["spec"]["versions"])
    versions[0]["served"] = False
    return scene.definition(versions=versions)


def other_names() -> Body:
    taken = {"type": "NamesAccepted", "status": "False", "message": "shortNames dgdep is taken"}
    return scene.definition() | {"status": {"conditions": [{"type": "Established", "status": "False"}, taken]}}


def of_release(version: str) -> Body:
    found = scene.definition()
    found["metadata"]["labels"]["app.kubernetes.io/version"] = version
    return found


@pytest.mark.parametrize(
    ("found", "expected", "early", "state", "about"),
    [
        (lambda: None, None, True, "ok", "the chart installs it"),
        (lambda: None, None, False, "error", "is not there"),
        (scene.definition, scene.operator().definition, False, "ok", "what the operator expects"),
        (scene.definition, None, True, "ok", "with the content of release 0.1.0"),
        (scene.definition, "another", False, "error", "expects content another"),
        (changed, scene.operator().definition, False, "error", "expects content"),
        (changed, None, True, "warning", "it was changed"),
        (lambda: of_release("0.0.9"), None, True, "warning", "is of release 0.0.9"),
        (not_served, None, False, "error", "serves no version, not v1alpha1"),
        (other_names, None, False, "error", "shortNames dgdep is taken"),
    ],
)
def test_the_definition(
    found: Callable[[], Body | None], expected: str | None, early: bool, state: str, about: str
) -> None:
    installed = [] if expected is None else [scene.operator(definition=expected)]
    (line,) = definition.lines(found(), installed, scene.RELEASE, before=early)
    assert (line.state.value, about in line.message) == (state, True), line


def test_the_definition_of_the_tree_names_its_release() -> None:
    assert yaml.safe_load(scene.CRD_TEXT)["metadata"]["labels"]["app.kubernetes.io/version"] == scene.RELEASE
    assert f"version: {scene.RELEASE}\n" in (ROOT / "charts" / "longshore" / "Chart.yaml").read_text()


@pytest.mark.parametrize(
    ("tried", "state", "about"),
    [
        (Tried(scene.namespace("restricted"), ""), "ok", "a dry run"),
        (
            Tried(scene.namespace(), 'pods "x" is forbidden: violates PodSecurity "baseline:latest"'),
            "error",
            "baseline",
        ),
        (Tried(scene.namespace(), "exceeded quota: pods"), "error", "exceeded quota"),
        (Tried(scene.namespace("privileged"), None, "no right"), "ok", "enforces privileged"),
        (Tried(scene.namespace("restricted"), None, "no right"), "error", "enforces restricted"),
        (Tried(scene.namespace(), None, "no right"), "warning", "default is not known: no right"),
        (Tried(None, None), "warning", "is not there yet"),
        (Tried(NO_RIGHT, None, "no right"), "warning", "not checked"),
    ],
)
def test_the_pod_security_of_a_namespace(tried: Tried, state: str, about: str) -> None:
    line = section("podsecurity", namespaces={SPACE: tried})
    assert (line.state.value, about in line.message) == (state, True), line


def test_an_invalid_manifest_is_an_error_with_every_field() -> None:
    line = section("manifest", subjects=[Subject(SPACE, "bad", None, ("spec.model: missing", "spec.x: unknown"))])
    assert line.state.value == "error" and "spec.model: missing; spec.x: unknown" in line.message


def tainted(name: str, role: str, effect: str = "NoSchedule") -> Body:
    return scene.node(name, role) | {"spec": {"taints": [{"key": "team", "value": "x", "effect": effect}]}}


def down(name: str, role: str) -> Body:
    return scene.node(name, role) | {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}


TOLERATED = {"agents": {"tolerations": [{"key": "team", "operator": "Exists"}]}}
GPU, RDMA = {"nvidia.com/gpu": "4"}, {"rdma/hca": "1k"}
CDI = {"agents": {"gpuAccess": "CDI"}}
ASKS = {"agents": {"resources": {"limits": {"rdma/hca": 1}}}}
PER_NODE = {**CDI, "prefill": {"ranksPerNode": 8}}


@pytest.mark.parametrize(
    ("check", "spec", "there", "state", "about"),
    [
        ("nodes.prefill", {}, [scene.node("p", "prefill")], "ok", "1 node of 1"),
        ("nodes.decode", {}, [scene.node("p", "prefill")], "error", "no node has the label role=decode"),
        ("nodes.prefill", {}, [tainted("p", "prefill")], "error", "p tainted with team=x:NoSchedule"),
        ("nodes.prefill", TOLERATED, [tainted("p", "prefill")], "ok", "1 node of 1"),
        ("nodes.prefill", {}, [tainted("p", "prefill", "PreferNoSchedule")], "ok", "1 node of 1"),
        ("nodes.prefill", {}, [tainted("p", "prefill"), scene.node("q", "prefill")], "warning", "1 node of 2"),
        ("nodes.prefill", {}, [down("p", "prefill")], "error", "p not ready"),
        ("gpus.prefill", {}, [scene.node("p", "prefill")], "ok", "asks for no GPUs"),
        ("gpus.prefill", {}, [scene.node("p", "prefill", **GPU)], "warning", "no access"),
        ("gpus.prefill", CDI, [scene.node("p", "prefill", **GPU)], "ok", "has 4 nvidia.com/gpu"),
        ("gpus.prefill", PER_NODE, [scene.node("p", "prefill", **GPU)], "error", "p (4) offer fewer"),
        ("gpus.prefill", CDI, [scene.node("p", "prefill", **{"nvidia.com/gpu": "2"})], "warning", "fewer"),
        ("gpus.prefill", CDI, [scene.node("p", "prefill")], "warning", "p (0) offer fewer"),
        ("devices.prefill", ASKS, [scene.node("p", "prefill", **RDMA)], "ok", "offers 1 rdma/hca"),
        ("devices.prefill", ASKS, [scene.node("p", "prefill")], "error", "fewer than the 1 rdma/hca"),
        ("rdma.prefill", {}, [scene.node("p", "prefill")], "ok", "offer none"),
        ("rdma.prefill", {}, [scene.node("p", "prefill", **RDMA)], "warning", "bytes between hosts take TCP"),
        ("rdma.prefill", {"transfer": {"wires": ["RDMA"]}}, [scene.node("p", "prefill")], "warning", "allows RDMA"),
    ],
)
def test_the_nodes_of_a_role(check: str, spec: Body, there: list[Body], state: str, about: str) -> None:
    line = only(nodes.lines("s", scene.spec_of(**spec), there, [], ""), check)
    assert (line.state.value, about in line.message) == (state, True), line


@pytest.mark.parametrize(
    ("spec", "there", "default", "state", "about"),
    [
        ({}, [], "", "ok", "no RuntimeClass"),
        ({"agents": {"gpuAccess": "Runtime"}}, ["nvidia"], "", "ok", "nvidia is there"),
        ({"agents": {"gpuAccess": "Runtime"}}, [], "", "error", "RuntimeClass nvidia is not there"),
        ({}, [], "gpus", "error", "RuntimeClass gpus is not there"),
        ({"agents": {"gpuAccess": "Runtime"}}, NO_RIGHT, "", "warning", "not checked"),
    ],
)
def test_the_runtime_class(spec: Body, there: Any, default: str, state: str, about: str) -> None:
    line = only(nodes.lines("s", scene.spec_of(**spec), scene.NODES, there, default), "runtimeclass")
    assert (line.state.value, about in line.message) == (state, True), line


def test_nodes_that_may_not_be_read_are_no_ok() -> None:
    found = before.lines(answers(nodes=NO_RIGHT))
    assert states(found, "nodes") == ["warning"] and states(found, "nodes.prefill") == []


def test_without_a_manifest_nodes_are_said_to_be_unchecked() -> None:
    found: Before = answers(subjects=[])
    assert only(before.lines(found), "nodes").state.value == "skipped"
