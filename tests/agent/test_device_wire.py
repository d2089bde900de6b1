"""The wire between two GPUs is inferred from the speed of a write; a slow one is reported as unknown."""

from __future__ import annotations

from typing import Any

import pytest
from fake_nvml import NAMES, FakeNVML

from longshore_agent.transports import nvml
from longshore_agent.transports.base import WriteState
from longshore_agent.transports.nixl import kind_of, rows_of
from longshore_agent.transports.probe import find_device_wire
from longshore_wire.names import Wire


class Clocked:
    """A transport whose writes take a given time, on a clock that the test controls."""

    def __init__(self, taken_ns: list[int], end: WriteState = WriteState.DONE) -> None:
        self._taken_ns, self._end = taken_ns, end
        self.now_ns = self._due_ns = 0
        self.released = 0

    def control(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this the clock of the process."""
        monkeypatch.setattr("time.perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr("time.sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)

    def begin(self) -> str:
        self._due_ns = self.now_ns + self._taken_ns[min(self.released, len(self._taken_ns) - 1)]
        return "a write"

    def state(self, write: str) -> WriteState:
        self.now_ns += 1000
        return self._end if self.now_ns >= self._due_ns else WriteState.OPEN

    def release(self, write: str) -> bool:
        self.released += 1
        return True


@pytest.mark.parametrize(
    ("taken_ns", "end", "wire"),
    [
        ([40_000], WriteState.DONE, Wire.CUDA_IPC),
        ([9_000_000, 400_000, 40_000], WriteState.DONE, Wire.CUDA_IPC),
        ([3_000_000] * 60 + [40_000], WriteState.DONE, Wire.CUDA_IPC),
        ([300_000], WriteState.DONE, None),
        ([40_000], WriteState.FAILED, None),
        ([10_000_000_000], WriteState.DONE, None),
    ],
    ids=["fast", "fast once warm", "processes share the GPU", "through the host", "failed", "stuck"],
)
def test_a_wire_between_gpus_is_named_only_if_one_write_was_too_fast_for_the_hosts_memory(
    taken_ns: list[int], end: WriteState, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Clocked(taken_ns, end)
    transport.control(monkeypatch)
    assert find_device_wire(transport, transport.begin, 1 << 20, ("", "")) is wire
    assert transport.released >= 1


@pytest.mark.parametrize(
    ("links", "peer", "taken_ns", "wire"),
    [
        ({frozenset((0, 1))}, 1, 40_000, Wire.NVLINK),
        (set(), 1, 40_000, Wire.CUDA_IPC),
        ({frozenset((0, 1))}, 2, 40_000, Wire.CUDA_IPC),
        ({frozenset((0, 1))}, 0, 40_000, Wire.CUDA_IPC),
        ({frozenset((0, 1))}, 1, 300_000, None),
    ],
    ids=["joined", "no NVLink here", "between others", "one GPU", "through the host"],
)
def test_a_fast_wire_is_nvlink_between_two_gpus_that_it_joins_and_cuda_ipc_otherwise(
    links: set[frozenset[int]], peer: int, taken_ns: int, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Clocked([taken_ns])
    transport.control(monkeypatch)
    monkeypatch.setattr(nvml, "_library", lambda: started(FakeNVML(links)))
    assert find_device_wire(transport, transport.begin, 1 << 20, (NAMES[0], NAMES[peer])) is wire


def started(fake: FakeNVML) -> Any:
    assert fake.library.nvmlInit_v2() == 0
    return fake.library


def test_pieces_name_the_memory_that_they_are_in() -> None:
    import numpy as np

    pieces = (np.array([4096, 64], np.uint64), np.array([16, 8], np.uint64))
    rows, kind = rows_of(*pieces, 3)
    assert (rows.tolist(), kind) == ([[4096, 16, 3], [64, 8, 3]], "VRAM")
    rows, kind = rows_of(*pieces, -1)
    assert (rows.tolist(), kind) == ([[4096, 16, 0], [64, 8, 0]], "DRAM")
    assert kind_of(0) == ("VRAM", 0)
