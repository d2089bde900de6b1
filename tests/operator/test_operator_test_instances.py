"""Tests that instances of `longshore verify` are no engines of a deployment, in no part of its status."""

from __future__ import annotations

from operator_scene import DECODE, PREFILL, Scene, engine, instance, peer, said, settled
from status_scene import worker

from longshore_spec.status import AgentStatus, InstanceStatus, PeerStatus
from longshore_wire.names import TEST_INSTANCE_PREFIX

TESTED = instance(f"{TEST_INSTANCE_PREFIX}prefill-1", "source")
TESTING = instance(f"{TEST_INSTANCE_PREFIX}decode-1", "target")
# As a worker of a test instance sees one that has left.
LOST = peer(TESTED.instance, "TCP", "lost")


def report(node: str, *instances: InstanceStatus, peers: tuple[PeerStatus, ...] = ()) -> AgentStatus:
    workers = tuple(
        worker(f"{entry.instance}/0/0", engines=(engine(entry.instance, *entry.roles),), peers=peers, data_path="Open")
        for entry in instances
    )
    return said(*instances, workers=workers, node=node)


def scene(prefill: AgentStatus, decode: AgentStatus) -> Scene:
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
    partial = instance(f"{TEST_INSTANCE_PREFIX}decode-2", "target", complete=False)
    tested = scene(report("a", TESTED, peers=(LOST,)), report("b", TESTING, partial, peers=(LOST,)))
    assert tested.reasons()["EnginesConnected"] == "NoEngines"
    assert tested.decide().status["decode"]["instances"] == 0
    assert "wires" not in tested.decide().status["decode"]
