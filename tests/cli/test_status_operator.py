"""Tests that `longshore status` tells an operator that does not serve, with the answers of an API server."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import check_scene as scene
import pytest
from api_scene import DEPLOYMENTS, LEASE, NAME, api_server, lease, operator

from longshore_cli.main import main

OWN_DEPLOYMENTS = "/apis/apps/v1/namespaces/longshore-system/deployments"


@pytest.mark.parametrize(
    ("objects", "state", "about"),
    [
        ({DEPLOYMENTS: operator(), LEASE: partial(lease, 3)}, "on", ""),
        # Clocks of two machines differ.
        ({DEPLOYMENTS: operator(), LEASE: partial(lease, -20)}, "on", ""),
        ({DEPLOYMENTS: operator(), LEASE: partial(lease, 30)}, "on", ""),
        ({DEPLOYMENTS: operator(), LEASE: partial(lease, 90)}, "off", f"of operator {NAME} was renewed 90"),
        ({DEPLOYMENTS: operator(), LEASE: partial(lease, 3, "")}, "off", f"nobody holds Lease {NAME}"),
        ({DEPLOYMENTS: operator(0), LEASE: partial(lease, 3)}, "off", f"operator {NAME} has no ready pod"),
        ({OWN_DEPLOYMENTS: operator(0)}, "off", f"operator {NAME} has no ready pod"),
        ({DEPLOYMENTS: {"items": []}}, "off", "no Deployment of an operator serves namespace team"),
        ({DEPLOYMENTS: operator()}, "unknown", "no right to get this"),
        ({OWN_DEPLOYMENTS: {"items": []}}, "unknown", "no right to get this"),
        ({}, "unknown", "no right to get this"),
    ],
)
def test_status_tells_whether_an_operator_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], objects: dict[str, Any], state: str, about: str
) -> None:
    own = f"/apis/longshore.dev/v1alpha1/namespaces/{scene.SPACE}/disaggdeployments/{scene.NAME}"
    pods = f"/api/v1/namespaces/{scene.SPACE}/pods"
    there = {own: scene.served(), pods: {"items": []}, **objects}
    with api_server(there, tmp_path / "kubeconfig") as path:
        words = ["status", scene.NAME, "--kubeconfig", path, "--interval", "0.1"]
        # Only Ready and silent agents decide.
        assert main([*words, "-o", "json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["deployments"]
        assert main(words) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "operator: " in line]
    assert found["operator"]["state"] == state
    assert about in found["operator"]["text"]
    assert found["worst"] == (f"{found['operator']['text']}: conditions may be old" if state == "off" else "")
    assert [line.split()[1:3] for line in lines] == ([] if state == "on" else [["operator:", f"{state}:"]])


def test_only_leases_of_operators_that_serve_a_shown_namespace_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    (own,) = operator()["items"]
    foreign = copy.deepcopy(own)
    foreign["metadata"]["namespace"] = "theirs"
    watched = {"name": "LONGSHORE_WATCH_NAMESPACE", "value": "another-team"}
    foreign["spec"]["template"]["spec"]["containers"][0]["env"].append(watched)
    foreign_path = LEASE.replace("longshore-system", "theirs")

    def foreign_lease() -> dict[str, Any]:
        asked.append(foreign_path)
        return lease(3)

    deployments = f"/apis/longshore.dev/v1alpha1/namespaces/{scene.SPACE}/disaggdeployments"
    there = {
        deployments: {"items": [scene.served()]},
        f"/api/v1/namespaces/{scene.SPACE}/pods": {"items": []},
        DEPLOYMENTS: {"items": [own, foreign]},
        LEASE: partial(lease, 3),
        foreign_path: foreign_lease,
    }
    with api_server(there, tmp_path / "kubeconfig") as path:
        assert main(["status", "--kubeconfig", path, "--interval", "0.1", "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["deployments"]
    assert (found["operator"]["state"], asked) == ("on", [])
