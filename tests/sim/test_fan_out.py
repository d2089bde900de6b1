"""Tests a room with several readers: a reader without memory delays only itself, and others get nothing twice."""

from __future__ import annotations

import dataclasses

import pytest
from sim_run import Run
from sim_scenarios import Replica, RoomSpec, scenario
from sim_world import MS, SECOND

from longshore_wire.errors import Reason
from longshore_wire.layout import ModelShape

ROOMS = tuple(RoomSpec(number, 10 * MS, 0, 1, 0, 40, (40,), 0, 0, 0, SECOND) for number in range(1, 7))


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_without_memory_holds_up_its_own_slabs_and_nothing_is_sent_again_to_another(seed: int) -> None:
    replicas = (Replica("P", True, 1, 1, 1, 0, 4, 0), Replica("D", False, 3, 1, 1, 0, 8, 1))
    run = Run(
        dataclasses.replace(
            scenario("repeats", seed),
            model=ModelShape.kv(layers=2, kv_heads=6, head_dim=1, element_bytes=4),
            replicas=replicas,
            rooms=ROOMS,
            settings={"ring_bytes": 4096, "slab_bytes_min": 256, "slab_bytes_max": 512, "lease_ns": 6 * SECOND},
        )
    )
    run.world.run(SECOND)
    prefill, decode = (place.lives[0].clients for place in run.places)
    assert decode[1].worker is not None
    ring = decode[1].worker.core.granter.ring
    taken = ring.allocate(ring.capacity_bytes)
    assert taken is not None
    run.world.at(8 * SECOND, ring.free, taken)

    run.world.at(7 * SECOND, lambda: before.extend([_outcomes(client) for client in decode] + [_slabs(run)]))
    before: list[object] = []
    # Every run checks that no slab begins twice and that all pages are right at the end.
    run.play(deep=True)

    # The others had everything; the slabs of the reader with a full ring had not begun.
    assert before[:3] == [[Reason.NONE] * len(ROOMS), [None] * len(ROOMS), [Reason.NONE] * len(ROOMS)]
    assert 3 * before[3] == 2 * _slabs(run)  # type: ignore[operator]
    assert [_outcomes(client) for client in (*prefill, *decode)] == [[Reason.NONE] * len(ROOMS)] * 4


def _outcomes(client: object) -> list[Reason | None]:
    return [room.ended for room in client.rooms.values()]  # type: ignore[attr-defined]


def _slabs(run: Run) -> int:
    return run.world.counts["slabs staged"]
