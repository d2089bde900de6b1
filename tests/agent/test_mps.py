"""Tells GPUs that are shared by MPS from others, and refuses the others where MPS is required. The driver is simulated."""

from __future__ import annotations

import ctypes
import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_driver import MPS, FakeDriver

from longshore_agent.errors import DeviceError
from longshore_agent.memory import cuda, mps
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.worker import resources
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.moving import Mover
from longshore_client import KVLayout, ModelShape, Parallel
from longshore_client.core import PASSING
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason

LAYOUT = KVLayout(ModelShape.kv(2, 2, 64, 2), Parallel(), 16)
# The UUID of the only device of the simulated driver.
NAME = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake, load = FakeDriver(), ctypes.CDLL

    def library(name: str | None, **options: Any) -> Any:
        return fake.library if name == "libcuda.so.1" else load(name, **options)

    monkeypatch.setattr(ctypes, "CDLL", library)
    caches = (cuda._driver, cuda.open_device, cuda.device_at)
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe directory that the environment names, and that does not exist."""
    found = tmp_path / "pipes"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(found))
    return found


def moved_by(monkeypatch: pytest.MonkeyPatch, *, required: bool) -> Mover:
    """The moving parts of a worker on the simulated device, with a transport that moves nothing."""

    def buffer(_: object, length_bytes: int, *, allocation: object, **options: Any) -> StagingBuffer:
        return StagingBuffer(length_bytes, **options)

    transport = SimpleNamespace(register=lambda *_: 1, close=lambda: None)
    monkeypatch.setattr(resources, "make_transport", lambda *_: transport)
    monkeypatch.setattr(resources, "DeviceStagingBuffer", buffer)
    monkeypatch.setattr(resources, "device_copier", lambda *_: SimpleNamespace())
    settings = dataclasses.replace(Settings(), lane_bytes=1 << 20, ring_bytes=1 << 20, gpu_mps=required)
    config = WorkerConfig("p/0/0", "p", 1, LAYOUT, (Half.SOURCE,), settings, port=0, device=NAME)
    return Mover(config, Metrics(), SpanRecorder(1), lambda *_: None)


@pytest.mark.parametrize("required", [False, True])
def test_a_worker_that_is_a_client_of_mps_starts_and_says_so(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, *, required: bool
) -> None:
    driver.attributes[MPS] = 1
    mover = moved_by(monkeypatch, required=required)
    assert mover.resources.mps is True
    mover.resources.close()


@pytest.mark.parametrize(("known", "said"), [({MPS: 0}, False), ({}, None)], ids=["time-sliced", "an older driver"])
def test_a_worker_that_is_no_client_starts_where_mps_is_not_required_and_says_so(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, known: dict[int, int], said: bool | None
) -> None:
    driver.attributes |= known
    mover = moved_by(monkeypatch, required=False)
    assert mover.resources.mps is said
    mover.resources.close()


@pytest.mark.shows("agent.gpu_mps", "field.gpu.mps")
@pytest.mark.parametrize("known", [{MPS: 0}, {}], ids=["time-sliced", "an older driver"])
def test_with_gpu_mps_a_worker_that_is_no_client_does_not_start_and_names_directory_and_way_out(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, pipes: Path, known: dict[int, int]
) -> None:
    driver.attributes |= known
    with pytest.raises(mps.MpsError) as refused:
        moved_by(monkeypatch, required=True)
    text = str(refused.value)
    # The worker tells this text to its engine.
    assert isinstance(refused.value, DeviceError)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert text.startswith(f"{NAME} is not shared by MPS (pipe directory {pipes}: ")
    assert "start nvidia-cuda-mps-control on this node with that CUDA_MPS_PIPE_DIRECTORY" in text
    assert "or set LONGSHORE_GPU_MPS=false" in text
    assert not driver.plain


def test_the_refusal_says_what_is_in_the_pipe_directory(driver: FakeDriver, tmp_path: Path) -> None:
    driver.attributes[MPS] = 0

    def why(directory: str) -> str:
        with pytest.raises(mps.MpsError) as refused:
            mps.require(cuda.Device(0), {"CUDA_MPS_PIPE_DIRECTORY": directory} if directory else {})
        return str(refused.value).partition("pipe directory ")[2].partition("), and")[0]

    pipes = tmp_path / "pipes"
    assert why(str(pipes)) == f"{pipes}: No such file or directory"
    pipes.mkdir()
    assert why(str(pipes)) == f"{pipes}: no daemon has made its pipes there"
    # A daemon that was killed leaves its pipes behind.
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(pipes / "control"))
    assert why(str(pipes)) == f"{pipes}: no daemon answers there"
    assert why("").startswith("/tmp/nvidia-mps: ")
    driver.attributes.pop(MPS)
    assert "older than CUDA 12.4" in why(str(pipes))


@pytest.mark.parametrize("code", [805, 806, 807])
@pytest.mark.parametrize("call", ["cuInit", "cuDevicePrimaryCtxRetain"])
def test_an_engine_may_try_again_while_the_server_of_mps_is_away(driver: FakeDriver, call: str, code: int) -> None:
    driver.fails[call] = code
    with pytest.raises(cuda.MpsAwayError, match=rf"{call}: .* \({code}\)") as away:
        cuda.open_device(NAME)
    assert away.value.reason in PASSING
    # The driver is asked again by the next call.
    driver.fails.clear()
    assert cuda.open_device(NAME).name == NAME


def test_another_fault_of_the_driver_is_one(driver: FakeDriver) -> None:
    driver.fails["cuInit"] = 100
    with pytest.raises(DeviceError, match=r"device is .*: cuInit: .* \(100\)") as refused:
        cuda.open_device(NAME)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert refused.value.reason not in PASSING
