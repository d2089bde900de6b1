"""Simulates the parts of GPU memory that the command line uses, on the CPU, for tests without a GPU.

As on a GPU, calls are only queued: written bytes are visible to others after they are settled. A test checks by `settled`
that no work is queued.
"""

from __future__ import annotations

import mmap

import torch

from longshore_wire.engine_messages import DeviceRegion


class PretendMemory:
    """Stands for `longshore_lab.engine.device_memory.DeviceMemory`."""

    def __init__(self, length_bytes: int, device: str) -> None:
        self.tensor = torch.zeros(length_bytes, dtype=torch.uint8)
        self.name = f"GPU-of-{device}"
        self.region = DeviceRegion(bytes(64), 0)
        self._seen = self.tensor.clone()

    @property
    def settled(self) -> bool:
        return torch.equal(self._seen, self.tensor)

    def put(self, image: mmap.mmap) -> None:
        self.tensor.copy_(torch.frombuffer(image, dtype=torch.uint8))
        self.settle()

    def get(self, image: mmap.mmap) -> None:
        torch.frombuffer(image, dtype=torch.uint8).copy_(self.tensor)

    def settle(self) -> None:
        self._seen = self.tensor.clone()
