"""Makes the handles by which an engine shares CUDA memory with its agent, names its device, and allocates it without torch.

Called by engines before `connect` and `Client.register_pool`. Imports no tensor library: it uses only methods of a
tensor, and calls the driver through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from types import SimpleNamespace
from typing import Protocol

from longshore_client.errors import ArgumentError
from longshore_wire.engine_messages import DeviceRegion

_HANDLE_BYTES = 64
_UUID_BYTES = 16
# The driver's CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL and CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE.
_DEVICE_ORDINAL = 9
_HAS_IPC_HANDLE = 10
# CUDA_ERROR_NO_DEVICE.
_NO_DEVICE = 100


class CUDATensor(Protocol):
    """The part of `torch.Tensor` that is used here."""

    def data_ptr(self) -> int:
        """Return the address of the first element."""


def device_region(tensor: CUDATensor) -> DeviceRegion:
    """Return the region of a torch CUDA tensor's memory, from its first byte on, for `register_pool`.

    Before `send`, the pages must be computed: synchronize the stream, or poll an event of it. The memory must stay
    allocated until `unregister_pool` has returned or the client is closed.

    Raises:
        ArgumentError: the argument is not a tensor in a GPU's memory, or its memory cannot be shared by handle.
    """
    address = _address(tensor)
    if not _attribute(_HAS_IPC_HANDLE, address):
        raise ArgumentError(
            "tensor lies in memory that has no CUDA IPC handle (expandable segments, or another virtual memory pool): "
            "start the engine with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or allocate its pages before that "
            "is switched on"
        )
    base, handle = ctypes.c_uint64(), ctypes.create_string_buffer(_HANDLE_BYTES)
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), None, ctypes.c_uint64(address))
    _call("cuIpcGetMemHandle", handle, ctypes.c_uint64(address))
    return DeviceRegion(handle.raw, address - base.value)


def device_name(tensor: CUDATensor) -> str:
    """Return the UUID of the GPU that holds a tensor, for `connect`. Raises ArgumentError as `device_region`."""
    device, found = ctypes.c_int(), ctypes.create_string_buffer(_UUID_BYTES)
    _call("cuDeviceGet", ctypes.byref(device), _attribute(_DEVICE_ORDINAL, _address(tensor)))
    _call("cuDeviceGetUuid_v2", found, device)
    return f"GPU-{uuid.UUID(bytes=found.raw)}"


def gpu_count() -> int:
    """Return the number of GPUs that this process sees; 0 also without a driver. Raises ArgumentError: the driver fails."""
    try:
        driver = _driver()
    except ArgumentError:
        return 0
    if driver.cuInit(0) == _NO_DEVICE:
        return 0
    found = ctypes.c_int()
    _call("cuInit", 0)
    _call("cuDeviceGetCount", ctypes.byref(found))
    return found.value


class DeviceMemory:
    """Memory of one GPU for the pages of an engine that has no tensor library. Not zeroed.

    `device_region` and `device_name` take it as a tensor. Any thread may call; a call returns when the GPU has carried it out.

    Args:
        index: the driver's number of the GPU in this process, from 0 to `gpu_count() - 1`.
    Raises:
        ArgumentError: no such GPU, or it has too little free memory.
    """

    device = SimpleNamespace(type="cuda")

    def __init__(self, length_bytes: int, index: int) -> None:
        self._context = _context(index)
        self._enter()
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length_bytes))
        self._address = address.value

    def data_ptr(self) -> int:
        """Return the address of the first byte."""
        return self._address

    def write(self, offset_bytes: int, data: bytes) -> None:
        """Copy bytes from host memory."""
        self._enter()
        _call("cuMemcpyHtoD_v2", self._at(offset_bytes), ctypes.c_char_p(data), ctypes.c_size_t(len(data)))
        _call("cuCtxSynchronize")

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return a copy of bytes in host memory."""
        self._enter()
        found = ctypes.create_string_buffer(length_bytes)
        _call("cuMemcpyDtoH_v2", found, self._at(offset_bytes), ctypes.c_size_t(length_bytes))
        return found.raw

    def clear(self, offset_bytes: int, length_bytes: int) -> None:
        """Zero bytes."""
        self._enter()
        _call("cuMemsetD8_v2", self._at(offset_bytes), ctypes.c_ubyte(0), ctypes.c_size_t(length_bytes))
        _call("cuCtxSynchronize")

    def close(self) -> None:
        """Free the memory. No agent may use it: unregister its pool, or close the client, before."""
        self._enter()
        _call("cuMemFree_v2", self._at(0))

    def _at(self, offset_bytes: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(self._address + offset_bytes)

    def _enter(self) -> None:
        _call("cuCtxSetCurrent", self._context)


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """Return the primary context of a GPU, which exists until the process ends. Raises ArgumentError."""
    device, found = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(found), device)
    return found


def _address(tensor: CUDATensor) -> int:
    device = getattr(getattr(tensor, "device", None), "type", None)
    if device != "cuda":
        raise ArgumentError(f"tensor is on {device or type(tensor).__name__}: give a torch tensor on a CUDA device")
    return tensor.data_ptr()


def _attribute(number: int, address: int) -> int:
    value = ctypes.c_int()
    _call("cuPointerGetAttribute", ctypes.byref(value), ctypes.c_int(number), ctypes.c_uint64(address))
    return value.value


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ArgumentError(f"there is no CUDA driver here: {error}") from error


def _call(name: str, *arguments: object) -> None:
    error = getattr(_driver(), name)(*arguments)
    if error:
        found = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(error), ctypes.byref(found))
        raise ArgumentError(f"{name}: {(found.value or b'an unknown error').decode()} ({error})")
