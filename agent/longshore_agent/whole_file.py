"""Files that others read at any instant, or that must outlive a kill: written whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file of ours atomically: a reader sees the new content or the old one, never a part.

    Raises:
        OSError: it cannot be written (a full disk); what was there before still is.
    """
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
