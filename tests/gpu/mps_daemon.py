"""Runs a daemon of CUDA's Multi-Process Service (MPS) with pipes of its own, for tests and benchmarks on GPUs.

Other processes of the machine are no clients of it, unless they get the variables.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
# A server opens every GPU, which takes seconds, and longer without persistence mode.
START_LIMIT_S, END_LIMIT_S = 60.0, 60.0


@contextmanager
def mps_daemon(folder: Path, *options: str) -> Iterator[Mapping[str, str]]:
    """Run a daemon and its server for this user; yield the variables of clients once the server takes them.

    A client that comes while the server still starts may get an error, so that it is started first.

    Args:
        folder: for pipes and logs, which stay. Its path is short, because sockets are made below it.
        options: of the daemon, such as `-multiuser-server`.
    Raises:
        SystemExit: the daemon is not installed, or its server does not start; with its logs.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise SystemExit(f"{PROGRAM} is not in PATH: install the driver's programs")
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in variables.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    environment = os.environ | variables

    def ask(command: str, limit_s: float = START_LIMIT_S) -> str:
        done = subprocess.run(
            [program],
            input=f"{command}\n",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
        return done.stdout + done.stderr

    subprocess.run([program, "-d", *options], check=True, env=environment, timeout=START_LIMIT_S)
    try:
        said = ask(f"start_server -uid {os.getuid()}")
        end_s = time.monotonic() + START_LIMIT_S
        # Each turn starts two processes, so that it needs no pause.
        while not ready(ask):
            if time.monotonic() > end_s:
                raise SystemExit(
                    f"no server of MPS takes clients after {START_LIMIT_S:g} s: {said}\n{mps_logs(folder)}"
                )
        yield variables
    finally:
        try:
            ask("quit", END_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.kill(int((folder / "pipe" / f"{PROGRAM}.pid").read_text()), signal.SIGKILL)


def ready(ask: Callable[[str], str]) -> bool:
    """Return whether the daemon has a server, and all of them take clients."""
    servers = [word for word in ask("get_server_list").split() if word.isdigit()]
    return bool(servers) and not any("INITIALIZING" in ask(f"get_server_status {server}") for server in servers)


def mps_logs(folder: Path, characters: int = 4000) -> str:
    """Return the end of the daemon's and the server's logs."""
    logs = sorted((folder / "log").glob("*.log"))
    return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-characters:]}" for log in logs)
