"""Scenarios of the simulator: replicas, the rooms they move, and the faults they meet. Made from a mix and a seed.

A scenario is a value: the same one always runs the same way, and a part of it is a scenario too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from sim_mixes import MIXES, Mix
from sim_world import MS, SECOND, Odds

from longshore_wire.crossover import WHOLE_PAGES, Crossover, Measured, Row
from longshore_wire.engine_messages import PAGES_PER_MESSAGE_MAX
from longshore_wire.layout import ModelShape, TargetMemory

# In place is cheaper for small rooms over a wire that is known.
TABLE = Crossover(measured=(Measured("Loopback", "sim", (Row(64, (500, 2_000), (0.01, 0.01), (0.001, 0.1)),)),))


@dataclass(frozen=True)
class Replica:
    """One DP replica of an engine instance. `host` is the machine; `host_page_size` is 0 without pages in host memory."""

    instance: str
    prefill: bool
    tp: int
    pp: int
    dp: int
    dp_rank: int
    page_size: int
    host: int
    host_page_size: int = 0

    @property
    def memories(self) -> tuple[TargetMemory, ...]:
        """The memories that its ranks have pages in, each with a worker of its own."""
        return (TargetMemory.DEVICE, TargetMemory.HOST) if self.host_page_size else (TargetMemory.DEVICE,)

    def memory_of(self, worker: int) -> TargetMemory:
        """Return the memory of a worker, by its number among those of this replica."""
        return self.memories[worker // (self.tp * self.pp)]


@dataclass(frozen=True)
class RoomSpec:
    """One request: its room, and when each engine offers or claims it. Times in ns from `at_ns`."""

    number: int
    at_ns: int
    prefill: int  # indexes of replicas
    decode: int
    first: int
    end: int
    chunks: tuple[int, ...]  # where each ends
    offer_ns: int
    chunk_ns: int
    claim_ns: int
    keep_ns: int
    skew_ns: int = 0  # each prefill rank is later than the one before
    stale_endpoint: bool = False  # the endpoint is that of the request's begin
    lie: int = 0  # added to the total that decode claims
    memory: TargetMemory = TargetMemory.DEVICE  # of decode's pages


@dataclass(frozen=True)
class Fault:
    """One fault. `what` is a method of `sim_run.Faults`; `who` and `value` are its arguments."""

    at_ns: int
    what: str
    who: tuple[int, ...]
    value: int = 0


@dataclass(frozen=True)
class Scenario:
    """See the module.

    Attributes:
        fates: fates of single messages and writes that are not drawn from the seed.
        steady: usual delays are constant.
        on_gpu: the devices of engines are GPUs, whose workers also reach host memory.
    """

    mix: str
    seed: int
    model: ModelShape
    replicas: tuple[Replica, ...]
    clocks_ns: tuple[int, ...]  # of each host
    rooms: tuple[RoomSpec, ...]
    faults: tuple[Fault, ...]
    odds: Odds
    settings: dict[str, Any]
    eager: bool = False
    turn_ns: int = 20_000
    wire: str = ""
    near: bool = False
    on_gpu: bool = False
    codec: bool = False
    cache_count: int = 1  # of each rank
    states: bool = False  # some caches are slots or windows
    message_pages: int = PAGES_PER_MESSAGE_MAX  # page lists of claims come in messages of so many
    fates: dict[tuple[str, ...], Any] | None = None
    steady: bool = False


# Time after the last fault until no lost peer is missed any more.
AFTERMATH_NS = 9 * SECOND


# Two of these are longer than the longest silence of a live peer, as in the product.
LEASE_NS = 12 * SECOND
AT_ONCE = frozenset({"kill_worker", "lose"})


def scenario(mix_name: str, seed: int) -> Scenario:
    """Return the scenario of a mix and a seed."""
    mix = MIXES[mix_name]
    draw = random.Random(f"{mix_name} {seed}")
    heads, prefills, decode = draw.choices(mix.shapes, mix.shape_weights)[0]
    model = ModelShape.kv(layers=3 if decode[1] == 3 else 2, kv_heads=heads, head_dim=1, element_bytes=4)
    host_count = draw.choice((2, 2, 3, 4))
    replicas = tuple(_replicas(draw, prefills, decode, host_count, mix))
    ring_bytes = draw.choice(mix.rings)
    sources = [at for at, each in enumerate(replicas) if each.prefill]
    targets = [at for at, each in enumerate(replicas) if not each.prefill]
    span_ns = draw.choice((SECOND // 2, 2 * SECOND, 4 * SECOND))
    rooms = tuple(
        _room(draw, mix, number, draw.choice(sources), draw.choice(targets), span_ns)
        for number in range(1, draw.randint(*mix.rooms) + 1)
    )
    faults = tuple(_faults(draw, mix, replicas, rooms, span_ns))
    if mix.aftermath:
        after_ns = max(fault.at_ns + fault.value for fault in faults) + AFTERMATH_NS
        after = [
            _room(draw, mix, len(rooms) + each, draw.choice(sources), draw.choice(targets), SECOND)
            for each in range(1, 9)
        ]
        rooms += tuple(replace(room, at_ns=after_ns + room.at_ns, stale_endpoint=False) for room in after)
    # Two slabs of one token for each source rank must fit, or no slab ever fits.
    cache_count = draw.randint(*mix.caches) if mix.caches != (1, 1) else 1
    smallest = (
        0 if mix.never_fits else 2 * 128 * cache_count * max(each.tp * each.pp for each in replicas if each.prefill) * 2
    )
    settings = {
        "ring_bytes": max(ring_bytes, smallest),
        "slab_bytes_min": 256,
        "slab_bytes_max": draw.choice((512, 1024)),
        "grant_window": draw.choice((1, 2, 4)),
        "lane_count": draw.choice((1, 4)),
        "lease_ns": LEASE_NS,
        "write_timeout_ns": 8 * SECOND,
        "room_timeout_ns": 20 * SECOND,
        "force_way": draw.choice(mix.ways),
        "crossover": TABLE if mix.wire else WHOLE_PAGES,
        **mix.settings,
    }
    return Scenario(
        mix=mix_name,
        seed=seed,
        model=model,
        replicas=replicas,
        clocks_ns=tuple(draw.randrange(mix.clocks_ns) for _ in range(host_count + 1)),
        rooms=rooms,
        faults=faults,
        odds=mix.odds,
        settings=settings,
        eager=draw.random() < 0.3,
        turn_ns=draw.choice((20_000, 20_000, 2 * MS)),
        wire="sim" if mix.wire else "",
        near=mix.near,
        on_gpu=mix.near and mix.host_memory,
        codec=draw.random() < 0.1,
        message_pages=draw.choice((PAGES_PER_MESSAGE_MAX, PAGES_PER_MESSAGE_MAX, 1, 3)),
        cache_count=cache_count,
        states=mix.states,
    )


def _replicas(
    draw: random.Random, prefills: tuple[tuple[int, int], ...], decode: tuple[int, int], host_count: int, mix: Mix
) -> list[Replica]:
    found = []
    for is_prefill, shapes in ((True, prefills), (False, (decode,))):
        page_size = draw.choice((2, 4, 8))
        for number in range(max(len(shapes), draw.choice((1, 1, 2)))):
            tp, pp = shapes[number % len(shapes)]
            dp = draw.choice((1, 1, 2)) if tp * pp < 3 else 1
            host = 0 if mix.near else draw.randrange(host_count)
            host_page_size = 1 if mix.host_memory and not is_prefill else 0
            name = f"{'P' if is_prefill else 'D'}{number}"
            found += [
                Replica(name, is_prefill, tp, pp, dp, each, page_size, host, host_page_size) for each in range(dp)
            ]
    return found


def _room(draw: random.Random, mix: Mix, number: int, prefill: int, decode: int, span_ns: int) -> RoomSpec:
    end = draw.randint(1, draw.choice((8, 40)))
    first = end if draw.random() < mix.full_hits else draw.choice((0, 0, 0, draw.randrange(end)))
    cuts = sorted({draw.randint(1, end) for _ in range(draw.choice((0, 0, 1, 3)))} | {end})
    if draw.random() < 0.2:
        cuts.append(end)  # an empty last chunk
    pause = draw.choice((MS, 20 * MS, 300 * MS))
    return RoomSpec(
        number,
        draw.randrange(span_ns),
        prefill,
        decode,
        first,
        end,
        tuple(cuts),
        draw.randrange(pause),
        draw.randrange(pause),
        draw.randrange(pause),
        draw.choice((0, 10 * MS, 500 * MS)),
        draw.choice((0, 0, 10 * MS, 800 * MS)),
        draw.random() < mix.stale,
        draw.choice((-1, 1)) if draw.random() < mix.lies else 0,
        draw.choice(tuple(TargetMemory)) if mix.host_memory else TargetMemory.DEVICE,
    )


def _faults(
    draw: random.Random, mix: Mix, replicas: tuple[Replica, ...], rooms: tuple[RoomSpec, ...], span_ns: int
) -> list[Fault]:
    kinds = [kind for kind, bounds in mix.faults.items() for _ in range(draw.randint(*bounds))]
    found = [_fault(draw, kind, replicas, rooms, draw.randrange(span_ns + SECOND)) for kind in kinds]
    return sorted(found, key=lambda fault: fault.at_ns)


def _fault(
    draw: random.Random, kind: str, replicas: tuple[Replica, ...], rooms: tuple[RoomSpec, ...], at_ns: int
) -> Fault:
    pause_ns = draw.choice((50 * MS, 500 * MS, 2 * SECOND, 7 * SECOND))
    if kind == "stop_engine":
        # Some outlast a lease.
        pause_ns = draw.choice((pause_ns, LEASE_NS + 3 * SECOND))
    if kind == "depart_prefill":
        # Peers consider a silent worker lost after five to six seconds.
        pause_ns = 6 * SECOND + draw.randrange(2 * SECOND)
    if kind.startswith("cancel"):
        room = draw.choice(rooms)
        prefill = kind == "cancel_prefill" or (kind == "cancel" and draw.random() < 0.5)
        # By one rank's client, or by all.
        rank = draw.choice((-1, 0))
        return Fault(room.at_ns + draw.randrange(400 * MS), "cancel", (room.number, int(prefill), rank))
    sides = {"prefill": [True], "decode": [False]}
    wanted = next((side for name, side in sides.items() if name in kind), [True, False])
    at = draw.choice([at for at, each in enumerate(replicas) if each.prefill in wanted])
    what = kind.replace("_prefill", "").replace("_decode", "")
    workers = replicas[at].tp * replicas[at].pp * len(replicas[at].memories)
    return Fault(at_ns, what, (at, draw.randrange(workers)), 0 if what in AT_ONCE else pause_ns)
