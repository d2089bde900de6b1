"""Tests pools in host memory that a GPU's worker registers: once, in a thread, and never longer than they are mapped.

The driver is simulated; `tests/gpu/test_host_memory_on_gpu.py` does the same with a real one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeDevice, outbound_slab
from fake_driver import OUT_OF_MEMORY, FakeDriver
from page_shapes import Shape

from longshore_agent.errors import DeviceError
from longshore_agent.memory import cuda, device_memory
from longshore_agent.pipeline.slabs import Ends, OutboundEnd
from longshore_agent.worker.neighbour_pools import NeighbourPools
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import DeviceRegion, Half
from longshore_wire.layout import TargetMemory
from longshore_wire.peer_messages import Attach, PoolInfo

OWNER = PeerId("decode", 0, 0, TargetMemory.HOST)
SHAPE = Shape(layers=2, split=True)
ATTACH = Attach(
    2, "test", "decode", 9, SHAPE.layout, "Loopback", b"", None, (PoolInfo(0, SHAPE.geometry, ()),), 1 << 20
)
LIMIT_S = 120.0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    real = ctypes.CDLL
    monkeypatch.setattr(
        ctypes,
        "CDLL",
        lambda name, *more, **named: fake.library if name == "libcuda.so.1" else real(name, *more, **named),
    )
    cuda._driver.cache_clear()
    yield fake
    cuda._driver.cache_clear()


class Scene:
    """A worker on a GPU whose target is a neighbour with pages in host memory."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ends = Ends()
        copier: Any = FakeDevice()
        attached = {(Half.SOURCE, OWNER): ATTACH}
        self.near = NeighbourPools(
            PeerId("prefill", 0, 0), cuda.Device(0), attached, self.ends, lambda *_: None, self.begun.append, copier
        )

    def put(self, slab: int) -> Any:
        made = outbound_slab(slab, 1 << 10)
        made.effect.peer = OWNER  # type: ignore[misc]
        self.near.put(made)
        return made

    def give(self, *handles: Any) -> None:
        for index, handle in enumerate(handles):
            self.near.pool_given(OWNER, 0, index, len(handles), handle)

    def turn(self) -> list[Any]:
        """Wait until the thread has mapped a pool, and take it; return the ends of slabs."""
        assert select.select([self.ends.wake], [], [], LIMIT_S)[0]
        found = self.ends.take()
        self.near.take_registered()
        return found + self.ends.take()


