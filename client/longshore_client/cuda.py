"""Makes the handles by which an engine shares CUDA tensors with its agent, and names their device.

Called by engines before `connect` and `Client.register_pool`. Imports no tensor library: it uses only methods of a
tensor, and calls the driver through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from typing import Protocol

from longshore_client.errors import ArgumentError
from longshore_wire.engine_messages import DeviceRegion

_HANDLE_BYTES = 64
_UUID_BYTES = 16
# The driver's CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL and CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE.
_DEVICE_ORDINAL = 9
_HAS_IPC_HANDLE = 10


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
        raise ArgumentError(f"{name} of the tensor's memory: {(found.value or b'an unknown error').decode()} ({error})")
