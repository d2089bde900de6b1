"""Whether a worker's control thread sleeps while bytes are due, by the wire that they come over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longshore_agent.worker.pace import WorkerPace
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.target_session import TargetSession

NOW_NS = 10_000_000_000


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
    mover: Any = SimpleNamespace(driven=False, transport=SimpleNamespace(notifies=True))
    pace = WorkerPace(mover, {Half.TARGET: Expecting(wire)}, NOW_NS)
    pace.news()
    assert pace.wait_ms(100, NOW_NS) == hot_ms
    # Nothing has happened for two milliseconds and more.
    assert pace.wait_ms(100, NOW_NS + 3_000_000) == later_ms
