"""Hands `longshore demo` and `longshore bench` over to the laboratory, which needs an extra of its own.

Called by `main`. No other module outside `lab/` imports `longshore_lab`, and this one only when one of the two commands
is run: the other commands work without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from longshore_wire.errors import LongshoreError, Reason

# With what the command line shows of each.
COMMANDS = {
    "demo": "move KV between unequal layouts on this machine and compare every byte and token",
    "bench": "measure transfers on this machine",
}
# The laboratory, what it imports itself, and what the agents need that it starts. A missing one would otherwise be
# noticed late: matplotlib, for one, only when everything was measured.
_MODULES = ("longshore_lab", "fastapi", "matplotlib", "numpy", "torch", "uvicorn", "zmq")
_EXIT_NOT_INSTALLED = 2


class LaboratoryMissingError(LongshoreError):
    """The laboratory, or something that it needs, is not installed; names that and the extras to install."""

    reason = Reason.UNSUPPORTED


def run(command: str, words: Sequence[str]) -> int:
    """Run one of COMMANDS with its arguments; return its exit status, which is 2 where the laboratory is not installed."""
    try:
        add_arguments, run_it = _parts(command)
    except LaboratoryMissingError as error:
        sys.stderr.write(f"longshore {command}: {error}\n")
        return _EXIT_NOT_INSTALLED
    parser = argparse.ArgumentParser(prog=f"longshore {command}")
    add_arguments(parser)
    return run_it(parser.parse_args(words))


def _parts(command: str) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    """Return what declares a command's arguments and what runs it. Raises LaboratoryMissingError."""
    missing = [name for name in _MODULES if find_spec(name) is None]
    if missing:
        raise LaboratoryMissingError(
            f"{', '.join(missing)} cannot be imported: install longshore[agent,cli,lab] and a transport, [nixl] or [mooncake]"
        )
    from longshore_lab import bench, demo

    return {"demo": (demo.add_arguments, demo.run), "bench": (bench.add_arguments, bench.run)}[command]
