"""Tests a deployment's life and status on a real API server: applied, changed, changed back, deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from controlplane.cluster import ControlPlane
from controlplane.nodes import add_nodes, remove_node
from controlplane.waiting import until
from deployments import MONITORS, Deployments, to_text
from operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("operator", "nodes")

CHILDREN = {
    "daemonset.apps/llama-agent-prefill",
    "daemonset.apps/llama-agent-decode",
    "configmap/llama-agent",
    "configmap/llama-engine-decode",
    "configmap/llama-engine-prefill",
    "service/llama-agent",
    "serviceaccount/llama-agent",
    "networkpolicy.networking.k8s.io/llama-agent",
}


def kept(body: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an object that two applications of the same spec must have in common."""
    metadata = {key: body["metadata"].get(key) for key in ("labels", "annotations")}
    metadata["annotations"].pop("deprecated.daemonset.template.generation", None)
    spec = json.loads(json.dumps(body.get("spec", {})))
    for key in ("clusterIP", "clusterIPs"):
        spec.pop(key, None)
    return {"metadata": metadata, "spec": spec, "data": body.get("data")}


@pytest.mark.shows("field.{prefill,decode}.nodeSelector")
def test_a_deployment_becomes_agents_on_the_nodes_of_both_roles(deployments: Deployments) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    assert deployments.names("ds,cm,svc,sa,netpol") == CHILDREN
    assert {pod["spec"]["nodeName"] for pod in deployments.pods()} == {"prefill-0", "prefill-1", "decode-0"}
    status = deployments.get("dgdep", "llama")["status"]
    assert status["agents"] == {"desired": 3, "ready": 3, "updated": 3, "summary": "3/3"}
    assert status["prefill"]["nodes"] == status["prefill"]["readyAgents"] == status["prefill"]["updatedAgents"] == 2
    assert status["decode"]["summary"] == "1/1 TP1"
    # A slab is a buffer without its trailer: 8192 tokens of a pair fill ten slabs and a small part of an eleventh.
    expected = {"way": "Staged", "pairs": 4, "bytesPerToken": 327680, "writesPerChunk": 44, "slicesPerChunk": 5242880}
    assert status["plan"] == expected
    assert deployments.plane.kubectl("get", "dgdep", "-n", deployments.namespace, "llama").splitlines()[1].split()[
        :7
    ] == ["llama", "True", "Ready", "2/2", "TP4", "1/1", "TP1"]
    deployments.plane.kubectl(
        "wait", "-n", deployments.namespace, "--for=condition=Ready", "dgdep/llama", "--timeout=150s"
    )


def test_ready_is_never_true_for_an_older_generation_and_agents_are_replaced(deployments: Deployments) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    before = {pod["metadata"]["uid"] for pod in deployments.pods()}
    deployments.apply(transfer={"backend": "Mooncake"})

    def look() -> bool:
        body = deployments.get("dgdep", "llama")
        ready = next(c for c in body["status"]["conditions"] if c["type"] == "Ready")
        if ready["observedGeneration"] != body["metadata"]["generation"] or ready["status"] != "True":
            return False
        pods = deployments.pods()
        assert len(pods) == 3 and not before & {pod["metadata"]["uid"] for pod in pods}, "Ready with agents of before"
        return True

    until(look, "Ready for the new generation")
    config = json.loads(deployments.get("cm", "llama-agent")["data"]["agent.json"])
    assert config["transfer"]["backend"] == "Mooncake"


def test_from_a_to_b_and_back_ends_as_a_fresh_a(deployments: Deployments) -> None:
    def children() -> dict[str, dict[str, Any]]:
        return {name: kept(deployments.get(*name.split("/"))) for name in CHILDREN}

    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    fresh = children()
    deployments.apply(
        transfer={"backend": "Mooncake"},
        agents={
            "hostNetwork": True,
            "allowOpenDataPath": True,
            "networkPolicy": False,
            "image": "other:1",
            "tolerations": [{"operator": "Exists"}],
            "resources": {"limits": {"memory": "1Gi"}},
        },
    )
    until(lambda: "networkpolicy.networking.k8s.io/llama-agent" not in deployments.names("netpol"), "no NetworkPolicy")
    until(
        lambda: deployments.get("ds", "llama-agent-decode")["spec"]["template"]["spec"].get("hostNetwork"),
        "B is applied",
    )
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    assert children() == fresh


