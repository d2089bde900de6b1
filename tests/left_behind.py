"""Runs a command with a mark in its environment and lists leftovers: processes, files, shared memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

_MARK = "TEST_RUN_MARK"
SHARED = Path("/dev/shm")


class Marked:
    """A process in a group of its own, with its own directory for temporary files; `stdout` is a pipe of text.

    Attributes:
        process: the process.
        directory: for its temporary files.
    """

    def __init__(self, arguments: list[str], directory: Path) -> None:
        self.mark = f"{_MARK}={uuid.uuid4().hex}"
        self.directory = directory
        self._shared_before = _shared()
        name, _, value = self.mark.partition("=")
        # The caller's LONGSHORE_ variables must not reach the tested command.
        environment = {key: text for key, text in os.environ.items() if not key.startswith("LONGSHORE_")}
        environment |= {name: value, "TMPDIR": str(directory), "PYTHONPATH": ":".join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def read_until(self, text: str) -> str:
        """Return its output up to the line that contains `text`."""
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if text in line:
                return said
        raise AssertionError(f"it never said {text!r}:\n{said}")

    def read_rest(self) -> str:
        """Wait for its end; return the rest of its output."""
        said, _ = self.process.communicate()
        return said

    def processes(self) -> list[str]:
        """Return the command lines of processes with the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
        return found

    def left(self) -> list[str]:
        """Return all leftovers."""
        files = [str(path) for path in self.directory.iterdir()]
        return [*self.processes(), *files, *sorted(_left_of(_shared() - self._shared_before))]

    def end(self) -> None:
        """End the remaining processes by PID."""
        for line in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), 9)
        self.process.wait()


@contextlib.contextmanager
def marked(arguments: list[str]) -> Iterator[Marked]:
    """Run a command; its directory for temporary files has a short path, as sockets need one."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        run = Marked(arguments, Path(directory))
        try:
            yield run
        finally:
            run.end()


def _shared() -> set[str]:
    names = ("longshore", "ucx", "torch", "gloo")
    return {str(path) for path in SHARED.iterdir() if any(name in path.name for name in names)}


def _left_of(shared: set[str]) -> set[str]:
    """Return the files that still exist and that no process uses.

    Agents of other tests may run beside these. UCX creates each file, opens it, and soon deletes its name. A process with the
    mark is a leftover itself.
    """
    return {path for path in shared - _in_use() if Path(path).exists()} if shared else set()


def _in_use() -> set[str]:
    """Return the paths of all files that processes have open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        # First what is open, then what is mapped: a process maps a file before it closes it.
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(str(descriptor.readlink()))
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            found |= {line.split(maxsplit=5)[-1] for line in lines if str(SHARED) in line}
    return found
