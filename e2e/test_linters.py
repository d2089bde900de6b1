"""Linters on the chart and on the operator's objects: kube-score, and the API server's own strict validation.

Each finding of kube-score is repaired, or is in `ANSWERS` with the reason.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from controlplane import binaries
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import CHART, Deployments, to_text
from operator_process import Start
from test_chart import MODES, helm

LIMIT_S = 150.0
# kube-score's grade of a check that found nothing.
_ALL_WELL = 10
_PULL = "IfNotPresent is right for tags of versions, and the chart's values set another policy or a digest"
_EGRESS = "a NetworkPolicy cannot select the API server or engines on the host's network, so egress is open"
# By kind, and kube-score's name of the check.
ANSWERS = {
    "Deployment": {
        "container-image-pull-policy": _PULL,
        "container-resources": "a CPU limit could delay the renewal of the Lease",
        "pod-networkpolicy": _EGRESS,
    },
    "Job": {
        "container-image-pull-policy": _PULL,
        "container-resources": "a CPU limit would only slow the test",
        "pod-networkpolicy": "its pod listens on no port",
    },
    "DaemonSet": {
        "container-image-pull-policy": _PULL,
        "container-resources": "a CPU limit would slow the control path, and memory is limited where ranksPerNode is given",
        "container-ephemeral-storage-request-and-limit": "an eviction would fail rooms, and users can set both",
        "container-security-context-user-group-id": "root runs chown once, with the operator's image and CHOWN alone",
        "pod-networkpolicy": _EGRESS,
    },
}


def answered(*wanted: str) -> dict[str, set[str]]:
    """Return the checks with an answer, by kind."""
    return {kind: set(ANSWERS[kind]) for kind in wanted}


def findings(*bodies: dict[str, object], text: str = "") -> dict[str, set[str]]:
    """Return the checks of kube-score that these objects fail, by kind."""
    done = subprocess.run(
        [binaries.find("kube-score"), "score", "--kubernetes-version=v1.34", "--output-format=json", "-"],
        input=text or "\n---\n".join(json.dumps(body) for body in bodies),
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    found: dict[str, set[str]] = {}
    for each in json.loads(done.stdout):
        for check in each["checks"]:
            if not check["skipped"] and check["grade"] < _ALL_WELL:
                found.setdefault(each["type_meta"]["kind"], set()).add(check["check"]["id"])
    return found


def _all_of(mode: str) -> list[str]:
    """Return the values of the chart in a mode, with the Job that only a value adds."""
    return [f"--set=mode={mode}", "--set=test.verify.deployment=llama"]


@pytest.mark.parametrize("mode", MODES)
def test_each_finding_of_the_chart_has_an_answer(plane: ControlPlane, mode: str) -> None:
    rendered = helm(plane, "template", "longshore", str(CHART), "--kube-version=1.34.0", *_all_of(mode))
    assert rendered.returncode == 0, rendered.stderr
    assert findings(text=rendered.stdout) == answered("Deployment", "Job")


@pytest.mark.parametrize("mode", MODES)
def test_the_server_strictly_accepts_the_chart(plane: ControlPlane, namespace: str, mode: str) -> None:
    values = (*_all_of(mode), "--set=crds.install=false")
    rendered = helm(plane, "template", "longshore", str(CHART), "-n", namespace, "--kube-version=1.34.0", *values)
    assert rendered.returncode == 0, rendered.stderr
    plane.kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=rendered.stdout)


def test_each_finding_of_the_operators_objects_has_an_answer(
    plane: ControlPlane, nodes: list[str], deployments: Deployments, start: Start
) -> None:
    start()
    deployments.apply()
    until(lambda: len(deployments.ours("ds")) == 2, "the DaemonSets")
    bodies = [body for kind in ("ds", "cm", "svc", "sa", "netpol", "pdb") for body in deployments.ours(kind)]
    for body in bodies:
        body.pop("status", None)
        for name in ("resourceVersion", "uid", "managedFields", "ownerReferences", "creationTimestamp", "generation"):
            body["metadata"].pop(name, None)
    assert findings(*bodies) == answered("DaemonSet")
    for body in bodies:
        body["metadata"]["name"] += "-strict"
        plane.kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=to_text(body))
