"""Starts programs in the background and ends them by their ids. Called by `cluster`, `nodes` and others."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# etcd and the API server end within a second on idle cores. After this limit a program is killed.
STOP_LIMIT_S = 60.0
LOG_TAIL_CHARACTERS = 3000


class Process:
    """One program with its own log file.

    Args:
        folder: directory of `<name>.log`.
        environment: the whole environment; None for ours.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        # Ends the child if this process is killed.
        guard = [tool, "--pdeathsig", "KILL", "--"] if (tool := shutil.which("setpriv")) else []
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                [*guard, *(str(part) for part in command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self._child.poll() is None

    def check(self) -> bool:
        """Return True. Raises RuntimeError with the end of its log if the program has ended by itself."""
        if not self.alive:
            raise RuntimeError(f"{self.name} ended with status {self._child.returncode}:\n{self.log()}")
        return True

    def log(self) -> str:
        """Return the end of the log."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the program; return its exit status."""
        if self.alive:
            self._child.send_signal(number)
        try:
            return self._child.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait(STOP_LIMIT_S)
