"""A fake of CUDA's driver whose GPUs are host memory, for tests of what the client calls. tests/gpu calls the real one.

It answers as the driver does: a call without the context of the memory's GPU, or outside of an allocation, fails.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

# The driver's codes.
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_DEVICE, INVALID_CONTEXT, NO_DEVICE = 1, 2, 3, 101, 201, 100
_NAMES = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY"}
_FIRST_DEVICE, _FIRST_CONTEXT = 40, 70
_ORDINAL, _HAS_HANDLE = 9, 10


class FakeDriver:
    """The calls of `longshore_client.cuda`, by the driver's names.

    Attributes:
        memory: [address] the context and bytes of each allocation.
        pending: addresses of allocations whose written bytes nobody has waited for.
    """

    def __init__(self, gpu_count: int, *, free_bytes: int = 1 << 30, init: int = 0) -> None:
        self._count, self._free_bytes, self._init = gpu_count, free_bytes, init
        self._initialized = False
        self._current = threading.local()
        self.memory: dict[int, tuple[int, Any]] = {}
        self.pending: set[int] = set()

    def cuInit(self, _flags: int) -> int:  # noqa: N802 - the driver's names, also below
        self._initialized = not self._init and self._count > 0
        return self._init or (0 if self._count else NO_DEVICE)

    def cuDeviceGetCount(self, found: Any) -> int:  # noqa: N802
        found._obj.value = self._count
        return 0 if self._initialized else NOT_INITIALIZED

    def cuDeviceGet(self, found: Any, index: Any) -> int:  # noqa: N802
        number = index if isinstance(index, int) else index.value
        found._obj.value = _FIRST_DEVICE + number
        return 0 if 0 <= number < self._count else INVALID_DEVICE

    def cuDeviceGetUuid_v2(self, found: Any, device: Any) -> int:  # noqa: N802
        found.raw = bytes(15) + bytes([device.value - _FIRST_DEVICE])
        return 0

    def cuDevicePrimaryCtxRetain(self, found: Any, device: Any) -> int:  # noqa: N802
        found._obj.value = _FIRST_CONTEXT + device.value - _FIRST_DEVICE
        return 0 if self._initialized else NOT_INITIALIZED

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self._current.context = context.value
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        context = getattr(self._current, "context", 0)
        self.pending -= {address for address in self.pending if self.memory[address][0] == context}
        return 0 if context else INVALID_CONTEXT

    def cuMemAlloc_v2(self, found: Any, length: Any) -> int:  # noqa: N802
        if not getattr(self._current, "context", 0):
            return INVALID_CONTEXT
        if length.value > self._free_bytes:
            return OUT_OF_MEMORY
        self._free_bytes -= length.value
        data = ctypes.create_string_buffer(length.value)
        found._obj.value = ctypes.addressof(data)
        self.memory[found._obj.value] = self._current.context, data
        return 0

    def cuMemFree_v2(self, address: Any) -> int:  # noqa: N802
        self._free_bytes += len(self.memory.pop(address.value)[1])
        return 0

    def cuMemcpyHtoD_v2(self, target: Any, source: Any, length: Any) -> int:  # noqa: N802
        return self._change(target, length, lambda: ctypes.memmove(target.value, source, length.value))

    def cuMemsetD8_v2(self, target: Any, value: Any, length: Any) -> int:  # noqa: N802
        return self._change(target, length, lambda: ctypes.memset(target.value, value.value, length.value))

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, length: Any) -> int:  # noqa: N802
        base = self._allocation(source.value, length.value)
        if base is not None:
            ctypes.memmove(target, source.value, length.value)
        return INVALID_VALUE if base is None else 0

    def cuMemGetAddressRange_v2(self, base: Any, _size: Any, address: Any) -> int:  # noqa: N802
        found = self._allocation(address.value, 1)
        base._obj.value = found or 0
        return INVALID_VALUE if found is None else 0

    def cuPointerGetAttribute(self, found: Any, number: Any, address: Any) -> int:  # noqa: N802
        base = self._allocation(address.value, 1)
        if base is None:
            return INVALID_VALUE
        found._obj.value = {_ORDINAL: self.memory[base][0] - _FIRST_CONTEXT, _HAS_HANDLE: 1}[number.value]
        return 0

    def cuIpcGetMemHandle(self, found: Any, address: Any) -> int:  # noqa: N802
        base = self._allocation(address.value, 1)
        found.raw = (base or 0).to_bytes(8, "little") + bytes(56)
        return INVALID_VALUE if base is None else 0

    def cuGetErrorName(self, code: Any, found: Any) -> int:  # noqa: N802
        found._obj.value = _NAMES.get(code.value, b"CUDA_ERROR_UNKNOWN")
        return 0

    def _allocation(self, address: int, length_bytes: int) -> int | None:
        """Return the beginning of the allocation of the current context that contains these bytes."""
        for base, (context, data) in self.memory.items():
            inside = base <= address and address + length_bytes <= base + len(data)
            if inside and context == getattr(self._current, "context", 0):
                return base
        return None

    def _change(self, target: Any, length: Any, change: Any) -> int:
        base = self._allocation(target.value, length.value)
        if base is None:
            return INVALID_VALUE
        change()
        self.pending.add(base)
        return 0
