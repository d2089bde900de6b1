"""Allocates GPU memory by `cuMemCreate`, which other processes map by fabric handles.

Called by `device_memory`; all calls of the driver go through `cuda`. Our pinned NIXL (its UCX) needs a fabric handle to let a
peer reach such memory. So memory without one is refused here instead of being moved slowly later.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

from longshore_agent.errors import DeviceError
from longshore_agent.memory import cuda
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
        if not _attribute(ordinal, _FABRIC_HANDLES_SUPPORTED):
            raise DeviceError(_refusal(device, "it does not support them"), reason=Reason.UNSUPPORTED)
        properties = AllocationProperties(
            type=_PINNED, requested_handle_types=_FABRIC, location=_Location(_ON_DEVICE, ordinal)
        )
        # Memory of cudaMalloc always has this property: an InfiniBand card may access it.
        properties.flags.gpu_direct_rdma_capable = int(_attribute(ordinal, _GPU_DIRECT_RDMA_SUPPORTED))
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


def _attribute(ordinal: int, attribute: int) -> bool:
    found = ctypes.c_int()
    try:
        cuda.call("cuDeviceGetAttribute", ctypes.byref(found), attribute, ordinal)
    except cuda.DriverError:
        # A driver that does not know the attribute lacks the feature.
        return False
    return bool(found.value)


def _refusal(device: cuda.Device, why: str) -> str:
    return f"{device.name} gives no memory with fabric handles ({why}), and {_WAY_OUT}"
