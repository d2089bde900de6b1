"""Writes a timeline of transfers for Perfetto: when each slab was gathered, on the wire and scattered.

Called by `transfer` and by the GPU benchmarks after the transfer, with the spans that workers always keep. A run without
a timeline has no extra cost. Does not read the agents' pages itself. `longshore trace` shows all steps of one room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longshore_cli.trace_file import Spot, TooManyRowsError, TraceFile
from longshore_lab.bench.errors import BenchError

# The stages of a slab in order. A slab that is written in place or copied directly has only the second.
GATHER, WIRE, SCATTER = "gather", "wire", "scatter"
STAGES = (GATHER, WIRE, SCATTER)
_OF_SPAN = {"gather": GATHER, "write": WIRE, "scatter": SCATTER}


class Slab(NamedTuple):
    """One slab of one transfer."""

    transfer: str
    source_rank: int
    target_rank: int
    slab: int


@dataclass
class Timeline:
    """Collects transfers, which follow each other on their host's clock."""

    _file: TraceFile = field(default_factory=TraceFile)

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
        spots: dict[Slab, list[Spot]] = {}
        for slab, stage, span in placed:
            spots.setdefault(slab, []).append(self._place(slab, stage, span))
        for through in spots.values():
            if len(through) > 1:
                self._file.arrow("slab", *through)

    def write(self, path: Path) -> None:
        """Write the file. Times begin at the first span.

        Raises:
            BenchError: nothing was added.
        """
        if self._file.empty:
            raise BenchError("no transfer was traced: name a way that moves bytes")
        self._file.write(path)

    def _place(self, slab: Slab, stage: str, span: Mapping[str, Any]) -> Spot:
        side, rank = ("decode", slab.target_rank) if stage == SCATTER else ("prefill", slab.source_rank)
        arguments = {
            "slab": slab.slab,
            "source_rank": slab.source_rank,
            "target_rank": slab.target_rank,
            "room": span["room"],
        }
        try:
            return self._file.span(
                f"{slab.transfer}: {side} rank {rank}",
                f"{'scatter thread' if stage == SCATTER else 'lane'} {span['lane']}",
                f"{stage} {slab.source_rank}→{slab.target_rank} slab {slab.slab}",
                stage,
                int(span["start_ns"]),
                int(span["end_ns"]),
                arguments,
            )
        except TooManyRowsError as error:
            raise BenchError(f"{error}: its spans are not those of one transfer") from error


def _check_whole(transfer: str, slabs: Mapping[Slab, Mapping[str, object]], stages: tuple[str, ...]) -> None:
    way_out = "an agent shows the newest 4,096 of a room only, and keeps spans_max of all rooms: move less"
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
