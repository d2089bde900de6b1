"""Renders the results of `longshore verify` and `longshore bench cluster` as tables or as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from longshore_cli.aligned import aligned
from longshore_cli.verify.pairs import EXPECTED_PAIRS_MIN, SLOW_PART, UNKNOWN, Judged
from longshore_cli.words import as_json, binary, plain
from longshore_spec.agent_config import AgentConfig
from longshore_wire.plan import Plan
from longshore_wire.ways import Staging, Way

_HEADER = ["prefill", "decode", "memory", "way", "wire", "GB/s", "expected", "verdict"]
_LOAD_HEADER = ["memory", "room", "at a time", "pairs", "rooms", "failed", "p50 ms", "p99 ms", "GB/s"]


@dataclass(frozen=True, slots=True)
class Load:
    """The rooms of one size and concurrency, of all pairs at once.

    Attributes:
        memory: of the test pages of all pairs; see `pairs.Measured`.
        concurrency: rooms of each pair at a time.
        bytes_per_second: of all pairs together.
    """

    memory: str
    room_bytes: int
    concurrency: int
    pairs: int
    rooms: int
    failed: int
    p50_s: float
    p99_s: float
    bytes_per_second: float
    text: str = ""


def plan_line(cache: str, plan: Plan, config: AgentConfig) -> str:
    """Return what the deployment's layouts plan for a cache of a room, before its wire is known."""
    staging = config.transfer.staging.value
    name = f" of {cache}" if len(config.model.all_caches) > 1 else ""
    text = f"plan{name}: {len(plan.pairs)} pairs of ranks, {plan.way.label}"
    if plan.way is not Way.STAGED or config.transfer.staging is not Staging.AUTO:
        return f"{text} (transfer.staging: {staging})"
    return f"{text}; with transfer.staging: {staging}, decode may choose in place by the measurements for a wire"


def table(judged: Sequence[Judged]) -> list[str]:
    """Return a line for each pair, and one for each that is failed or slow."""
    rows = [_HEADER]
    for each in judged:
        pair = each.pair
        speed, expected = _speed(pair.bytes_per_second), _speed(each.expected)
        rows.append([pair.prefill, pair.decode, pair.memory, pair.way, pair.wire, speed, expected, each.verdict])
    lines = aligned(rows, frozenset({0, 1, 2, 3, 4, 7}))
    if any(each.expected for each in judged):
        lines.append(
            f"expected: the median of the pairs with the same memory, way and wire, if there are {EXPECTED_PAIRS_MIN}"
        )
    for each in judged:
        pair = each.pair
        if pair.reason:
            lines.append(f"{pair.prefill} -> {pair.decode}: {pair.reason}: {pair.text}")
        elif each.slow:
            lines.append(
                f"{pair.prefill} -> {pair.decode}: slow: {_speed(pair.bytes_per_second)} GB/s is less than {SLOW_PART:.0%} of the "
                f"{_speed(each.expected)} GB/s of other pairs over {pair.wire}: compare the NICs, cables and load of both nodes"
            )
    return [plain(line) for line in lines]


def summary(judged: Sequence[Judged], pair_count: int) -> str:
    """Return the last line. `pair_count` counts all pairs, of which some may have been left out."""
    counts = {word: sum(each.verdict == word for each in judged) for word in ("ok", "SLOW", "FAILED", "untested")}
    text = f"{counts['ok'] + counts['SLOW']} of {pair_count} pairs moved every byte right"
    more = [f"{count} {word.lower()}" for word, count in counts.items() if word != "ok" and count]
    if pair_count > len(judged):
        more.append(f"{pair_count - len(judged)} left out: give --pairs {pair_count} for all")
    return f"{text}; {', '.join(more)}" if more else text


def verify_json(judged: Sequence[Judged], pair_count: int, plans: Mapping[str, Plan]) -> str:
    """Return all results as JSON. The numbers of the first cache's plan stand alone, too."""
    pairs = [asdict(each.pair) | {"expected": each.expected, "verdict": each.verdict.lower()} for each in judged]
    planned = {name: {"way": plan.way.label, "rank_pairs": len(plan.pairs)} for name, plan in plans.items()}
    return as_json({"pairs": pairs, "pair_count": pair_count, "plan": next(iter(planned.values())), "plans": planned})


def load_table(loads: Sequence[Load]) -> list[str]:
    """Return a line for each load, and the first failure of each."""
    rows = [_LOAD_HEADER]
    for load in loads:
        times = [f"{1000 * seconds:.2f}" if seconds else UNKNOWN for seconds in (load.p50_s, load.p99_s)]
        counts = [str(count) for count in (load.concurrency, load.pairs, load.rooms, load.failed)]
        rows.append([load.memory, binary(load.room_bytes), *counts, *times, _speed(load.bytes_per_second)])
    failures = [f"{binary(load.room_bytes)} x {load.concurrency}: {load.text}" for load in loads if load.text]
    return [*aligned(rows, frozenset({0})), *map(plain, failures)]


def load_json(loads: Sequence[Load]) -> str:
    """Return all results as JSON."""
    return as_json([asdict(load) for load in loads])


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f}" if bytes_per_second else UNKNOWN
