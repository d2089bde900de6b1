"""Measures the resources of a process: descriptors by kind, mapped pages of engines, and its own memory.

Tests compare the end with the start. Reads /proc only.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Allocators and Python's caches keep freed memory, and workers remember rooms for two leases. In scenes of a dozen rooms a
# worker grew by at most 1 MiB. Leaks would add up over the scenes.
GROWTH_BYTES_MAX = 4 << 20


@dataclass(frozen=True)
class Holdings:
    """The resources of one process at one moment."""

    descriptors: Mapping[str, int]
    mapped_pages: int  # regions of engines' pages
    own_bytes: int  # resident anonymous memory

    def grown_from(self, start: Holdings, kept_descriptors: int = 0) -> str:
        """Return the resources that have grown; empty if none. `kept_descriptors` more are permitted."""
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
    """Read a process's current resources."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        # Some are closed during the scan.
        with contextlib.suppress(OSError):
            kinds[_kind(str(entry.readlink()))] += 1
    regions = {line.split()[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:pages-" in line}
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    own_kib = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
    return Holdings(dict(kinds), len(regions), own_kib << 10)


def holdings_of(pids: Iterable[int]) -> dict[int, Holdings]:
    """Read the resources of several processes; one that ends during the reading is left out."""
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = holdings(pid)
    return found


def _kind(target: str) -> str:
    if target.startswith("/memfd:pages-"):
        return "pages"
    if target.startswith("/"):
        # A transport's shared memory has another name in each of its lives.
        return re.sub(r"_[0-9a-f]+( \(deleted\))?$", "", target)
    return target.partition(":[")[0]
