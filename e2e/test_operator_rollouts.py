"""Tests rollouts on a real API server: which agents a change replaces, how many at a time, and which wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from controlplane.cluster import ControlPlane
from controlplane.nodes import add_nodes, remove_node
from controlplane.waiting import until
from deployments import Deployments, to_text

pytestmark = pytest.mark.usefixtures("operator", "nodes")

PREFILL = {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "prefill"}}
DECODE = {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "decode"}}
PREFILL_NODES, DECODE_NODES = {"prefill-0", "prefill-1"}, {"decode-0"}


@pytest.fixture
def ready(deployments: Deployments) -> Deployments:
    """A deployment that is Ready."""
    deployments.apply()
    deployments.wait_reason("Ready", "Ready")
    return deployments


def replaced(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {node for node in before if before[node] != after.get(node)}


def test_an_edit_of_one_role_replaces_that_roles_agents_alone(ready: Deployments) -> None:
    before = ready.lives()
    ready.apply(prefill=PREFILL | {"staging": {"lanes": 2}})
    ready.wait_reason("Ready", "Ready")
    after = ready.lives()
    assert replaced(before, after) == PREFILL_NODES
    ready.apply(prefill=PREFILL | {"staging": {"lanes": 2}}, decode=DECODE | {"staging": {"poolSize": "8Gi"}})
    ready.wait_reason("Ready", "Ready")
    assert replaced(after, ready.lives()) == DECODE_NODES
    status = ready.get("dgdep", "llama")["status"]
    assert status["agents"] == {"desired": 3, "ready": 3, "updated": 3, "summary": "3/3"}
    assert (status["prefill"]["updatedAgents"], status["decode"]["updatedAgents"]) == (2, 1)


def test_a_change_for_planning_replaces_nobody(deployments: Deployments) -> None:
    deployments.apply(transfer={"wires": ["TCP", "RDMA"]})
    deployments.wait_reason("Ready", "Ready")
    before = deployments.lives()
    plan = deployments.get("dgdep", "llama")["status"]["plan"]
    deployments.apply(transfer={"wires": ["RDMA", "TCP"], "chunkTokens": 4096})
    deployments.wait_reason("Ready", "Ready")
    assert deployments.lives() == before
    assert deployments.get("dgdep", "llama")["status"]["plan"]["writesPerChunk"] < plan["writesPerChunk"]


@pytest.fixture
def own_nodes(plane: ControlPlane, deployments: Deployments) -> Iterator[dict[str, str]]:
    """Three nodes by role: one each for prefill, decode and both."""
    name = deployments.namespace
    labels = {"prefill": ("yes", "no"), "decode": ("no", "yes"), "both": ("yes", "yes")}
    nodes = {role: f"{name}-{role}" for role in labels}
    add_nodes(plane, {nodes[role]: {f"{name}/p": p, f"{name}/d": d} for role, (p, d) in labels.items()})
    yield nodes
    for node in nodes.values():
        remove_node(plane, node)


def test_a_node_of_both_roles_has_one_agent_and_restarts_with_either_role(
    deployments: Deployments, own_nodes: dict[str, str]
) -> None:
    name = deployments.namespace
    prefill = PREFILL | {"nodeSelector": {f"{name}/p": "yes"}}
    decode = DECODE | {"nodeSelector": {f"{name}/d": "yes"}}
    deployments.apply(prefill=prefill, decode=decode)
    deployments.wait_reason("Ready", "Ready")
    before = deployments.lives()
    assert before.keys() == set(own_nodes.values())
    status = deployments.get("dgdep", "llama")["status"]
    assert (status["prefill"]["summary"], status["decode"]["summary"]) == ("2/2 TP4", "2/2 TP1")
    assert status["agents"]["summary"] == "3/3"
    deployments.apply(prefill=prefill | {"staging": {"lanes": 2}}, decode=decode)
    deployments.wait_reason("Ready", "Ready")
    assert replaced(before, deployments.lives()) == {own_nodes["prefill"], own_nodes["both"]}


def test_an_edit_of_a_selector_replaces_nobody_whose_roles_stay(ready: Deployments, plane: ControlPlane) -> None:
    def strategies() -> set[str]:
        return {body["spec"]["updateStrategy"]["type"] for body in ready.ours("ds")}

    before = ready.lives()
    narrow = {"longshore.dev/role": "prefill", ready.namespace: "yes"}
    plane.kubectl("label", "node", "prefill-0", "prefill-1", f"{ready.namespace}=yes")
    # All nodes of prefill are kept.
    ready.apply(prefill=PREFILL | {"nodeSelector": narrow})
    ready.wait_reason("Ready", "Ready")
    assert ready.lives() == before
    # One of them is no longer selected.
    plane.kubectl("label", "node", "prefill-1", f"{ready.namespace}-")
    until(lambda: ready.lives().keys() == {"prefill-0", "decode-0"}, "an agent less")
    until(lambda: ready.get("dgdep", "llama")["status"]["agents"]["summary"] == "2/2", "an agent less is counted")
    ready.wait_reason("Ready", "Ready")
    assert not replaced(ready.lives(), before)
    # The next change of the agents' config starts a rollout as before.
    ready.apply(prefill=PREFILL | {"staging": {"lanes": 2}})
    ready.wait_reason("Ready", "Ready")
    assert replaced(before, ready.lives()) == PREFILL_NODES
    until(lambda: strategies() == {"RollingUpdate"}, "rolling updates again")
    # A narrower selector and its reversal replace only the agent of the dropped node.
    before = ready.lives()
    ready.apply(prefill=PREFILL | {"staging": {"lanes": 2}, "nodeSelector": narrow})
    until(lambda: "prefill-1" not in ready.lives(), "an agent less")
    ready.apply(prefill=PREFILL | {"staging": {"lanes": 2}})
    ready.wait_reason("Ready", "Ready")
    after = ready.lives()
    assert after.keys() == before.keys() and replaced(before, after) == {"prefill-1"}
    until(lambda: strategies() == {"RollingUpdate"}, "rolling updates again")
    plane.kubectl("label", "node", "prefill-0", f"{ready.namespace}-")


@pytest.mark.shows("field.paused")
def test_nothing_changes_while_paused_and_all_of_it_after(ready: Deployments) -> None:
    before = ready.lives()
    versions = {kind: [body["metadata"]["resourceVersion"] for body in ready.ours(kind)] for kind in ("cm", "svc")}
    staging = {"staging": {"lanes": 2}}
    ready.apply(paused=True, prefill=PREFILL | staging, agents={"keysRevision": 2})
    found = ready.wait_reason("AgentsReady", "Paused", about="DaemonSet llama-agent-prefill")
    assert "keys of revision 2" in found["message"]
    ready.wait_reason("Progressing", "Paused")
    assert ready.condition("Ready")["status"] == "False"
    assert ready.lives() == before
    assert versions == {kind: [body["metadata"]["resourceVersion"] for body in ready.ours(kind)] for kind in versions}
    assert len(ready.list("secrets")) == 1
    ready.apply(prefill=PREFILL | staging, agents={"keysRevision": 2})
    ready.wait_reason("Ready", "Ready")
    assert replaced(before, ready.lives()) == PREFILL_NODES | DECODE_NODES
    assert len(ready.list("secrets")) == 2


@pytest.mark.shows("field.agents.updateStrategy.type")
def test_on_delete_agents_stay_until_their_pods_are_deleted(deployments: Deployments) -> None:
    agents: dict[str, Any] = {"updateStrategy": {"type": "OnDelete"}}
    deployments.apply(agents=agents)
    deployments.wait_reason("Ready", "Ready")
    before = deployments.lives()
    deployments.apply(agents=agents, decode=DECODE | {"staging": {"poolSize": "8Gi"}})
    deployments.wait_reason("AgentsReady", "AgentsOutdated", about="OnDelete")
    deployments.wait_reason("Progressing", "Blocked")
    assert deployments.lives() == before
    (pod,) = (pod for pod in deployments.pods() if pod["spec"]["nodeName"] in DECODE_NODES)
    deployments.plane.kubectl("delete", "pod", pod["metadata"]["name"], "-n", deployments.namespace, "--wait=false")
    deployments.wait_reason("Ready", "Ready")
    assert replaced(before, deployments.lives()) == DECODE_NODES


def test_as_many_agents_as_the_spec_says_are_replaced_at_a_time(deployments: Deployments) -> None:
    deployments.apply(agents={"updateStrategy": {"rollingUpdate": {"maxUnavailable": "50%"}}})
    deployments.wait_reason("Ready", "Ready")
    found = {body["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] for body in deployments.ours("ds")}
    assert found == {"50%"}


def test_the_daemon_set_of_an_older_operator_gives_its_nodes_to_those_of_the_roles(ready: Deployments) -> None:
    """An older operator made one DaemonSet for the nodes of both roles."""
    ready.apply(paused=True)
    ready.wait_reason("Progressing", "Paused")
    parts = ready.ours("ds")
    old = json.loads(json.dumps(parts[0]))
    terms = [
        term
        for body in parts
        for term in body["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
    ]
    template = old["spec"]["template"]
    template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] = {
        "nodeSelectorTerms": terms
    }
    template["metadata"]["annotations"]["longshore.dev/config"] = "0123456789abcdef"
    del template["metadata"]["labels"]["longshore.dev/roles"]
    del old["metadata"]["labels"]["longshore.dev/roles"]
    kept = {key: old["metadata"][key] for key in ("namespace", "labels", "annotations", "ownerReferences")}
    old = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "spec": old["spec"],
        "metadata": {"name": "llama-agent"} | kept,
    }
    old["spec"]["selector"] = {"matchLabels": {"longshore.dev/deployment": "llama"}}
    for body in parts:
        ready.plane.kubectl("delete", "ds", body["metadata"]["name"], "-n", ready.namespace)
    until(lambda: ready.pods() == [], "no agents")
    manager = "--field-manager=longshore-operator"
    ready.plane.kubectl("apply", "--server-side", manager, "-f", "-", stdin=to_text(old))
    until(lambda: len(ready.lives()) == 3, "three agents of the old DaemonSet")
    before = ready.lives()
    ready.apply()
    ready.wait_reason("Ready", "Ready")
    parts_alone = {"daemonset.apps/llama-agent-prefill", "daemonset.apps/llama-agent-decode"}
    until(lambda: ready.names("ds") == parts_alone, "the old DaemonSet is gone")
    until(lambda: replaced(before, ready.lives()) == PREFILL_NODES | DECODE_NODES, "an agent of its own for each node")
