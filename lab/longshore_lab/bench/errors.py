"""The one error of benchmarks."""

from __future__ import annotations


class BenchError(Exception):
    """Bytes were wrong, a room failed or a part did not answer; the text says which, and no time was counted for it."""