def region(*, sealed: bool = True) -> int:
    descriptor = os.memfd_create("longshore-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, SHAPE.geometry.region_bytes[0])
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


def mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("longshore-host")


def test_a_pool_is_registered_once_piece_by_piece_before_its_slabs_begin(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_REGISTERED_BYTES", 4096)
    scene, regions = Scene(), [region(), region()]
    first = scene.put(0)
    scene.give(*regions)
    assert scene.begun == []
    assert scene.turn() == []
    second = scene.put(1)
    assert scene.begun == [first, second]
    assert second.neighbour is first.neighbour
    assert sum(driver.host.values()) == sum(SHAPE.geometry.region_bytes)
    assert set(driver.host.values()) <= {4096, SHAPE.geometry.region_bytes[0] % 4096}
    addresses = [address for address, _ in first.neighbour.regions]
    assert set(addresses) <= driver.host.keys()
    assert not any(map(is_open, regions))
    scene.near.pool_gone(OWNER, 0)
    assert scene.turn() == []
    assert (driver.host, mappings()) == ({}, 0)


def test_a_pool_is_unregistered_before_it_is_unmapped_and_its_owner_hears_of_it_afterwards(driver: FakeDriver) -> None:
    scene = Scene()
    slab = scene.put(0)
    scene.give(region(), region())
    scene.turn()
    slab.neighbour.hold()
    scene.near.pool_gone(OWNER, 0)
    assert scene.near.take_unmapped() == []
    assert len(driver.host) == mappings() == 2
    slab.neighbour.let_go()
    assert scene.turn() == []
    assert scene.near.take_unmapped() == [(OWNER, 0)]
    assert (driver.host, mappings()) == ({}, 0)


def test_unregistering_does_not_hold_up_the_control_thread(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, goes_on = Scene(), threading.Event()
    unregister = cuda.Device.unregister_host
    monkeypatch.setattr(cuda.Device, "unregister_host", lambda *given: (goes_on.wait(LIMIT_S), unregister(*given)))
    scene.put(0)
    scene.give(region(), region())
    scene.turn()
    scene.near.pool_gone(OWNER, 0)
    assert scene.near.take_unmapped() == []
    assert len(driver.host) == 2
    goes_on.set()
    scene.turn()
    assert scene.near.take_unmapped() == [(OWNER, 0)]
    assert (driver.host, mappings()) == ({}, 0)


def test_a_refusal_while_the_pool_is_registered_belongs_to_a_later_request(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, goes_on = Scene(), threading.Event()
    register = cuda.Device.register_host
    monkeypatch.setattr(cuda.Device, "register_host", lambda *given: (goes_on.wait(LIMIT_S), register(*given)))
    slab = scene.put(0)
    scene.give(region(), region())
    scene.near.pool_given(OWNER, 0, 0, 0, None)
    goes_on.set()
    assert scene.turn() == []
    assert scene.begun == [slab]
    scene.near.pool_gone(OWNER, 0)
    scene.turn()
    assert (driver.host, mappings()) == ({}, 0)


def test_memory_that_the_driver_does_not_give_back_fails_the_device(driver: FakeDriver) -> None:
    scene = Scene()
    scene.put(0)
    scene.give(region(), region())
    scene.turn()
    driver.fails["cuMemHostUnregister"] = 1
    scene.near.pool_gone(OWNER, 0)
    with pytest.raises(DeviceError, match="cuMemHostUnregister"):
        scene.turn()
    assert scene.near.take_unmapped() == []
    assert (len(driver.host), mappings()) == (2, 2)
    driver.fails.clear()
    for pool in scene.near._leaving[OWNER, 0]:
        pool._unmap()
    assert (driver.host, mappings()) == ({}, 0)


def test_a_pool_that_is_gone_while_it_is_registered_fails_its_slabs_at_once_and_is_unmapped_later(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_REGISTERED_BYTES", 4096)
    scene, goes_on, pieces = Scene(), threading.Event(), []
    register = cuda.Device.register_host

    def registers(*given: Any) -> None:
        pieces.append(given)
        assert goes_on.wait(LIMIT_S)
        register(*given)

    monkeypatch.setattr(cuda.Device, "register_host", registers)
    scene.put(0)
    scene.give(region(), region())
    while not pieces:
        goes_on.wait(0.001)
    scene.near.pool_gone(OWNER, 0)
    (end,) = scene.ends.take()
    assert isinstance(end, OutboundEnd)
    assert "was unregistered" in end.error
    assert scene.near.take_unmapped() == []
    goes_on.set()
    assert scene.turn() == []
    assert scene.near.take_unmapped() == [(OWNER, 0)]
    assert (driver.host, mappings(), scene.begun) == ({}, 0, [])
    # The thread has stopped after the piece at which it was.
    assert len(pieces) == 1


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda driver: driver.fails.update(cuMemHostRegister_v2=OUT_OF_MEMORY), "cannot register the memory"),
        (lambda driver: setattr(driver, "host_shift", 1 << 40), "other addresses than the host"),
        (lambda driver: driver.fails.update(cuMemHostGetDevicePointer_v2=1), "cuMemHostGetDevicePointer"),
    ],
)
def test_memory_that_the_driver_cannot_register_fails_the_slabs_with_its_reason(
    driver: FakeDriver, spoil: Any, text: str
) -> None:
    spoil(driver)
    scene, regions = Scene(), [region(), region()]
    scene.put(0)
    scene.give(*regions)
    (end,) = scene.turn()
    assert text in end.error
    assert "pool 0 of decode cannot be mapped" in end.error
    assert (driver.host, mappings(), scene.begun) == ({}, 0, [])
    assert not any(map(is_open, regions))


def test_memory_that_its_engine_could_truncate_is_not_given_to_a_gpu(driver: FakeDriver) -> None:
    scene = Scene()
    scene.put(0)
    scene.give(region(), region(sealed=False))
    (end,) = scene.turn()
    assert "seal it" in end.error
    assert (driver.host, mappings()) == ({}, 0)


def test_pages_that_are_partly_on_a_gpu_are_refused_and_closed(driver: FakeDriver) -> None:
    scene, descriptor = Scene(), region()
    scene.put(0)
    scene.give(descriptor, DeviceRegion(bytes(64), 0))
    (end,) = scene.turn()
    assert "cannot be neighbours" in end.error
    assert not is_open(descriptor)


def test_a_worker_on_a_cpu_refuses_pages_on_a_gpu(driver: FakeDriver) -> None:
    scene = Scene()
    scene.near._device = None
    scene.put(0)
    scene.give(DeviceRegion(bytes(64), 0), DeviceRegion(bytes(64), 0))
    (end,) = scene.turn()
    assert "cannot be neighbours" in end.error
