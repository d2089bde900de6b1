"""Joins the answers of agents on one room into its steps, in the order of their start, on one clock. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from longshore_cli.rooms.clocks import Correction
from longshore_wire.errors import LongshoreError, Reason

# Kinds of spans, as `/v1/rooms/{id}` has them.
WAIT, CALL, STAGE, SEND, HANDLE = "wait", "call", "stage", "send", "handle"
# The control thread's time from waking to the last step of this room before it sleeps again. Others lie within it.
TURN = "turn"
_ROLES = {"source": "prefill", "target": "decode"}
# The first message of a half, by the call of its engine.
_OPENING = {"send": "Offer", "receive": "Receive"}


class NoStepsError(LongshoreError):
    """The agents know a room and have no step of it any more; says what to raise."""

    reason = Reason.UNSUPPORTED


class AmbiguousRoomError(LongshoreError):
    """Several prefill instances have a room of this number; names them."""

    reason = Reason.UNKNOWN_INSTANCE


class Step(NamedTuple):
    """One step of a room.

    Attributes:
        worker: the name of the worker that has recorded it, or whose engine has.
        process: such as `prefill worker 0`; the number is the rank.
        thread: the lane or thread of the process.
        kind: WAIT: nothing of the room ran.
        source_rank, target_rank, slab, cache: -1 if none. Slabs are counted by cache.
    """

    worker: str
    process: str
    thread: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    source_rank: int = -1
    target_rank: int = -1
    slab: int = -1
    cache: int = -1


class Gap(NamedTuple):
    """A time in which nothing of the room ran. `until` is what ended it."""

    start_ns: int
    end_ns: int
    until: str


def joined(details: Sequence[Mapping[str, Any]], shifts: Sequence[Correction]) -> list[Step]:
    """Return all steps of a room, by start.

    Args:
        details: answers of `/v1/rooms/{id}`.
        shifts: of the hosts of these answers.
    Raises:
        AmbiguousRoomError: the answers are on rooms of several instances.
        NoStepsError: no answer has a step.
    """
    room = details[0]["room"]
    instances = sorted({entry["room"]["instance"] for detail in details for entry in detail["halves"]})
    if len(instances) > 1:
        raise AmbiguousRoomError(f"room {room} is one of {', '.join(instances)}: choose with --instance")
    labels = _labels(details)
    found: list[Step] = []
    for detail, shift in zip(details, shifts, strict=True):
        found += _turns([_step(span, labels, shift.shift_ns) for span in detail["spans"]])
    if not found:
        raise NoStepsError(
            f"room {room}: its workers keep no steps of it any more: trace it sooner after its end, or raise "
            "LONGSHORE_SPANS_MAX of its agents"
        )
    return sorted(found, key=lambda step: (step.start_ns, -step.end_ns))


def gaps(steps: Sequence[Step], start_ns: int, end_ns: int) -> list[Gap]:
    """Return the times in [start, end) in which no step ran. Begin and end of a wait divide them."""
    events = {start_ns: "", end_ns: "the end"}
    for step in steps:
        if step.kind == WAIT:
            events[step.end_ns] = f"{step.process}: end of {step.name}"
    for step in reversed(steps):
        events[step.start_ns] = f"{step.process}: {step.name}"
    running = [step for step in steps if step.kind != WAIT]
    found: list[Gap] = []
    covered_ns, count = start_ns, 0
    for first_ns, second_ns in pairwise(sorted(at_ns for at_ns in events if start_ns <= at_ns <= end_ns)):
        while count < len(running) and running[count].start_ns <= first_ns:
            covered_ns = max(covered_ns, running[count].end_ns)
            count += 1
        if (begin_ns := max(first_ns, covered_ns)) < second_ns:
            found.append(Gap(begin_ns, second_ns, events[second_ns]))
    return found


def cut_workers(details: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the processes of workers that no longer have the room's first steps."""
    labels = _labels(details)
    return sorted(labels[worker][1] for detail in details for worker in detail["incomplete"] if worker in labels)


def busy_ns(steps: Iterable[Step], start_ns: int, end_ns: int) -> int:
    """Return the time in [start, end) in which at least one of the steps, in the order of their start, ran."""
    total_ns, covered_ns = 0, start_ns
    for step in steps:
        if step.kind != WAIT and step.end_ns > covered_ns and step.start_ns < end_ns:
            total_ns += min(step.end_ns, end_ns) - max(step.start_ns, covered_ns)
            covered_ns = min(step.end_ns, end_ns)
    return total_ns


