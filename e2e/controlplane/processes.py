"""Starts the control plane's programs in the background and ends them by their ids. Called by `cluster` and `nodes`."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# etcd and the API server end within a second; one that does not is killed.
STOP_LIMIT_S = 15.0
LOG_TAIL_CHARACTERS = 3000


class Process:
    """One program with a log file of its own.

    Args:
        folder: where `<name>.log` is written.
        environment: all of it; None: ours.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        # If this process is killed, nobody else would end its children.
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
        """Its process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child.poll() is None

    def check(self) -> bool:
        """Return True. Raises RuntimeError, with the end of its log, if it has ended by itself."""
        if not self.alive:
            raise RuntimeError(f"{self.name} ended with status {self._child.returncode}:\n{self.log()}")
        return True

    def log(self) -> str:
        """Return the end of its log."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; return its exit status."""
        if self.alive:
            self._child.send_signal(number)
        try:
            return self._child.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait(STOP_LIMIT_S)
