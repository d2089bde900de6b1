"""Tests the example for engine authors with real agents, and that its page quotes its lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
            # Its engines have left. What they did is still there.
            status = until_left(directory)
            rooms, trace = said("rooms", directory), said("trace", "room", "1", directory)
    assert done.returncode == 0, done.stderr
    assert [done.stdout] == blocks("")
    listed = [tuple(line.split()[index] for index in (0, 2, 3)) for line in rooms.splitlines()[1:]]
    # The example does not wait for prefill's half of its last room.
    listed = [each for each in listed if each[:2] != ("3", "source")]
    assert sorted(set(listed)) == [
        ("1", "source", "done"),
        ("1", "target", "done"),
        ("2", "source", "failed"),
        ("2", "target", "failed"),
        ("3", "target", "done"),
    ]
    assert "Claim" in trace
    agents = {agent["name"]: agent["report"] for agent in status["agents"]}
    for name, done in (("prefill-0", 2), ("decode-0", 2)):
        assert agents[name]["rooms_done"] == agents[name]["left"]["rooms_done"] >= done
    [decoded] = [engine for engine in agents["decode-0"]["left"]["last"] if engine["worker"] == "my-decode/0/0"]
    assert (decoded["rooms_done"], decoded["roles"]) == (1, ["target"])
    assert decoded["bytes_moved"] >= 409_600


def said(*arguments: str) -> str:
    *command, directory = arguments
    return subprocess.run(
        [sys.executable, "-m", "longshore_cli.main", *command, "--directory", directory],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout


def until_left(directory: str) -> Any:
    """Return the status when the workers of the example's ranks have ended."""
    for _ in range(100):
        found = json.loads(said("status", "-o", "json", directory))
        [deployment] = found["deployments"]
        # One rank of decode has a worker for each of its two memories.
        if sum(agent["report"]["left"]["count"] for agent in deployment["agents"]) == 5:
            return deployment
    raise AssertionError(found)


def test_every_line_of_code_on_the_page_is_in_the_example() -> None:
    written = {line.strip() for line in EXAMPLE.read_text().splitlines()}
    shown = [line.strip() for block in blocks("python") for line in block.splitlines()]
    assert shown
    assert [line for line in shown if line not in written] == []
