"""The alerts' unit tests by promtool, and the dashboard by the types of Grafana's SDK. Needs no cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from controlplane import binaries
from deployments import ROOT
from prometheus_server import DASHBOARD, EXAMPLE, RULES

LIMIT_S = 120.0
UNIT_TESTS = sorted((ROOT / "e2e" / "alerts").glob("*.test.yaml"))


def run(program: str, *arguments: str | Path, text: str = "") -> str:
    """Return the output of a program; fail with it if the program fails."""
    command = [binaries.find(program), *arguments]
    done = subprocess.run(command, input=text, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    assert "SUCCESS" in run("promtool", "test", "rules", path)


def test_promtool_finds_no_fault_in_the_rules() -> None:
    run("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_the_example_is_a_configuration_of_prometheus() -> None:
    assert "SUCCESS" in run("promtool", "check", "config", EXAMPLE)


def test_the_dashboard_is_what_grafana_reads() -> None:
    run("check-dashboard", text=DASHBOARD.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"legendFormat"', '"legendFormatt"', "unexpected field 'legendFormatt'"),
        ('"unit": "Bps"', '"unit": 3', "of type string"),
        ('"lineWidth"', '"linewidth"', "unexpected field 'linewidth'"),
    ],
)
def test_a_field_that_grafana_does_not_know_is_found(old: str, new: str, found: str) -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(AssertionError) as caught:
        run("check-dashboard", text=text.replace(old, new))
    assert found in str(caught.value)
