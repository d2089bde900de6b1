"""Tests the wheel with each extra in an environment that has nothing else: programs, imports, and bytes over a transport."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tree_of_files import ROOT, project

from longshore_agent.program import REQUIRED as AGENT_REQUIRED
from longshore_operator.program import REQUIRED as OPERATOR_REQUIRED
from longshore_spec import distribution

VERSION = project()["project"]["version"]
UV = Path(sys.executable).with_name("uv")
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(folder)]
    subprocess.run([str(UV), "build", *options, str(ROOT)], check=True, timeout=LIMIT_S)
    return folder / f"longshore_kv-{VERSION}-py3-none-any.whl"


class Environment:
    """A virtual environment with the wheel and the requirements of some extras."""

    def __init__(self, folder: Path, wheel: Path, extras: str) -> None:
        self.folder = folder / "venv"
        python = self.folder / "bin" / "python"
        subprocess.run([str(UV), "venv", "--quiet", "--python", sys.executable, str(self.folder)], check=True)
        # Links into uv's cache, which has the files since `make install`: torch alone has gigabytes.
        options = ["--quiet", "--link-mode", "symlink", "--constraints", str(ROOT / "requirements.lock")]
        named = f"{distribution.NAME}{extras} @ {wheel.as_uri()}"
        subprocess.run(
            [str(UV), "pip", "install", "--python", str(python), *options, named], check=True, timeout=LIMIT_S
        )

    def run(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in an empty directory, with no other variables."""
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder.parent), **settings}
        command = [str(self.folder / "bin" / words[0]), *words[1:]]
        return subprocess.run(
            command,
            cwd=self.folder.parent,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def said(self, *words: str, **settings: str) -> str:
        done = self.run(*words, **settings)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def refused(self, *words: str, **settings: str) -> str:
        """Return the only line with which a program ends that cannot start."""
        done = self.run(*words, **settings)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (words, done.stdout, done.stderr)
        return done.stderr.strip()


def client_alone(at: Environment) -> None:
    installed = at.said(
        "python", "-c", "from importlib.metadata import distributions as d; print(*[x.name for x in d()])"
    )
    assert set(installed.split()) == {"longshore-kv", "msgspec"}
    at.said("python", "-c", "import longshore_client, longshore_wire")
    assert at.refused("longshore-agent") == (
        f"longshore-agent: {', '.join(name for name in AGENT_REQUIRED if name != 'msgspec')} cannot be imported: "
        "pip install 'longshore-kv[agent,nixl]', or '.[agent,nixl]' in a checkout; in place of nixl, mooncake serves too"
    )
    assert at.refused("longshore-operator") == (
        f"longshore-operator: {', '.join(name for name in OPERATOR_REQUIRED if name != 'msgspec')} cannot be imported: "
        "pip install 'longshore-kv[operator]', or '.[operator]' in a checkout"
    )
    assert at.refused("longshore", "completion", "bash").endswith(
        "pip install 'longshore-kv[cli]', or '.[cli]' in a checkout"
    )
    assert "longshore-kv[cli]" in at.refused("longshore", "keys", "keys")
    assert at.said("kubectl_complete-longshore", "r") == ":1\n"


def cli(at: Environment) -> None:
    assert "complete " in at.said("longshore", "completion", "bash")
    assert "rooms\t" in at.said("kubectl_complete-longshore", "r")
    assert "usage: longshore trace" in at.said("longshore", "trace", "--help")
    assert "longshore-kv[agent,cli,lab,nixl]" in at.refused("longshore", "demo")
    assert "longshore-kv[agent,cli,nixl]" in at.refused("longshore", "up", "-f", "none.yaml")
    assert "keys are in " in at.said("longshore", "keys", "keys")


def operator(at: Environment) -> None:
    assert at.said("longshore-operator", "--version") == f"longshore-operator {VERSION}\n"
    assert "LONGSHORE_LEASE_S" in at.run("longshore-operator", LONGSHORE_LEASE_S="1").stderr


def moves_bytes(backend: str) -> Callable[[Environment], None]:
    def agent(at: Environment) -> None:
        assert at.said("longshore-agent", "--version") == f"longshore-agent {VERSION}\n"
        assert "usage: longshore-agent" in at.said("longshore-agent", "--help")
        moved = json.loads(at.said("python", "-m", "longshore_agent.self_test", LONGSHORE_BACKEND=backend))
        assert (moved["backend"], moved["error"], moved["bytes_moved"]) == (backend, "", 1 << 20)
        refused = at.refused("longshore-agent", LONGSHORE_OTEL="true", LONGSHORE_RUN_DIRECTORY=str(at.folder / "run"))
        assert refused == (
            "longshore-agent: LONGSHORE_OTEL: OpenTelemetry is not installed: "
            "pip install 'longshore-kv[agent,otel]', or '.[agent,otel]' in a checkout"
        )

    return agent


EXTRAS: dict[str, Callable[[Environment], None]] = {
    "": client_alone,
    "[cli]": cli,
    "[operator]": operator,
    "[agent,nixl]": moves_bytes("NIXL"),
    "[agent,mooncake]": moves_bytes("Mooncake"),
}


@pytest.mark.rest("releases")
@pytest.mark.slow
@pytest.mark.parametrize("extras", EXTRAS)
def test_the_wheel_with_these_extras_works_where_nothing_else_is_installed(
    extras: str, wheel: Path, tmp_path: Path
) -> None:
    at = Environment(tmp_path, wheel, extras)
    assert at.said("longshore", "--version") == f"longshore {VERSION}\n"
    EXTRAS[extras](at)
