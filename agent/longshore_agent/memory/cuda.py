"""Calls the CUDA driver through ctypes: contexts, plain device memory, memory of other processes, and launches.

Called by `device_memory` and the device kernels. No other module calls the driver. Loads no tensor library,
and the driver only when a device is opened, so never on a CPU worker. The driver's errors become ours here.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from enum import StrEnum
from typing import Any

from longshore_agent.errors import DeviceError
from longshore_wire.errors import Reason

IPC_HANDLE_BYTES = 64
_UUID_BYTES = 16
# The driver's CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that it supports.
_IPC_LAZY_PEER_ACCESS = 1
_SUCCESS = 0
# Errors that callers distinguish.
_INVALID_VALUE = 1
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
_NOT_READY = 600
# The driver's errors while a server of MPS starts or ends, or its daemon is away. A later start may succeed.
_MPS_AWAY = frozenset({805, 806, 807})
# A device attribute, from the driver's CUdevice_attribute.
MPS_ENABLED = 133
# Flags of registered host memory: for all contexts, and mapped for devices.
_HOST_PORTABLE, _HOST_MAPPED = 1, 2
# A flag of events. Events without timing cost less.
_EVENT_DISABLE_TIMING = 2


class Allocation(StrEnum):
    """How device memory is allocated."""

    CUDA_MALLOC = "cudaMalloc"
    CU_MEM_CREATE = "cuMemCreate"


class DriverError(DeviceError):
    """The driver refused a call.

    Attributes:
        code: the driver's CUresult.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class MpsAwayError(DriverError):
    """The server of CUDA's Multi-Process Service does not answer at the moment. The engine may try again."""


