"""Runs `longshore verify` and `longshore bench cluster`: starts test engines, moves rooms between them, prints results."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TypeVar, get_args

from longshore_cli import agents, cluster, up_directory
from longshore_cli.agent_report import report_of
from longshore_cli.arguments import ArgumentsError, duration, seconds, whole, wholes
from longshore_cli.lifetime import InterruptedBySignal, interrupts_raised
from longshore_cli.threads import Threads
from longshore_cli.verify import report
from longshore_cli.verify.pairs import UNKNOWN, Measured, Pair, choose, is_bad, judge, quantile, rounds
from longshore_cli.verify.places import TOGETHER_MAX, Engine, Place, Programs, VerifyError, kept_alive, opened
from longshore_cli.verify.report import Load
from longshore_cli.words import plain
from longshore_spec.agent_config import AgentConfig
from longshore_spec.quantity import QuantityError, parse_quantity
from longshore_spec.verify_messages import (
    ROOM_FIRST,
    ROOMS_MAX,
    Claim,
    Claimed,
    Done,
    End,
    Offer,
    RoomResult,
    WantedMemory,
    room_tokens,
)
from longshore_wire.errors import LongshoreError, Reason

# The first room of a pair also connects its workers; it is compared and not timed.
_WARM_UP = 1
# A batch of `bench cluster` becomes larger until it takes this long, so that the pauses between batches count little.
_BATCH_S = 0.5

RoomIds = Iterator[int]
Work = TypeVar("Work")
Result = TypeVar("Result")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `verify` reads."""
    _describe(parser, "Move rooms of test bytes between every pair of agents, and compare them.")
    parser.add_argument("--size", type=_size, default=16 << 20, help="bytes of a room, rounded up to pages (16Mi)")
    parser.add_argument("--repeats", type=_repeats, default=3, help="timed rooms of each pair, after a first one (3)")
    parser.add_argument("--pairs", type=whole(1), default=500, help="at most this many, spread over all agents (500)")
    parser.add_argument("--strict", action="store_true", help="a slow link is a failure")
    parser.add_argument(
        "--flip-byte", action="store_true", help="send one wrong byte between the first pair, which the test must find"
    )


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `bench` reads."""
    _describe(parser, "Load pairs of running agents with rooms of test bytes, each agent once.")
    parser.add_argument("--sizes", type=_sizes, default=[1 << 20, 16 << 20], help="bytes of a room (1Mi,16Mi)")
    parser.add_argument("--concurrency", type=wholes, default=[1, 4], help="rooms of each pair at a time (1,4)")
    parser.add_argument("--seconds", type=seconds, default=3.0, help="of each size and concurrency (3)")
    parser.add_argument("--pairs", type=whole(1), default=TOGETHER_MAX, help=f"at most this many ({TOGETHER_MAX})")


def verify(arguments: argparse.Namespace) -> int:
    """Test pairs of agents; return 0 if all bytes are right, else 1; 1 also for a slow link with --strict."""

    def run(places: list[Place], config: AgentConfig) -> int:
        plans, tokens = config.plans(), room_tokens(config, arguments.size)
        planned_bytes = sum(
            pair.payload_bytes(*pair.units_of(0, tokens)) for plan in plans.values() for pair in plan.pairs
        )
        all_pairs = _pairs(places)
        pairs = choose(*all_pairs, arguments.pairs)
        pair_count = len(all_pairs[0]) * len(all_pairs[1])
        rooms = itertools.count(ROOM_FIRST)
        with _engines(places, pairs, arguments, arguments.size, 1) as (engines, problems):
            measured: list[Measured] = []
            for now in rounds(pairs):
                flips = arguments.flip_byte and not measured
                work = [
                    (pair, list(itertools.islice(rooms, arguments.repeats + _WARM_UP)), flips and pair == pairs[0])
                    for pair in now
                ]
                measured += _together(lambda each: _tested(engines, problems, arguments.size, *each), work)
            measured = _with_wires(measured, places, engines)
        judged = judge(_as_planned(each, planned_bytes) for each in measured)
        if arguments.output == "json":
            print(report.verify_json(judged, pair_count, plans))
        else:
            print("\n".join(report.plan_line(*each, config) for each in plans.items()))
            print("\n".join(report.table(judged)))
            print(report.summary(judged, pair_count))
        return int(is_bad(judged, strict=arguments.strict))

    return _with_places("verify", arguments, run)


def bench(arguments: argparse.Namespace) -> int:
    """Load pairs of agents; return 0 if no room failed, else 1."""

    def run(places: list[Place], _config: AgentConfig) -> int:
        pairs = next(rounds(choose(*_pairs(places), count_max=len(places) ** 2)))[: min(arguments.pairs, TOGETHER_MAX)]
        with _engines(places, pairs, arguments, arguments.sizes[-1], arguments.concurrency[-1]) as (engines, problems):
            lost = next((name for pair in pairs for name in pair if name in problems), "")
            if lost:
                raise VerifyError(f"{lost}: {problems[lost]}", reason=problems[lost].reason)
            rooms = itertools.count(ROOM_FIRST)
            for pair in pairs:  # the first room connects the workers
                _move(engines, pair, [next(rooms)], arguments.sizes[0])
            loads = [
                _load(engines, pairs, rooms, size, concurrency, arguments.seconds)
                for size in arguments.sizes
                for concurrency in arguments.concurrency
            ]
        print(report.load_json(loads) if arguments.output == "json" else "\n".join(report.load_table(loads)))
        return int(any(load.failed for load in loads))

    return _with_places("bench cluster", arguments, run)


def _describe(parser: argparse.ArgumentParser, description: str) -> None:
    parser.description = description
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="the DisaggDeployment")
    cluster.add_arguments(parser)
    up_directory.add_argument(parser)
    parser.add_argument(
        "--timeout",
        type=duration,
        default=60.0,
        help="seconds for a test engine's start, and for the rooms of a pair (60)",
    )
    parser.add_argument(
        "--memory",
        choices=get_args(WantedMemory),
        default="auto",
        help="of the test pages; auto: that of the GPUs of an agent's pod; without GPUs, and for the Loopback, host memory (auto)",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="the format (table)")


def _with_places(command: str, arguments: argparse.Namespace, run: Callable[[list[Place], AgentConfig], int]) -> int:
    if arguments.directory is None and not arguments.name:
        raise ArgumentsError("give the NAME of a DisaggDeployment, or --directory")
    if arguments.directory is not None and (
        arguments.name or arguments.namespace or arguments.context or arguments.kubeconfig
    ):
        raise ArgumentsError("--directory names agents of this machine: leave out the deployment, or --directory")
    try:
        with interrupts_raised(), opened(arguments) as (places, config):
            return run(places, config)
    except InterruptedBySignal as error:
        sys.stderr.write(f"longshore {command}: interrupted; its test engines have ended\n")
        return error.status


def _pairs(places: Sequence[Place]) -> tuple[list[str], list[str]]:
    return [place.name for place in places if place.prefill], [place.name for place in places if place.decode]


@contextmanager
def _engines(
    places: Sequence[Place], pairs: Sequence[Pair], arguments: argparse.Namespace, room_bytes: int, room_count: int
) -> Iterator[tuple[dict[str, Engine], dict[str, LongshoreError]]]:
    """Run the test engines of all agents in `pairs`; yield them, and the errors of those that do not start, by name."""
    problems: dict[str, LongshoreError] = {}
    engines: dict[str, Engine] = {}
    wanted = {name for pair in pairs for name in pair}
    with Programs() as programs:

        def start(place: Place) -> None:
            try:
                engines[place.name] = place.engine(
                    programs, room_bytes, room_count, arguments.timeout, arguments.memory
                )
            except LongshoreError as error:
                problems[place.name] = error

        _together(start, [place for place in places if place.name in wanted])
        with kept_alive(list(engines.values())):
            yield engines, problems


def _together(run: Callable[[Work], Result], work: Sequence[Work]) -> list[Result]:
    """Return the results of all work."""
    with Threads(TOGETHER_MAX) as threads:
        found = [threads.submit(run, each) for each in work]
        return [each.result() for each in found]


def _move(
    engines: Mapping[str, Engine],
    pair: Pair,
    rooms: Sequence[int],
    room_bytes: int,
    *,
    concurrency: int = 1,
    compare_each: bool = True,
    flip_byte: bool = False,
) -> Claimed:
    """Move rooms between two agents. Raises LongshoreError: a test engine is lost, or refuses a request."""
    source, target = engines[pair[0]], engines[pair[1]]
    endpoint = source.started.prefill
    assert endpoint is not None, "this agent has an instance for prefill"
    numbers = tuple(rooms)
    source.ask(Offer(numbers, room_bytes, flip_byte), Done)
    try:
        claimed = target.ask(Claim(endpoint, numbers, room_bytes, concurrency, compare_each), Claimed)
    except LongshoreError:
        source.ask(End(numbers, cancel=True), Done)
        raise
    # Rooms with wrong bytes have ended by themselves.
    bad = tuple(each.room for each in claimed.rooms if each.reason and not each.bytes_moved)
    good = tuple(number for number in numbers if number not in bad)
    for ended, cancel in ((good, False), (bad, True)):
        if ended:
            source.ask(End(ended, cancel), Done)
    return claimed


def _tested(
    engines: Mapping[str, Engine],
    problems: Mapping[str, LongshoreError],
    room_bytes: int,
    pair: Pair,
    rooms: Sequence[int],
    flip_byte: bool,
) -> Measured:
    base = Measured(*pair, room_bytes)
    if lost := {name: problems[name] for name in pair if name in problems}:
        reason = next(iter(lost.values())).reason.name
        return replace(
            base, reason=reason, text="; ".join(f"{name}: {error}" for name, error in lost.items()), untested=True
        )
    base = replace(base, memory=_memory(engines, pair))
    try:
        claimed = _move(engines, pair, rooms, room_bytes, flip_byte=flip_byte)
    except LongshoreError as error:
        return replace(base, reason=error.reason.name, text=str(error))
    bad = next((each for each in claimed.rooms if each.reason), None)
    if bad is not None:
        return replace(base, reason=bad.reason, text=bad.text)
    timed = claimed.rooms[_WARM_UP:]
    return replace(
        base,
        room_bytes=timed[0].bytes_moved,
        bytes_per_second=median(each.bytes_moved / each.seconds for each in timed),
    )


def _memory(engines: Mapping[str, Engine], pair: Pair) -> str:
    return "->".join(dict.fromkeys(engines[name].started.memory for name in pair))


def _as_planned(pair: Measured, planned_bytes: int) -> Measured:
    """Return the pair, or its failure if its rooms had other sizes than the plan of the two layouts says."""
    if pair.reason or pair.room_bytes == planned_bytes:
        return pair
    text = f"{pair.room_bytes} bytes moved, and {planned_bytes} are planned between the deployment's layouts"
    return replace(pair, reason=Reason.LAYOUT_MISMATCH.name, text=text)


def _with_wires(measured: list[Measured], places: Sequence[Place], engines: Mapping[str, Engine]) -> list[Measured]:
    """Return the pairs with the ways and wires that decode's agents tell, while the instances are there."""
    pages = {
        place.name: place.pages
        for place in places
        if place.decode and place.name in engines and place.pages is not None
    }
    told: dict[Pair, tuple[str, str]] = {}
    found = agents.answers(list(pages.values()), lambda page: report_of(page.name, page.status()))
    if failures := [each for each in found if isinstance(each, LongshoreError)]:
        sys.stderr.write(
            f"longshore verify: {len(failures)} agents do not tell ways and wires: {plain(str(failures[0]))}\n"
        )
    instances = {
        engine.started.prefill.instance: name for name, engine in engines.items() if engine.started.prefill is not None
    }
    for name, answer in zip(pages, found, strict=True):
        if isinstance(answer, LongshoreError):
            continue
        for worker in answer.workers:
            if worker.worker.startswith(f"{engines[name].started.decode}/"):
                for pair in worker.peers:
                    if pair.instance in instances:
                        ways = ",".join(pair.ways) or UNKNOWN
                        # Engines of one agent use no transport.
                        wire = UNKNOWN if ways == "direct" else pair.wire
                        told[instances[pair.instance], name] = ways, wire
    return [
        replace(each, way=told[key][0], wire=told[key][1]) if (key := (each.prefill, each.decode)) in told else each
        for each in measured
    ]


