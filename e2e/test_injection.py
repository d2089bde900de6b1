"""Tests the chart's injection on a real API server: which pods it changes, and how."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import CHART, Deployments, to_text
from example_pods import Body, example, moved, pods, without_settings
from operator_process import OperatorProcess
from test_chart import helm

from longshore_spec.names import HTTP_PORT

LABEL = "longshore.dev/inject"
# File of the pods -> file of their deployment.
PODS = {"engine/pods.yaml": "engine/deployment.yaml", "vllm/pods.yaml": "vllm/tiny.yaml"}
NOT_YET = "namespace {} has no such deployment and role"


@pytest.fixture(scope="module")
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace that has opted in, with the deployments of the examples, and a release that injects."""
    name = f"inject-{uuid.uuid4().hex[:6]}"
    plane.kubectl("create", "namespace", name)
    plane.kubectl("label", "namespace", name, f"{LABEL}=enabled")
    values = "inject.enabled=true,crds.install=false,mode=namespaced"
    values += ",gpu.mps.hostDirectory=/run/nvidia/mps/pipe,gpu.mps.pipeDirectory=/mps/pipe"
    done = helm(plane, "install", "longshore", str(CHART), "-n", name, f"--set={values}")
    assert done.returncode == 0, done.stderr
    mps = {"mps_host_directory": "/run/nvidia/mps/pipe", "mps_pipe_directory": "/mps/pipe"}
    with OperatorProcess(plane, name, watch_namespace=name, **mps):
        for file in PODS.values():
            for body in example(file):
                plane.kubectl("apply", "-f", "-", stdin=to_text(moved(body, name)))
        until(
            lambda: plane.kubectl("get", "cm", "-n", name, "-l", "longshore.dev/engine", "-o", "name").count("\n") == 3,
            "four ConfigMaps for engines",
        )
        # The API server learns of policies and their parameters by its own watches.
        known = labelled({"spec": {"containers": [{"name": "a", "image": "b"}]}}, name, "own-engine.prefill")
        until(lambda: "volumes" in created(plane, known)["spec"], "the policy is in force")
        yield name
        # Delete them first. Otherwise operators of other tests would see deployments in a namespace that is being deleted.
        plane.try_kubectl("delete", "dgdep", "--all", "-n", name)
    helm(plane, "uninstall", "longshore", "-n", name, "--wait")
    plane.try_kubectl("delete", "namespace", name, "--wait=false")


def labelled(pod: Body, namespace: str, target: str, **labels: str) -> Body:
    """Return a pod without a ServiceAccount's token, so that no other component adds volumes to it."""
    metadata = {"name": "engine", "namespace": namespace, "labels": {LABEL: target, **labels}}
    spec = {**pod["spec"], "automountServiceAccountToken": False}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def created(plane: ControlPlane, pod: Body) -> Body:
    """Return a pod as the API server would store it."""
    found: Body = json.loads(plane.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=to_text(pod)))
    return found


