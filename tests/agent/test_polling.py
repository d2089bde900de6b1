"""Tests whether a worker's control thread sleeps while bytes are due, by wire, or while a GPU copies directly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longshore_agent.transports.nixl import NixlTransport
from longshore_agent.worker.polling import Polling
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.target import TargetSession

NOW_NS = 10_000_000_000
LONG_MS = 5000
MS = 1_000_000


class Expecting(TargetSession):
    """A decode core that expects bytes of one peer."""

    def __init__(self, wire: str) -> None:
        peer: Any = SimpleNamespace(wire=wire, wire_due_ns=0, wire_epoch=1, epoch=1)
        self.peers = {PeerId("prefill", 0, 0): peer}

    @property
    def expects_bytes(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("wire", "hot_ms", "later_ms"),
    [("NVLink", 0, 1), ("CudaIPC", 0, 1), ("RDMA", 1, 1), ("TCP", 0, 0)],
)
def test_a_slab_that_takes_microseconds_finds_its_target_awake_and_one_of_another_wire_need_not(
    wire: str, hot_ms: int, later_ms: int
) -> None:
    resources = SimpleNamespace(runner=SimpleNamespace(busy=False), device=None, transport=NixlTransport)
    mover: Any = SimpleNamespace(resources=resources)
    pace = Polling(mover, {Half.TARGET: Expecting(wire)}, NOW_NS)
    pace.news()
    assert pace.wait_ms(lambda _: 100, NOW_NS) == hot_ms
    # Its source may serve other ranks for milliseconds before this one.
    assert pace.wait_ms(lambda _: 100, NOW_NS + 9 * MS) == hot_ms
    assert pace.wait_ms(lambda _: 100, NOW_NS + 11 * MS) == later_ms


def test_a_target_looks_each_millisecond_after_it_was_awake_and_less_often_only_after_many_sleeps() -> None:
    resources = SimpleNamespace(runner=SimpleNamespace(busy=False), device=None, transport=NixlTransport)
    mover: Any = SimpleNamespace(resources=resources, notices=list)
    pace = Polling(mover, {Half.TARGET: Expecting("NVLink")}, NOW_NS)

    def slept_ms(turns: int, now_ns: int) -> int:
        for _ in range(turns):
            pace.notices(now_ns)
            wait_ms = pace.wait_ms(lambda _: LONG_MS, now_ns)
        return wait_ms

    pace.news()
    assert slept_ms(1000, NOW_NS + MS) == 0
    assert slept_ms(60, NOW_NS + 20 * MS) == 1
    assert slept_ms(10, NOW_NS + 20 * MS) == 5


def slept(mover: Any, quiet_ms: list[int], *, in_place_count: int = 0) -> list[int]:
    """Return the thread's sleep this long after the last event."""
    target = object.__new__(TargetSession)
    target.in_place_count, target.peers = in_place_count, {}
    pace = Polling(mover, {Half.TARGET: target}, 0)
    pace.news()
    pace.wait_ms(lambda _: LONG_MS, 0)
    return [pace.wait_ms(lambda _: LONG_MS, each * MS) for each in quiet_ms]


def played(*, busy: bool = False, copying: bool = False, on_gpu: bool = True) -> Any:
    transport = SimpleNamespace(notifies=False)
    device = object() if on_gpu else None
    runner = SimpleNamespace(busy=busy, copying=copying)
    resources = SimpleNamespace(runner=runner, device=device, transport=transport)
    return SimpleNamespace(resources=resources)


@pytest.mark.parametrize(
    ("mover", "expected"),
    [
        (played(busy=True, copying=True), [0, 0, 1]),
        (played(busy=True), [0, 1, 1]),
        (played(), [LONG_MS, LONG_MS, LONG_MS]),
    ],
    ids=["a direct copy", "a staged slab", "nothing"],
)
def test_a_source_looks_without_a_pause_for_as_long_as_a_slab_of_its_way_takes(mover: Any, expected: list[int]) -> None:
    assert slept(mover, [1, 5, 50]) == expected


def test_a_target_on_a_gpu_does_not_sleep_right_after_it_heard_of_pages_that_a_neighbour_writes() -> None:
    assert slept(played(), [1, 5], in_place_count=1) == [0, LONG_MS]
    assert slept(played(on_gpu=False), [1, 5], in_place_count=1) == [LONG_MS, LONG_MS]
