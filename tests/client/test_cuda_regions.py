"""Tests GPU memory of engines without a GPU: errors of handles, and what is called of the driver. tests/gpu has a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_client_driver import FakeDriver

from longshore_client import ArgumentError, cuda
from longshore_client.cuda import DeviceMemory, device_name, device_region, gpu_count


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver(2, free_bytes=4096)
    monkeypatch.setattr(cuda, "_driver", lambda: found)
    monkeypatch.setattr(cuda, "_context", cuda._context.__wrapped__)
    return found


@pytest.mark.shows("argument.device_region.tensor", "argument.device_name.tensor")
@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(4, device="meta"), [1]], ids=["CPU", "meta", "list"])
def test_only_a_cuda_tensor_has_a_handle(wrong: object) -> None:
    for question in (device_region, device_name):
        with pytest.raises(ArgumentError, match="give a torch tensor on a CUDA device"):
            question(wrong)


def test_memory_of_a_gpu_is_written_read_and_cleared_by_any_thread(driver: FakeDriver) -> None:
    memory, other = DeviceMemory(1024, 1), DeviceMemory(1024, 0)
    memory.write(0, bytes(range(256)) * 4)
    seen: list[bytes] = []

    def change() -> None:
        memory.write(100, b"a\0b")
        memory.clear(1000, 24)
        seen.append(memory.read(96, 8))

    # A thread without a current context.
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()
    assert seen == [b"`abc" + b"a\0b" + b"g"]
    assert memory.read(998, 26) == bytes([998 % 256, 999 % 256]) + bytes(24)
    assert other.read(0, 4) == bytes(4)
    assert driver.pending == set()
    with pytest.raises(ArgumentError, match="CUDA_ERROR_INVALID_VALUE"):
        memory.write(1020, bytes(5))


def test_memory_of_a_gpu_has_its_name_and_handle_as_a_tensor_has(driver: FakeDriver) -> None:
    memory = DeviceMemory(64, 1)
    assert device_name(memory) == "GPU-00000000-0000-0000-0000-000000000001"
    region = device_region(memory)
    assert (int.from_bytes(region.handle[:8], "little"), region.offset_bytes) == (memory.data_ptr(), 0)


def test_memory_that_a_gpu_does_not_have_is_refused_and_closed_memory_is_free(driver: FakeDriver) -> None:
    memory = DeviceMemory(4096, 0)
    with pytest.raises(ArgumentError, match="cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceMemory(1, 0)
    memory.close()
    DeviceMemory(4096, 0)
    with pytest.raises(ArgumentError, match="cuDeviceGet"):
        DeviceMemory(1, 2)


def test_gpus_are_counted_and_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for made, count in ((FakeDriver(2), 2), (FakeDriver(0), 0)):
        monkeypatch.setattr(cuda, "_driver", lambda made=made: made)
        assert gpu_count() == count
    monkeypatch.setattr(cuda, "_driver", lambda: FakeDriver(1, init=805))
    with pytest.raises(ArgumentError, match=r"cuInit: .*\(805\)"):
        gpu_count()


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ArgumentError("there is no CUDA driver here")

    monkeypatch.setattr(cuda, "_driver", missing)
    assert gpu_count() == 0
