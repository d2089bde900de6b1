"""The memory of a test rank's pages: that of a GPU of its node, or host memory. Called by `instance`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from longshore_client import cuda
from longshore_client.errors import ArgumentError
from longshore_client.memory import create_region
from longshore_lab.test_engine.headroom import NoMemoryError
from longshore_spec.agent_config import Backend
from longshore_spec.verify_messages import MemoryKind, WantedMemory
from longshore_wire.engine_messages import DeviceRegion
from longshore_wire.errors import LongshoreError, Reason

Regions = Sequence[int] | Sequence[DeviceRegion]


class NoGPUError(LongshoreError):
    """GPU memory was asked for, and this process cannot use a GPU."""

    reason = Reason.UNSUPPORTED


class Memory(Protocol):
    """The pages of a rank, in one region. Offsets and lengths are in bytes.

    Attributes:
        device_name: for `connect`.
        regions: the one region, for `Client.register_pool`.
    """

    device_name: str
    regions: Regions

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Change bytes."""

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return bytes."""

    def clear(self, offset_bytes: int, length_bytes: int) -> None:
        """Zero bytes."""

    def close(self) -> None:
        """Free it. The agent must not use it any more."""


# Allocates the memory of a rank: its number and the bytes. Raises LongshoreError.
Allocate = Callable[[int, int], Memory]


def chosen(wanted: WantedMemory, backend: Backend) -> tuple[MemoryKind, Allocate]:
    """Return which memory is used, and what allocates it.

    Args:
        backend: of the agent.
    Raises:
        NoGPUError: GPU memory is wanted and there is no GPU, or its driver fails.
    """
    if wanted == "host" or (wanted == "auto" and not backend.moves_gpu_memory):
        return "host", HostMemory
    try:
        count = cuda.gpu_count()
    except ArgumentError as error:
        raise NoGPUError(f"the CUDA driver fails: {error}: mend it, or give --memory host") from error
    if count:
        return "gpu", partial(GPUMemory, count)
    if wanted == "gpu":
        raise NoGPUError("the agent's pod sees no GPU: set agents.gpuAccess, or leave --memory gpu out")
    return "host", HostMemory


class HostMemory:
    """See Memory. Any rank's; it is zeroed."""

    device_name = "cpu"

    def __init__(self, _rank: int, length_bytes: int) -> None:
        self._descriptor, self._bytes = create_region(length_bytes)
        self.regions: Regions = [self._descriptor]

    def write(self, offset_bytes: int, data: bytes) -> None:
        """See Memory."""
        self._bytes[offset_bytes : offset_bytes + len(data)] = data

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """See Memory."""
        return self._bytes[offset_bytes : offset_bytes + length_bytes]

    def clear(self, offset_bytes: int, length_bytes: int) -> None:
        """See Memory."""
        self.write(offset_bytes, bytes(length_bytes))

    def close(self) -> None:
        """See Memory."""
        self._bytes.close()
        os.close(self._descriptor)


class GPUMemory(cuda.DeviceMemory):
    """See Memory. Ranks take the GPUs of the node in turn."""

    def __init__(self, gpu_count: int, rank: int, length_bytes: int) -> None:
        try:
            super().__init__(length_bytes, rank % gpu_count)
            self.device_name = cuda.device_name(self)
            self.regions: Regions = [cuda.device_region(self)]
        except ArgumentError as error:
            raise NoMemoryError(
                f"GPU {rank % gpu_count} has no {length_bytes} bytes for rank {rank}: {error}: give smaller sizes or a lower "
                "concurrency, or --memory host"
            ) from error
