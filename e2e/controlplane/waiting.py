"""Waits for states of the world, each with a limit. Used by everything in `e2e`; nothing there sleeps by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Between two looks: short beside what is waited for, and cheap for an API server on loopback.
LOOK_EVERY_S = 0.1
_never = threading.Event()


class TooLateError(AssertionError):
    """A state did not come within its limit; says what was seen last."""


def until(look: Callable[[], T], what: str, limit_s: float = 150.0) -> T:
    """Return what `look` returns as soon as it is true.

    Args:
        look: called again and again; an AssertionError or OSError of it counts as not yet.
        what: what is waited for, for the message.
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
