"""Runs a module so that it gets SIGTERM when the process that started it dies: `python -m longshore_cli.tethered PID MODULE`.

Started by `local_agents`, which passes its own PID. The module then ends even if its parent is killed by SIGKILL. The
kernel sends the signal when the *thread* that started this process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request SIGTERM at the parent's death, then execute the module. Never returns."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        sys.exit(f"prctl: {os.strerror(error)}")
    # If the parent died before the line above, the kernel sends no signal.
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one has ended")
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[3:]])  # noqa: S606 -- the purpose of this file


if __name__ == "__main__":
    main()
