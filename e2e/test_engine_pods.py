"""Tests that the example engines' pods run unchanged, with only the objects that the operator creates for them.

The nodes' pods are processes (`controlplane.process_node`) with the users, groups, variables and mounts of their manifests.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from controlplane.cluster import ControlPlane
from controlplane.process_node import ProcessNode
from controlplane.waiting import until
from deployments import Deployments, to_text
from example_pods import EXAMPLES, Body, example, moved
from operator_process import OperatorProcess
from real_agents import process_node

from longshore_spec.names import HTTP_PORT

PROGRAMS = ("engine/own_engine.py", "engine/engine_pod.py")
# Starting an agent, its self-test and its workers on few cores.
START_LIMIT_S = 150.0


@dataclass
class Field:
    """A deployment with ready agents on two nodes, and the program of its engines."""

    plane: ControlPlane
    deployments: Deployments
    nodes: dict[str, ProcessNode]
    pods: dict[str, Body]

    @property
    def namespace(self) -> str:
        return self.deployments.namespace

    def start(self, body: Body) -> None:
        self.plane.kubectl("apply", "-f", "-", stdin=to_text(body))

    def log(self, role: str, prefix: str) -> str:
        process = self.nodes[role].container(self.namespace, prefix).process
        return process.log_path.read_text() if process is not None else ""

    def address(self, role: str, prefix: str) -> str:
        return self.nodes[role].pod(self.namespace, prefix).address


@pytest.fixture(scope="module")
def field(plane: ControlPlane) -> Iterator[Field]:
    namespace = f"engines-{uuid.uuid4().hex[:6]}"
    plane.kubectl("create", "namespace", namespace)
    with ExitStack() as stack:
        stack.callback(plane.try_kubectl, "delete", "namespace", namespace, "--wait=false")
        # Delete it first. Otherwise operators of other tests would see a deployment in a namespace that is being deleted.
        stack.callback(plane.try_kubectl, "delete", "dgdep", "--all", "-n", namespace)
        nodes = {
            role: stack.enter_context(process_node(plane, f"{namespace}-{role}", f"{namespace}-{role}"))
            for role in ("prefill", "decode")
        }
        stack.enter_context(OperatorProcess(plane, namespace, watch_namespace=namespace))
        deployments = Deployments(plane, namespace, HTTP_PORT)
        for body in example("engine/deployment.yaml"):
            plane.kubectl("apply", "-f", "-", stdin=to_text(moved(body, namespace)))
        files = [f"--from-file={EXAMPLES / name}" for name in PROGRAMS]
        plane.kubectl("create", "configmap", "own-engine-program", "-n", namespace, *files)
        deployments.wait_reason("Ready", "Ready", "own-engine", START_LIMIT_S)
        pods = {
            body["metadata"]["name"].rpartition("-")[2]: moved(body, namespace)
            for body in example("engine/pods.yaml")
            if body["kind"] == "Deployment"
        }
        yield Field(plane, deployments, nodes, pods)


def test_the_examples_engines_move_requests_between_their_pods(field: Field) -> None:
    field.start(field.pods["prefill"])
    until(lambda: "registered" in field.log("prefill", "own-engine-prefill-"), "prefill is registered", START_LIMIT_S)
    decode = copy.deepcopy(field.pods["decode"])
    # Process nodes have no DNS, so replace the Service's name by its address.
    assert decode["spec"]["template"]["spec"]["containers"][0]["args"] == ["own-engine-prefill"]
    address = field.address("prefill", "own-engine-prefill-")
    decode["spec"]["template"]["spec"]["containers"][0]["args"] = [address]
    field.start(decode)
    until(lambda: field.log("decode", "own-engine-decode-").count("equal") >= 2, "two requests moved", START_LIMIT_S)
    said = field.log("decode", "own-engine-decode-").splitlines()
    assert said[:2] == ["decode is registered", "DONE, 409600 bytes, equal"]
    field.deployments.wait_reason("EnginesConnected", "EnginesConnected", "own-engine")


@pytest.mark.parametrize("name", ["engine/pods.yaml", "vllm/pods.yaml"])
def test_the_api_server_takes_every_example_as_it_is_written(plane: ControlPlane, name: str) -> None:
    said = plane.kubectl("create", "--dry-run=server", "--validate=strict", "-n", "default", "-f", str(EXAMPLES / name))
    assert said.count("created (server dry run)") == len(example(name))


def test_an_engine_outside_the_group_is_told_so_at_once(field: Field) -> None:
    body = copy.deepcopy(field.pods["decode"])
    body["metadata"]["name"] = "outsider"
    template = body["spec"]["template"]
    body["spec"]["selector"]["matchLabels"] = template["metadata"]["labels"] = {"app": "outsider"}
    del template["spec"]["securityContext"]["supplementalGroups"]
    field.start(body)

    # It is restarted each time it ends, and each start has its own log.
    def said() -> str:
        pod = field.nodes["decode"].pod(field.namespace, "outsider-")
        return "".join(path.read_text() for path in Path(pod.folder).glob("*.log"))

    until(lambda: "NotPermitted" in said(), "the engine is told", START_LIMIT_S)
    assert "is for user 10001 and group 10001 (mode 0660)" in said() and "supplementalGroups: [10001]" in said()
    assert "user 20000, groups 20000" in said()
