"""Runs the commands of docs/how-to/sglang.md as they are, except for paths and ports, and asks for a completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from controlplane.ports import free_port
from controlplane.processes import Process
from controlplane.waiting import until
from sglang_engines import ROOT, Nursery
from sglang_scene import write_plugins

PAGE = ROOT / "docs" / "how-to" / "sglang.md"
LIMIT_S = 400.0

pytestmark = pytest.mark.timeout(1500)


def commands() -> list[str]:
    """Return the indented blocks of the page, in order."""
    blocks: list[list[str]] = [[]]
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("       "):
            blocks[-1].append(line.strip())
        elif blocks[-1]:
            blocks.append([])
    return ["\n".join(block) for block in blocks if block]


@pytest.fixture(scope="module")
def stage(nursery: Nursery) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the commands with our paths and ports, and their environment, when the router listens."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-sglang-")))
        ports = {number: str(free_port()) for number in ("8100", "8200", "8000", "8998")}
        changed = {
            "/tmp/sglang/bin/python": str(nursery.venv / "bin" / "python"),
            ".venv/bin/longshore": str(Path(sys.executable).with_name("longshore")),
            "/tmp/longshore-sglang": str(directory / "agents"),
            "/tmp/tiny": str(directory / "tiny"),
            **ports,
            # The page uses the default.
            "--disaggregation-mode prefill": f"--disaggregation-mode prefill --disaggregation-bootstrap-port {ports['8998']}",
        }
        found = commands()
        for before, after in changed.items():
            assert before == "8998" or any(before in command for command in found), before
            found = [command.replace(before, after) for command in found]
        _install, model, up, prefill, decode, router, _request = found
        paths = [write_plugins(directory), ROOT / "engines", ROOT / "client", ROOT / "wire"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
        subprocess.run(["bash", "-ec", model], cwd=ROOT, env=environment, check=True)
        running = {}
        for name, command in (("up", up), ("prefill", prefill), ("decode", decode), ("router", router)):
            lines = command.splitlines()
            first = next(index for index, line in enumerate(lines) if not line.startswith("export "))
            program = "\n".join([*lines[:first], f"exec {lines[first]}", *lines[first + 1 :]])
            process = running[name] = Process(
                f"how-to-{name}", ["bash", "-ec", program], nursery.directory, environment
            )
            stack.callback(process.stop)
            if name == "up":
                until(partial(listens, process, directory), "agents listen", LIMIT_S)
            if name == "decode":
                for role, port in (("prefill", "8100"), ("decode", "8200")):
                    until(partial(serves, running[role], ports[port]), f"{role} serves", LIMIT_S)
        until(lambda: serves(running["router"], ports["8000"]), "the router serves", LIMIT_S)
        yield found, environment


def listens(agents: Process, directory: Path) -> bool:
    sockets = [directory / "agents" / f"{role}-0" / "agent.sock" for role in ("prefill", "decode")]
    return agents.check() and all(path.exists() for path in sockets)


def serves(process: Process, port: str) -> bool:
    try:
        return process.check() and httpx.get(f"http://127.0.0.1:{port}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def test_the_pages_request_is_answered(stage: tuple[list[str], dict[str, str]]) -> None:
    found, environment = stage
    done = subprocess.run(
        ["bash", "-ec", found[-1]], env=environment, check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    words = json.loads(done.stdout)["choices"][0]["text"].split()
    assert 1 <= len(words) <= 8
    assert all(word.startswith("w") for word in words)
