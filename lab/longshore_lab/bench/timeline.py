"""The timeline of transfers: when each slab was gathered, on the wire and scattered, in Chrome's trace format.

Called by `transfer` and by the GPU benchmarks with the spans that workers keep anyway, read from their agents' pages after
the transfer: nothing is recorded for a timeline, and a run without one pays nothing. Knows no agents. Perfetto
(ui.perfetto.dev) and chrome://tracing open the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longshore_lab.bench.errors import BenchError

# The stages of a slab in their order. A slab that is written in place, or copied from pages to pages, has the second only.
GATHER, WIRE, SCATTER = "gather", "wire", "scatter"
STAGES = (GATHER, WIRE, SCATTER)
_OF_SPAN = {"gather": GATHER, "write": WIRE, "scatter": SCATTER}
# Threads of one worker in the file: each takes this many rows at most, for spans of one lane that overlap.
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
    """Transfers that were added, one after another on the clock of their host."""

    _events: list[dict[str, Any]] = field(default_factory=list)
    _workers: dict[str, int] = field(default_factory=dict)
    _rows: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # when each row was used last
    _row_ids: dict[tuple[int, str, int], int] = field(default_factory=dict)
    _slab_count: int = 0

    def add(self, transfer: str, spans: Iterable[Mapping[str, Any]], *, staged: bool) -> None:
        """Add one transfer.

        Args:
            transfer: its name; each worker of it becomes a process of that name in the file.
            spans: as `/v1/rooms/{room}` of both agents have them.
            staged: each slab must have all three stages; otherwise the wire alone.
        Raises:
            BenchError: spans of a slab are missing: the workers keep the newest, and have forgotten some.
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
            # An arrow from stage to stage of one slab; it binds to the span that it begins or ends in.
            phase = {GATHER: "s", WIRE: "t", SCATTER: "f"}[stage]
            arrow = {"ph": phase, "cat": "slab", "name": "slab", "id": number, "bp": "e"}
            self._events.append(arrow | known)

    def _row(self, process: int, thread: str, start_ns: int, end_ns: int) -> int:
        """Return the row of a span: viewers draw what overlaps in one row as if it were nested, so it gets another."""
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
