"""Empty storages for kopf. Its low-level event handlers, the only ones that we use, need no state. Used by `handlers`.

kopf's own storages copy each object several times per event to compare it with the last handled version.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """Has no last handled state."""

    def build(self, **_: Any) -> Any:
        """Return an empty essence."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Return None: nothing was handled."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


class NoProgress(kopf.ProgressStorage):
    """Has no progress of handlers."""

    def fetch(self, **_: Any) -> Any:
        """Return None: no handler has started."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""

    def purge(self, **_: Any) -> None:
        """Remove nothing."""

    def touch(self, **_: Any) -> None:
        """Change nothing."""

    def clear(self, *, essence: Any) -> Any:
        """Return the essence unchanged."""
        return essence