class _IpcHandle(ctypes.Structure):
    """64 opaque bytes. A structure, because the driver takes it by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _UUID_BYTES),)


_SIGNATURES = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGetCount": [ctypes.POINTER(ctypes.c_int)],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDeviceGetUuid_v2": [ctypes.POINTER(_Uuid), ctypes.c_int],
    "cuDeviceCanAccessPeer": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxSetCurrent": [ctypes.c_void_p],
    "cuMemAlloc_v2": [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t],
    "cuMemFree_v2": [ctypes.c_uint64],
    "cuMemsetD8_v2": [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t],
    "cuMemcpyDtoH_v2": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t],
    "cuMemGetAddressRange_v2": [
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    ],
    "cuDeviceGetAttribute": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
    # These take addresses of structures that `device_memory` defines.
    "cuMemGetAllocationGranularity": [ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p, ctypes.c_int],
    "cuMemAddressReserve": [
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_uint64,
        ctypes.c_ulonglong,
    ],
    "cuMemAddressFree": [ctypes.c_uint64, ctypes.c_size_t],
    "cuMemCreate": [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong],
    "cuMemRelease": [ctypes.c_uint64],
    "cuMemExportToShareableHandle": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_ulonglong],
    "cuMemMap": [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ulonglong],
    "cuMemUnmap": [ctypes.c_uint64, ctypes.c_size_t],
    "cuMemSetAccess": [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint],
    "cuMemHostAlloc": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint],
    "cuEventCreate": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint],
    "cuIpcGetMemHandle": [ctypes.POINTER(_IpcHandle), ctypes.c_uint64],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [ctypes.c_uint64],
}


class Device:
    """One GPU with its primary context, which torch also uses.

    Attributes:
        index: the driver's index in this process.
        name: its UUID in nvidia-smi's form.
        context: the driver's handle of the context.
    """

    def __init__(self, index: int) -> None:
        """Retain the device's primary context. Raises DeviceError."""
        self.index, self.name = index, device_uuid(index)
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.ordinal())
        self.context = context

    def ordinal(self) -> int:
        """Return the driver's CUdevice of this GPU. Raises DeviceError."""
        handle = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(handle), self.index)
        return handle.value

    def attribute(self, number: int) -> int | None:
        """Return a device attribute by the driver's number; None: the driver does not know it. Raises DeviceError."""
        found = ctypes.c_int()
        try:
            call("cuDeviceGetAttribute", ctypes.byref(found), number, self.ordinal())
        except DriverError as error:
            if error.code != _INVALID_VALUE:
                raise
            return None
        return found.value

    def enter(self) -> None:
        """Make the context current for this thread. Every thread must call it before it uses CUDA or a library that does."""
        call("cuCtxSetCurrent", self.context)

    def allocate(self, length_bytes: int) -> int:
        """Allocate memory as `cudaMalloc` does and return its address. Raises DeviceError."""
        self.enter()
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), length_bytes)
        return address.value

    def free(self, address: int) -> None:
        """Free memory of `allocate`; waits for the device."""
        self.enter()
        call("cuMemFree_v2", address)

    def fill_zero(self, address: int, length_bytes: int) -> None:
        """Zero memory of the device."""
        self.enter()
        call("cuMemsetD8_v2", address, 0, length_bytes)

    def read(self, address: int, length_bytes: int) -> bytes:
        """Return a copy of a few bytes of the device's memory."""
        self.enter()
        found = ctypes.create_string_buffer(length_bytes)
        call("cuMemcpyDtoH_v2", found, address, length_bytes)
        return found.raw

    def open_shared(self, handle: bytes) -> int:
        """Map another process's allocation; return its first byte's address here.

        Raises:
            DeviceError: the driver refuses the handle: its process is dead or this one, or its device is out of reach.
        """
        self.enter()
        address = ctypes.c_uint64()
        known = _IpcHandle.from_buffer_copy(handle)
        call("cuIpcOpenMemHandle_v2", ctypes.byref(address), known, _IPC_LAZY_PEER_ACCESS)
        return address.value

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return (first address, bytes) of the allocation, own or shared, that contains `address`."""
        self.enter()
        base, length_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(length_bytes), address)
        return base.value, length_bytes.value

    def close_shared(self, address: int) -> None:
        """Unmap memory of `open_shared`."""
        self.enter()
        call("cuIpcCloseMemHandle", address)

    def register_host(self, address: int, length_bytes: int) -> None:
        """Pin a range of this process's memory, so that the device's kernels access it by the same addresses.

        Existing pages take about 0.1 s for each GiB, missing ones 0.8 s. It does not hold the GIL.

        Raises:
            DeviceError: the driver cannot pin it, or the device does not use the host's addresses.
        """
        self.enter()
        call("cuMemHostRegister_v2", address, length_bytes, _HOST_PORTABLE | _HOST_MAPPED)
        seen = ctypes.c_uint64()
        try:
            call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), address, 0)
            if seen.value != address:
                raise DeviceError(
                    f"device {self.index} sees host memory at other addresses than the host: its engines cannot write it directly"
                )
        except DeviceError:
            self.unregister_host(address)
            raise

    def unregister_host(self, address: int) -> None:
        """Undo `register_host` of the range that begins at `address`. No device work may use it."""
        self.enter()
        call("cuMemHostUnregister", address)


class Event:
    """A point in a stream that can be polled. Reusable."""

    def __init__(self, device: Device) -> None:
        device.enter()
        handle = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(handle), _EVENT_DISABLE_TIMING)
        self._handle = handle
        self._query, self._record = _quick("cuEventQuery"), _quick("cuEventRecord")

    def record(self, stream: int) -> None:
        """Mark the work queued on `stream` (the driver's handle) so far. Raises DeviceError."""
        error = self._record(self._handle, stream)
        if error != _SUCCESS:
            raise DeviceError(f"cuEventRecord: {_error_name(error)}")

    def passed(self) -> bool:
        """Whether the device has finished the marked work. Raises DeviceError if some of it failed."""
        error = self._query(self._handle)
        if error == _SUCCESS:
            return True
        if error != _NOT_READY:
            raise DeviceError(f"cuEventQuery: {_error_name(error)}")
        return False


class HostBytes:
    """A few bytes of host memory to which the device can copy, kept for the life of the process."""

    def __init__(self, device: Device, length_bytes: int) -> None:
        device.enter()
        address = ctypes.c_void_p()
        call("cuMemHostAlloc", ctypes.byref(address), length_bytes, 0)
        assert address.value is not None
        self._address, self._length_bytes = address.value, length_bytes
        self._copy = _quick("cuMemcpyDtoHAsync_v2")

    def fill(self, source: int, stream: int) -> None:
        """Queue a copy from device memory at `source` on `stream`. Raises DeviceError."""
        error = self._copy(self._address, source, self._length_bytes, stream)
        if error != _SUCCESS:
            raise DeviceError(f"cuMemcpyDtoHAsync: {_error_name(error)}")

    def read(self) -> bytes:
        """Return the bytes."""
        return ctypes.string_at(self._address, self._length_bytes)


def launch(
    device: Device,
    function: int,
    programs: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    stream: int,
    arguments: ctypes.Array[ctypes.c_void_p],
) -> None:
    """Queue one launch. `arguments` has the address of each argument, which is copied. Raises DeviceError."""
    _quick("cuCtxSetCurrent")(device.context)
    error = _quick("cuLaunchKernel")(function, *programs, threads, 1, 1, shared_bytes, stream, arguments, None)
    if error != _SUCCESS:
        raise DeviceError(f"cuLaunchKernel on device {device.index}: {_error_name(error)}")


def copy_to_device(device: Device, target: int, data: bytes, stream: int) -> None:
    """Queue a copy of a few bytes to the device on `stream`. Raises DeviceError."""
    _quick("cuCtxSetCurrent")(device.context)
    error = _quick("cuMemcpyHtoDAsync_v2")(target, data, len(data), stream)
    if error != _SUCCESS:
        raise DeviceError(f"cuMemcpyHtoDAsync on device {device.index}: {_error_name(error)}")


@functools.cache
def open_device(name: str) -> Device:
    """Return the device with a UUID, which is the engines' name for it.

    Raises:
        DeviceError: UNSUPPORTED if this process does not see it.
        MpsAwayError: the driver cannot be initialized at the moment.
    """
    count = ctypes.c_int()
    try:
        call("cuDeviceGetCount", ctypes.byref(count))
    except MpsAwayError:
        raise
    except DeviceError as error:
        raise DeviceError(f"device is {name!r}: {error}", reason=Reason.UNSUPPORTED) from error
    seen = [device_uuid(index) for index in range(count.value)]
    if name not in seen:
        raise DeviceError(
            f"device is {name!r}: this process sees {seen}; give the agent the GPUs of its engines",
            reason=Reason.UNSUPPORTED,
        )
    return device_at(seen.index(name))


@functools.cache
def device_at(index: int) -> Device:
    """Return the device with an index. Raises DeviceError."""
    return Device(index)


@functools.cache
def reached_by_all(name: str) -> bool:
    """Return whether all other visible devices can write the memory of the one with this UUID. Raises DeviceError."""
    target, count = open_device(name).index, ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    for index in range(count.value):
        reaches = ctypes.c_int(1)
        if index != target:
            writer, written = ctypes.c_int(), ctypes.c_int()
            call("cuDeviceGet", ctypes.byref(writer), index)
            call("cuDeviceGet", ctypes.byref(written), target)
            call("cuDeviceCanAccessPeer", ctypes.byref(reaches), writer.value, written.value)
        if not reaches.value:
            return False
    return True


def device_uuid(index: int) -> str:
    """Return `GPU-` and the UUID of a device, in nvidia-smi's form. Raises DeviceError."""
    handle, found = ctypes.c_int(), _Uuid()
    call("cuDeviceGet", ctypes.byref(handle), index)
    call("cuDeviceGetUuid_v2", ctypes.byref(found), handle.value)
    return f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}"


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"there is no CUDA driver: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    code = driver.cuInit(0)
    if code != _SUCCESS:
        raise _refused("cuInit", code, driver)
    return driver


