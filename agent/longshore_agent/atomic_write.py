"""Writes files atomically, for concurrent readers and for processes that may be killed."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees either the old or the new content.

    Raises:
        OSError: the file cannot be written (for example on a full disk); the old content is kept.
    """
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
