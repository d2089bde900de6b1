"""Tests the example for engine authors with real agents, and that its page quotes its lines."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from left_behind import marked

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engine" / "own_engine.py"
MANIFEST = ROOT / "examples" / "engine" / "deployment.yaml"
PAGE = ROOT / "docs" / "how-to" / "engines.md"


def blocks(language: str) -> list[str]:
    """Return the page's code blocks in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


@pytest.mark.slow
def test_the_example_prints_what_its_page_shows() -> None:
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        arguments = ["-u", "-m", "longshore_cli.main", "up", "-f", str(MANIFEST), "--directory", directory]
        with marked(arguments) as up:
            up.read_until("Ctrl-C")
            done = subprocess.run(
                [sys.executable, str(EXAMPLE), directory], check=False, capture_output=True, text=True, timeout=600
            )
    assert done.returncode == 0, done.stderr
    assert [done.stdout] == blocks("")


def test_every_line_of_code_on_the_page_is_in_the_example() -> None:
    written = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    shown = [line.strip() for block in blocks("python") for line in block.splitlines()]
    assert shown
    assert [line for line in shown if line not in written] == []
