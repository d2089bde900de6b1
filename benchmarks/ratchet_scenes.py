"""Runs the scenes of the ratchet, each once and then with twice as many repetitions, and prints their names in this order.

`ratchet` runs it under callgrind, which begins a new count at each call of `mark`. (Run of 2N - run of N) / N is the work of
one repetition: what a scene costs once, such as its start, is in both.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from ratchet_world import CLOCK, QuietSource, World  # isort: skip - it replaces libraries, so it comes first

from operator_scene import IMAGES, KEY, Scene

from longshore_client import Half, RoomEventKind
from longshore_operator import kinds
from longshore_operator.errors import NotFoundError
from longshore_operator.kinds import Kind
from longshore_operator.metrics import Metrics
from longshore_operator.ownership import Claim
from longshore_operator.reconcile import Reconciler
from longshore_operator.settings import Settings
from longshore_operator.work_queue import WorkQueue

_SECOND_NS = 1_000_000_000
# Tokens of a room on a GPU with lanes of 64 MiB: of one slab, and of 32.
_ONE_SLAB, _SLABS = 64, 32 * 384
_LONG_CLAIM_PAGES = 4096
_PEERS = 100


def mark() -> None:
    """End a count and begin the next one. No other code calls this function."""
    os.getpgrp()


def staged_room(tokens: int) -> Callable[[], None]:
    """One room that is claimed, offered, staged and released."""
    world = World(CLOCK)
    return lambda: world.move([tokens])


def direct_room() -> Callable[[], None]:
    """One room between two engines of one agent."""
    world = World(CLOCK, near=True)
    return lambda: world.move([_ONE_SLAB])


def hybrid_room(*, near: bool) -> Callable[[], None]:
    """One room of three caches, staged or between two engines of one agent."""
    world = World(CLOCK, near=near, hybrid=True)
    return lambda: world.move([_ONE_SLAB])


def rooms_at_once() -> Callable[[], None]:
    """64 staged rooms of one slab each."""
    world = World(CLOCK)
    return lambda: world.move([_ONE_SLAB] * 64)


def long_claim() -> Callable[[], None]:
    """A claim whose page ids travel to the source, and its cancellation."""
    world = World(CLOCK, near=True)
    numbers = iter(range(1_000_000, 2_000_000))
    source, target = world.source.worker.source, world.target.client
    assert source is not None

    def claim() -> None:
        room, instance = next(numbers), world.source.client.instance
        target.receive(room, world.endpoints[0], list(range(_LONG_CLAIM_PAGES)), 0, _LONG_CLAIM_PAGES * 64)
        world.run(lambda: any(key.room == room for key in source.rooms))
        target.cancel(room, Half.TARGET, instance=instance)
        target.wait(room, Half.TARGET, instance)
        target.wait(room, Half.TARGET, instance, (RoomEventKind.RELEASED,))

    return claim


def idle_second() -> Callable[[], None]:
    """A second in which a worker and its peers exchange heartbeats only, and their cores check their times."""
    world = World(CLOCK)
    world.quiet = [QuietSource(world, f"quiet{number}") for number in range(_PEERS)]
    target = world.target.client
    for number, source in enumerate(world.quiet):
        target.receive(number, source.endpoint, [number], 0, 64)
        target.cancel(number, Half.TARGET)
        target.wait(number, Half.TARGET, kinds=(RoomEventKind.RELEASED,))

    def second() -> None:
        end_ns = CLOCK.now_ns() + _SECOND_NS
        while CLOCK.now_ns() < end_ns:
            if not world.turn():
                CLOCK.advance(10_000_000)

    return second


def control_thread() -> Callable[[], None]:
    """One room of eleven slabs whose copies and writes take long: most turns only poll the driver and the transport."""
    world = World(CLOCK, polls=30)
    return lambda: world.move([4096])


def reconcile() -> Callable[[], None]:
    """One reconcile of a deployment with two agents in which nothing has changed."""
    # Times of the scene's polls are relative to this one.
    CLOCK.restart()
    scene, settings = Scene(), Settings()
    for node, role in (("node-a", "prefill"), ("node-b", "decode")):
        scene.put_node(node, role)
    scene.apply()
    scene.count(2, 2, 2)
    for node in ("node-a", "node-b"):
        scene.put_agent(node)
    scene.body["status"]["operator"] = Claim.of(settings).status()
    scene.write_status()
    # Each call but that for a PodMonitor would be a write, or a read that a reconcile without a change does not need.
    api: Any = SimpleNamespace(get=_no_monitor)
    mutex: Any = SimpleNamespace(check=lambda: None)
    reconciler = Reconciler(scene.world, api, WorkQueue(), mutex, settings, Metrics())
    vars(reconciler)["_images"] = IMAGES
    return lambda: asyncio.run(reconciler.reconcile(KEY))


async def _no_monitor(kind: Kind, *_: object) -> None:
    assert kind is kinds.POD_MONITOR, kind
    raise NotFoundError("there is none")


class Case(NamedTuple):
    """A scene, and its shorter run's repetitions."""

    make: Callable[[], Callable[[], None]]
    repetitions: int


SCENES = {
    "staged room of 1 slab": Case(lambda: staged_room(_ONE_SLAB), 10),
    "staged room of 32 slabs": Case(lambda: staged_room(_SLABS), 2),
    "direct room": Case(direct_room, 10),
    "staged room of 3 caches": Case(lambda: hybrid_room(near=False), 10),
    "direct room of 3 caches": Case(lambda: hybrid_room(near=True), 10),
    "64 rooms at once": Case(rooms_at_once, 1),
    "claim of 4,096 pages": Case(long_claim, 5),
    "idle second with 100 peers": Case(idle_second, 1),
    "GPU control thread": Case(control_thread, 2),
    "reconcile without a change": Case(reconcile, 3),
}


def main() -> None:
    """Run the scenes whose names are given, or all."""
    gc.disable()
    for name in sys.argv[1:] or SCENES:
        case = SCENES[name]
        once = case.make()
        # What is made once, such as compiled kernels and caches, is made now.
        once()
        once()
        for count in (case.repetitions, 2 * case.repetitions):
            mark()
            for _ in range(count):
                once()
        mark()
        print(name, case.repetitions, flush=True)


if __name__ == "__main__":
    main()
