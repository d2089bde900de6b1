"""Files that others read at any instant, or that must outlive a kill: written whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of ours, in place of what was there. Who reads it meanwhile sees all of it, or what was there before."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)
