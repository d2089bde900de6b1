"""Waits for conditions, each with a limit. All of `e2e` uses it instead of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Polling interval: short compared with the waits, and cheap for an API server on loopback.
LOOK_EVERY_S = 0.1
_never = threading.Event()


class TooLateError(AssertionError):
    """A condition was not met within its limit; has the last result."""


def until(look: Callable[[], T], what: str, limit_s: float = 150.0) -> T:
    """Call `look` until its result is true, and return the result.

    Args:
        look: called repeatedly; its AssertionError or OSError counts as not yet.
        what: the name of the condition in the message.
    Raises:
        TooLateError: after `limit_s`, with the last result or error.
    """
    end_s = time.monotonic() + limit_s
    seen: object = None
    while True:
        try:
            found = look()
        except (AssertionError, OSError) as error:
            seen = error
        else:
            if found:
                return found
            seen = found
        if time.monotonic() > end_s:
            raise TooLateError(f"not within {limit_s:g} s: {what}; last seen: {seen!r}")
        _never.wait(LOOK_EVERY_S)
