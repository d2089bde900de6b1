"""Tests an engine's CUDA memory in another process: mapped by handle, refused without one, free at once after a kill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from gpu_world import EngineProcess, GPUAgent

from longshore_agent.errors import PoolError
from longshore_wire.engine_messages import DeviceRegion

pytestmark = pytest.mark.gpu

# Two planes of 1 MiB pages: large enough to be seen in the device's free memory.
SMALL = {"device": 0, "layers": 2, "kv_heads": 4, "tp": 1, "rank": 0, "page_size": 16, "page_count": 64}
LARGE = SMALL | {"layers": 64, "page_count": 4096}


@pytest.fixture
def engine(torch: Any) -> Iterator[EngineProcess]:
    with EngineProcess() as process:
        yield process


def free_bytes(torch: Any) -> int:
    return int(torch.cuda.mem_get_info(0)[0])


@pytest.mark.shows("argument.device_region.tensor", "argument.device_name.tensor")
def test_what_an_engine_wrote_is_read_and_what_we_write_it_sees(torch: Any, engine: EngineProcess) -> None:
    from longshore_agent.memory import cuda
    from longshore_agent.memory.device_memory import DeviceMapping

    torch.cuda.init()
    seen = engine.ask("allocate", **SMALL)
    engine.ask("fill", seed=3, tokens=40, pages=[5, 2, 9])
    device = cuda.open_device(seen["device"])
    region = DeviceRegion(bytes.fromhex(seen["handle"]), seen["offset"])
    assert region.offset_bytes > 0
    mapping, second = (DeviceMapping(device, region, seen["bytes"]) for _ in range(2))
    mapping.unmap()
    assert device.read(second.address, 2) == b"\xa5\x5a"
    found = device.read(second.address, seen["bytes"])
    assert found != b"\xa5\x5a" * (seen["bytes"] // 2)
    device.fill_zero(second.address, seen["bytes"])
    torch.cuda.synchronize()
    assert engine.ask("differences", sequences=[]) == seen["bytes"] // 2
    second.unmap()
    second.unmap()


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1 << 62), (1 << 50, 1), (-1, 1)], ids=["too long", "too far", "before"]
)
def test_a_region_outside_its_allocation_is_refused(
    offset: int, length: int, torch: Any, engine: EngineProcess
) -> None:
    from longshore_agent.memory import cuda
    from longshore_agent.memory.device_memory import DeviceMapping

    seen = engine.ask("allocate", **SMALL)
    with pytest.raises(PoolError):
        DeviceMapping(cuda.open_device(seen["device"]), DeviceRegion(bytes.fromhex(seen["handle"]), offset), length)


def test_a_handle_that_is_none_is_refused(torch: Any) -> None:
    from longshore_agent.memory import cuda
    from longshore_agent.memory.device_memory import DeviceMapping

    for handle in (b"", bytes(64), b"\xff" * 64):
        with pytest.raises(PoolError):
            DeviceMapping(cuda.device_at(0), DeviceRegion(handle, 0), 1)


def test_expandable_segments_are_refused_with_the_way_out(torch: Any) -> None:
    with (
        EngineProcess(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as engine,
        pytest.raises(AssertionError, match=r"expandable_segments:False"),
    ):
        engine.ask("allocate", **SMALL)


def test_a_killed_engines_memory_is_free_within_2_seconds(torch: Any) -> None:
    torch.cuda.init()
    with GPUAgent(LONGSHORE_RING_BYTES="64Mi", LONGSHORE_LANE_BYTES="16Mi") as agent, EngineProcess() as engine:
        before = free_bytes(torch)
        pool_bytes = engine.ask("allocate", **LARGE)["bytes"]
        engine.ask("register", socket=agent.socket, instance="killed", role="SOURCE")
        assert before - free_bytes(torch) > pool_bytes
        engine.kill()
        end_s = time.monotonic() + 2
        while before - free_bytes(torch) > pool_bytes // 2:
            assert time.monotonic() < end_s, f"{before - free_bytes(torch)} bytes are still held"
        with EngineProcess() as again:
            again.ask("allocate", **LARGE)
            again.ask("register", socket=agent.socket, instance="killed", role="SOURCE")
