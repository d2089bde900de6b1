"""Tests operator and CRD of unequal releases on a real API server: no deployment leaves Ready, and the difference is named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import CRD, Deployments, to_text
from fault_proxy import FaultProxy
from operator_process import Start

Body = dict[str, Any]
pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture
def serve(plane: ControlPlane) -> Iterator[Callable[[Callable[[Body], None]], None]]:
    """Serve the CRD after a change of its schema; serve the tree's again at the end."""

    def change(edit: Callable[[Body], None]) -> None:
        body = yaml.safe_load(CRD.read_text(encoding="utf-8"))
        [version] = body["spec"]["versions"]
        before = copy.deepcopy(version["schema"])
        edit(version["schema"]["openAPIV3Schema"]["properties"])
        assert version["schema"] != before
        plane.kubectl("replace", "-f", "-", stdin=to_text(body))

    yield change
    plane.kubectl("replace", "-f", str(CRD))


def newer(properties: Body) -> None:
    """Add two fields with defaults, one of them in a section of its own, as a later release may."""
    fields = properties["spec"]["properties"]
    fields["transfer"]["properties"]["newKnob"] = {"type": "string", "enum": ["Auto", "Never"], "default": "Auto"}
    size = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True, "default": "1Gi"}
    fields["cache"] = {"type": "object", "default": {}, "properties": {"size": size}}
    properties["status"]["properties"]["later"] = {"type": "string"}


def older(properties: Body) -> None:
    """Take away what an earlier release may lack: a part of the status, a column, and conditions by a closed list."""
    status = properties["status"]["properties"]
    del status["operator"], status["prefill"]["properties"]["dataPaths"]
    condition = status["conditions"]["items"]["properties"]["type"]
    condition["enum"] = ["Ready", "Compatible", "AgentsReady", "Progressing"]


def ready(deployments: Deployments) -> tuple[Body, dict[str, str]]:
    """Return the condition and each node's agent once the deployment is ready."""
    return deployments.wait_reason("Ready", "Ready"), deployments.lives()


def test_a_newer_definition_replaces_no_agent_and_leaves_ready_as_it_is(
    deployments: Deployments, start: Start, serve: Callable[..., None]
) -> None:
    start()
    deployments.apply()
    before = ready(deployments)
    serve(newer)
    deployments.wait_reason("DefinitionMatches", "FieldsUnknown", about="spec.cache, spec.transfer.newKnob")
    assert ready(deployments) == before
    assert deployments.condition("Compatible")["reason"] == "PlanMade"
    [told] = deployments.events("FieldsUnknown")
    assert "spec.cache" in told["message"]

    # An operator that starts meanwhile, as one of the old release that was moved, sees a new deployment too.
    deployments.apply("second")
    deployments.wait_reason("Compatible", "PlanMade", "second")
    assert deployments.get("dgdep", "second")["spec"]["transfer"]["newKnob"] == "Auto"


def test_an_older_definition_gets_what_it_has_and_an_event_says_what_it_lacks(
    plane: ControlPlane, deployments: Deployments, start: Start, serve: Callable[..., None]
) -> None:
    serve(older)
    running = start()
    deployments.apply()
    ready(deployments)
    status = deployments.get("dgdep", "llama")["status"]
    assert {entry["type"] for entry in status["conditions"]} == {"Ready", "Compatible", "AgentsReady", "Progressing"}
    assert "operator" not in status
    [told] = until(lambda: deployments.events("FieldsUnknown") or _fail("no event"), "the event")
    assert "status.operator" in told["message"]
    version = deployments.get("dgdep", "llama")["metadata"]["resourceVersion"]
    count = running.metric('longshore_operator_api_calls{kind="DisaggDeployment",verb="APPLY"}')
    assert count > 0
    # At rest it writes nothing, although it cannot claim the deployment.
    reconciled = running.metric("longshore_operator_reconcile_seconds_count")
    until(
        lambda: running.metric("longshore_operator_reconcile_seconds_count") > reconciled + 1 or _fail("none"),
        "two looks",
    )
    assert deployments.get("dgdep", "llama")["metadata"]["resourceVersion"] == version
    assert running.metric('longshore_operator_api_calls{kind="DisaggDeployment",verb="APPLY"}') == count

    plane.kubectl("replace", "-f", str(CRD))
    deployments.wait_reason("DefinitionMatches", "FieldsKnown")
    assert deployments.get("dgdep", "llama")["status"]["operator"]["scope"] == "Namespace"


def test_without_its_schema_a_status_that_the_definition_refuses_is_told_by_an_event(
    deployments: Deployments, start: Start, serve: Callable[..., None], proxy: FaultProxy
) -> None:
    serve(older)
    proxy.refuse = lambda _, path: 403 if path.startswith("/openapi/") else None
    start(kubeconfig=proxy.kubeconfig)
    deployments.apply()
    [told] = until(lambda: deployments.events("FieldsUnknown") or _fail("no event"), "the event")
    assert "status.operator: field not declared in schema" in told["message"]
    assert "kubectl apply --server-side" in told["message"]


def _fail(text: str) -> Any:
    raise AssertionError(text)
