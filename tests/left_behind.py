"""Finds what runs with a mark in its environment leave behind: processes, files, shared memory.

`marked` runs one command and lists its leftovers. Run as a script, this module waits until its standard input ends, which
it does however the process at the other end has ended, and then ends all processes with a mark and removes their shared
memory. `conftest` starts it so, so that an interrupted or killed run of the tests leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_MARK = "TEST_RUN_MARK"
SHARED = Path("/dev/shm")
# Processes that end by themselves after the one that started them: the resource tracker of multiprocessing, for example.
_END_LIMIT_S = 5.0
_LOOK_S = 0.05
_PAUSE = threading.Event()


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
        return [f"{pid} {line}" for pid, line in processes_with(self.mark).items()]

    def left(self) -> list[str]:
        """Return all leftovers."""
        files = [str(path) for path in self.directory.iterdir()]
        # A run of tests that was killed beside this one has its memory until its cleaner removes it.
        end_s = time.monotonic() + _END_LIMIT_S
        while (shared := sorted(_left_of(_shared() - self._shared_before))) and time.monotonic() < end_s:
            _PAUSE.wait(_LOOK_S)
        return [*self.processes(), *files, *shared]

    def end(self) -> None:
        """End the remaining processes by PID."""
        kill_all(self.mark)
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


def processes_with(mark: str) -> dict[int, str]:
    """Return the command lines of all other processes whose environment has `mark` (NAME=value), by PID."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(bytes(1), b" ").decode().strip()
    return found


def wait_for_end(mark: str) -> dict[int, str]:
    """Return the processes with a mark that do not end by themselves within some seconds."""
    end_s = time.monotonic() + _END_LIMIT_S
    while (found := processes_with(mark)) and time.monotonic() < end_s:
        _PAUSE.wait(_LOOK_S)
    return found


def kill_all(mark: str) -> None:
    """Kill the processes with a mark, and those that they start meanwhile."""
    while found := processes_with(mark):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _PAUSE.wait(_LOOK_S)


def _clean_up_after(mark: str) -> None:
    """Wait until standard input ends; then end what has the mark, and remove its shared memory."""
    before = _shared()
    sys.stdin.read()
    kill_all(mark)
    for path in _left_of(_shared() - before):
        Path(path).unlink(missing_ok=True)


def _shared() -> set[str]:
    names = ("longshore", "ucx", "torch", "gloo", "sem.mp-")
    return {str(path) for path in SHARED.iterdir() if any(name in path.name for name in names)}


def _left_of(shared: set[str]) -> set[str]:
    """Return the files that still exist and that no process uses.

    Agents of other tests may run beside these. UCX creates each file, opens it, and soon deletes its name. A process with the
    mark is a leftover itself.
    """
    used = _in_use() if shared else set()
    left = set()
    for path in shared:
        with contextlib.suppress(FileNotFoundError):
            if _identity(Path(path)) not in used:
                left.add(path)
    return left


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _in_use() -> set[tuple[int, int]]:
    """Return the devices and inodes of all files that processes have open or mapped.

    Their paths would not do: the C library maps a new semaphore by another name, which it deletes.
    """
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        # First what is open, then what is mapped: a process maps a file before it closes it.
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(_identity(descriptor))
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                _, _, _, device, inode, *_ = line.split(maxsplit=5)
                major, minor = (int(number, 16) for number in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found


if __name__ == "__main__":
    _clean_up_after(sys.argv[1])
