"""Reserves standard output for a program's JSON lines, and sends all other output to the log.

Called first by programs whose output other programs read: the agent's self-test, and those that measure transports.
Libraries print warnings to standard output from C, for example when the machine is busy; those lines belong in the log.
"""

from __future__ import annotations

import os
import sys
from typing import IO

import msgspec


def own_output() -> IO[bytes]:
    """Return the file for answers. From now on, all other standard output goes to standard error."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return os.fdopen(answers, "wb")


def say(out: IO[bytes], message: msgspec.Struct) -> None:
    """Write one line of JSON and flush it."""
    out.write(msgspec.json.encode(message) + b"\n")
    out.flush()
