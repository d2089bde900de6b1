"""Memory of a GPU from `cuMemCreate`, which other processes map by fabric handles: an address range, and what backs it.

Called by `device_memory`; every call of the driver goes through `cuda`. A fabric handle is the only one by which the NIXL that we
pin (its UCX) lets a peer reach such memory, so memory without one is refused here rather than moved slowly later.
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
# Bytes of a CUmemFabricHandle.
_FABRIC_HANDLE_BYTES = 64
# What the driver says where this process, or the host, may not make such handles.
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
    """One allocation, mapped for its own device; who imports its handle maps it for another.

    Attributes:
        address: of the first byte, as the device counts.
        length_bytes: of the whole range: what was asked for, rounded up to what the device allocates at least.
    """

    def __init__(self, device: cuda.Device, length_bytes: int) -> None:
        """Allocate and map at least `length_bytes`; what has failed leaves nothing behind.

        Raises:
            DeviceError: UNSUPPORTED: the device or the host gives no fabric handles; else the memory is not there.
        """
        device.enter()
        ordinal = device.ordinal()
        if not _attribute(ordinal, _FABRIC_HANDLES_SUPPORTED):
            raise DeviceError(_refusal(device, "it does not support them"), reason=Reason.UNSUPPORTED)
        properties = AllocationProperties(
            type=_PINNED, requested_handle_types=_FABRIC, location=_Location(_ON_DEVICE, ordinal)
        )
        # Memory of cudaMalloc is always so: an InfiniBand card may read and write it.
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
        """Unmap the memory and give it back. Nothing may run on it. Idempotent."""
        self._device.enter()
        self._undo.close()

    def _allocate(self, undo: ExitStack, properties: AllocationProperties, length_bytes: int) -> None:
        """Take one thing after the other; `undo` gives them back: the mapping, then the memory, then the addresses."""
        granularity = ctypes.c_size_t()
        cuda.call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), _MINIMUM)
        self.length_bytes = -(-length_bytes // granularity.value) * granularity.value
        address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        cuda.call("cuMemAddressReserve", ctypes.byref(address), self.length_bytes, 0, 0, 0)
        self.address = address.value
        undo.callback(cuda.call, "cuMemAddressFree", self.address, self.length_bytes)
        cuda.call("cuMemCreate", ctypes.byref(handle), self.length_bytes, ctypes.byref(properties), 0)
        undo.callback(cuda.call, "cuMemRelease", handle.value)
        # The transport's library exports it when it registers the memory, and says so in a log only if that fails.
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
        # The driver is older than the attribute, and so has not what it is about.
        return False
    return bool(found.value)


def _refusal(device: cuda.Device, why: str) -> str:
    return f"{device.name} gives no memory with fabric handles ({why}), and {_WAY_OUT}"
