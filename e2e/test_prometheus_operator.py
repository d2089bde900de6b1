"""The chart's and the operator's objects for the Prometheus operator, checked by an API server that has its real definitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from controlplane import binaries
from controlplane.cluster import ControlPlane
from controlplane.waiting import until
from deployments import CHART, Deployments
from operator_process import Start
from prometheus_server import RULES
from test_chart import helm

pytestmark = pytest.mark.usefixtures("nodes")

NAMES = ("podmonitors", "prometheusrules")
OPERATOR = "longshore-operator"
VALUES = (
    "--set=crds.install=false,podMonitor.enabled=true,monitoring.rules.enabled=true,monitoring.dashboard.enabled=true"
)


def definition(name: str) -> Path:
    """Return the file of a definition in the Prometheus operator's Go module."""
    folder = binaries.module_folder("prometheus-operator", "github.com/prometheus-operator/prometheus-operator")
    return folder / "example" / "prometheus-operator-crd" / f"monitoring.coreos.com_{name}.yaml"


@pytest.fixture
def definitions(plane: ControlPlane) -> Iterator[None]:
    for name in NAMES:
        plane.kubectl("create", "-f", str(definition(name)))
    for name in NAMES:
        until(lambda name=name: plane.try_kubectl("get", name, "-A").returncode == 0, f"{name} are served")
    yield
    for name in NAMES:
        plane.kubectl("delete", "crd", f"{name}.monitoring.coreos.com")


def test_without_the_definitions_helm_names_them(plane: ControlPlane, namespace: str) -> None:
    done = helm(plane, "install", "longshore", str(CHART), "-n", namespace, VALUES)
    assert done.returncode != 0
    for kind in ("PodMonitor", "PrometheusRule"):
        assert f'no matches for kind "{kind}" in version "monitoring.coreos.com/v1"' in done.stderr


def test_the_definitions_accept_every_field_of_the_chart(
    plane: ControlPlane, namespace: str, definitions: None
) -> None:
    values = (VALUES, "-n", namespace, "--kube-version=1.34.0")
    rendered = helm(plane, "template", "longshore", str(CHART), *values)
    assert rendered.returncode == 0, rendered.stderr
    plane.kubectl("create", "--validate=strict", "-n", namespace, "-f", "-", stdin=rendered.stdout)
    try:
        text = plane.kubectl("get", "prometheusrule", OPERATOR, "-n", namespace, "-o", "yaml")
        assert yaml.safe_load(text)["spec"] == yaml.safe_load(RULES.read_text(encoding="utf-8"))
    finally:
        plane.kubectl("delete", "-n", namespace, "-f", "-", "--wait=false", stdin=rendered.stdout)


def test_the_definition_keeps_every_field_of_an_agents_monitor(
    deployments: Deployments, start: Start, definitions: None
) -> None:
    start()
    deployments.apply(agents={"podMonitor": True})
    spec = until(lambda: deployments.get("podmonitor", "llama-agent"), "a PodMonitor")["spec"]
    assert spec["jobLabel"] == "app.kubernetes.io/name"
    (endpoint,) = spec["podMetricsEndpoints"]
    assert {entry["targetLabel"] for entry in endpoint["relabelings"]} == {"deployment", "roles", "node"}
    assert all(len(entry["sourceLabels"]) == 1 for entry in endpoint["relabelings"])
    deployments.apply()
    until(lambda: deployments.list("podmonitors") == [], "no PodMonitor")
