"""The memory of a rank's pages: that of a GPU, or host memory. Called by `pages`, and by programs that choose the memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from longshore_client import cuda
from longshore_client.memory import create_region
from longshore_wire.engine_messages import DeviceRegion

Regions = Sequence[int] | Sequence[DeviceRegion]


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

    def read(self, offset_bytes: int, length_bytes: int) -> bytes | memoryview:
        """Return bytes; of host memory a view that may be written."""

    def clear(self, offset_bytes: int, length_bytes: int) -> None:
        """Zero bytes."""

    def close(self) -> None:
        """Free it. The agent must not use it any more."""


class HostMemory:
    """See Memory. It is zeroed.

    Attributes:
        descriptor: of the memory, which other processes can map.
    """

    device_name = "cpu"

    def __init__(self, length_bytes: int, name: str = "longshore-pages") -> None:
        self.descriptor, mapping = create_region(length_bytes, name)
        self._bytes = memoryview(mapping)
        self.regions: Regions = [self.descriptor]

    def write(self, offset_bytes: int, data: bytes) -> None:
        """See Memory."""
        self._bytes[offset_bytes : offset_bytes + len(data)] = data

    def read(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """See Memory."""
        return self._bytes[offset_bytes : offset_bytes + length_bytes]

    def clear(self, offset_bytes: int, length_bytes: int) -> None:
        """See Memory."""
        self.write(offset_bytes, bytes(length_bytes))

    def close(self) -> None:
        """See Memory. The mapping stays until no view refers to it. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class GPUMemory(cuda.DeviceMemory):
    """See Memory. `index` is the driver's number of the GPU. Raises ArgumentError."""

    def __init__(self, length_bytes: int, index: int) -> None:
        super().__init__(length_bytes, index)
        self.device_name = cuda.device_name(self)
        self.regions: Regions = [cuda.device_region(self)]
