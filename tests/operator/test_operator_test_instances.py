"""Tests that instances of `longshore verify` are no engines of a deployment, in no part of its status."""

from __future__ import annotations

from operator_scene import DECODE, PREFILL, Scene, peer, settled

from longshore_operator.reports import AgentReport, Engine, Instance, Peer, Worker
from longshore_wire.names import TEST_INSTANCE_PREFIX

TESTED = Instance(f"{TEST_INSTANCE_PREFIX}prefill-1", ("source",))
TESTING = Instance(f"{TEST_INSTANCE_PREFIX}decode-1", ("target",))
# As a worker of a test instance sees one that has left.
LOST = Peer(TESTED.instance, 0, 0, "lost", "TCP")


def report(node: str, *instances: Instance, peers: tuple[Peer, ...] = ()) -> AgentReport:
    workers = tuple(
        Worker(f"{entry.instance}/0/0", (Engine(entry.instance, 0, entry.roles),), peers, "Open") for entry in instances
    )
    return AgentReport("team/llama", node, instances=instances, workers=workers)


def scene(prefill: AgentReport, decode: AgentReport) -> Scene:
    found = settled()
    found.body["spec"]["prefill"]["instances"] = found.body["spec"]["decode"]["instances"] = 1
    found.put_agent("a", said=prefill)
    found.put_agent("b", said=decode)
    return found


def test_test_instances_change_nothing_in_the_status_of_a_deployment_with_engines() -> None:
    ours = (peer("d"), peer("p"))
    plain = scene(report("a", PREFILL, peers=ours), report("b", DECODE, peers=ours))
    tested = scene(report("a", PREFILL, TESTED, peers=(*ours, LOST)), report("b", DECODE, TESTING, peers=(*ours, LOST)))
    status = tested.decide().status
    assert status == plain.decide().status
    assert status["prefill"]["instances"] == status["decode"]["instances"] == 1
    assert tested.reasons()["PeersConnected"] == "PeersConnected"


def test_a_deployment_with_test_instances_alone_has_no_engines() -> None:
    partial = Instance(f"{TEST_INSTANCE_PREFIX}decode-2", ("target",), complete=False)
    tested = scene(report("a", TESTED, peers=(LOST,)), report("b", TESTING, partial, peers=(LOST,)))
    assert tested.reasons()["EnginesConnected"] == "NoEngines"
    assert tested.decide().status["decode"]["instances"] == 0
    assert "wire" not in tested.decide().status["decode"]
