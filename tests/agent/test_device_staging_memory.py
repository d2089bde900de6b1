"""GPU staging memory by cudaMalloc and by cuMemCreate: allocation, release and refusals. The driver is simulated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from fake_driver import FABRIC, FIRST_ADDRESS, GPU_DIRECT_RDMA, OUT_OF_MEMORY, FakeDriver

from longshore_agent.errors import DeviceError
from longshore_agent.memory import cuda
from longshore_agent.memory.device_memory import AccessDescription, AllocationProperties, DeviceStagingBuffer
from longshore_agent.settings import Settings
from longshore_wire.errors import ConfigError, Reason

MIB = 1 << 20
STEPS = (
    "cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap",
    "cuMemSetAccess", "cuMemsetD8_v2",
)  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: fake.library)
    cuda._driver.cache_clear()
    yield fake
    cuda._driver.cache_clear()


def buffer(length_bytes: int, allocation: cuda.Allocation = cuda.Allocation.CU_MEM_CREATE) -> DeviceStagingBuffer:
    return DeviceStagingBuffer(cuda.Device(0), length_bytes, allocation=allocation)


def test_the_drivers_structures_are_laid_out_as_its_header_has_them() -> None:
    # sizeof and offsetof of cuda.h (CUDA 13.0 and 12), printed by a C program on x86-64.
    assert ctypes.sizeof(AllocationProperties) == 32
    fields = ("type", "requested_handle_types", "location", "win32_handle_metadata", "flags")
    assert [getattr(AllocationProperties, name).offset for name in fields] == [0, 4, 8, 16, 24]
    assert (ctypes.sizeof(AccessDescription), AccessDescription.flags.offset) == (12, 8)


@pytest.mark.parametrize(
    ("length_bytes", "granule_bytes", "taken_bytes"),
    [(1, 2 * MIB, 2 * MIB), (2 * MIB, 2 * MIB, 2 * MIB), (2 * MIB + 1, 2 * MIB, 4 * MIB), (5 * MIB, 4 * MIB, 8 * MIB)],
)
def test_memory_is_taken_in_whole_granules_and_as_long_to_its_user_as_asked_for(
    length_bytes: int, granule_bytes: int, taken_bytes: int, driver: FakeDriver
) -> None:
    driver.granularity_bytes = granule_bytes
    made = buffer(length_bytes)
    assert (made.address, made.length_bytes) == (FIRST_ADDRESS, length_bytes)
    assert driver.lengths.pop("cuMemsetD8_v2") == length_bytes
    assert set(driver.lengths) == {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"}
    assert set(driver.lengths.values()) == {taken_bytes}
    assert driver.plain == {}
    made.close()
    assert driver.held == ({}, {}, {}, {})


@pytest.mark.parametrize("rdma", [True, False])
def test_it_is_pinned_on_its_device_with_fabric_handles_and_for_infiniband_where_the_device_can(
    rdma: bool, driver: FakeDriver
) -> None:
    if not rdma:
        # A driver that does not know the attribute.
        del driver.attributes[GPU_DIRECT_RDMA]
    buffer(MIB)
    made = driver.properties
    assert (made.type, made.requested_handle_types, made.win32_handle_metadata) == (1, 8, None)
    assert (made.location.type, made.location.id) == (1, 0)
    assert made.flags.gpu_direct_rdma_capable == rdma
    assert (made.flags.compression_type, made.flags.usage, bytes(made.flags.reserved)) == (0, 0, bytes(4))


def test_it_is_unmapped_then_released_and_then_its_addresses_are_given_back_once(driver: FakeDriver) -> None:
    made = buffer(MIB)
    driver.calls.clear()
    made.close()
    made.close()
    assert [call for call in driver.calls if call != "cuCtxSetCurrent"] == [
        "cuMemUnmap", "cuMemRelease", "cuMemAddressFree",
    ]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_leaves_nothing_behind(step: str, driver: FakeDriver) -> None:
    driver.fails[step] = OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=step) as caught:
        buffer(3 * MIB)
    assert caught.value.reason is Reason.INTERNAL
    assert driver.held == ({}, {}, {}, {})
    driver.fails.clear()
    buffer(3 * MIB).close()


@pytest.mark.parametrize("error", [cuda.NOT_PERMITTED, cuda.NOT_SUPPORTED])
@pytest.mark.parametrize("step", ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_a_host_without_fabric_handles_is_refused_with_the_way_out_and_gets_no_other_memory(
    step: str, error: int, driver: FakeDriver
) -> None:
    driver.fails[step] = error
    with pytest.raises(DeviceError, match=rf"{step}.*\({error}\)") as caught:
        buffer(MIB)
    assert caught.value.reason is Reason.UNSUPPORTED
    for words in ("GPU_STAGING_MEMORY=cuMemCreate", "IMEX channel", "set gpu_staging_memory: cudaMalloc"):
        assert words in str(caught.value)
    assert driver.held == ({}, {}, {}, {})
    assert "cuMemAlloc_v2" not in driver.calls


@pytest.mark.parametrize("known", [True, False])
def test_so_is_a_device_without_them_before_anything_is_taken(known: bool, driver: FakeDriver) -> None:
    del driver.attributes[FABRIC]
    if known:
        driver.attributes[FABRIC] = 0
    with pytest.raises(DeviceError, match=r"does not support them.*set gpu_staging_memory: cudaMalloc") as caught:
        buffer(MIB)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert not set(driver.calls) & {*STEPS, "cuMemAlloc_v2"}


def test_memory_is_from_cuda_malloc_unless_another_kind_is_asked_for(driver: FakeDriver) -> None:
    made = DeviceStagingBuffer(cuda.Device(0), 5 * MIB + 1)
    assert driver.plain == {made.address: 5 * MIB + 1}
    assert not set(driver.calls) & {"cuMemCreate", "cuMemAddressReserve", "cuMemMap"}
    made.close()
    assert driver.held == ({}, {}, {}, {})
    driver.fails["cuMemsetD8_v2"] = OUT_OF_MEMORY
    with pytest.raises(DeviceError):
        buffer(MIB, cuda.Allocation.CUDA_MALLOC)
    assert driver.held == ({}, {}, {}, {})


def test_the_setting_is_one_of_two_and_mooncake_takes_one_of_them() -> None:
    name = "LONGSHORE_GPU_STAGING_MEMORY"
    assert Settings().gpu_staging_memory is cuda.Allocation.CUDA_MALLOC
    chosen = Settings.from_environment({name: "cuMemCreate"})
    assert chosen.gpu_staging_memory is cuda.Allocation.CU_MEM_CREATE
    assert chosen.environment() == {name: "cuMemCreate"}
    assert Settings.from_environment(chosen.environment()) == chosen
    with pytest.raises(ConfigError, match=f"{name}.*none of cudaMalloc, cuMemCreate"):
        Settings.from_environment({name: "malloc"})
    with pytest.raises(ConfigError, match=f"LONGSHORE_BACKEND is Mooncake and {name} is cuMemCreate: .*use NIXL"):
        Settings.from_environment({name: "cuMemCreate", "LONGSHORE_BACKEND": "Mooncake"})
