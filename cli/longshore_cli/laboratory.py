"""Runs `longshore demo` and `longshore bench` from the laboratory, which needs the extra `lab`.

Called by `main`, which runs `longshore bench cluster` without the laboratory. No other module outside `lab/` imports
`longshore_lab`. This one imports it only when one of the two commands runs, so that the other commands work without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from longshore_cli import examples
from longshore_spec import distribution
from longshore_wire.errors import LongshoreError, Reason

# Each command with its help text.
COMMANDS = {
    "demo": "move KV between unequal layouts on this machine and compare every byte and token",
    "bench": "measure transfers on this machine; `bench cluster` measures the agents of a running deployment",
}
# Imports of the laboratory and of the agents that it starts. They are checked first: matplotlib, for example, would
# otherwise be missed only after the whole measurement.
_MODULES = ("longshore_lab", "fastapi", "matplotlib", "numpy", "torch", "uvicorn", "zmq")
_EXIT_NOT_INSTALLED = 2


class LaboratoryMissingError(LongshoreError):
    """The laboratory or one of its requirements is not installed; names it and the extras to install."""

    reason = Reason.UNSUPPORTED


def run(command: str, words: Sequence[str], program: str = "longshore") -> int:
    """Run one of COMMANDS with its arguments; return its exit status: 2 if the laboratory is not installed."""
    try:
        add_arguments, run_it = _parts(command)
    except LaboratoryMissingError as error:
        sys.stderr.write(f"longshore {command}: {error}\n")
        return _EXIT_NOT_INSTALLED
    parser = argparse.ArgumentParser(prog=f"{program} {command}")
    examples.add(parser, command)
    add_arguments(parser)
    return run_it(parser.parse_args(words))


def _parts(command: str) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    """Return a command's functions (declare arguments, run). Raises LaboratoryMissingError."""
    if fault := distribution.lacking(_MODULES, "agent", "cli", "lab", "nixl"):
        raise LaboratoryMissingError(fault)
    from longshore_lab import bench, demo

    return {"demo": (demo.add_arguments, demo.run), "bench": (bench.add_arguments, bench.run)}[command]
