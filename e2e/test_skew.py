"""Tests operator and CRD of unequal releases on a real API server: no deployment leaves Ready, and the difference is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import CRD, Deployments, baseline_definition, baseline_tree
from fault_proxy import FaultProxy
from operator_process import OperatorProcess, Start

Body = dict[str, Any]
pytestmark = pytest.mark.usefixtures("nodes")
_RECONCILES = "longshore_operator_reconcile_seconds_count"
_STATUS_WRITES = 'longshore_operator_api_calls{kind="DisaggDeployment",verb="APPLY"}'


@pytest.fixture
def serve(plane: ControlPlane) -> Iterator[Callable[[str], None]]:
    """Serve this CRD; serve the tree's again at the end."""
    yield lambda text: plane.kubectl("replace", "-f", "-", stdin=text) and None
    plane.kubectl("replace", "-f", str(CRD))


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's packages of the baseline."""
    return baseline_tree(tmp_path_factory.mktemp("baseline"))


def newer() -> str:
    """Return the baseline's CRD with two more fields with defaults, one of them in a section of its own."""
    body = yaml.safe_load(baseline_definition())
    properties = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    fields = properties["spec"]["properties"]
    fields["transfer"]["properties"]["newKnob"] = {"type": "string", "enum": ["Auto", "Never"], "default": "Auto"}
    size = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True, "default": "1Gi"}
    fields["cache"] = {"type": "object", "default": {}, "properties": {"size": size}}
    properties["status"]["properties"]["later"] = {"type": "string"}
    return str(yaml.safe_dump(body))


def older() -> str:
    """Return the tree's CRD without a part of the status, a field of another part, and conditions beside a closed list."""
    body = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    status = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    del status["operator"], status["prefill"]["properties"]["dataPaths"]
    condition = status["conditions"]["items"]["properties"]["type"]
    condition["enum"] = ["Ready", "Compatible", "AgentsReady", "Progressing"]
    return str(yaml.safe_dump(body))


def ready(deployments: Deployments) -> tuple[Body, dict[str, str]]:
    """Return the condition and each node's agent once the deployment is ready."""
    return deployments.wait_reason("Ready", "Ready"), deployments.lives()


def looked(operator: OperatorProcess, count: int) -> None:
    """Wait until an operator has reconciled this many times more."""
    before = operator.metric(_RECONCILES)
    until(lambda: operator.metric(_RECONCILES) >= before + count, f"{count} reconciles")


def told(deployments: Deployments) -> str:
    """Return the message of the event that names fields as soon as it is there."""

    def look() -> str:
        found = deployments.events("FieldsUnknown")
        assert len(found) == 1, found
        return str(found[0]["message"])

    return until(look, "the event")


def test_a_newer_definition_replaces_no_agent_and_leaves_ready_as_it_is(
    deployments: Deployments, start: Start, serve: Callable[[str], None], baseline: Path
) -> None:
    start(tree=baseline)
    deployments.apply()
    before = ready(deployments)
    serve(newer())
    deployments.wait_reason("DefinitionMatches", "FieldsUnknown", about="spec.cache, spec.transfer.newKnob")
    assert ready(deployments) == before
    assert deployments.condition("Compatible")["reason"] == "PlanMade"
    assert "spec.cache" in told(deployments)
    deployments.apply("second")
    deployments.wait_reason("Compatible", "PlanMade", "second")
    assert deployments.get("dgdep", "second")["spec"]["transfer"]["newKnob"] == "Auto"


def test_a_newer_operator_and_back_with_the_baselines_definition_replace_no_agent(
    deployments: Deployments, start: Start, serve: Callable[[str], None], baseline: Path
) -> None:
    """The agents' image stays. Their init containers have that of the operator, which is another one each time."""
    serve(baseline_definition())
    last = start(tree=baseline, agent_image="agent:1", operator_image="operator:1")
    deployments.apply()
    before = ready(deployments)
    for number, tree in enumerate((None, baseline), start=2):
        last.process.stop()
        last = start(tree=tree, agent_image="agent:1", operator_image=f"operator:{number}")
        looked(last, 3)
        assert ready(deployments) == before
        assert deployments.condition("Compatible")["reason"] == "PlanMade"


def test_an_older_definition_gets_what_it_has_and_an_event_says_what_it_lacks(
    deployments: Deployments, start: Start, serve: Callable[[str], None]
) -> None:
    serve(older())
    running = start()
    deployments.apply()
    ready(deployments)
    status = deployments.get("dgdep", "llama")["status"]
    assert {entry["type"] for entry in status["conditions"]} == {"Ready", "Compatible", "AgentsReady", "Progressing"}
    assert "operator" not in status
    assert "status.operator" in told(deployments)
    # At rest it writes nothing, although it cannot claim the deployment.
    version, writes = deployments.get("dgdep", "llama")["metadata"]["resourceVersion"], running.metric(_STATUS_WRITES)
    assert writes > 0
    looked(running, 2)
    assert deployments.get("dgdep", "llama")["metadata"]["resourceVersion"] == version
    assert running.metric(_STATUS_WRITES) == writes

    serve(CRD.read_text(encoding="utf-8"))
    deployments.wait_reason("DefinitionMatches", "FieldsKnown")
    assert deployments.get("dgdep", "llama")["status"]["operator"]["scope"] == "Namespace"


def test_without_its_schema_a_status_that_the_definition_refuses_is_told_by_an_event(
    deployments: Deployments, start: Start, serve: Callable[[str], None], proxy: FaultProxy
) -> None:
    serve(older())
    proxy.refuse = lambda _, path: 403 if path.startswith("/openapi/") else None
    start(kubeconfig=proxy.kubeconfig)
    deployments.apply()
    message = told(deployments)
    assert "status.operator: field not declared in schema" in message
    assert "kubectl apply --server-side" in message
