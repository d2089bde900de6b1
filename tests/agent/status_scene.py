"""Provides states of an agent for tests of its pages: workers, rooms, and a supervisor that a test controls."""

from __future__ import annotations

from typing import Any

import msgspec

from longshore_agent.status.findings import Rules
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import AgentSnapshot, WorkerSnapshot
from longshore_spec import status as structs
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.names import room_name

MODEL = ModelShape.kv(layers=4, kv_heads=8, head_dim=64, element_bytes=2)
PASSED = structs.SelfTest(backend="NIXL", wire="SharedMemory", bytes_moved=1 << 20, seconds=0.01)
BIG_ROOM = 2**64 - 1
RULES = Rules(backend="NIXL", self_test_bytes=1 << 20)


def layout(tp: int, *, page_size: int = 16) -> KVLayout:
    return KVLayout(MODEL, Parallel(tp=tp), page_size)


def room(number: int, *, half: str = "target", instance: str = "p") -> structs.RoomStatus:
    pairs = (structs.PairStatus("p", 0, 0, "staged", "open", 1, 3),)
    return structs.RoomStatus(
        room=room_name(number), instance=instance, half=half, state="open", ways=("staged",), tokens_wanted=100,
        tokens_done=32, tokens_total=-1, slabs_done=1, slabs_total=3, bytes_moved=4096, age_s=0.5, pairs=pairs,
    )  # fmt: skip


def worker(name: str = "d/0", **changes: Any) -> WorkerSnapshot:
    counts = Metrics()
    counts.add("longshore_writes_total", 3, way="staged")
    fields: dict[str, Any] = {
        "worker": name, "pid": 10, "epoch": str(2**63 + 1), "state": structs.WorkerState.READY,
        "metrics": counts.snapshot(), "self_test": PASSED,
    }  # fmt: skip
    return WorkerSnapshot(**fields | changes)


def agent(*workers: WorkerSnapshot, **changes: Any) -> AgentSnapshot:
    fields: dict[str, Any] = {
        "deployment": "demo", "node": "n1", "version": "0.1", "backend": "NIXL", "started_unix_s": 1.5,
        "uptime_s": 2.5, "workers": workers, "metrics": Metrics().snapshot(),
    }  # fmt: skip
    return AgentSnapshot(**fields | changes)


class Source:
    """A supervisor whose state a test sets. Like the real one, it passes its snapshot on as msgpack."""

    def __init__(self) -> None:
        self.state = agent(worker())
        self.asked: str | None = None
        self.absent: LongshoreError | None = None

    def snapshot(self, room: str | None = None) -> AgentSnapshot:
        self.asked = room
        if self.absent is not None:
            raise self.absent
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=AgentSnapshot)
