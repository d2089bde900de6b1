"""Runs a module so that it gets SIGTERM when the process that started it dies: `python -m longshore_cli.tethered PID MODULE`.

Started by `local_agents`, which passes its own PID. A death that no handler sees, such as SIGKILL, then still ends
what was started. The kernel sends the signal when the *thread* that started this process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the module; never returns."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        sys.exit(f"prctl: {os.strerror(error)}")
    # The parent may have died before the line above; then nobody would send the signal.
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one is gone")
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[3:]])  # noqa: S606 -- the purpose of this file


if __name__ == "__main__":
    main()
