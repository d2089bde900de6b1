"""What a process holds of the machine: descriptors by kind, mapped pages of engines, memory of its own.

Used by tests that compare the end with the start. Reads /proc only.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# What an allocator and Python's caches keep of what was freed, and rooms that are remembered for two leases: scenes of a
# dozen rooms were seen to make a worker grow by 1 MiB at most, and what is lost in each of them would add up.
GROWTH_BYTES_MAX = 4 << 20


@dataclass(frozen=True)
class Holdings:
    """Of one process at one moment."""

    descriptors: Mapping[str, int]
    mapped_pages: int  # regions of engines' pages
    own_bytes: int  # anonymous memory that is there

    def grown_from(self, start: Holdings, kept_descriptors: int = 0) -> str:
        """What is more than it was; empty: nothing is. So many descriptors may be kept, of whatever kind."""
        more = Counter(self.descriptors) - Counter(start.descriptors)
        found = [f"{kind}: {start.descriptors.get(kind, 0)} -> {self.descriptors[kind]}" for kind in sorted(more)]
        if more.total() <= kept_descriptors:
            found.clear()
        if self.mapped_pages > start.mapped_pages:
            found.append(f"mapped regions of pages: {start.mapped_pages} -> {self.mapped_pages}")
        if self.own_bytes > start.own_bytes + GROWTH_BYTES_MAX:
            found.append(f"own memory: {start.own_bytes >> 20} -> {self.own_bytes >> 20} MiB")
        return ", ".join(found)


def holdings(pid: int) -> Holdings:
    """Read what a process holds now."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        # Some are closed while we look.
        with contextlib.suppress(OSError):
            kinds[_kind(str(entry.readlink()))] += 1
    regions = {line.split()[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:pages-" in line}
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    own_kib = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
    return Holdings(dict(kinds), len(regions), own_kib << 10)


def _kind(target: str) -> str:
    if target.startswith("/memfd:pages-"):
        return "pages"
    if target.startswith("/"):
        # Shared memory of a transport has a name for each life of it.
        return re.sub(r"_[0-9a-f]+( \(deleted\))?$", "", target)
    return target.partition(":[")[0]