def transfer(steps: Sequence[Step]) -> tuple[int, int] | None:
    """Return the time from when both halves were open to decode's DONE; None: a part of it is not known."""
    opened = [min((step.start_ns for step in steps if step.name in names), default=None) for names in _OPENING.items()]
    told = [step.end_ns for step in steps if step.process.startswith("decode") and step.name in {"DONE", "send DONE"}]
    begun = [at_ns for at_ns in opened if at_ns is not None]
    if len(begun) < len(opened) or not told or max(told) < max(begun):
        return None
    return max(begun), max(told)


def arrows(steps: Sequence[Step]) -> Iterator[tuple[int, int]]:
    """Yield indexes of the steps that sent a message and of those that handled it."""
    sent: dict[tuple[object, ...], list[int]] = {}
    for index, step in enumerate(steps):
        ranks = (step.source_rank, step.target_rank, step.cache, step.slab)
        if step.kind == SEND:
            name = step.name.removeprefix("send ")
            # A message of a pair of ranks is for the peer, others are for the engine.
            key = (name, *ranks) if step.source_rank >= 0 else (name, step.worker)
            sent.setdefault(key, []).append(index)
        elif step.kind == CALL and step.name in _OPENING:
            sent.setdefault((_OPENING[step.name], step.worker), []).append(index)
        elif step.kind in {HANDLE, WAIT}:
            key = (step.name, *ranks) if step.source_rank >= 0 else (step.name, step.worker)
            if waiting := sent.get(key):
                yield waiting.pop(0), index


def _step(span: Mapping[str, Any], labels: Mapping[str, tuple[str, str]], shift_ns: int) -> tuple[Step, int]:
    """Return the step of a span, and the beginning of its turn; 0: it is of no turn."""
    worker, kind, name = span["worker"], span["kind"], _printable(span["stage"])
    engine_label, worker_label = labels.get(worker, (f"engine of {worker}", f"worker {worker}"))
    process = engine_label if kind in {CALL, WAIT} else worker_label
    start_ns, end_ns, woken_ns = (int(span[field]) for field in ("start_ns", "end_ns", "woken_ns"))
    # An agent of an earlier release names no cache.
    ranks = span["source_rank"], span["target_rank"], span["slab"], span.get("cache", -1)
    step = Step(worker, process, _thread(span, name), name, kind, start_ns - shift_ns, end_ns - shift_ns, *ranks)
    return step, min(woken_ns, start_ns) - shift_ns if woken_ns else 0


def _turns(steps: Sequence[tuple[Step, int]]) -> list[Step]:
    """Return steps and the turns of their control threads."""
    turns: dict[tuple[str, int], Step] = {}
    for step, woken_ns in steps:
        if woken_ns:
            turn = turns.get((step.worker, woken_ns))
            end_ns = step.end_ns if turn is None else max(turn.end_ns, step.end_ns)
            turns[step.worker, woken_ns] = Step(step.worker, step.process, "turns", TURN, HANDLE, woken_ns, end_ns)
    return [*(step for step, _ in steps), *turns.values()]


def _thread(span: Mapping[str, Any], name: str) -> str:
    if span["kind"] == STAGE:
        return f"{'scatter thread' if name == 'scatter' else 'lane'} {span['lane']}"
    if span["kind"] in {CALL, WAIT}:
        return "calls" if name.removesuffix(" waits") in _OPENING else "events"
    return "control"


def _labels(details: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the names of each worker's engine and of the worker itself."""
    roles: dict[str, set[str]] = {}
    for detail in details:
        for entry in detail["halves"]:
            roles.setdefault(entry["worker"], set()).add(_ROLES[entry["room"]["half"]])
    found = {worker: (" and ".join(sorted(each)), _rank(worker)) for worker, each in roles.items()}
    counts = Counter(found.values())
    return {
        worker: (f"{role} engine {place}", f"{role} worker {place}")
        for worker, (role, rank) in found.items()
        for place in [rank if counts[role, rank] == 1 else worker]
    }


def _rank(worker: str) -> str:
    """Return the place of a worker in its instance: its rank, after its data-parallel rank if that is not 0."""
    return worker.partition("/")[2].removeprefix("0/") or worker


def _printable(text: str) -> str:
    """Return a name, which an engine may have given, without control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)
