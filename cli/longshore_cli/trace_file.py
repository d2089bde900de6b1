"""Writes a file in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Called by `longshore trace` and by the laboratory's benchmarks. Knows processes, threads, spans and arrows, and nothing of
rooms and slabs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Rows of one thread in the file, for overlapping spans of one lane.
ROWS_MAX = 16
_NS_PER_US = 1000


class TooManyRowsError(Exception):
    """More spans of one thread overlap than one room can have."""


class Spot(NamedTuple):
    """A place in the file, where an arrow begins or ends."""

    process: int
    row: int
    at_ns: int


@dataclass
class TraceFile:
    """Collects spans in the order of their start."""

    _events: list[dict[str, Any]] = field(default_factory=list)
    _processes: dict[str, int] = field(default_factory=dict)
    _rows: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # end of the last span in each row
    _row_ids: dict[tuple[int, str, int], int] = field(default_factory=dict)
    _arrow_count: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is no span."""
        return not self._events

    def process(self, name: str) -> int:
        """Return the number of a process. The file shows processes in the order of their first mention."""
        return self._processes.setdefault(name, len(self._processes) + 1)

    def span(
        self,
        process: str,
        thread: str,
        name: str,
        category: str,
        start_ns: int,
        end_ns: int,
        arguments: Mapping[str, object],
    ) -> Spot:
        """Add a span, in a row of its own if it overlaps another one of its thread. Raises TooManyRowsError."""
        number = self.process(process)
        row = self._row(number, thread, start_ns, end_ns)
        event = {"ph": "X", "cat": category, "name": name, "args": dict(arguments)}
        place = {"pid": number, "tid": row, "ts": start_ns, "dur": (end_ns - start_ns) / _NS_PER_US}
        self._events.append(event | place)
        return Spot(number, row, start_ns)

    def arrow(self, name: str, *spots: Spot) -> None:
        """Add an arrow through spans, which bind it at their starts."""
        phases = ["s", *["t"] * (len(spots) - 2), "f"]
        for phase, spot in zip(phases, spots, strict=True):
            place = {"pid": spot.process, "tid": spot.row, "ts": spot.at_ns}
            self._events.append({"ph": phase, "cat": name, "name": name, "id": self._arrow_count, "bp": "e"} | place)
        self._arrow_count += 1

    def write(self, path: Path) -> None:
        """Write the file. Times begin at the first span."""
        first_ns = min(event["ts"] for event in self._events)
        events = [event | {"ts": (event["ts"] - first_ns) / _NS_PER_US} for event in self._events]
        body = {"traceEvents": self._names() + events, "displayTimeUnit": "ms"}
        path.write_text(json.dumps(body), encoding="utf-8")

    def _row(self, process: int, thread: str, start_ns: int, end_ns: int) -> int:
        """Return a free row for a span. Viewers draw overlapping spans of one row as nested, so each needs its own."""
        rows = self._rows.setdefault((process, thread), [])
        index = next((number for number, used_ns in enumerate(rows) if used_ns <= start_ns), len(rows))
        if index == len(rows):
            if index >= ROWS_MAX:
                raise TooManyRowsError(f"{thread} has {ROWS_MAX} spans at once")
            rows.append(0)
        rows[index] = end_ns
        return self._row_ids.setdefault((process, thread, index), len(self._row_ids) + 1)

    def _names(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name, process in self._processes.items():
            found += [
                {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}},
                {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}},
            ]
        for (process, thread, index), row in self._row_ids.items():
            label = thread if not index else f"{thread} ({index + 1})"
            found.append({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": label}})
        return found
