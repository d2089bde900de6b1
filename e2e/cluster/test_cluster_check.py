"""`longshore check` names the causes of faults. `test_cluster_moves` checks a deployment that works."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from cluster_pods import PROGRAM, Placed, of_cluster
from cluster_site import ROLE, SYSTEM, Site
from controlplane.waiting import until
from example_pods import example

_STATUS_LIMIT_S = 60.0


def test_an_agent_without_its_image_is_named(placed: Placed) -> None:
    placed.create(tp=1, agents={"image": "localhost/no-such-agent:1"})

    def said() -> str:
        status, lines = placed.checked()
        assert status == 1
        line = lines.get("images", {})
        return str(line["message"]) if line.get("state") == "error" else ""

    assert "localhost/no-such-agent:1: " in until(said, "the check names the image", _STATUS_LIMIT_S)


def test_a_node_without_its_label_and_an_operator_that_is_off_are_named(site: Site, placed: Placed) -> None:
    placed.create(tp=1)
    placed.wait("Ready")
    site.kubectl("label", "node", site.nodes["prefill"], f"{ROLE}-")
    try:
        placed.wait("Ready=False", _STATUS_LIMIT_S)
        status, lines = placed.checked()
        assert status == 1 and f"no node is picked by prefill ({ROLE}=prefill)" in lines["AgentsReady"]["message"]
        assert lines["AgentsReady"]["way_out"].startswith("Label nodes")
    finally:
        site.kubectl("label", "node", site.nodes["prefill"], f"{ROLE}=prefill")
    placed.wait("Ready")

    replicas = site.get(SYSTEM, "deployment", "longshore-operator")["spec"]["replicas"]
    scale = f"kubectl -n {SYSTEM} scale deployment longshore-operator --replicas="
    site.type(f"{scale}0")
    try:
        status, lines = placed.checked()
        assert (status, lines["available"]["way_out"]) == (1, f"{scale}1")
    finally:
        site.type(f"{scale}{replicas}")
        site.kubectl("-n", SYSTEM, "rollout", "status", "deployment/longshore-operator", "--timeout=60s")
    assert placed.checked()[0] == 0


@pytest.fixture
def engines(site: Site, namespace: str) -> Iterator[Placed]:
    """The example of engines in pods, which works."""
    placed = Placed(site, namespace, "own-engine")
    for body in example("engine/deployment.yaml"):
        site.apply(namespace, of_cluster(site, namespace, body))
    placed.wait("Ready")
    site.kubectl("-n", namespace, "create", "configmap", "own-engine-program", *PROGRAM)
    service, *deployments = (of_cluster(site, namespace, body) for body in example("engine/pods.yaml"))
    # The nodes have no DNS for the Service's name.
    del service["spec"]["clusterIP"]
    site.apply(namespace, service)
    address = site.get(namespace, "service", service["metadata"]["name"])["spec"]["clusterIP"]
    for deployment in deployments:
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        deployment["spec"]["strategy"] = {"type": "Recreate"}
        if "args" in container:
            container["args"] = [address]
    site.apply(namespace, *deployments)
    placed.wait("EnginesConnected")
    yield placed
    site.kubectl("-n", namespace, "delete", "deployment", "--all", "--cascade=foreground", "--timeout=120s")


def looks(placed: Placed, condition: str, *words: str) -> None:
    """Wait until the status of the object, `longshore status` and `longshore check` each name a cause."""

    def named() -> bool:
        status, reason, message = placed.condition(condition)
        assert status == "False" and all(word in message for word in words), (status, reason, message)
        _, table = placed.command("status")
        assert all(word in table for word in words), table
        code, lines = placed.checked()
        assert code == 1, lines
        text = " ".join(line["message"] for line in lines.values() if line["state"] == "error")
        assert all(word in text for word in words), text
        return True

    until(named, f"the first looks name {', '.join(words)}", _STATUS_LIMIT_S)


def test_each_of_six_faults_is_named_at_the_first_look(site: Site, namespace: str, engines: Placed) -> None:
    """A label, a taint, a quota, an image, the page size of an engine, and its tensor parallelism."""
    kubectl, node = partial(site.kubectl, "-n", namespace), site.nodes["decode"]
    decode = "deployment/own-engine-decode"

    site.kubectl("label", "node", node, f"{ROLE}-")
    looks(engines, "AgentsReady", f"no node is picked by decode ({ROLE}=decode)")
    site.kubectl("label", "node", node, f"{ROLE}=decode")
    engines.wait("Ready")

    # A taint without an effect on the agent that runs, until its pod is gone.
    site.kubectl("taint", "node", node, "broken=disk:NoSchedule")
    kubectl("delete", "pod", engines.agent("decode"))
    looks(engines, "AgentsReady", "broken=disk:NoSchedule")
    site.kubectl("taint", "node", node, "broken-")
    engines.wait("Ready")

    kubectl("create", "quota", "tight", "--hard=pods=1")
    kubectl("delete", "pod", engines.agent("decode"))
    looks(engines, "AgentsReady", "exceeded quota: tight")
    kubectl("delete", "quota", "tight")
    engines.wait("Ready")

    engines.change({"agents": {"image": "localhost/no-such-agent:1"}})
    looks(engines, "AgentsReady", "localhost/no-such-agent:1")
    engines.change({"agents": {"image": None}})
    engines.wait("Ready")
    engines.wait("EnginesConnected")

    for variable, value, words in (
        ("PAGE_SIZE", "32", ("decode.pageSize", "32", "8")),
        ("TENSOR_PARALLEL", "2", ("decode.tensorParallel", "2", "1")),
    ):
        kubectl("set", "env", decode, f"LONGSHORE_ENGINE_{variable}={value}")
        looks(engines, "EnginesConnected", "own-engine-decode-", "is refused", *words)
        kubectl("set", "env", decode, f"LONGSHORE_ENGINE_{variable}-")
        engines.wait("EnginesConnected")

    kubectl("set", "image", decode, "engine=localhost/no-such-engine:1")
    looks(engines, "EnginesConnected", "pod own-engine-decode-", "ImagePull", "localhost/no-such-engine:1")
