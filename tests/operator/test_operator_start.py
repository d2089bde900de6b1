"""Tests the operator's message if it cannot start: one line with the remedy, without a stack trace."""

from __future__ import annotations

import subprocess
import sys

import pytest


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "longshore_operator.main", *arguments],
        env={"PYTHONPATH": ":".join(sys.path), "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_cluster_it_ends_with_one_line_that_says_how_to_name_one() -> None:
    ended = started(KUBECONFIG="/none/config")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("longshore-operator: KUBECONFIG: no cluster is known here: ")
    assert "run it in a pod with a ServiceAccount, or name a kubeconfig" in line


@pytest.mark.slow
def test_help_is_shown_and_nothing_starts() -> None:
    ended = started("--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "docs/reference/operator.md" in ended.stdout
    ended = started("--bogus")
    assert ended.returncode == 2
    assert "unrecognized arguments: --bogus" in ended.stderr
