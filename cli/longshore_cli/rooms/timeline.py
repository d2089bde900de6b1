"""Renders the steps of a room: as a table for a terminal, and as a file for Perfetto. Decides nothing about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longshore_cli.aligned import aligned
from longshore_cli.rooms.steps import CALL, WAIT, Gap, Step, arrows, busy_ns, gaps, transfer
from longshore_cli.trace_file import TooManyRowsError, TraceFile
from longshore_wire.errors import LongshoreError, Reason

# Steps in the table. A room of many slabs is for the file.
TABLE_STEPS_MAX = 400
# Behind the name of a process in the file.
_CUT = " (first steps are gone)"
# Shorter gaps are counted, not shown.
_SHOWN_GAP_NS = 1000
_LEFT = frozenset({2, 3})
# In the file and in sums: as a room passes them.
_PLACES = ("prefill engine", "prefill worker", "decode worker", "decode engine")


class TraceFileError(LongshoreError):
    """The file cannot be written, or the steps cannot be those of one room."""

    reason = Reason.UNSUPPORTED


def table(steps: Sequence[Step], cut: Sequence[str] = ()) -> str:
    """Return the table: each step and each gap, and the sums. `cut` are processes whose first steps are gone."""
    first_ns = steps[0].start_ns
    last_ns = max(step.end_ns for step in steps)
    found = gaps(steps, first_ns, last_ns)
    shown = [*steps[:TABLE_STEPS_MAX]]
    until_ns = shown[-1].start_ns
    lines: list[tuple[int, list[str]]] = [(step.start_ns, _row(step, first_ns)) for step in shown]
    lines += [(gap.start_ns, _gap_row(gap, first_ns)) for gap in found if _is_shown(gap) and gap.start_ns < until_ns]
    lines.sort(key=lambda line: line[0])
    rows = [["at us", "for us", "process", "step"], *(row for _, row in lines)]
    text = aligned(rows, _LEFT)
    if len(shown) < len(steps):
        text.append(f"… {len(steps) - len(shown)} more steps: write them to a file with -o")
    if cut:
        text.append("")
        text.append(
            f"incomplete: the first steps of {', '.join(cut)} are gone, so that times and sums lack them: a worker keeps its "
            "newest steps of all rooms (LONGSHORE_SPANS_MAX) and shows the newest 4,096 of one"
        )
    return "\n".join([*text, "", *_sums(steps, first_ns, last_ns)])


def write(steps: Sequence[Step], path: Path, cut: Sequence[str] = ()) -> None:
    """Write the file: a process for each engine and worker, an arrow for each message that was handled.

    Args:
        cut: processes whose first steps are gone.
    Raises:
        TraceFileError: more steps of one thread overlap than one room can have, or the file cannot be written.
    """
    file = TraceFile()
    shown = {process: f"{process}{_CUT if process in cut else ''}" for process in _processes(steps)}
    for name in shown.values():
        file.process(name)
    try:
        spots = [
            file.span(
                shown[step.process], step.thread, _text(step), step.kind, step.start_ns, step.end_ns, _arguments(step)
            )
            for step in steps
        ]
    except TooManyRowsError as error:
        raise TraceFileError(f"{error}: give the agents of one deployment only") from error
    for sender, receiver in arrows(steps):
        file.arrow("message", spots[sender], spots[receiver])
    try:
        file.write(path)
    except OSError as error:
        raise TraceFileError(f"-o {path}: {error.strerror}: name a file that can be written") from error


def _sums(steps: Sequence[Step], first_ns: int, last_ns: int) -> list[str]:
    lines = [_sum("from the first step to the last", steps, first_ns, last_ns)]
    if (found := transfer(steps)) is not None:
        lines.append(_sum("from both halves open to decode's DONE", steps, *found))
        first_ns, last_ns = found
    else:
        lines.append(
            "the time to decode's DONE is not known: the room is open or has failed, an agent of one half is not named, or its "
            "steps are no longer kept"
        )
    for process in _processes(steps):
        own = [step for step in steps if step.process == process]
        lines.append(f"  of that, {process} ran {_us(busy_ns(own, first_ns, last_ns))} us")
    if not any(step.kind == CALL for step in steps):
        lines.append("the engines have reported no steps: set LONGSHORE_CLIENT_SPANS=true at the agents")
    return lines


def _sum(what: str, steps: Sequence[Step], start_ns: int, end_ns: int) -> str:
    idle_ns = sum(gap.end_ns - gap.start_ns for gap in gaps(steps, start_ns, end_ns))
    share = 100 * idle_ns / max(1, end_ns - start_ns)
    return f"{what}: {_us(end_ns - start_ns)} us, and in {_us(idle_ns)} us of them ({share:.0f} %) nothing of this room ran"


def _processes(steps: Sequence[Step]) -> list[str]:
    def place(process: str) -> tuple[int, str]:
        return next((index for index, kind in enumerate(_PLACES) if process.startswith(kind)), len(_PLACES)), process

    return sorted({step.process for step in steps}, key=place)


def _row(step: Step, first_ns: int) -> list[str]:
    return [_us(step.start_ns - first_ns), _us(step.end_ns - step.start_ns), step.process, _text(step)]


def _gap_row(gap: Gap, first_ns: int) -> list[str]:
    return [_us(gap.start_ns - first_ns), _us(gap.end_ns - gap.start_ns), "--", f"nothing, until {gap.until}"]


def _is_shown(gap: Gap) -> bool:
    return gap.end_ns - gap.start_ns >= _SHOWN_GAP_NS


def _text(step: Step) -> str:
    ranks = f" {step.source_rank}→{step.target_rank}" if step.source_rank >= 0 else ""
    cache = f" cache {step.cache}" if step.cache > 0 else ""
    slab = f" slab {step.slab}" if step.slab >= 0 else ""
    taken = " (until the engine takes it)" if step.kind == WAIT and step.thread == "events" else ""
    return f"{step.name}{ranks}{cache}{slab}{taken}"


def _arguments(step: Step) -> dict[str, object]:
    named = {"source_rank": step.source_rank, "target_rank": step.target_rank, "cache": step.cache, "slab": step.slab}
    return {"worker": step.worker} | {name: value for name, value in named.items() if value >= 0}


def _us(time_ns: int) -> str:
    return f"{time_ns / 1000:.1f}"
