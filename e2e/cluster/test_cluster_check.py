"""`longshore check` with agents in pods on two nodes, whose pages it reads through the API server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from cluster_pods import Placed
from controlplane.waiting import until

_COMMAND_LIMIT_S = 60.0
_STATUS_LIMIT_S = 60.0


def checked(placed: Placed, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit status and the lines of the command."""
    command = [sys.executable, "-m", "longshore_cli.main", "check", *words, "-n", placed.namespace, "-o", "json"]
    command += ["--kubeconfig", str(placed.site.kubeconfig)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S)
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.shortest
def test_a_deployment_that_works_is_ok_and_an_agent_without_its_image_is_named(placed: Placed) -> None:
    placed.create(tp=1)
    placed.wait("Ready")
    status, lines = checked(placed, "rooms")
    assert status == 0, lines
    states = {line["check"]: line["state"] for line in lines}
    for check in (
        "lease",
        "crd",
        "Ready",
        "images",
        "pods",
        "keys",
        "pages",
        "versions",
        "readyz",
        "wires",
        "descriptors",
    ):
        assert states[check] == "ok", lines
    placed.change({"agents": {"image": "localhost/no-such-agent:1"}})

    def said() -> str:
        found = [line for line in checked(placed, "rooms")[1] if line["check"] == "images" and line["state"] == "error"]
        return found[0]["message"] if found else ""

    assert "localhost/no-such-agent:1: " in until(said, "the check names the image", _STATUS_LIMIT_S)
    assert checked(placed, "rooms")[0] == 1
