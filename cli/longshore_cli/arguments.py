"""Argument types for argparse that several commands share. Each error message names the valid values.

Called by `bench`, `demo` and `up` when they declare their arguments. All arguments are checked before anything starts,
so that a long measurement cannot fail at a file that is not writable.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from longshore_spec.agent_config import Backend
from longshore_wire.errors import LongshoreError, Reason

BACKENDS = tuple(backend.value for backend in Backend)
# The exit status of a command whose arguments are invalid, as argparse's.
EXIT_INVALID = 2


class ArgumentsError(LongshoreError):
    """Arguments contradict each other, or name a file that cannot be read; names the way out. `main` exits with 2."""

    reason = Reason.UNSUPPORTED


def whole(low: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` on."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = low - 1
        if found < low:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {low} on")
        return found

    return read


def wholes(text: str) -> list[int]:
    """Parse comma-separated whole numbers from 1 on; return them sorted and without duplicates."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 on, separated by commas")
    return found


def tp_pair(text: str, heads: int) -> tuple[int, int]:
    """Parse the TPs of prefill and decode, such as `4:1`; both must divide the number of KV heads."""
    prefill, _, decode = text.partition(":")
    try:
        found = int(prefill), int(decode)
    except ValueError:
        found = 0, 0
    if any(tp < 1 or heads % tp for tp in found):
        raise argparse.ArgumentTypeError(f"{text}: give TPs that divide {heads} KV heads, such as 4:1")
    return found


def duration(text: str) -> float:
    """Parse a duration in seconds above 0."""
    found = seconds(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds above 0")
    return found


def seconds(text: str) -> float:
    """Parse a duration in seconds, 0 or more."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds from 0 on")
    return found


def new_file(text: str) -> Path:
    """Parse the path of an output file; its directory must exist."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory: name a file in it")
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such directory")
    return path
