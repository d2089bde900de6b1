"""Maps engines' GPU regions by handle, and allocates a worker's GPU staging memory.

Called by `pools` and by the worker; the GPU counterpart of `ipc` and `staging`. `cuda` converts the driver's errors to
ours.
"""

from __future__ import annotations

import threading

from longshore_agent.errors import DeviceError, PoolError, ShapeError
from longshore_agent.memory import cuda
from longshore_agent.memory.cuda_virtual import VirtualMemory
from longshore_agent.memory.staging import EXTENT_BYTES, StagingPieces
from longshore_wire.engine_messages import DeviceRegion

# Engines' allocations that are mapped here: (device, handle) -> [address, users]. One allocation may hold many tensors,
# and the driver maps it only once in a process.
_mapped: dict[tuple[int, bytes], list[int]] = {}
_lock = threading.Lock()


class DeviceMapping:
    """One region of an engine's GPU memory, mapped into this process. The counterpart of `ipc.Mapping`.

    Attributes:
        device: the device for which it is mapped. The memory may be on another device that this one reaches.
        address: the device address of its first byte.
        length_bytes: the declared size.
    """

    def __init__(self, device: cuda.Device, region: DeviceRegion, length_bytes: int) -> None:
        """Map the allocation that holds the region.

        Raises:
            PoolError: the handle is invalid, or the region exceeds the allocation.
        """
        if len(region.handle) != cuda.IPC_HANDLE_BYTES:
            raise PoolError(f"a handle of {len(region.handle)} bytes: CUDA's have {cuda.IPC_HANDLE_BYTES}")
        self.device = device
        self._key = (device.index, region.handle)
        self._is_mapped = False
        try:
            base = self._open()
            self._is_mapped = True
            _, allocation_bytes = device.allocation_of(base)
        except DeviceError as error:
            self.unmap()
            raise PoolError(f"the engine's memory cannot be mapped: {error}") from error
        if region.offset_bytes < 0 or region.offset_bytes + length_bytes > allocation_bytes:
            self.unmap()
            raise PoolError(
                f"{length_bytes} bytes at {region.offset_bytes} were declared: the allocation has {allocation_bytes}"
            )
        self.address = base + region.offset_bytes
        self.length_bytes = length_bytes

    def unmap(self) -> None:
        """Release the region, and unmap its allocation with the last region. No device work may use it. Idempotent."""
        if not self._is_mapped:
            return
        self._is_mapped = False
        with _lock:
            entry = _mapped[self._key]
            entry[1] -= 1
            if entry[1]:
                return
            del _mapped[self._key]
            self.device.close_shared(entry[0])

    def _open(self) -> int:
        with _lock:
            entry = _mapped.get(self._key)
            if entry is None:
                entry = _mapped[self._key] = [self.device.open_shared(self._key[1]), 0]
            entry[1] += 1
            return entry[0]


class DeviceStagingBuffer(StagingPieces):
    """Staging memory of a GPU worker, from `cudaMalloc` or `cuMemCreate`. The counterpart of `staging.StagingBuffer`.

    Attributes:
        address: the device address of the first byte.
        length_bytes: the requested size.
    """

    def __init__(
        self,
        device: cuda.Device,
        length_bytes: int,
        *,
        extent_bytes: int = EXTENT_BYTES,
        allocation: cuda.Allocation = cuda.Allocation.CUDA_MALLOC,
    ) -> None:
        """Allocate and zero `length_bytes` (at least 1).

        Raises:
            ShapeError: a length is below 1.
            DeviceError: out of memory, or (UNSUPPORTED) the device cannot share memory of that allocation with peers.
        """
        if length_bytes < 1 or extent_bytes < 1:
            raise ShapeError(f"length_bytes is {length_bytes} and extent_bytes is {extent_bytes}: give at least 1")
        self._device = device
        is_virtual = allocation is cuda.Allocation.CU_MEM_CREATE
        self._virtual = VirtualMemory(device, length_bytes) if is_virtual else None
        address = device.allocate(length_bytes) if self._virtual is None else self._virtual.address
        super().__init__(address, length_bytes, extent_bytes)
        self._is_open = True
        try:
            device.fill_zero(self.address, length_bytes)
        except DeviceError:
            self.close()
            raise

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The whole buffer, in the form in which tensor libraries import memory."""
        return {"shape": (self.length_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def bytes_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return a copy of a few bytes, such as a trailer. Raises ShapeError outside the buffer."""
        self._check(offset_bytes, length_bytes)
        assert self._is_open, "a read of a closed staging buffer"
        return self._device.read(self.address + offset_bytes, length_bytes)

    def close(self) -> None:
        """Free the memory. No registration and no device work may use it. Idempotent."""
        if self._is_open:
            self._is_open = False
            if self._virtual is None:
                self._device.free(self.address)
            else:
                self._virtual.free()