def test_expecting_other_numbers_of_engines_replaces_no_agent(deployments: Deployments) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    before = {pod["metadata"]["uid"] for pod in deployments.pods()}
    prefill = {"tensorParallel": 4, "pageSize": 64, "instances": 7, "nodeSelector": {"longshore.dev/role": "prefill"}}
    deployments.apply(prefill=prefill)
    deployments.wait_reason("Ready", "Ready")
    assert deployments.get("dgdep", "llama")["status"]["prefill"]["expectedInstances"] == 7
    assert {pod["metadata"]["uid"] for pod in deployments.pods()} == before


def test_a_deleted_deployment_leaves_nothing_behind(deployments: Deployments) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    deployments.plane.kubectl("delete", "dgdep", "llama", "-n", deployments.namespace)
    until(lambda: deployments.names() == set(), "no child is left")


def test_a_namespace_goes_with_its_deployments(plane: ControlPlane, deployments: Deployments) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    plane.kubectl("delete", "namespace", deployments.namespace, "--wait=false")
    until(lambda: plane.try_kubectl("get", "namespace", deployments.namespace).returncode != 0, "it is gone")


@pytest.mark.parametrize("child", sorted(CHILDREN))
def test_a_child_that_is_deleted_comes_back_at_once(deployments: Deployments, child: str) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    kind, name = child.split("/")
    uid = deployments.get(kind, name)["metadata"]["uid"]
    deployments.plane.kubectl("delete", kind, name, "-n", deployments.namespace, "--wait=false")
    until(lambda: deployments.get(kind, name)["metadata"]["uid"] != uid, "there is a new one")
    deployments.wait_reason("Ready", "Ready")


@pytest.mark.shows("field.agents.keysRevision")
def test_keys_are_made_once_and_anew_on_request(deployments: Deployments, operator: OperatorProcess) -> None:
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    first = deployments.get("dgdep", "llama")["status"]["keys"]
    deployments.apply(transfer={"chunkTokens": 4096})
    deployments.wait_reason("Ready", "Ready")
    assert deployments.get("dgdep", "llama")["status"]["keys"] == first
    deployments.apply(transfer={"chunkTokens": 4096}, agents={"keysRevision": 2})
    deployments.wait_reason("Ready", "Ready")
    second = deployments.get("dgdep", "llama")["status"]["keys"]
    assert second["revision"] == 2
    assert second["accepted"][1] == first["accepted"][0]
    template = deployments.get("ds", "llama-agent-decode")["spec"]["template"]["spec"]
    sources = next(volume["projected"]["sources"] for volume in template["volumes"] if volume["name"] == "keys")
    mounted = {source["secret"]["items"][0]["path"]: source["secret"]["name"] for source in sources}
    assert mounted == {"curve.json": second["secret"], "previous.json": first["secret"]}
    assert second["previous"] == first["secret"] != second["secret"]
    secrets = {entry["metadata"]["name"]: entry for entry in deployments.list("secrets")}
    assert set(secrets) == {first["secret"], second["secret"]}
    log = operator.process.log_path.read_text()
    assert "client_secret" not in log and "server_secret" not in log


