"""Tests that the status is true for real agents and real engines.

The nodes' pods are processes (`controlplane.process_node`). Agents read all their files from the API server's objects.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from agent_world import Engine, EngineProcess, Request, room_ids
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import Deployments
from operator_process import OperatorProcess
from real_agents import MODEL, PAGE_SIZE, PodAgent, move, move_through, process_node

from longshore_client import Busy, Half, HelloRefused, KVLayout, ModelShape, Parallel, RoomEventKind
from longshore_lab.test_engine.ranks import Rank
from longshore_spec.names import HTTP_PORT

# Starting an agent, its self-test and its workers loads torch several times on few cores.
START_LIMIT_S = 150.0
SHAPE = ModelShape.kv(layers=4, kv_heads=12, head_dim=32, element_bytes=4)
LINKS = ("EnginesConnected", "PeersConnected", "TransportVerified")


@dataclass
class Field:
    """A deployment of two nodes, with its operator."""

    deployments: Deployments
    operator: OperatorProcess
    prefill: PodAgent
    decode: PodAgent
    spec: dict[str, object]

    @property
    def agents(self) -> tuple[PodAgent, PodAgent]:
        return self.prefill, self.decode

    def lives(self) -> list[tuple[str, str]]:
        return [agent.life for agent in self.agents]

    def status(self) -> dict:
        return self.deployments.get("dgdep", "llama")["status"]

    def reason(self, condition: str, reason: str, status: str, about: str = "") -> dict:
        found = self.deployments.wait_reason(condition, reason, limit_s=START_LIMIT_S, about=about)
        assert found["status"] == status, found
        return found


@pytest.fixture(scope="module")
def field(plane: ControlPlane) -> Iterator[Field]:
    namespace = f"real-{uuid.uuid4().hex[:6]}"
    roles = {role: f"{namespace}-{role}" for role in ("prefill", "decode")}
    plane.kubectl("create", "namespace", namespace)
    with ExitStack() as stack:
        stack.callback(plane.try_kubectl, "delete", "namespace", namespace, "--wait=false")
        nodes = {role: stack.enter_context(process_node(plane, f"{name}-0", name)) for role, name in roles.items()}
        settings = {"watch_namespace": namespace, "poll_stale_s": 5, "poll_timeout_s": 3}
        operator = stack.enter_context(OperatorProcess(plane, namespace, **settings))
        deployments = Deployments(plane, namespace, HTTP_PORT)
        selectors = {role: {"longshore.dev/role": name} for role, name in roles.items()}
        spec: dict[str, object] = {
            "model": MODEL,
            "prefill": {
                "instances": 1,
                "tensorParallel": 1,
                "pageSize": PAGE_SIZE,
                "staging": {"bufferSize": "8Mi", "lanes": 2},
                "nodeSelector": selectors["prefill"],
            },
            "decode": {
                "instances": 1,
                "tensorParallel": 2,
                "pageSize": PAGE_SIZE,
                "staging": {"poolSize": "32Mi"},
                "nodeSelector": selectors["decode"],
            },
        }
        deployments.apply(**spec)
        agents = {role: PodAgent(node, namespace) for role, node in nodes.items()}
        yield Field(deployments, operator, agents["prefill"], agents["decode"], spec)


@pytest.fixture
def target(field: Field) -> Iterator[Engine]:
    field.reason("Ready", "Ready", "True")
    engine = Engine(field.decode, f"d-{uuid.uuid4().hex[:4]}", 2, roles=[Half.TARGET])
    yield engine
    engine.close()


@pytest.fixture
def source(field: Field) -> Iterator[EngineProcess]:
    field.reason("Ready", "Ready", "True")
    engine = EngineProcess(field.prefill, f"p-{uuid.uuid4().hex[:4]}", roles=[Half.SOURCE])
    yield engine
    engine.close()


def test_before_any_engine_has_come_agents_are_ready_and_links_unknown(field: Field) -> None:
    field.reason("Ready", "Ready", "True")
    for condition in LINKS:
        field.reason(condition, "NoEngines", "Unknown")
    for agent in (field.prefill, field.decode):
        status = agent.status()
        assert status["deployment"] == f"{field.deployments.namespace}/llama"
        assert status["self_test"]["bytes_moved"] == 1 << 20
        # An agent reports the config digests of its own roles, as its pod has them.
        assert agent.digest in status["config"].values()
    status = field.status()
    assert "wires" not in status["prefill"]
    assert (status["prefill"]["instances"], status["decode"]["instances"]) == (0, 0)
    # No agent was reported as silent while it started, although it is polled before it listens.
    begun = min(_ready_since(pod) for pod in field.deployments.pods())
    assert [found for found in field.deployments.events("AgentSilent") if found["firstTimestamp"] < begun] == []


def _ready_since(pod: dict) -> str:
    return next(found["lastTransitionTime"] for found in pod["status"]["conditions"] if found["type"] == "Ready")


def test_engines_that_connect_and_move_pages_make_every_condition_true(
    field: Field, source: EngineProcess, target: Engine
) -> None:
    source.endpoint()
    field.reason("EnginesConnected", "EnginesConnected", "True")
    field.reason("PeersConnected", "NoPeers", "Unknown")
    ends = move(source, target, next(room_ids), 500)
    assert {end.kind for end in ends} == {RoomEventKind.DONE}
    assert target.intact()
    field.reason("PeersConnected", "PeersConnected", "True")
    field.reason("TransportVerified", "WireVerified", "True")
    field.reason("Ready", "Ready", "True")

    def told() -> list[tuple[set[str], int]]:
        status = field.status()
        return [(set(status[role].get("wires", ())), status[role]["instances"]) for role in ("prefill", "decode")]

    # An agent that answers late, on a busy machine, is left out for a moment.
    wires = until(lambda: field.prefill.wires("source"), "prefill's wires")
    assert len(wires) == 1 and wires <= {"TCP", "SharedMemory"}
    until(lambda: told() == [(wires, 1), (field.decode.wires("target"), 1)], "both wires in the status")


def test_an_engine_that_was_killed_is_missed(field: Field, source: EngineProcess, target: Engine) -> None:
    assert move(source, target, next(room_ids), 100)
    field.reason("PeersConnected", "PeersConnected", "True")
    source.kill()
    # The operator may have polled between two tests, when decode's engine was missing.
    field.reason("EnginesConnected", "EnginesMissing", "False", about="0 of 1 prefill")
    # Its peer reports it for as long as the peer's own engine lives.
    field.reason("PeersConnected", "PeersLost", "False", about=source.instance)
    assert field.status()["prefill"]["instances"] == 0
    field.reason("Ready", "Ready", "True")


def test_an_engine_of_another_layout_is_refused_by_name_and_stays_missing(field: Field, source: EngineProcess) -> None:
    source.endpoint()
    field.reason("EnginesConnected", "EnginesMissing", "False")
    with pytest.raises(HelloRefused, match=r"decode\.tensorParallel is 1 at the engine and 2"):
        Rank(field.decode.socket, "wrong", KVLayout(SHAPE, Parallel(), PAGE_SIZE), [Half.TARGET], 8, START_LIMIT_S)
    field.reason("EnginesConnected", "EnginesMissing", "False", about="0 of 1 decode")


def test_an_agent_that_was_killed_is_restarted_and_its_engines_come_back(
    field: Field, source: EngineProcess, target: Engine
) -> None:
    assert move(source, target, next(room_ids), 100)
    field.reason("PeersConnected", "PeersConnected", "True")
    before = field.decode.container.restarts
    os.kill(field.decode.container.main_pid, signal.SIGKILL)
    field.reason("AgentsReady", "AgentsNotReady", "False")
    assert field.deployments.condition("Ready")["status"] == "False"
    field.reason("Ready", "Ready", "True")
    assert field.decode.container.restarts == before + 1
    field.reason("EnginesConnected", "EnginesConnected", "True")
    until(
        lambda: {end.kind for end in move(source, target, next(room_ids), 200)} == {RoomEventKind.DONE},
        "a room is done",
    )
    assert target.intact()
    field.reason("PeersConnected", "PeersConnected", "True")


def test_an_agent_that_was_stopped_is_silent_and_no_one_guesses(
    field: Field, source: EngineProcess, target: Engine
) -> None:
    assert move(source, target, next(room_ids), 100)
    field.reason("PeersConnected", "PeersConnected", "True")
    stopped = field.prefill.container.main_pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        for condition in LINKS:
            field.reason(condition, "AgentSilent", "Unknown", about=f"{field.deployments.namespace}-prefill-0")
        # Only the supervisor was stopped: its worker still moves pages.
        assert {end.kind for end in move(source, target, next(room_ids), 100)} == {RoomEventKind.DONE}
        # The kubelet notices later. An agent that does not answer is silent, whether its pod is ready or not.
        field.reason("AgentsReady", "AgentsNotReady", "False")
        assert field.deployments.condition("EnginesConnected")["reason"] == "AgentSilent"
    finally:
        os.kill(stopped, signal.SIGCONT)
    for condition, reason in (("Ready", "Ready"), ("EnginesConnected",) * 2, ("PeersConnected",) * 2):
        field.reason(condition, reason, "True")


def test_an_agent_that_is_told_to_end_finishes_its_open_rooms_and_takes_no_new_ones(
    field: Field, target: Engine
) -> None:
    source = Engine(field.prefill, f"p-{uuid.uuid4().hex[:4]}", 1, roles=[Half.SOURCE])
    try:
        request = Request(source, target, 200)
        request.claim()
        (pod, _), container, status = field.prefill.life, field.prefill.container, field.prefill.ask
        until(lambda: status()["workers"][0]["rooms_open"], "the prefill's agent knows of the claim")
        namespace = field.deployments.namespace
        name = next(entry["metadata"]["name"] for entry in field.deployments.pods() if entry["metadata"]["uid"] == pod)
        field.deployments.plane.kubectl("delete", "pod", name, "-n", namespace, "--wait=false")
        until(lambda: {entry["state"] for entry in status()["workers"]} == {"draining"}, "it drains")
        with pytest.raises(Busy, match="the agent stops"):
            source.client.send(next(room_ids), [0], 0, PAGE_SIZE, last=True)
        request.offer()
        request.arrives(START_LIMIT_S)
        assert target.intact()
        until(lambda: container.exit_code is not None, "it has ended")
        # It ended by itself, before the end of its grace period.
        assert container.exit_code == 0
        until(lambda: field.prefill.life[0] not in {pod, ""}, "its successor")
        assert ends_of(source, target) == {RoomEventKind.DONE}
        field.reason("Ready", "Ready", "True")
    finally:
        source.close()


def test_rooms_keep_finishing_while_new_keys_replace_agents_one_by_one(field: Field, target: Engine) -> None:
    source = Engine(field.prefill, f"p-{uuid.uuid4().hex[:4]}", 1, roles=[Half.SOURCE])
    try:
        assert ends_of(source, target) == {RoomEventKind.DONE}
        before = field.status()["keys"]
        old = before["secret"].rpartition("-")[2]
        assert [keys for _, keys in field.lives()] == [old, old]
        # Agents of both roles are replaced concurrently. By hand, only one has new keys for as long as the test needs.
        agents = {"keysRevision": before["revision"] + 1, "updateStrategy": {"type": "OnDelete"}}
        field.deployments.apply(**field.spec, agents=agents)
        field.reason("AgentsReady", "AgentsOutdated", "False")
        (pod,) = (pod for pod in field.deployments.pods() if pod["metadata"]["uid"] == field.prefill.life[0])
        field.deployments.plane.kubectl(
            "delete", "pod", pod["metadata"]["name"], "-n", field.deployments.namespace, "--wait=false"
        )
        until(lambda: field.prefill.life[1] not in {old, ""}, "one agent has new keys", START_LIMIT_S)
        lives = field.lives()
        until(lambda: ends_of(source, target) == {RoomEventKind.DONE}, "a room between the two", START_LIMIT_S)
        # Both agents ran all the time, with keys of two revisions.
        assert lives == field.lives()
        field.deployments.apply(**field.spec, agents=agents | {"updateStrategy": {"type": "RollingUpdate"}})
        while any(keys in {old, ""} for _, keys in field.lives()):
            ends_of(source, target)
        field.reason("Ready", "Ready", "True")
        after = field.status()["keys"]
        assert after["previous"] == before["secret"] != after["secret"]
        assert {keys for _, keys in field.lives()} == {after["secret"].rpartition("-")[2]}
        assert ends_of(source, target) == {RoomEventKind.DONE}
        assert target.intact()
        for agent in field.agents:
            assert agent.metric("longshore_authentication_failures_total") == 0
    finally:
        source.close()


def ends_of(source: Engine, target: Engine) -> set[RoomEventKind]:
    """Return a room's end at all ranks. A room of an agent that is being replaced may fail; its pages are then released."""
    return {end.kind for end in move_through(Request(source, target, 200))}
