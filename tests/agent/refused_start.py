"""Runs an agent whose settings are wrong, for tests of what it says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

_LIMIT_S = 120


def refused_start(variables: Mapping[str, str], stdin: str | None = None) -> str:
    """Run an agent with these environment variables alone; it must end with 2; return its error output."""
    ended = subprocess.run(
        [sys.executable, "-m", "longshore_agent.main"],
        env={**variables, "PYTHONPATH": ":".join(sys.path)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2
    return ended.stderr
