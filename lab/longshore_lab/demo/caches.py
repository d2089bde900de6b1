"""Moves requests of several caches between unequal layouts, by the agents of the demo, and compares every byte.

Called by `command` after the pairs. Kinds of memory are data: the planes of a layer, and how each side pages them. The ranks
are the test engine's, in this process, without a model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from longshore_cli.lifetime import Watch
from longshore_cli.local_agents import LocalAgent
from longshore_lab.demo.cluster import STAGED, Agents
from longshore_lab.demo.counts import Counts, Result, Transfer, wires_of
from longshore_lab.demo.errors import DifferenceError
from longshore_lab.demo.progress import Progress
from longshore_lab.devices import Placement, device_of, memory_on
from longshore_lab.test_engine.instance import Instance
from longshore_lab.test_engine.ranks import side_by_side
from longshore_spec.verify_messages import RoomResult
from longshore_wire.engine_messages import Half
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, Plane

# The last page of each cache is not full.
TOKENS = 1900
# Where chunks of a request end, but for the last one.
CUTS = (700, 1333)
ROUNDS = 2
# For workers that start, and for all rooms of a way. Both take seconds on a busy machine.
_LIMIT_S = 120.0
_BF16, _FP8 = 2, 1


class Cache(NamedTuple):
    """One cache of a request.

    Attributes:
        prefill, decode: tokens of a page, or with PageOrder.SLOT layers of a page, and its order.
        blob_bytes: of an opaque page.
        window: tokens before the end that are kept; 0: all of them.
    """

    name: str
    model: ModelShape
    prefill: tuple[int, PageOrder]
    decode: tuple[int, PageOrder]
    blob_bytes: int = 0
    window: int = 0


REQUESTS = {
    "hybrid": (
        Cache("kv", ModelShape.kv(4, 4, 128, _BF16), (16, PageOrder.NHD), (64, PageOrder.HND)),
        # The sections q, k and v, and one matrix for each head of v.
        Cache(
            "conv",
            ModelShape(6, (Plane(4, 256, 3), Plane(4, 256, 3), Plane(8, 256, 3)), _BF16),
            (2, PageOrder.SLOT),
            (3, PageOrder.SLOT),
        ),
        Cache("ssm", ModelShape(6, (Plane(8, 65536),), _BF16), (2, PageOrder.SLOT), (3, PageOrder.SLOT)),
        Cache("window", ModelShape.kv(2, 4, 128, _BF16), (16, PageOrder.NHD), (32, PageOrder.NHD), window=500),
        Cache("draft", ModelShape.kv(1, 4, 128, _BF16), (16, PageOrder.NHD), (16, PageOrder.HND)),
    ),
    "MLA": (
        Cache("latent", ModelShape.latent(8, 576, _BF16), (16, PageOrder.NHD), (64, PageOrder.NHD)),
        # 128 bytes a token, and after them a scale of 4 bytes for each.
        Cache("index", ModelShape.latent(8, 128, _FP8), (64, PageOrder.OPAQUE), (64, PageOrder.OPAQUE), 64 * (128 + 4)),
    ),
}
# (request, prefill TP, decode TP)
RUNS = (("hybrid", 2, 1), ("MLA", 4, 1), ("hybrid", 1, 2))
RUNS_QUICK = RUNS[:2]


def move_requests(
    transports: Sequence[Agents], placement: Placement, progress: Progress, watch: Watch, *, quick: bool
) -> list[Result]:
    """Move each request by all ways of the first transport, and staged over the others.

    Raises:
        DifferenceError: a byte is wrong, which is named by its cache, or a room failed.
    """
    return [
        _moved(agents, *run, [STAGED] if number else list(agents.decode), placement, progress, watch)
        for run in (RUNS_QUICK if quick else RUNS)
        for number, agents in enumerate(transports)
    ]


def layout_of(caches: Sequence[Cache], half: Half, tp: int) -> KVLayout:
    """Return the layout of rank 0 of one side."""
    layouts = []
    for cache in caches:
        size, order = cache.prefill if half is Half.SOURCE else cache.decode
        layouts.append(KVLayout(cache.model, Parallel(tp), size, order, blob_bytes=cache.blob_bytes, name=cache.name))
    return msgspec.structs.replace(layouts[0], others=tuple(layouts[1:]))


def _moved(
    agents: Agents,
    name: str,
    prefill_tp: int,
    decode_tp: int,
    ways: Sequence[str],
    placement: Placement,
    progress: Progress,
    watch: Watch,
) -> Result:
    """Move one request over one transport, by each of these ways."""
    caches, called = REQUESTS[name], f"{name} {prefill_tp} -> {decode_tp}"
    windows = {cache.name: cache.window for cache in caches if cache.window}

    def start(side: tuple[str, LocalAgent]) -> Instance:
        way, agent = side
        half, tp, devices = Half.TARGET, decode_tp, placement.decode
        if way == "prefill":
            half, tp, devices = Half.SOURCE, prefill_tp, placement.prefill
        return Instance(
            agent.socket_path,
            f"{name.lower()}-{prefill_tp}-{decode_tp}-{way}",
            layout_of(caches, half, tp),
            half,
            lambda rank, length_bytes: memory_on(device_of(devices, rank), length_bytes),
            TOKENS,
            1,
            _LIMIT_S,
            windows,
        )

    with ExitStack() as stack:
        source, *targets = side_by_side(
            start, [("prefill", agents.prefill), *((way, agents.decode[way]) for way in ways)]
        )
        for instance in (source, *targets):
            stack.callback(instance.close)
        for agent in agents.all:
            stack.callback(agent.workers_watched_by(watch, [each.instance for each in (source, *targets)]))
        rooms = itertools.count(1)
        transfers = [
            _transfer(called, agents, way, source, target, [next(rooms) for _ in range(1 + ROUNDS)])
            for way, target in zip(ways, targets, strict=True)
        ]
    names = ", ".join(cache.name for cache in caches)
    times = " and ".join(f"{one.way} in {one.median_s:.2f} s" for one in transfers)
    megabytes = f"{transfers[0].payload_bytes / 1e6:.0f} MB"
    progress.say(f"{called} by {agents.backend}: {megabytes} of {names}, {times}; every byte is equal")
    return Result(called, agents.backend, tuple(transfers))


def _transfer(
    called: str, agents: Agents, way: str, source: Instance, target: Instance, rooms: Sequence[int]
) -> Transfer:
    """Move rooms one after the other by one way, and compare each. The first one, which attaches the workers, is not timed."""
    end_s = time.monotonic() + _LIMIT_S
    endpoint = source.endpoint(_LIMIT_S)

    def offer() -> list[RoomResult]:
        source.offer(rooms, TOKENS, end_s, CUTS)
        return []

    def claim() -> list[RoomResult]:
        results, _ = target.claim(endpoint, rooms, TOKENS, 1, end_s, compare_each=True)
        return results

    # Both are threads' work, so that an interrupt need not wait for an agent.
    _, results = side_by_side(lambda call: call(), [offer, claim])
    for result in results:
        if result.text:
            raise DifferenceError(f"{called} by {agents.backend}, {way}: room {result.room}: {result.text}")
    source.ended(rooms, end_s, cancel=False)
    total = Counts.of(agents.prefill.metrics(), source.instance, way)
    counts = Counts(total.slabs // len(rooms), total.writes // len(rooms), total.pieces // len(rooms))
    if not counts.writes:
        raise DifferenceError(f"{called} by {agents.backend}: nothing was written by the way {way}")
    wires = wires_of(agents.decode[way].status()["workers"], target.instance)
    seconds = tuple(result.seconds for result in results[1:])
    return Transfer(way, 1, counts, results[0].bytes_moved, seconds, wires)
