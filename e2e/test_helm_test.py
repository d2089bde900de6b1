"""Runs `helm test` with running pods of the operator, the test and the agents, each with the chart's manifests and rights.

The node's pods are processes (`controlplane.process_node`) with the tokens of their own ServiceAccounts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from controlplane.cluster import ControlPlane
from controlplane.process_node import ProcessNode
from controlplane.waiting import until
from deployments import CHART
from real_agents import process_node
from test_chart import helm

LIMIT = "--timeout=150s"


@pytest.fixture
def node(plane: ControlPlane, namespace: str) -> Iterator[ProcessNode]:
    with process_node(plane, f"{namespace}-0", namespace) as started:
        yield started


@pytest.fixture
def release(plane: ControlPlane, namespace: str, node: ProcessNode) -> Iterator[str]:
    """A release whose operator runs on the node, with its Lease and its rights."""
    values = {
        "mode": "namespaced",
        "crds.install": "false",
        "nodeSelector.longshore\\.dev/role": namespace,
        "test.nodeSelector.longshore\\.dev/role": namespace,
        "test.limitSeconds": "120",
    }
    done = helm(plane, "install", "longshore", str(CHART), "-n", namespace, "--wait", LIMIT, *_set(values))
    assert done.returncode == 0, (done.stderr, [entry.process and entry.process.log() for entry in _containers(node)])
    yield "longshore"
    helm(plane, "uninstall", "longshore", "-n", namespace, "--wait", LIMIT)


def _set(values: dict[str, str]) -> list[str]:
    return [f"--set={name}={value}" for name, value in values.items()]


def _containers(node: ProcessNode) -> list:
    return [container for pod in node.pods() for container in pod.containers]


def _ended(node: ProcessNode, name: str) -> list[int | None]:
    """Return the exit states of the containers of this name."""
    return [container.exit_code for container in _containers(node) if container.spec["name"] == name]


def test_helm_test_runs_agents_and_leaves_nothing(
    plane: ControlPlane, namespace: str, release: str, node: ProcessNode
) -> None:
    done = helm(plane, "test", release, "-n", namespace, LIMIT)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "Phase:          Succeeded" in done.stdout
    events = plane.kubectl("get", "events", "-n", namespace, "-o", "jsonpath={.items[*].reason}").split()
    assert {"PlanMade", "AllAgentsReady", "Ready"} <= set(events)
    # The test's deployment, its agents and the test's pod are gone; the operator is not.
    assert plane.kubectl("get", "dgdep", "-n", namespace, "-o", "name") == ""

    def pods() -> list[str]:
        return plane.kubectl("get", "pods", "-n", namespace, "-o", "name").split()

    until(lambda: len(pods()) == 1, "only one pod is there")
    [operator] = pods()
    assert operator.startswith("pod/longshore-operator-")
    log = node.container(namespace, operator.removeprefix("pod/")).process.log_path.read_text()
    assert "orbidden" not in log and "Traceback" not in log


@pytest.mark.shows("value.agent.image", "value.test.limitSeconds")
def test_helm_test_fails_where_agents_do_not_become_ready(
    plane: ControlPlane, namespace: str, release: str, node: ProcessNode
) -> None:
    values = {"test.limitSeconds": "8", "agent.image": "no-such-image:1"}
    done = helm(
        plane, "upgrade", release, str(CHART), "-n", namespace, "--reuse-values", "--wait", LIMIT, *_set(values)
    )
    assert done.returncode == 0, done.stderr
    done = helm(plane, "test", release, "-n", namespace, LIMIT)
    assert done.returncode != 0
    assert "Phase:          Failed" in done.stdout, (done.stdout, done.stderr)
    tried = node.pod(namespace, "longshore-operator-test-")
    assert tried.containers[0].exit_code == 1
    said = tried.containers[0].process.log()
    assert "AgentsReady: False AgentsNotReady" in said and "ErrImagePull" in said
    assert "failed: try-out-" in said
    # The job, which has that log, stays under the name in the notes.
    notes = helm(plane, "get", "notes", release, "-n", namespace).stdout
    [logs] = [line.split()[1:] for line in notes.splitlines() if line.startswith("  kubectl") and " logs " in line]
    assert plane.kubectl(*("get" if word == "logs" else word for word in logs), "-o", "name").startswith("job.batch/")
    until(lambda: plane.kubectl("get", "dgdep", "-n", namespace, "-o", "name") == "", "its deployment is gone")
