"""Fixtures: one control plane for the whole run. Every wait has a limit; every process is ended by its id."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_responder import AgentResponder
from controlplane.cluster import ControlPlane
from controlplane.nodes import add_nodes, start_kwok
from controlplane.ports import free_port
from deployments import Deployments, install_definition
from families import pytest_configure, pytest_runtest_makereport
from fault_proxy import FaultProxy
from operator_process import OperatorProcess, Start

# Hooks of pytest, for the tests with real engines below.
__all__ = ["pytest_configure", "pytest_runtest_makereport"]
# The engines for real agents here are those of the agents' own tests.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "agent"))

# KWOK's pods get loopback addresses, so that one responder on this machine can simulate all agents.
POD_NETWORK = "127.128.0.0/10"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with KWOK and our CRD."""
    with ControlPlane(tmp_path_factory.mktemp("controlplane")) as plane:
        start_kwok(plane, POD_NETWORK)
        install_definition(plane)
        yield plane


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace for one test, deleted afterwards with its content."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    plane.kubectl("create", "namespace", name)
    yield name
    plane.try_kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def nodes(plane: ControlPlane) -> list[str]:
    """Two nodes for prefill, one for decode, one for neither."""
    labels = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "other-0": "none"}
    add_nodes(plane, {name: {"longshore.dev/role": role} for name, role in labels.items()})
    return list(labels)


@pytest.fixture(scope="session")
def responder() -> Iterator[AgentResponder]:
    """The simulation of all agents. Deployments must use its port."""
    responder = AgentResponder(free_port())
    yield responder
    responder.stop()


@pytest.fixture(scope="module")
def operator(plane: ControlPlane, nodes: list[str]) -> Iterator[OperatorProcess]:
    """The operator for most tests. It serves all namespaces, so it must not outlive the module that uses it."""
    plane.try_kubectl("create", "namespace", "longshore-system")
    with OperatorProcess(plane, "longshore-system") as running:
        yield running


@pytest.fixture
def deployments(plane: ControlPlane, namespace: str, responder: AgentResponder) -> Deployments:
    """The deployments of the test's namespace. The responder simulates their agents."""
    responder.reset()
    return Deployments(plane, namespace, responder.port)


@pytest.fixture
def start(plane: ControlPlane, deployments: Deployments) -> Iterator[Start]:
    """Starts operators that serve the test's namespace alone."""
    running: list[OperatorProcess] = []

    def begin(**settings: object) -> OperatorProcess:
        chosen = {"namespace": deployments.namespace, "watch_namespace": deployments.namespace, **settings}
        one = OperatorProcess(plane, **chosen)
        running.append(one)
        return one.__enter__()

    yield begin
    for one in running:
        one.process.stop()


@pytest.fixture
def proxy(plane: ControlPlane) -> Iterator[FaultProxy]:
    made = FaultProxy(plane)
    yield made
    made.stop()
