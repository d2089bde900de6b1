"""Simulates the parts of GPU memory that the command line uses, on the CPU, for tests without a GPU.

As on a GPU, calls are only queued: written bytes are visible to others after they are settled. A test checks by `settled`
that no work is queued.
"""

from __future__ import annotations

import torch

from longshore_wire.engine_messages import DeviceRegion


class PretendMemory:
    """Stands for `longshore_lab.engine.device_memory.DeviceMemory`."""

    def __init__(self, length_bytes: int, device: str) -> None:
        self.tensor = torch.zeros(length_bytes, dtype=torch.uint8)
        self.device_name = f"GPU-of-{device}"
        self.regions = [DeviceRegion(bytes(64), 0)]
        self._seen = self.tensor.clone()

    @property
    def settled(self) -> bool:
        return torch.equal(self._seen, self.tensor)

    def write(self, offset_bytes: int, data: bytes) -> None:
        self.tensor[offset_bytes : offset_bytes + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.settle()

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        return self.tensor[offset_bytes : offset_bytes + length_bytes].numpy().tobytes()

    def clear(self, offset_bytes: int, length_bytes: int) -> None:
        self.write(offset_bytes, bytes(length_bytes))

    def close(self) -> None:
        pass

    def settle(self) -> None:
        self._seen = self.tensor.clone()
