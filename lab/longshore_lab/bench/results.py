"""The results of a run of `transfer`: samples of every line at every size, and the rates computed from them.

Filled by `transfer`, shown by `report`. Measures and prints nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from longshore_lab.bench.scene import Course
from longshore_lab.devices import HOST, Placement

MIB = 1 << 20


@dataclass
class Series:
    """Samples of one line at one size: seconds and processor seconds of every repetition."""

    seconds: list[float] = field(default_factory=list)
    core_s: list[float] = field(default_factory=list)

    def add(self, seconds: float, core_s: float) -> None:
        """Add one repetition."""
        self.seconds.append(seconds)
        self.core_s.append(core_s)

    @property
    def median_s(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    def rate(self, length_bytes: int) -> float:
        """Median rate in GB/s (10^9 bytes)."""
        return length_bytes / self.median_s / 1e9

    def core_s_per_gb(self, length_bytes: int) -> float:
        """Processor seconds for 10^9 bytes, at the median."""
        return statistics.median(self.core_s) / length_bytes * 1e9


@dataclass
class SizeResult:
    """All lines at one size: courses by name, `bare path`, `transport` (one descriptor), `transport slices`, `copy`."""

    length_bytes: int
    lines: dict[str, Series]
    cores: int

    @property
    def bound(self) -> float:
        """Bound of the processor in GB/s; `transfer` defines it."""
        transport, copy = (self.lines[name].core_s_per_gb(self.length_bytes) for name in ("transport", "copy"))
        return self.cores / (transport + 2 * copy)

    def rate(self, name: str) -> float | None:
        """Rate of a line in GB/s; None if it was not measured at this size."""
        series = self.lines.get(name)
        return series.rate(self.length_bytes) if series is not None and series.seconds else None


@dataclass
class Report:
    """A whole run."""

    courses: list[Course]
    sizes: list[SizeResult]
    backend: str
    wire: str
    slice_bytes: int
    batch: int
    page_size: int
    repeats: int
    placement: Placement = HOST
