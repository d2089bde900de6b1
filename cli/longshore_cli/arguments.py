"""What several commands read from their command lines, as types for argparse; each fault says what to give.

Called by `bench`, `demo` and `up` when they declare their arguments. Nothing is started before all of them were read: a
measurement of minutes must not end at a file that cannot be written.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from longshore_wire.agent_config import Backend

BACKENDS = tuple(backend.value for backend in Backend)


def whole(low: int) -> Callable[[str], int]:
    """Return what reads a whole number from `low` on."""

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
    """Read whole numbers from 1 on, separated by commas; return them in order, each once."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 on, separated by commas")
    return found


def tp_pair(text: str, heads: int) -> tuple[int, int]:
    """Read `4:1`, the TPs of prefill and decode for a model with so many KV heads."""
    prefill, _, decode = text.partition(":")
    try:
        found = int(prefill), int(decode)
    except ValueError:
        found = 0, 0
    if any(tp < 1 or heads % tp for tp in found):
        raise argparse.ArgumentTypeError(f"{text}: give TPs that divide {heads} KV heads, such as 4:1")
    return found


def seconds(text: str) -> float:
    """Read how long something takes, in seconds from 0 on."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds from 0 on")
    return found


def new_file(text: str) -> Path:
    """Read the path of a file that is written in the end; its directory is there."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory: name a file in it")
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such directory")
    return path
