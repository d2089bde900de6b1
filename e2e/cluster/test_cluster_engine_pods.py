"""The examples of engines' pods on real kubelets, and what a kubelet says of pods that lack what they need."""

from __future__ import annotations

import base64
import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_pods import PROGRAM, READY_LIMIT_S, of_cluster
from cluster_site import CHART, SYSTEM, Site
from controlplane import binaries
from controlplane.ports import HOST, free_port
from controlplane.processes import Process
from controlplane.waiting import until
from example_pods import Body, example, pod_of, without_settings
from pages import commands, typed

_LIMIT_S = 120.0


def _engines(site: Site, namespace: str) -> dict[str, Body]:
    """Return the pods of the examples' engines, by role. Their label has `namespace` delete them first."""
    found = {}
    for body in example("engine/pods.yaml")[1:]:
        pod = pod_of(of_cluster(site, namespace, body))
        pod["metadata"]["labels"]["engine"] = pod["metadata"]["name"]
        found[pod["metadata"]["name"].rpartition("-")[2]] = pod
    return found


def _says(site: Site, namespace: str, pod: str, text: str) -> bool:
    """Whether the events or the state of a pod say this."""
    events = site.get(namespace, "events", f"--field-selector=involvedObject.name={pod}")["items"]
    state = site.get(namespace, "pod", pod)["status"]
    return text in json.dumps([event.get("message") for event in events]) + json.dumps(state)


def test_the_examples_engines_run_between_two_nodes_and_a_pod_that_lacks_something_says_what(
    site: Site, namespace: str
) -> None:
    for body in example("engine/deployment.yaml"):
        site.apply(namespace, of_cluster(site, namespace, body))
    engines = _engines(site, namespace)
    early = copy.deepcopy(engines["prefill"])
    early["metadata"] |= {"name": "no-agent"}
    early["spec"]["volumes"][0]["hostPath"]["path"] += "-that-is-not-there"
    nameless = copy.deepcopy(engines["prefill"])
    nameless["metadata"] |= {"name": "no-config"}
    nameless["spec"]["containers"][0]["envFrom"][0]["configMapRef"]["name"] = "nothing-engine-prefill"
    outsider = copy.deepcopy(engines["prefill"])
    outsider["metadata"] |= {"name": "outsider"}
    outsider["spec"]["restartPolicy"] = "Never"
    del outsider["spec"]["securityContext"]["supplementalGroups"]
    site.kubectl("-n", namespace, "create", "configmap", "own-engine-program", *PROGRAM)
    site.kubectl(
        *("-n", namespace, "wait", "--for=condition=Ready", "dgdep/own-engine"), f"--timeout={READY_LIMIT_S:g}s"
    )
    site.apply(namespace, engines["prefill"], early, nameless, outsider)

    def log(pod: str) -> str:
        return site.try_kubectl("-n", namespace, "logs", pod).stdout

    until(lambda: "prefill is registered" in log("own-engine-prefill"), "prefill is registered", _LIMIT_S)
    # The nodes have no DNS for the Service's name.
    decode = engines["decode"]
    decode["spec"]["containers"][0]["args"] = [site.get(namespace, "pod", "own-engine-prefill")["status"]["podIP"]]
    site.apply(namespace, decode)
    until(lambda: "DONE, 409600 bytes, equal" in log("own-engine-decode"), "a request has moved", _LIMIT_S)
    until(lambda: _says(site, namespace, "no-agent", "is not a directory"), "the missing folder is named", _LIMIT_S)
    until(
        lambda: _says(site, namespace, "no-config", 'configmap \\"nothing-engine-prefill\\" not found'),
        "the missing ConfigMap is named",
        _LIMIT_S,
    )
    until(lambda: "NotPermitted" in log("outsider"), "the engine outside the group is told", _LIMIT_S)
    assert "mode 0660" in log("outsider") and "supplementalGroups: [10001]" in log("outsider")


@pytest.fixture
def injection(site: Site, namespace: str) -> Iterator[None]:
    """Injection as the page on engines' pods switches it on. It is off again for the next test."""
    if "mutatingadmissionpolicies" not in site.kubectl("api-resources", "-o", "name"):
        pytest.skip("this API server does not serve MutatingAdmissionPolicy: see docs/how-to/engine-pods.md")
    typed(site, *commands("docs/how-to/engine-pods.md", "## Injection"), namespace=namespace)
    yield
    off = ("--reuse-values", "--set=inject.enabled=false", "--wait", "--timeout=120s")
    site.helm("upgrade", "longshore", str(CHART), "-n", SYSTEM, *off)


def test_labelled_pods_get_what_an_engine_needs_and_move_requests(site: Site, namespace: str, injection: None) -> None:
    for body in example("engine/deployment.yaml"):
        site.apply(namespace, of_cluster(site, namespace, body))
    site.kubectl("-n", namespace, "create", "configmap", "own-engine-program", *PROGRAM)
    engines = {}
    for role, pod in _engines(site, namespace).items():
        engines[role] = without_settings(pod)
        engines[role]["metadata"]["labels"]["longshore.dev/inject"] = f"own-engine.{role}"

    def in_force() -> bool:
        create = ("-n", namespace, "create", "--dry-run=server", "-o", "json", "-f", "-")
        pod = json.loads(site.kubectl(*create, stdin=json.dumps(engines["prefill"])))
        return "longshore" in {volume["name"] for volume in pod["spec"]["volumes"]}

    until(in_force, "the policy is in force", _LIMIT_S)
    site.apply(namespace, engines["prefill"])

    def log(pod: str) -> str:
        return site.try_kubectl("-n", namespace, "logs", pod).stdout

    until(lambda: "prefill is registered" in log("own-engine-prefill"), "prefill is registered", _LIMIT_S)
    # The nodes have no DNS for the Service's name.
    address = site.get(namespace, "pod", "own-engine-prefill")["status"]["podIP"]
    engines["decode"]["spec"]["containers"][0]["args"] = [address]
    site.apply(namespace, engines["decode"])
    until(lambda: "DONE, 409600 bytes, equal" in log("own-engine-decode"), "a request has moved", _LIMIT_S)


