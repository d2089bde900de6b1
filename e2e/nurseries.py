"""Starts the process from which engines are forked, and sends commands to it. Called by the tests of each engine."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
KILL_LIMIT_S = 60.0
LOG_TAIL_CHARACTERS = 4000


class EngineError(Exception):
    """An engine did not start, or ended; has the end of its log."""


class Nursery:
    """The process from which engines are forked and which ends them. A context manager.

    Start it from a thread that outlives it: it ends with that thread, and every engine with it.

    Args:
        venv: the environment of the engine.
        directory: for the logs.
    Attributes:
        program: see `nursery`.
        environment: variables of all processes in addition to ours.
    """

    program: ClassVar[Path]
    environment: ClassVar[Mapping[str, str]]

    def __init__(self, venv: Path, directory: Path) -> None:
        self.venv = venv
        self.directory = directory
        self.log_path = directory / "nursery.log"
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LONGSHORE_")}
        # Bytecode is cached in the engine's environment, which saves half of every later start.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **self.environment,
        }
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                [self.venv / "bin" / "python", FOLDER / "nursery.py", self.program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                process_group=0,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._child is not None
        self._child.terminate()
        try:
            self._child.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()  # Its keepers end with it, and engines with their keepers.
            self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()

    def wait_ready(self) -> None:
        """Return when the engine is imported."""
        if not self._ready:
            self._read()
            self._ready = True

    _ready = False

    def ask(self, **command: Any) -> dict[str, Any]:
        """Return the answer to one command."""
        assert self._child is not None
        assert self._child.stdin is not None
        self.wait_ready()
        self._child.stdin.write(json.dumps(command).encode() + b"\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise EngineError(f"the nursery ended:\n{tail(self.log_path)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def tail(path: Path) -> str:
    """Return the end of a log."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:]
    except OSError as error:
        return f"{path}: {error.strerror}"


def write_entry_points(directory: Path, group: str, more: Mapping[str, str] | None = None) -> Path:
    """Write metadata by which an engine finds our plug-ins of a group, as an installation has it; return its folder.

    Args:
        more: further plug-ins, by name.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = directory / "plugins"
    found = folder / "longshore_kv-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: longshore-kv\nVersion: 0\n", encoding="utf-8")
    plugins = project["entry-points"][group] | dict(more or {})
    lines = [f"{name} = {value}" for name, value in plugins.items()]
    (found / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]), encoding="utf-8")
    return folder
