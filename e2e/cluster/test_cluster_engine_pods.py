"""The examples of engines' pods on real kubelets, and what a kubelet says of pods that lack what they need."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import pytest
from cluster_pods import READY_LIMIT_S
from cluster_site import CHART, SYSTEM, Site
from controlplane.waiting import until
from example_pods import EXAMPLES, Body, example, pod_of, without_settings
from pages import commands, typed

_LIMIT_S = 120.0
_PROGRAM = [f"--from-file={EXAMPLES / 'engine' / name}" for name in ("own_engine.py", "engine_pod.py")]


def _on(site: Site, namespace: str, body: Body) -> Body:
    """Return an example's object for this namespace and this cluster's image; the nodes have the examples' labels."""
    text = json.dumps(body).replace("/run/longshore/default/", f"/run/longshore/{namespace}/")
    found: Body = json.loads(text.replace('"longshore-agent:0.1.0"', json.dumps(site.agent_image)))
    found["metadata"]["namespace"] = namespace
    return found


def _engines(site: Site, namespace: str) -> dict[str, Body]:
    """Return the pods of the examples' engines, by role. Their label has `namespace` delete them first."""
    found = {}
    for body in example("engine/pods.yaml")[1:]:
        pod = pod_of(_on(site, namespace, body))
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
        site.apply(namespace, _on(site, namespace, body))
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
    site.kubectl("-n", namespace, "create", "configmap", "own-engine-program", *_PROGRAM)
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
        site.apply(namespace, _on(site, namespace, body))
    site.kubectl("-n", namespace, "create", "configmap", "own-engine-program", *_PROGRAM)
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