@pytest.fixture
def groups(site: Site, namespace: str, tmp_path: Path) -> Iterator[None]:
    """The controller of LeaderWorkerSets, as a process of this machine, and its webhooks, which give pods their variables."""
    if site.real is None:
        pytest.skip("the API server must reach webhooks on this machine: only on the nodes of `make e2e-cluster`")
    source = binaries.module_folder("lws", "sigs.k8s.io/lws") / "config"
    definition = source / "crd" / "bases" / "leaderworkerset.x-k8s.io_leaderworkersets.yaml"
    site.kubectl("apply", "--server-side", "-f", str(definition))
    authority, port = site.real.plane.authority, free_port()
    for made, name in zip(authority.issue("lws", HOST, user="lws"), ("tls.crt", "tls.key"), strict=True):
        shutil.copy(made, tmp_path / name)
    settings = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": HOST, "port": port, "certDir": str(tmp_path)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"{HOST}:{free_port()}"},
    }
    config = tmp_path / "lws.json"
    config.write_text(json.dumps(settings), encoding="utf-8")
    command = [binaries.find("lws"), f"--config={config}"]
    controller = Process("lws", command, tmp_path, os.environ | {"KUBECONFIG": str(site.kubeconfig)})
    webhooks = list(yaml.safe_load_all((source / "webhook" / "manifests.yaml").read_text(encoding="utf-8")))
    trust = base64.b64encode(authority.certificate_path.read_bytes()).decode()
    for hook in (hook for body in webhooks for hook in body["webhooks"]):
        path = hook["clientConfig"].pop("service")["path"]
        hook["clientConfig"] = {"url": f"https://{HOST}:{port}{path}", "caBundle": trust}
        hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    site.apply(namespace, *webhooks)
    yield
    site.kubectl("-n", namespace, "delete", "lws", "--all", "--cascade=foreground", "--timeout=120s")
    for body in webhooks:
        site.kubectl("delete", body["kind"], body["metadata"]["name"])
    controller.stop()
    site.kubectl("delete", "-f", str(definition))


@pytest.mark.programs("lws")
def test_the_ranks_of_a_group_of_pods_form_one_instance(site: Site, namespace: str, groups: None) -> None:
    for body in example("engine/deployment.yaml"):
        site.apply(namespace, of_cluster(site, namespace, body))
    site.kubectl("-n", namespace, "create", "configmap", "own-engine-program", *PROGRAM)
    service, group = (of_cluster(site, namespace, body) for body in example("engine/group.yaml"))
    # The nodes have no DNS for the first pod's name, so all reach it by an address of the Service.
    del service["spec"]["clusterIP"]
    service["spec"]["ports"].append({"name": "group", "port": 7001, "targetPort": "group"})
    site.apply(namespace, service)
    address = site.get(namespace, "service", "own-engine-prefill")["spec"]["clusterIP"]
    (container,) = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert container["args"] == ["$(LWS_LEADER_ADDRESS)"]
    container["args"] = [address]
    # Until the controller serves its webhook, the API server refuses the group.
    until(lambda: site.apply(namespace, group) is None, "the group is accepted", _LIMIT_S)

    def log(pod: str) -> str:
        return site.try_kubectl("-n", namespace, "logs", pod).stdout

    def placed() -> dict[str, Body]:
        found = site.get(namespace, "pods", "-l", "leaderworkerset.sigs.k8s.io/name=own-engine-group")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    leader, worker = "own-engine-group-0", "own-engine-group-0-1"
    until(lambda: "prefill is registered in pod 1" in log(worker), "the worker is registered", READY_LIMIT_S)
    until(lambda: "prefill is registered" in log(leader), "the leader is registered", _LIMIT_S)
    assert {pod["spec"]["nodeName"] for pod in placed().values()} == {site.nodes["prefill"]}
    decode = _engines(site, namespace)["decode"]
    decode["spec"]["containers"][0]["args"] = [address]
    site.apply(namespace, decode)
    until(lambda: "DONE, 409600 bytes, equal" in log("own-engine-decode"), "a request has moved", _LIMIT_S)
    wait = ("-n", namespace, "wait", "--for=condition=EnginesConnected", "dgdep/own-engine")
    site.kubectl(*wait, f"--timeout={READY_LIMIT_S:g}s")
    assert site.get(namespace, "dgdep", "own-engine")["status"]["prefill"]["instances"] == 1

    # The group starts again as a whole, as another instance.
    before = {pod["metadata"]["uid"] for pod in placed().values()}
    site.kubectl("-n", namespace, "delete", "pod", worker)
    until(lambda: len(placed()) == 2 and not before & {p["metadata"]["uid"] for p in placed().values()}, "other pods")

    def moves_again() -> bool:
        (state,) = site.get(namespace, "pod", "own-engine-decode")["status"]["containerStatuses"]
        return state["restartCount"] > 0 and "DONE, 409600 bytes, equal" in log("own-engine-decode")

    until(moves_again, "decode starts again and a request moves", _LIMIT_S)
