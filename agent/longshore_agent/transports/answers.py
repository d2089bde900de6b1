"""Standard output of a program that answers with lines of JSON, kept clean of what transports' libraries print.

Called first by the programs that others ask: the agent's self-test, and those that measure transports alone. Libraries print
warnings to standard output from C, when the machine is busy for example; those lines belong into the log.
"""

from __future__ import annotations

import os
import sys
from typing import IO

import msgspec


def own_output() -> IO[bytes]:
    """Return where answers go; whatever else is printed to standard output from now on goes to standard error."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return os.fdopen(answers, "wb")


def say(out: IO[bytes], message: msgspec.Struct) -> None:
    """Write one line of JSON and send it off."""
    out.write(msgspec.json.encode(message) + b"\n")
    out.flush()