def _load(
    engines: Mapping[str, Engine],
    pairs: Sequence[Pair],
    rooms: RoomIds,
    room_bytes: int,
    concurrency: int,
    limit_s: float,
) -> Load:
    """Load all pairs at once for a time; return what their rooms took."""

    def one(pair: Pair) -> tuple[list[RoomResult], float]:
        found: list[RoomResult] = []
        rate_s, count = 0.0, 2 * concurrency
        end_s = time.monotonic() + limit_s
        while not found or time.monotonic() < end_s:
            numbers = list(itertools.islice(rooms, min(count, max(ROOMS_MAX, concurrency))))
            claimed = _move(engines, pair, numbers, room_bytes, concurrency=concurrency, compare_each=False)
            found += claimed.rooms
            rate_s += claimed.seconds
            if any(each.reason for each in claimed.rooms):
                break
            if claimed.seconds < _BATCH_S:
                count *= 2
        return found, rate_s

    results = _together(one, pairs)
    ended = [each for found, _ in results for each in found]
    right = [each.seconds for each in ended if not each.reason] or [0.0]
    return Load(
        memory=",".join(sorted({_memory(engines, pair) for pair in pairs})),
        room_bytes=max((each.bytes_moved for each in ended), default=room_bytes),
        concurrency=concurrency,
        pairs=len(pairs),
        rooms=len(ended),
        failed=sum(bool(each.reason) for each in ended),
        p50_s=quantile(right, 0.5),
        p99_s=quantile(right, 0.99),
        bytes_per_second=sum(sum(each.bytes_moved for each in found) / max(rate_s, 1e-9) for found, rate_s in results),
        text=next((f"{each.reason}: {each.text}" for each in ended if each.reason), ""),
    )


def _repeats(text: str) -> int:
    found = whole(1)(text)
    if found > ROOMS_MAX - _WARM_UP:
        raise argparse.ArgumentTypeError(f"{text}: give at most {ROOMS_MAX - _WARM_UP}")
    return found


def _size(text: str) -> int:
    try:
        return parse_quantity(text)
    except QuantityError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sizes(text: str) -> list[int]:
    return sorted({_size(part) for part in text.split(",")})
