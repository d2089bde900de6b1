"""Tests which memory a test engine takes for its pages, and how its ranks share the GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_client_driver import FakeDriver

from longshore_client import cuda
from longshore_lab.test_engine.headroom import NoGPUError, NoMemoryError, chosen, on_host
from longshore_lab.test_engine.memory import Memory
from longshore_spec.agent_config import Backend
from longshore_wire.engine_messages import DeviceRegion

_CONTEXT = cuda._context.__wrapped__  # not cached between tests


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(count: int, **more: int) -> FakeDriver:
        driver = FakeDriver(count, **more)
        monkeypatch.setattr(cuda, "_driver", lambda: driver)
        monkeypatch.setattr(cuda, "_context", _CONTEXT)
        return driver

    return make


def changed(memory: Memory) -> bytes:
    memory.write(3, b"abcdef")
    memory.clear(4, 2)
    return memory.read(2, 8)


def test_ranks_take_the_gpus_in_turn(gpus) -> None:
    gpus(2)
    for wanted in ("auto", "gpu"):
        kind, allocate = chosen(wanted, Backend.NIXL)
        assert kind == "gpu"
        made = [allocate(rank, 64) for rank in range(3)]
        assert [each.device_name[-1] for each in made] == ["0", "1", "0"]
        for each in made:
            assert isinstance(each.regions[0], DeviceRegion)
            assert changed(each)[1:7] == b"a\0\0def"
            each.close()


@pytest.mark.parametrize(
    ("wanted", "count", "backend"),
    [
        ("auto", 0, Backend.NIXL),
        ("host", 0, Backend.NIXL),
        ("host", 2, Backend.MOONCAKE),
        ("auto", 2, Backend.LOOPBACK),
    ],
)
def test_host_memory_is_taken_without_gpus_and_when_it_is_wanted_and_of_an_agent_that_moves_no_other(
    wanted: Any, count: int, backend: Backend, gpus
) -> None:
    gpus(count)
    kind, allocate = chosen(wanted, backend)
    assert (kind, allocate) == ("host", on_host)
    made = allocate(0, 64)
    assert (made.device_name, changed(made)) == ("cpu", b"\0a\0\0def\0")
    made.close()


def test_gpus_that_are_missing_or_fail_or_are_full_are_named_with_the_way_out(gpus) -> None:
    gpus(0)
    with pytest.raises(NoGPUError, match=r"sees no GPU: set agents.gpuAccess, or leave --memory gpu out"):
        chosen("gpu", Backend.NIXL)
    gpus(1, init=999)
    with pytest.raises(NoGPUError, match=r"cuInit: .*\(999\): mend it, or give --memory host"):
        chosen("auto", Backend.NIXL)
    gpus(2, free_bytes=100)
    _, allocate = chosen("auto", Backend.NIXL)
    with pytest.raises(NoMemoryError, match=r"GPU 1 has no 101 bytes for rank 3: .*OUT_OF_MEMORY.*or --memory host"):
        allocate(3, 101)
