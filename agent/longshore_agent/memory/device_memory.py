"""Maps engines' GPU regions by handle, registers host memory for a GPU, and allocates a worker's GPU staging memory.

Called by `pools` and by the worker; the counterpart of `host_memory`. All calls of the driver go through `cuda`,
which converts its errors to ours. Staging memory of `cuMemCreate` is mapped by other processes by fabric handles. Our pinned
NIXL (its UCX) needs a fabric handle to let a peer reach such memory. So memory without one is refused here instead of being
moved slowly later.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import ExitStack

from longshore_agent.errors import DeviceError, PoolError, ShapeError
from longshore_agent.memory import cuda
from longshore_agent.memory.host_memory import EXTENT_BYTES, StagingRange, map_shared
from longshore_wire.engine_messages import DeviceRegion
from longshore_wire.errors import Reason
from longshore_wire.names import ENVIRONMENT_PREFIX

# Attributes of a device, from the driver's CUdevice_attribute.
_GPU_DIRECT_RDMA_SUPPORTED = 110
_FABRIC_HANDLES_SUPPORTED = 128
# CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_FABRIC, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE
# and CU_MEM_ALLOC_GRANULARITY_MINIMUM.
_PINNED = 1
_FABRIC = 8
_ON_DEVICE = 1
_READ_WRITE = 3
_MINIMUM = 0
# Size of a CUmemFabricHandle in bytes.
_FABRIC_HANDLE_BYTES = 64
# The driver's errors if this process or the host may not create such handles.
_NO_FABRIC = frozenset({cuda.NOT_PERMITTED, cuda.NOT_SUPPORTED})
_WAY_OUT = (
    f"{ENVIRONMENT_PREFIX}GPU_STAGING_MEMORY=cuMemCreate needs them: give the agent an IMEX channel of its host "
    f"(/dev/nvidia-caps-imex-channels), or set gpu_staging_memory: cudaMalloc ({ENVIRONMENT_PREFIX}GPU_STAGING_MEMORY=cudaMalloc)"
)

# Engines' allocations that are mapped here: (device, handle) -> [address, users]. One allocation may hold many tensors,
# and the driver maps it only once in a process.
_mapped: dict[tuple[int, bytes], list[int]] = {}
_lock = threading.Lock()
# Piece of host memory that is registered at once. Other threads call the driver between two pieces.
_REGISTERED_BYTES = 8 << 20


class DeviceMapping:
    """One region of an engine's GPU memory, mapped into this process. The counterpart of `host_memory.Mapping`.

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


class RegisteredMapping:
    """One region of an engine's host memory, mapped into this process and registered for a GPU's kernels.

    Attributes:
        address: the address of its first byte, for the host and the device.
        length_bytes: the declared size.
    """

    def __init__(
        self, device: cuda.Device, descriptor: int, length_bytes: int, stop: threading.Event | None = None
    ) -> None:
        """Map a memory file, whose descriptor stays the caller's, and register it piece by piece until `stop` is set.

        Raises:
            PoolError: the file is shorter, its owner could truncate it, the driver cannot register it, or it was stopped.
        """
        self._device = device
        self._mapping = map_shared(descriptor, length_bytes)
        self._registered: list[int] = []
        self.address, self.length_bytes = self._mapping.address, length_bytes
        try:
            if not self._mapping.sealed:
                raise PoolError("a GPU can only be given memory that nobody can truncate: seal it (F_SEAL_SHRINK)")
            for start in range(0, length_bytes, _REGISTERED_BYTES):
                if stop is not None and stop.is_set():
                    raise PoolError("it is no longer needed")
                piece, piece_bytes = self.address + start, min(_REGISTERED_BYTES, length_bytes - start)
                self._mapping.populate(start, piece_bytes)
                device.register_host(piece, piece_bytes)
                self._registered.append(piece)
        except DeviceError as error:
            self.unmap()
            raise PoolError(f"the GPU's driver cannot register the memory: {error}") from error
        except PoolError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Undo the registration, then the mapping. No device work may use it. Idempotent.

        Raises:
            DeviceError: the driver keeps a part, so the mapping stays, too.
        """
        while self._registered:
            self._device.unregister_host(self._registered[-1])
            self._registered.pop()
        self._mapping.unmap()


class DeviceStagingBuffer(StagingRange):
    """Staging memory of a GPU worker, from `cudaMalloc` or `cuMemCreate`. The counterpart of `host_memory.StagingBuffer`.

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

    def close(self) -> None:
        """Free the memory. No registration and no device work may use it. Idempotent."""
        if self._is_open:
            self._is_open = False
            if self._virtual is None:
                self._device.free(self.address)
            else:
                self._virtual.free()


