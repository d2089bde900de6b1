"""Storages for kopf that hold nothing: only its low-level event handlers are used, and they need no state.

kopf's own ones copy each object of each event several times to compare it with what a handler saw last. Used by `handlers`.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """Knows no last handled state and makes none."""

    def build(self, **_: Any) -> Any:
        """Return nothing of the object."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Return that nothing was handled yet."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


class NoProgress(kopf.ProgressStorage):
    """Knows no progress of handlers."""

    def fetch(self, **_: Any) -> Any:
        """Return that no handler has begun."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""

    def purge(self, **_: Any) -> None:
        """There is nothing to remove."""

    def touch(self, **_: Any) -> None:
        """Nothing waits for a touch."""

    def clear(self, *, essence: Any) -> Any:
        """Return it as it is: nothing of ours is in it."""
        return essence
