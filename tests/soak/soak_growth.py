"""Records memory, descriptors and threads of every process of the soak, at every pause, from its start to its end.

Called by `soak`. A process is compared with itself: if a life of many minutes holds more at its last pause than at its first, with
as much open at both, it has grown. Connections to ended peers are counted separately: Mooncake closes none of them before its
process ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from process_ledger import Holdings, holdings
from soak_nodes import Fleet, now_s

# Least life to judge: long enough that state kept for two leases is forgotten, and for several deaths of peers.
LIFE_MIN_S = 120.0
# Permitted growth of a process over its life, independent of its length. Rooms and dead peers are remembered for two
# leases, and allocators keep freed memory. A leak in each room or strike adds up to more.
OWN_BYTES_MAX = 24 << 20
DESCRIPTORS_MAX = 16
THREADS_MAX = 2
# The state's number in /proc/net/tcp.
CLOSE_WAIT = "08"


@dataclass(frozen=True)
class Sample:
    """One process at one pause."""

    at_s: float
    held: Holdings
    threads: int
    dead_sockets: int  # connections whose other end is gone

    @property
    def descriptors(self) -> int:
        """Descriptors of all kinds, without those that Mooncake keeps."""
        return sum(self.held.descriptors.values()) - self.dead_sockets


@dataclass
class Life:
    """One process from its first pause to its last one."""

    title: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def span_s(self) -> float:
        """Seconds between its first and its last pause."""
        return self.samples[-1].at_s - self.samples[0].at_s

    def growth(self) -> str:
        """Return what has grown; empty: nothing, or its life was too short to judge."""
        first, last = self.samples[0], self.samples[-1]
        if self.span_s < LIFE_MIN_S:
            return ""
        found = []
        if last.held.own_bytes > first.held.own_bytes + OWN_BYTES_MAX:
            found.append(f"own memory {first.held.own_bytes >> 20} -> {last.held.own_bytes >> 20} MiB")
        if last.descriptors > first.descriptors + DESCRIPTORS_MAX:
            found.append(f"descriptors {dict(first.held.descriptors)} -> {dict(last.held.descriptors)}")
        if last.threads > first.threads + THREADS_MAX:
            found.append(f"threads {first.threads} -> {last.threads}")
        if last.held.mapped_pages > first.held.mapped_pages:
            found.append(f"mapped regions of pages {first.held.mapped_pages} -> {last.held.mapped_pages}")
        return f"{self.title} (pid {self.pid}, {self.span_s:.0f} s): {', '.join(found)}" if found else ""


@dataclass(frozen=True)
class Total:
    """Resources of all processes at one pause."""

    processes: int
    own_bytes: int
    descriptors: int
    threads: int
    dead_sockets: int


class Book:
    """All lives so far."""

    def __init__(self) -> None:
        self.lives: dict[tuple[str, int], Life] = {}
        self.totals: list[Total] = []

    def note(self, fleets: list[Fleet]) -> None:
        """Measure every process; no room is open and no process is stopped or dead now."""
        found = [(life, sample) for life, sample in self._look(fleets)]
        for life, sample in found:
            life.samples.append(sample)
        self.totals.append(
            Total(
                len(found),
                sum(sample.held.own_bytes for _, sample in found),
                sum(sample.descriptors for _, sample in found),
                sum(sample.threads for _, sample in found),
                sum(sample.dead_sockets for _, sample in found),
            )
        )

    def growth(self) -> list[str]:
        """Return what has grown, one line for each life."""
        return [grown for life in self.lives.values() if (grown := life.growth())]

    def _look(self, fleets: list[Fleet]) -> Iterator[tuple[Life, Sample]]:
        for fleet in fleets:
            for node in fleet.nodes.values():
                for what, pid in node.processes().items():
                    title = f"{node.title} {what}"
                    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
                    life = self.lives.setdefault((title, pid), Life(title, pid))
                    yield life, Sample(now_s(), holdings(pid), threads, dead_sockets(pid))


def dead_sockets(pid: int) -> int:
    """Count the TCP connections of a process that the other end has closed and it has not."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    closed = {f"socket:[{row.split()[9]}]" for table in tables for row in table if row.split()[3] == CLOSE_WAIT}
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += str(entry.readlink()) in closed
    return found
