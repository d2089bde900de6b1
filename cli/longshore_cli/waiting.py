"""Reads again and again until all is well or the time is over: the option `--wait` of `check` and `status`. Judges nothing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from longshore_cli.arguments import duration
from longshore_cli.cluster import UnavailableError
from longshore_cli.words import plain

_T = TypeVar("_T")


def add_argument(parser: argparse.ArgumentParser, until: str) -> None:
    """Declare the option; `until` is its condition in words."""
    parser.add_argument(
        "--wait", type=duration, default=0.0, metavar="S", help=f"repeat until {until}, at most for S seconds"
    )


def until_well(read: Callable[[], _T], trouble: Callable[[_T], str], until_s: float, every_s: float) -> _T:
    """Return what `read` returns once it has no trouble, or its last result after `until_s` (time.monotonic).

    An API server that is away may come back. On a terminal the error output says what is waited for when that changes.

    Args:
        trouble: returns what is not well, in words; empty: nothing.
    Raises:
        UnavailableError: the API server was still away at the end.
    """
    said = ""
    while True:
        try:
            found = read()
            words = trouble(found)
            if not words or time.monotonic() >= until_s:
                return found
        except UnavailableError as error:
            words = str(error)
            if time.monotonic() >= until_s:
                raise
        if words != said and sys.stderr.isatty():
            print(f"waiting: {plain(words)}", file=sys.stderr, flush=True)
        said = words
        time.sleep(max(0.0, min(every_s, until_s - time.monotonic())))
