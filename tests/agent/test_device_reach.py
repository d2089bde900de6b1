"""Tests that a GPU uses DIRECT only if every other visible GPU can write its memory. The driver is simulated."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable

import pytest

from longshore_agent.errors import DeviceError
from longshore_agent.memory import cuda
from longshore_agent.settings import Settings
from longshore_agent.worker.config import WorkerConfig
from longshore_wire.engine_messages import Half
from longshore_wire.layout import KVLayout, ModelShape, Parallel

NAMES = [f"GPU-{uuid.UUID(int=number + 1)}" for number in range(3)]
Reach = Callable[[int, int], bool]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs a driver with three GPUs and these peer accesses."""

    def install(reaches: Reach) -> None:
        def call(name: str, *arguments: object) -> None:
            values = [getattr(each, "_obj", each) for each in arguments]
            if name == "cuDeviceGetCount":
                values[0].value = len(NAMES)
            elif name == "cuDeviceGet":
                values[0].value = values[1]
            elif name == "cuDeviceGetUuid_v2":
                ctypes.memmove(values[0].bytes, uuid.UUID(int=values[1] + 1).bytes, 16)
            elif name == "cuDeviceCanAccessPeer":
                values[0].value = reaches(values[1], values[2])

        monkeypatch.setattr(cuda, "call", call)

    caches = (cuda.open_device, cuda.device_at, cuda.reached_by_all)
    for cached in caches:
        cached.cache_clear()
    yield install
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("target", range(3))
def test_a_device_that_all_others_reach_takes_part(play, target: int) -> None:
    play(lambda near, far: near != far)
    assert cuda.reached_by_all(NAMES[target])


def test_one_that_cannot_be_reached_by_one_other_does_not_whatever_it_reaches_itself(play) -> None:
    play(lambda near, far: (near, far) != (2, 0))
    assert not cuda.reached_by_all(NAMES[0])
    assert cuda.reached_by_all(NAMES[2])


def test_an_unknown_device_is_an_error_that_names_those_that_are_seen(play) -> None:
    play(lambda near, far: True)
    with pytest.raises(DeviceError, match=NAMES[1]):
        cuda.reached_by_all("GPU-of-somebody-else")


def test_a_worker_says_whether_its_gpu_is_reached_and_one_on_a_cpu_nothing(play) -> None:
    play(lambda near, far: (near, far) != (2, 0))
    layout = KVLayout(ModelShape.kv(layers=4, kv_heads=8, head_dim=64, element_bytes=2), Parallel(tp=1), page_size=16)
    said = {
        device: WorkerConfig("p/0/0", "p", 1, layout, (Half.SOURCE,), Settings(), port=0, device=device).peer_access()
        for device in ("cpu", *NAMES)
    }
    assert list(said.values()) == [None, False, True, True]