_QUICK_SIGNATURES: dict[str, list[Any]] = {
    "cuLaunchKernel": [ctypes.c_void_p, *(ctypes.c_uint,) * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p],
    "cuCtxSetCurrent": [ctypes.c_void_p],
    "cuEventQuery": [ctypes.c_void_p],
    "cuEventRecord": [ctypes.c_void_p, ctypes.c_void_p],
    "cuMemcpyHtoDAsync_v2": [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p],
    "cuMemcpyDtoHAsync_v2": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p],
}


@functools.cache
def _quick(name: str) -> Any:
    """Return a non-blocking function of the driver that is called without releasing the GIL.

    Such a call takes 1 to 3 us. Getting the GIL back could take a thousand times as long.
    """
    _driver()
    function = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = _QUICK_SIGNATURES[name], ctypes.c_int
    return function


def call(name: str, *arguments: object) -> None:
    """Call a function of the driver that is in the table. Raises DriverError."""
    error = getattr(_driver(), name)(*arguments)
    if error != _SUCCESS:
        raise _refused(name, error, _driver())


def _refused(name: str, code: int, driver: ctypes.CDLL) -> DriverError:
    kind = MpsAwayError if code in _MPS_AWAY else DriverError
    return kind(f"{name}: {_name_in(driver, code)}", code)


def _error_name(error: int) -> str:
    return _name_in(_driver(), error)


def _name_in(driver: ctypes.CDLL, error: int) -> str:
    found = ctypes.c_char_p()
    driver.cuGetErrorName(error, ctypes.byref(found))
    return f"{(found.value or b'an unknown error').decode()} ({error})"
