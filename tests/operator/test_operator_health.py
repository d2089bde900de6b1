"""Tests that Argo CD and Flux, by the page's check and expressions, judge the operator's statuses as the page says."""

from __future__ import annotations

from typing import Any

import celpy
import pytest
import yaml
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError
from lupa.lua51 import LuaRuntime
from operator_scene import Scene, settled
from test_code_blocks import of
from test_operator_decide import SCENES, incompatible, paused

from longshore_spec.names import KIND

Body = dict[str, Any]

DOCUMENTS = [body for block in of("yaml") if "gitops.md" in block.place for body in yaml.safe_load_all(block.text)]
CHECK = next(body["data"] for body in DOCUMENTS if body["kind"] == "ConfigMap")
EXPRESSIONS = next(body["spec"]["healthCheckExprs"] for body in DOCUMENTS if body["kind"] == "Kustomization")


def paused_and_ready() -> Scene:
    scene = settled()
    scene.body["spec"]["paused"] = True
    return scene


def decided(scene: Scene) -> Body:
    """Return the deployment with the status that the operator writes."""
    return scene.body | {"status": scene.decide().status or scene.body["status"]}


def without_conditions(body: Body) -> Body:
    return body | {"status": {"observedGeneration": body["metadata"]["generation"]}}


def stale(body: Body) -> Body:
    return body | {"metadata": body["metadata"] | {"generation": body["metadata"]["generation"] + 1}}


# What the page says, for both tools.
JUDGED = {
    "no status": ({**settled().body, "status": None}, "Progressing", "error"),
    "no condition": (without_conditions(settled().body), "Progressing", "error"),
    "older generation": (stale(decided(settled())), "Progressing", "in progress"),
    "older generation that failed": (stale(decided(incompatible())), "Progressing", "in progress"),
    "ready": (decided(SCENES["Ready", "Ready"]), "Healthy", "current"),
    "rollout": (decided(SCENES["Progressing", "RollingOut"]), "Progressing", "in progress"),
    "refused spec": (decided(incompatible()), "Degraded", "failed"),
    "agents do not start": (decided(SCENES["Progressing", "Blocked"]), "Degraded", "failed"),
    "no node": (decided(SCENES["AgentsReady", "NoNodes"]), "Degraded", "failed"),
    "paused": (decided(paused()), "Suspended", "in progress"),
    "paused and ready": (decided(paused_and_ready()), "Suspended", "current"),
}


def by_argo(body: Body) -> tuple[str, str]:
    """Return status and message as Argo CD's interpreter gets them. It has Lua 5.1 and passes the object as `obj`."""
    lua = LuaRuntime()
    lua.globals()["obj"] = lua.table_from(
        {key: value for key, value in body.items() if value is not None}, recursive=True
    )
    (text,) = CHECK.values()
    health = lua.execute(text)
    return health["status"], health["message"]


def by_flux(body: Body) -> str:
    """Return what Flux's evaluator does: the generations, then `inProgress`, `failed` and `current`, else in progress."""
    status = body["status"] or {}
    if status.get("observedGeneration", body["metadata"]["generation"]) != body["metadata"]["generation"]:
        return "in progress"
    environment = celpy.Environment()
    (entry,) = EXPRESSIONS
    for name, verdict in (("inProgress", "in progress"), ("failed", "failed"), ("current", "current")):
        if name in entry:
            try:
                result = environment.program(environment.compile(entry[name])).evaluate({"status": json_to_cel(status)})
            except CELEvalError:
                return "error"
            if result:
                return verdict
    return "in progress"


@pytest.mark.parametrize("name", JUDGED)
def test_a_deployment_is_judged_as_the_page_says(name: str) -> None:
    body, argo, flux = JUDGED[name]
    assert (by_argo(body)[0], by_flux(body)) == (argo, flux)


def test_the_checks_are_for_our_kind_and_the_message_is_that_of_ready() -> None:
    assert list(CHECK) == [f"resource.customizations.health.longshore.dev_{KIND}"]
    assert [(entry["apiVersion"], entry["kind"]) for entry in EXPRESSIONS] == [("longshore.dev/v1alpha1", KIND)]
    scene = incompatible()
    assert by_argo(decided(scene))[1] == scene.message("Ready")
