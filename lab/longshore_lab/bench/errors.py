"""The error of benchmarks."""

from __future__ import annotations


class BenchError(Exception):
    """Bytes were wrong, a room failed or a part did not answer. Its time is not counted."""
