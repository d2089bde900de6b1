"""Two replicas of the operator on two nodes: one hangs and its pod is deleted, and the other one takes over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_pods import Placed, Rooms
from cluster_site import CHART, SYSTEM, Site
from controlplane.waiting import until

# The Lease expires after 15 s without a renewal, and a waiting replica looks at it every 2 s.
_TAKEN_OVER_LIMIT_S = 30.0
_CHUNK_TOKENS = 4096


@pytest.fixture
def replicas(site: Site, release: str) -> Iterator[list[str]]:
    """The names of two replicas, each on a node of its own. One replica remains for the next test."""
    change = ("upgrade", "longshore", str(CHART), "-n", SYSTEM, "--wait", "--timeout=120s", *site.values())
    # A pod of the rollout's old version would keep a new one away from its node.
    site.kubectl("-n", SYSTEM, "scale", "deployment/longshore-operator", "--replicas=0")
    until(lambda: _operators(site) == [], "the single replica is gone")
    site.helm(*change, "--set=replicas=2", "--set=nodeSelector=null")
    pods = _operators(site)
    assert {pod["spec"]["nodeName"] for pod in pods} == set(site.nodes.values())
    yield [pod["metadata"]["name"] for pod in pods]
    site.helm(*change)


def test_a_second_operator_takes_over_with_the_status_as_it_was_and_carries_out_an_edit(
    site: Site, replicas: list[str], placed: Placed, load: Rooms
) -> None:
    placed.wait("EnginesConnected")
    placed.wait("PeersConnected")
    before, told = placed.transitions(), placed.events()
    leader = _holder(site)
    (survivor,) = set(replicas) - {leader}
    # It cannot release the Lease any more, as on a node that lost its power.
    _stop(site, leader)
    site.kubectl("-n", SYSTEM, "delete", "pod", leader, "--grace-period=0", "--force")
    until(lambda: _holder(site) == survivor, "the other replica holds the Lease", _TAKEN_OVER_LIMIT_S)
    placed.change({"transfer": {"chunkTokens": _CHUNK_TOKENS}})
    until(lambda: _planned(placed), "the edit is carried out")
    load.more(10)
    assert placed.transitions() == before
    assert placed.events() == told
    assert load.failed() == []


def _operators(site: Site) -> list[dict]:
    return list(site.get(SYSTEM, "pods", "-l", "app.kubernetes.io/name=longshore-operator")["items"])


def _holder(site: Site) -> str:
    return str(site.get(SYSTEM, "lease", "longshore-operator")["spec"]["holderIdentity"])


def _stop(site: Site, name: str) -> None:
    """Stop an operator's process by SIGSTOP."""
    pod = site.get(SYSTEM, "pod", name)
    (role,) = [role for role, node in site.nodes.items() if node == pod["spec"]["nodeName"]]
    container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    site.node(role).run("ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGSTOP", container)


def _planned(placed: Placed) -> bool:
    """Whether the status describes the current spec."""
    found = placed.site.get(placed.namespace, "dgdep", placed.name)
    return bool(found["status"]["observedGeneration"] == found["metadata"]["generation"])
