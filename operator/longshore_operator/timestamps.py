"""Times of objects of the API server: RFC 3339 with whole seconds."""

from __future__ import annotations

import datetime as dt


def now() -> str:
    """Return the current time."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(since: str, until: str) -> float:
    """Return the seconds from one time to another."""
    return (dt.datetime.fromisoformat(until) - dt.datetime.fromisoformat(since)).total_seconds()
