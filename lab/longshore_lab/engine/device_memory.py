"""Allocates GPU memory for engines' pages through torch, and exports it to the agent.

Called by `cache` and by the benchmarks' pages, for which it is a `test_engine.memory.Memory`. The only file of the laboratory that calls CUDA, so that all others can be
tested without a GPU. Knows neither pages nor agents.
"""

from __future__ import annotations

import time

import torch

from longshore_client.cuda import device_name, device_region
from longshore_lab.engine.errors import EngineError
from longshore_lab.test_engine.memory import Regions


class DeviceMemory:
    """Uninitialised bytes on one GPU.

    Attributes:
        tensor: [length_bytes] uint8 on the GPU.
        device_name: the GPU's UUID, in the form that `connect` takes.
        regions: the exported region, in the form that `Client.register_pool` takes.
    Raises:
        EngineError: torch cannot use the device, or it has too little memory.
        ArgumentError: the memory has no handle; names the setting of torch that prevents it.
    """

    def __init__(self, length_bytes: int, device: str) -> None:
        try:
            # The driver uses this thread's current context, which must be that of this device.
            with torch.cuda.device(device):
                self.tensor = torch.empty(length_bytes, dtype=torch.uint8, device=device)
                self.device_name = device_name(self.tensor)
                self.regions: Regions = [device_region(self.tensor)]
        except (RuntimeError, AssertionError) as error:
            raise EngineError(
                f"torch {torch.__version__} gives no {length_bytes} bytes on {device}: {error}: use a torch built for this "
                "machine's CUDA, or another device"
            ) from error

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Change bytes."""
        # torch takes memory that can be written only.
        self.tensor[offset_bytes : offset_bytes + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.settle()

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return a copy of bytes in host memory."""
        self.settle()
        return bytes(self.tensor[offset_bytes : offset_bytes + length_bytes].cpu().numpy().tobytes())

    def clear(self, offset_bytes: int, length_bytes: int) -> None:
        """Zero bytes."""
        self.tensor[offset_bytes : offset_bytes + length_bytes].zero_()
        self.settle()

    def close(self) -> None:
        """Free it, once no tensor refers to it. The agent must not use it any more."""
        self.tensor = self.tensor.new_empty(0)

    def settle(self) -> None:
        """Wait for all queued work on the device, so that an agent sees every write and none follows."""
        torch.cuda.synchronize(self.tensor.device)


class PlainCopy:
    """Two pieces of memory, on one GPU or on two, and torch's copy between them."""

    def __init__(self, length_bytes: int, source: str, target: str) -> None:
        """Allocate the memory. Raises the errors of `DeviceMemory`."""
        self._near, self._far = DeviceMemory(length_bytes, source), DeviceMemory(length_bytes, target)
        self._near.tensor.random_(0, 256)
        self._settle()

    def seconds(self, length_bytes: int) -> float:
        """Copy the first bytes and compare them; return the seconds of the copy. Raises EngineError if they differ."""
        near, far = self._near.tensor[:length_bytes], self._far.tensor[:length_bytes]
        far.zero_()
        self._settle()
        begin_s = time.perf_counter()
        far.copy_(near, non_blocking=True)
        self._settle()
        found_s = time.perf_counter() - begin_s
        if not torch.equal(far.cpu(), near.cpu()):
            raise EngineError("a plain copy between the GPUs left wrong bytes")
        return found_s

    def _settle(self) -> None:
        self._near.settle()
        self._far.settle()