def test_a_node_that_comes_gets_an_agent_and_one_that_goes_is_not_missed(
    plane: ControlPlane, deployments: Deployments
) -> None:
    selector = {"longshore.dev/role": deployments.namespace}
    add_nodes(plane, {f"{deployments.namespace}-0": selector})
    prefill = {"tensorParallel": 4, "pageSize": 64, "nodeSelector": selector}
    decode = {"tensorParallel": 1, "pageSize": 64, "nodeSelector": selector}
    deployments.apply(prefill=prefill, decode=decode)
    deployments.wait_reason("Ready", "Ready")
    add_nodes(plane, {f"{deployments.namespace}-1": selector})
    until(lambda: deployments.get("dgdep", "llama")["status"]["agents"]["summary"] == "2/2", "two agents")
    assert deployments.get("dgdep", "llama")["status"]["decode"]["nodes"] == 2
    for number in range(2):
        remove_node(plane, f"{deployments.namespace}-{number}")
    deployments.wait_reason("AgentsReady", "NoNodes")
    assert deployments.condition("Ready")["status"] == "False"


def test_a_node_that_changes_its_role_is_counted_with_the_other_one(
    plane: ControlPlane, deployments: Deployments
) -> None:
    roles = {role: {"longshore.dev/role": f"{deployments.namespace}-{role}"} for role in ("prefill", "decode")}
    names = [f"{deployments.namespace}-{number}" for number in range(2)]
    add_nodes(plane, dict.fromkeys(names, roles["prefill"]))
    prefill = {"tensorParallel": 4, "pageSize": 64, "nodeSelector": roles["prefill"]}
    decode = {"tensorParallel": 1, "pageSize": 64, "nodeSelector": roles["decode"]}
    deployments.apply(prefill=prefill, decode=decode)
    deployments.wait_reason("AgentsReady", "NoNodes")
    until(lambda: deployments.get("dgdep", "llama")["status"]["prefill"]["summary"] == "2/2 TP4", "agents of prefill")
    before = deployments.lives()
    plane.kubectl("label", "node", names[0], "--overwrite", f"longshore.dev/role={deployments.namespace}-decode")

    def summaries() -> bool:
        status = deployments.get("dgdep", "llama")["status"]
        return (status["prefill"]["summary"], status["decode"]["summary"]) == ("1/1 TP4", "1/1 TP1")

    until(summaries, "one agent of each role")
    deployments.wait_reason("Ready", "Ready")
    after = deployments.lives()
    assert after.keys() == before.keys()
    # The agent of the other role has another configuration; the other node's agent stays.
    assert after[names[0]] != before[names[0]] and after[names[1]] == before[names[1]]
    for name in names:
        remove_node(plane, name)


@pytest.mark.shows("field.agents.podMonitorLabels", "field.agents.podMonitor")
def test_a_pod_monitor_is_made_where_its_kind_is_and_its_absence_is_told(
    plane: ControlPlane, deployments: Deployments
) -> None:
    agents = {"podMonitor": True, "podMonitorLabels": {"release": "prometheus"}}
    deployments.apply(agents=agents)
    deployments.wait_reason("Ready", "Ready")
    (event,) = until(lambda: deployments.events("PodMonitorRefused"), "an event")
    assert event["type"] == "Warning" and "PodMonitor llama-agent" in event["message"]
    plane.kubectl("create", "-f", "-", stdin=to_text(MONITORS))

    def monitor() -> dict[str, Any]:
        return deployments.get("podmonitor", "llama-agent")

    made = until(monitor, "a PodMonitor")
    assert made["spec"]["podMetricsEndpoints"][0]["port"] == "http"
    assert made["metadata"]["labels"]["release"] == "prometheus"
    # No watch covers it: the next resync restores it.
    plane.kubectl("delete", "podmonitor", "llama-agent", "-n", deployments.namespace)
    until(lambda: monitor()["metadata"]["uid"] != made["metadata"]["uid"], "a new PodMonitor")
    patch = '{"spec": {"podMetricsEndpoints": []}}'
    plane.kubectl("patch", "podmonitor", "llama-agent", "-n", deployments.namespace, "--type=merge", "-p", patch)
    until(lambda: monitor()["spec"]["podMetricsEndpoints"], "the endpoint is back")
    deployments.apply()
    until(lambda: deployments.list("podmonitors") == [], "no PodMonitor")
    plane.kubectl("delete", "crd", "podmonitors.monitoring.coreos.com")
