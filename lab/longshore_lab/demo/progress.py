"""Prints one line for each step, with the seconds since the start."""

from __future__ import annotations

import sys
import time


class Progress:
    """Prints lines and flushes each, also into a pipe."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line."""
        sys.stdout.write(f"[{time.monotonic() - self._started_s:4.0f} s] {text}\n")
        sys.stdout.flush()