def sorted_lists(value: Any) -> Any:
    """Return a value whose lists are compared without their order."""
    if isinstance(value, dict):
        return {key: sorted_lists(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return sorted(map(sorted_lists, value), key=lambda entry: json.dumps(entry, sort_keys=True))
    return value


@pytest.mark.parametrize("file", PODS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_labelled_pod_becomes_the_pod_of_the_example(
    plane: ControlPlane, namespace: str, file: str, role: str
) -> None:
    name = example(PODS[file])[0]["metadata"]["name"]
    pod = pods(file, namespace)[f"{name}-{role}"]
    injected = created(plane, labelled(without_settings(pod), namespace, f"{name}.{role}"))
    assert sorted_lists(injected["spec"]) == sorted_lists(created(plane, pod)["spec"])
    again = created(
        plane, {**injected, "metadata": {key: injected["metadata"][key] for key in ("name", "labels", "namespace")}}
    )
    assert again["spec"] == injected["spec"]


def test_what_a_pod_has_stays(plane: ControlPlane, namespace: str) -> None:
    spec = {
        "securityContext": {"supplementalGroups": [5], "runAsUser": 7},
        "initContainers": [{"name": "first", "image": "i"}],
        "containers": [
            {
                "name": "a",
                "image": "i",
                "envFrom": [{"secretRef": {"name": "s"}}],
                "env": [{"name": "X", "value": "y"}],
            },
            {"name": "b", "image": "i", "volumeMounts": [{"name": "own", "mountPath": "/own"}]},
        ],
        "volumes": [{"name": "own", "emptyDir": {}}],
    }
    found = created(plane, labelled({"spec": spec}, namespace, "own-engine.decode"))["spec"]
    config = {"configMapRef": {"name": "own-engine-engine-decode"}}
    mount = {"name": "longshore", "mountPath": f"/run/longshore/{namespace}/own-engine", "readOnly": True}
    first, second = found["containers"]
    assert found["securityContext"] == {"supplementalGroups": [5, 10001], "runAsUser": 7}
    assert (first["envFrom"], first["env"]) == ([{"secretRef": {"name": "s"}}, config], [{"name": "X", "value": "y"}])
    assert (first["volumeMounts"], second["envFrom"]) == ([mount], [config])
    assert second["volumeMounts"] == [{"name": "own", "mountPath": "/own"}, mount]
    assert [volume["name"] for volume in found["volumes"]] == ["own", "longshore"]
    assert not {"envFrom", "volumeMounts"} & set(found["initContainers"][0])


def test_a_pod_of_a_deployment_with_mps_gets_the_pipes_of_the_nodes_daemon(plane: ControlPlane, namespace: str) -> None:
    Deployments(plane, namespace, HTTP_PORT).apply("shared", gpu={"mps": True})
    own = {"name": "b", "image": "i", "volumeMounts": [{"name": "own", "mountPath": "/mps/pipe"}]}
    spec = {"containers": [{"name": "a", "image": "i"}, own], "volumes": [{"name": "own", "emptyDir": {}}]}
    pod = labelled({"spec": spec}, namespace, "shared.decode")
    until(lambda: plane.try_kubectl("create", "--dry-run=server", "-f", "-", stdin=to_text(pod)).returncode == 0, "it")
    found = created(plane, pod)["spec"]
    first, second = found["containers"]
    assert {"name": "longshore-mps", "hostPath": {"path": "/run/nvidia/mps/pipe", "type": "Directory"}} in found[
        "volumes"
    ]
    assert {"name": "longshore-mps", "mountPath": "/mps/pipe"} in first["volumeMounts"]
    # A container's own mount stays.
    assert [mount["name"] for mount in second["volumeMounts"]] == ["own", "longshore"]
    again = labelled({"spec": found}, namespace, "shared.decode")
    assert created(plane, again)["spec"] == found


def attack(namespace: str, name: str, **metadata: Any) -> Body:
    """Return a ConfigMap with the labels of the operator's, which would give pods the whole node and a library."""
    labels = {"longshore.dev/deployment": "own-engine", "longshore.dev/engine": "prefill"}
    data = {
        "LONGSHORE_ENGINE_SOCKET": "/agent.sock",
        "LONGSHORE_ENGINE_MPS_HOST_DIRECTORY": "/",
        "CUDA_MPS_PIPE_DIRECTORY": "/host",
        "LD_PRELOAD": "/host/evil.so",
    }
    about = {"name": name, "namespace": namespace, "labels": labels, **metadata}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


def test_only_an_operator_writes_what_pods_are_changed_by(plane: ControlPlane, namespace: str) -> None:
    """A user who may write ConfigMaps, and deployments, is refused, whether he makes one or changes the operator's."""
    rights = ["--verb=*", "--resource=configmaps,disaggdeployments.longshore.dev"]
    plane.kubectl("create", "role", "writer", *rights, "-n", namespace)
    plane.kubectl("create", "rolebinding", "writer", "--role=writer", "--user=eve", "-n", namespace)
    as_eve = ("--as=eve", "--dry-run=server", "-f", "-")

    def refused(verb: str, body: Body) -> str:
        done = plane.try_kubectl(verb, *as_eve, stdin=to_text(body))
        assert done.returncode != 0
        return done.stderr

    words = "which only the operator writes"
    until(lambda: words in refused("create", attack(namespace, "zz-notes")), "the right to write ConfigMaps")
    assert words in refused("replace", attack(namespace, "own-engine-engine-prefill"))
    bare = attack(namespace, "own-engine-engine-prefill", labels={})
    assert words in refused("replace", bare), "a label cannot be taken away either"
    plain = plane.try_kubectl("create", *as_eve, stdin=to_text(attack(namespace, "plain", labels={"a": "b"})))
    assert plain.returncode == 0, plain.stderr


@pytest.mark.parametrize("forged", [{}, {"labels": {"longshore.dev/engine": "prefill"}}, {"ownerReferences": True}])
def test_a_config_map_that_is_not_the_operators_changes_and_refuses_no_pod(
    plane: ControlPlane, namespace: str, forged: dict[str, Any]
) -> None:
    """An administrator wrote it, or somebody before the policy was there."""
    if "ownerReferences" in forged:
        owner = json.loads(plane.kubectl("get", "dgdep", "own-engine", "-n", namespace, "-o", "json"))["metadata"]
        named = {"kind": "DisaggDeployment", "name": "own-engine", "uid": owner["uid"], "controller": True}
        forged = {"ownerReferences": [{"apiVersion": "longshore.dev/v1alpha1", **named}]}
    pod = labelled({"spec": {"containers": [{"name": "a", "image": "i"}]}}, namespace, "own-engine.prefill")
    before = created(plane, pod)["spec"]
    # The API server knows the policy's parameters by a watch, so that the next one, which would count, is waited for.
    name = f"zz-{uuid.uuid4().hex[:6]}"
    plane.kubectl("create", "-f", "-", stdin=to_text(attack(namespace, name, **forged)))
    later = f"later-{uuid.uuid4().hex[:6]}"
    Deployments(plane, namespace, HTTP_PORT).apply(later)
    seen = labelled(pod, namespace, f"{later}.prefill")
    until(lambda: "volumes" in created(plane, seen)["spec"], "a later ConfigMap is known")
    assert created(plane, pod)["spec"] == before
    plane.kubectl("delete", "--ignore-not-found", f"configmap/{name}", f"dgdep/{later}", "-n", namespace)


def test_pods_without_the_label_and_namespaces_that_have_not_opted_in_are_left_alone(
    plane: ControlPlane, namespace: str
) -> None:
    pod = {"spec": {"containers": [{"name": "a", "image": "i"}]}}
    plain = labelled(pod, namespace, "")
    del plain["metadata"]["labels"]
    assert "volumes" not in created(plane, plain)["spec"]
    for target in ("own-engine.prefill", "nothing"):
        assert "volumes" not in created(plane, labelled(pod, "default", target))["spec"]


@pytest.mark.parametrize("target", ["own-engin.prefill", "own-engine", "own-engine.both", "own-engine-prefill", ""])
def test_a_label_that_names_no_deployment_and_role_of_the_namespace_is_refused(
    plane: ControlPlane, namespace: str, target: str
) -> None:
    pod = labelled({"spec": {"containers": [{"name": "a", "image": "i"}]}}, namespace, target)
    done = plane.try_kubectl("create", "--dry-run=server", "-f", "-", stdin=to_text(pod))
    assert done.returncode != 0
    assert f"is '{target}', and {NOT_YET.format(namespace)}" in done.stderr
    assert "give <deployment>.prefill or <deployment>.decode" in done.stderr


def test_a_pod_that_has_other_things_under_our_volumes_name_is_refused_by_the_api_server(
    plane: ControlPlane, namespace: str
) -> None:
    pod = {"containers": [{"name": "a", "image": "i"}], "volumes": [{"name": "longshore", "emptyDir": {}}]}
    body = labelled({"spec": pod}, namespace, "own-engine.prefill")
    done = plane.try_kubectl("create", "--dry-run=server", "-f", "-", stdin=to_text(body))
    assert 'Duplicate value: "longshore"' in done.stderr


def test_engines_that_come_before_their_deployment_start_when_it_is_there(plane: ControlPlane, namespace: str) -> None:
    engines = copy.deepcopy(moved(example("engine/pods.yaml")[1], namespace))
    engines["metadata"]["name"] = "early"
    template = engines["spec"]["template"]
    template["metadata"]["labels"] = {"app": "early", LABEL: "late.prefill"}
    engines["spec"]["selector"]["matchLabels"] = {"app": "early"}
    template["spec"] = without_settings({"spec": template["spec"]})["spec"]
    plane.kubectl("apply", "-f", "-", stdin=to_text(engines))
    deployments = Deployments(plane, namespace, HTTP_PORT)
    until(
        lambda: any(NOT_YET.format(namespace) in entry["message"] for entry in deployments.events("FailedCreate")),
        "the ReplicaSet says why",
    )
    assert not deployments.list("pods", "-l", "app=early")
    deployments.apply("late")
    until(lambda: deployments.list("pods", "-l", "app=early"), "the engine's pod is made")
    volumes = deployments.list("pods", "-l", "app=early")[0]["spec"]["volumes"]
    assert {"path": f"/run/longshore/{namespace}/late", "type": "Directory"} in [
        volume.get("hostPath") for volume in volumes
    ]
