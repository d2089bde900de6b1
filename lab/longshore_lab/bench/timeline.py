"""Writes a timeline of transfers in Chrome's trace format: when each slab was gathered, on the wire and scattered.

Called by `transfer` and by the GPU benchmarks after the transfer, with the spans that workers always keep. A run without
a timeline has no extra cost. Does not read the agents' pages itself. Perfetto (ui.perfetto.dev) and chrome://tracing open
the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longshore_lab.bench.errors import BenchError

# The stages of a slab in order. A slab that is written in place or copied directly has only the second.
GATHER, WIRE, SCATTER = "gather", "wire", "scatter"
STAGES = (GATHER, WIRE, SCATTER)
_OF_SPAN = {"gather": GATHER, "write": WIRE, "scatter": SCATTER}
# Rows of one thread in the file, for overlapping spans of one lane.
_ROWS_MAX = 16
_NS_PER_US = 1000


class Slab(NamedTuple):
    """One slab of one transfer."""

    transfer: str
    source_rank: int
    target_rank: int
    slab: int


@dataclass
class Timeline:
    """Collects transfers, which follow each other on their host's clock."""

    _events: list[dict[str, Any]] = field(default_factory=list)
    _workers: dict[str, int] = field(default_factory=dict)
    _rows: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # end of the last span in each row
    _row_ids: dict[tuple[int, str, int], int] = field(default_factory=dict)
    _slab_count: int = 0

    def add(self, transfer: str, spans: Iterable[Mapping[str, Any]], *, staged: bool) -> None:
        """Add one transfer.

        Args:
            transfer: its name; each of its workers becomes a process of that name in the file.
            spans: the spans of `/v1/rooms/{room}` of both agents.
            staged: whether each slab must have all three stages instead of the wire alone.
        Raises:
            BenchError: spans of a slab are missing, because the workers keep only the newest.
        """
        slabs: dict[Slab, dict[str, Mapping[str, Any]]] = {}
        for span in sorted(spans, key=lambda each: int(each["start_ns"])):
            slab = Slab(transfer, int(span["source_rank"]), int(span["target_rank"]), int(span["slab"]))
            if (stage := _OF_SPAN.get(str(span["stage"]))) is not None:
                slabs.setdefault(slab, {})[stage] = span
        _check_whole(transfer, slabs, STAGES if staged else (WIRE,))
        placed = sorted(
            ((slab, stage, span) for slab, stages in slabs.items() for stage, span in stages.items()),
            key=lambda each: int(each[2]["start_ns"]),
        )
        numbers = {slab: self._slab_count + index for index, slab in enumerate(slabs)}
        self._slab_count += len(slabs)
        for slab, stage, span in placed:
            self._place(slab, stage, span, number=numbers[slab], stages=slabs[slab])

    def write(self, path: Path) -> None:
        """Write the file. Times begin at the first span.

        Raises:
            BenchError: nothing was added.
        """
        if not self._events:
            raise BenchError("no transfer was traced: name a way that moves bytes")
        first_ns = min(event["ts"] for event in self._events)
        events = [event | {"ts": (event["ts"] - first_ns) / _NS_PER_US} for event in self._events]
        body = {"traceEvents": self._names() + events, "displayTimeUnit": "ms"}
        path.write_text(json.dumps(body), encoding="utf-8")

    def _place(
        self, slab: Slab, stage: str, span: Mapping[str, Any], *, number: int, stages: Mapping[str, object]
    ) -> None:
        side, rank = ("decode", slab.target_rank) if stage == SCATTER else ("prefill", slab.source_rank)
        process = self._workers.setdefault(f"{slab.transfer}: {side} rank {rank}", len(self._workers) + 1)
        start_ns, end_ns = int(span["start_ns"]), int(span["end_ns"])
        thread = f"{'scatter thread' if stage == SCATTER else 'lane'} {span['lane']}"
        row = self._row(process, thread, start_ns, end_ns)
        name = f"{stage} {slab.source_rank}→{slab.target_rank} slab {slab.slab}"
        known = {"pid": process, "tid": row, "ts": start_ns}
        arguments = {
            "slab": slab.slab,
            "source_rank": slab.source_rank,
            "target_rank": slab.target_rank,
            "room": span["room"],
        }
        length = {"dur": (end_ns - start_ns) / _NS_PER_US}
        self._events.append({"ph": "X", "cat": stage, "name": name, "args": arguments} | known | length)
        if len(stages) > 1:
            # An arrow between two stages of a slab. It binds to the enclosing spans.
            phase = {GATHER: "s", WIRE: "t", SCATTER: "f"}[stage]
            arrow = {"ph": phase, "cat": "slab", "name": "slab", "id": number, "bp": "e"}
            self._events.append(arrow | known)

    def _row(self, process: int, thread: str, start_ns: int, end_ns: int) -> int:
        """Return a free row for a span. Viewers draw overlapping spans of one row as nested, so each needs its own."""
        rows = self._rows.setdefault((process, thread), [])
        index = next((number for number, used_ns in enumerate(rows) if used_ns <= start_ns), len(rows))
        if index == len(rows):
            if index >= _ROWS_MAX:
                raise BenchError(f"{thread} has {_ROWS_MAX} spans at once: its spans are not those of one transfer")
            rows.append(0)
        rows[index] = end_ns
        return self._row_ids.setdefault((process, thread, index), len(self._row_ids) + 1)

    def _names(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name, process in self._workers.items():
            found += [
                {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}},
                {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}},
            ]
        for (process, thread, index), row in self._row_ids.items():
            label = thread if not index else f"{thread} ({index + 1})"
            found.append({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": label}})
        return found


def _check_whole(transfer: str, slabs: Mapping[Slab, Mapping[str, object]], stages: tuple[str, ...]) -> None:
    way_out = "a worker keeps the newest only: move less, or --set spans_max=NUMBER"
    counts: dict[tuple[int, int], set[int]] = {}
    for slab, found in slabs.items():
        counts.setdefault((slab.source_rank, slab.target_rank), set()).add(slab.slab)
        if missing := [stage for stage in stages if stage not in found]:
            raise BenchError(
                f"{transfer}: slab {slab.slab} from rank {slab.source_rank} to {slab.target_rank} has no span of its "
                f"{missing[0]}: {way_out}"
            )
    for (source, target), seen in counts.items():
        if seen != set(range(len(seen))):
            raise BenchError(f"{transfer}: slabs from rank {source} to {target} are missing in its spans: {way_out}")