class _Location(ctypes.Structure):
    """The driver's CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """The driver's CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """The driver's CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """One allocation, mapped for its own device. Importers of its handle map it for their devices.

    Attributes:
        address: the device address of the first byte.
        length_bytes: the requested size, rounded up to the device's allocation granularity.
    """

    def __init__(self, device: cuda.Device, length_bytes: int) -> None:
        """Allocate and map at least `length_bytes`. A failure leaves no allocation behind.

        Raises:
            DeviceError: UNSUPPORTED if the device or host provides no fabric handles; otherwise out of memory.
        """
        device.enter()
        ordinal = device.ordinal()
        if not device.attribute(_FABRIC_HANDLES_SUPPORTED):
            raise DeviceError(_refusal(device, "it does not support them"), reason=Reason.UNSUPPORTED)
        properties = AllocationProperties(
            type=_PINNED, requested_handle_types=_FABRIC, location=_Location(_ON_DEVICE, ordinal)
        )
        # Memory of cudaMalloc always has this property: an InfiniBand card may access it.
        properties.flags.gpu_direct_rdma_capable = device.attribute(_GPU_DIRECT_RDMA_SUPPORTED) or 0
        self._device = device
        with ExitStack() as undo:
            try:
                self._allocate(undo, properties, length_bytes)
            except cuda.DriverError as error:
                if error.code not in _NO_FABRIC:
                    raise
                raise DeviceError(_refusal(device, str(error)), reason=Reason.UNSUPPORTED) from error
            self._undo = undo.pop_all()

    def free(self) -> None:
        """Unmap and free the memory. No device work may use it. Idempotent."""
        self._device.enter()
        self._undo.close()

    def _allocate(self, undo: ExitStack, properties: AllocationProperties, length_bytes: int) -> None:
        """Reserve addresses, create the memory and map it; `undo` reverts them in reverse order."""
        granularity = ctypes.c_size_t()
        cuda.call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), _MINIMUM)
        self.length_bytes = -(-length_bytes // granularity.value) * granularity.value
        address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        cuda.call("cuMemAddressReserve", ctypes.byref(address), self.length_bytes, 0, 0, 0)
        self.address = address.value
        undo.callback(cuda.call, "cuMemAddressFree", self.address, self.length_bytes)
        cuda.call("cuMemCreate", ctypes.byref(handle), self.length_bytes, ctypes.byref(properties), 0)
        undo.callback(cuda.call, "cuMemRelease", handle.value)
        # The transport's library exports it at registration, and only logs a failure. So we test the export here.
        exported = ctypes.create_string_buffer(_FABRIC_HANDLE_BYTES)
        cuda.call("cuMemExportToShareableHandle", exported, handle.value, _FABRIC, 0)
        cuda.call("cuMemMap", self.address, self.length_bytes, 0, handle.value, 0)
        undo.callback(cuda.call, "cuMemUnmap", self.address, self.length_bytes)
        access = AccessDescription(properties.location, _READ_WRITE)
        cuda.call("cuMemSetAccess", self.address, self.length_bytes, ctypes.byref(access), 1)


def _refusal(device: cuda.Device, why: str) -> str:
    return f"{device.name} gives no memory with fabric handles ({why}), and {_WAY_OUT}"
