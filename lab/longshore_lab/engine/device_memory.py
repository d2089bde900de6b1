"""Memory on a GPU for engines' pages, as an engine takes it from torch, and how its agent finds it.

Called by `cache` and by the benchmarks' pages. The only file of the laboratory that calls CUDA, so that all others can
be tried without a GPU; knows neither pages nor agents.
"""

from __future__ import annotations

import mmap
import time

import torch

from longshore_client.cuda import device_name, device_region
from longshore_lab.engine.errors import EngineError


class DeviceMemory:
    """Bytes on one GPU, with nothing written to them.

    Attributes:
        tensor: [length_bytes] uint8 there.
        name: the GPU's UUID, as `connect` takes it.
        region: how an agent finds the first byte, as `Client.register_pool` takes it.
    Raises:
        EngineError: torch cannot use the device, or it has too little memory.
        ArgumentError: its memory has no handle; says which setting of torch is in the way.
    """

    def __init__(self, length_bytes: int, device: str) -> None:
        try:
            # The driver answers for the context that is current in this thread: that of this device.
            with torch.cuda.device(device):
                self.tensor = torch.empty(length_bytes, dtype=torch.uint8, device=device)
                self.name, self.region = device_name(self.tensor), device_region(self.tensor)
        except (RuntimeError, AssertionError) as error:
            raise EngineError(
                f"torch {torch.__version__} gives no {length_bytes} bytes on {device}: {error}: use a torch built for this "
                "machine's CUDA, or another device"
            ) from error

    def put(self, image: mmap.mmap) -> None:
        """Copy all bytes from memory of the host."""
        # The tensor lives for one copy: one that stayed would see the mapping after its end.
        self.tensor.copy_(torch.frombuffer(image, dtype=torch.uint8))
        self.settle()

    def get(self, image: mmap.mmap) -> None:
        """Copy all bytes to memory of the host."""
        self.settle()
        torch.frombuffer(image, dtype=torch.uint8).copy_(self.tensor)

    def settle(self) -> None:
        """Return when all that was queued on the device is done: an agent sees what was written, and nothing comes later."""
        torch.cuda.synchronize(self.tensor.device)


class PlainCopy:
    """Two pieces of memory, on one GPU or on two, and the copy between them that torch makes."""

    def __init__(self, length_bytes: int, source: str, target: str) -> None:
        """Take the memory; raises as `DeviceMemory`."""
        self._near, self._far = DeviceMemory(length_bytes, source), DeviceMemory(length_bytes, target)
        self._near.tensor.random_(0, 256)
        self._settle()

    def seconds(self, length_bytes: int) -> float:
        """Copy the first bytes and compare them; return how long the copy took. Raises EngineError: they differ."""
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
