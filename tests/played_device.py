"""Simulates a GPU in host memory for a worker's copier, without a driver and without compiling.

Imported in a separate process, like `copy_checks`: it imports torch, and `play` replaces the functions that call a driver.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from page_shapes import one_part, trailer_for

from longshore_agent.errors import DeviceError
from longshore_agent.kernels import device_copier as copier_module
from longshore_agent.kernels import device_digest, device_kernel, device_launch
from longshore_agent.kernels.copier import Copy, Slab, View
from longshore_agent.kernels.device_kernel import CopyStream
from longshore_agent.memory import cuda
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.memory.pools import KVPool

CPU = torch.device("cpu")
DEVICE: Any = SimpleNamespace(index=0, name="GPU-0", enter=lambda: None)


# Names of the simulated kernels' functions.
FUNCTIONS = {1: "copy", 2: "digest"}


@dataclass
class PlayedKernel:
    """Replaces Triton's kernel and counts compilations."""

    function: int = 1
    compiled: list[dict[str, object]] = field(default_factory=list)
    launched: list[tuple[object, ...]] = field(default_factory=list)  # as Triton's users do it

    def warmup(self, *_: object, **constants: object) -> Any:
        self.compiled.append(constants)
        return SimpleNamespace(function=self.function, metadata=SimpleNamespace(shared=0), _init_handles=lambda: None)

    def __getitem__(self, programs: tuple[int, int, int]) -> Any:
        return lambda *values, **constants: self.launched.append((programs, values, constants))


class PlayedBytes:
    found = bytes(range(64))

    def __init__(self, _: object, length_bytes: int) -> None:
        self.length_bytes = length_bytes

    def fill(self, *_: object) -> None:
        pass

    def read(self) -> bytes:
        return self.found


class MemoryBytes(PlayedBytes):
    """Host memory to which the host copies at once."""

    def fill(self, source: int, _: int) -> None:
        self.found = ctypes.string_at(source, self.length_bytes)


class PlayedEvent:
    passes = True

    def __init__(self, *_: object) -> None:
        pass

    def passed(self) -> bool:
        return self.passes

    def record(self, *_: object) -> None:
        pass


class RefusingEvent(PlayedEvent):
    def record(self, *_: object) -> None:
        raise DeviceError("the driver refuses")


def stream_of(_: torch.device) -> CopyStream:
    stream = CopyStream(CPU)
    stream.context = DEVICE
    return stream


# What the copier uses of torch.
_TORCH = SimpleNamespace(
    device=lambda *_: CPU,
    cuda=SimpleNamespace(set_device=lambda _: None, current_stream=lambda _: SimpleNamespace(synchronize=lambda: None)),
)


def play() -> tuple[PlayedKernel, list[tuple[object, ...]]]:
    """Replace driver and device; return the fake kernel and the list of launches."""
    kernel, launches = PlayedKernel(), []
    modules: dict[Any, dict[str, Any]] = {
        device_launch: {"_KERNEL": device_kernel.DeviceKernel(kernel)},
        device_digest: {
            "_KERNEL": device_kernel.DeviceKernel(PlayedKernel(2), device_digest.ARGUMENTS, device_digest.constants)
        },
        device_kernel: {
            "torch": SimpleNamespace(cuda=SimpleNamespace(device=lambda _: nullcontext())),
            "triton": SimpleNamespace(__version__="3.6.0"),
        },
        copier_module: {"CopyStream": stream_of, "torch": _TORCH},
        cuda: {
            "copy_to_device": lambda _, target, data, stream: ctypes.memmove(target, data, len(data)),
            "launch": lambda *arguments: launches.append(arguments),
            "Event": PlayedEvent,
            "HostBytes": PlayedBytes,
        },
    }
    _change(modules)
    return kernel, launches


def interpret() -> None:
    """Replace driver and device for Triton's interpreter, which executes the kernels at once."""
    _change(
        {
            copier_module: {"CopyStream": lambda _: CopyStream(CPU), "torch": _TORCH},
            cuda: {"Event": PlayedEvent, "HostBytes": MemoryBytes},
        }
    )


def _change(modules: dict[Any, dict[str, Any]]) -> None:
    for module, changes in modules.items():
        for name, value in changes.items():
            setattr(module, name, value)


def make_copier() -> tuple[Any, StagingBuffer]:
    """Return a copier, and the fake memory of its lanes and its ring."""
    memory = StagingBuffer(1 << 20)
    return copier_module.DeviceCopier(DEVICE, memory, memory), memory  # type: ignore[arg-type]


def on_device(pool: KVPool) -> KVPool:
    pool.device = DEVICE
    return pool


def staged(kind: str, view: View, memory: StagingBuffer, tokens: tuple[int, int], offset_bytes: int = 0) -> Copy:
    """Return a gather with its trailer, or a scatter that checks its trailer."""
    slab = Slab(memory, offset_bytes, view.payload_bytes(tokens))
    if kind == "gather":
        return one_part(view, slab, tokens, trailer_for(slab.payload_bytes))
    return one_part(slab, view, tokens, accepts=lambda found: found == PlayedBytes.found)


def copied(copier: Any, sides: list[View], tokens: tuple[int, int]) -> Any:
    """Queue a direct copy, after its kernel was compiled."""
    while (copy := copier.submit(one_part(sides[0], sides[1], tokens))) is None:
        wait_compiled()
    return copy


def wait_compiled() -> None:
    """Wait until the compiling thread has finished its work."""
    device_kernel._COMPILING._thread.submit(lambda: None).result()
