"""A fake of the CUDA driver's library: it records reservations, allocations and mappings, and fails on demand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from longshore_agent.memory import cuda
from longshore_agent.memory.device_memory import AccessDescription, AllocationProperties

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED = 1, 2, 712
FIRST_ADDRESS = 0x7F00_0000_0000
FABRIC, GPU_DIRECT_RDMA, MPS = 128, 110, 133


class FakeDriver:
    """One device.

    Attributes:
        fails: error code by name of the call, returned instead of its effect.
        attributes: the device's attributes by the driver's number; others are unknown.
        calls: names in order.
        lengths: the byte counts passed to each call, by its name.
        reserved, created, mapped, plain: current allocations: bytes by address or handle, and (handle, bytes) by address.
        properties: those of the last allocation.
        host: registered ranges of host memory: bytes by address.
        host_shift: the distance between a device's address of host memory and the host's.
    """

    def __init__(self, granularity_bytes: int = 2 << 20) -> None:
        self.granularity_bytes = granularity_bytes
        self.fails: dict[str, int] = {}
        self.attributes = {FABRIC: 1, GPU_DIRECT_RDMA: 1}
        self.calls: list[str] = []
        self.lengths: dict[str, int] = {}
        self.reserved: dict[int, int] = {}
        self.created: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.plain: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.host: dict[int, int] = {}
        self.host_shift = 0
        self.properties = AllocationProperties()
        self._acts: dict[str, Callable[..., int | None]] = {
            "cuDeviceGetCount": self._device_get_count,
            "cuDeviceGetAttribute": self._device_get_attribute,
            "cuMemGetAllocationGranularity": self._get_allocation_granularity,
            "cuMemAddressReserve": self._address_reserve,
            "cuMemAddressFree": self._address_free,
            "cuMemCreate": self._create,
            "cuMemRelease": self._release,
            "cuMemExportToShareableHandle": self._export_to_shareable_handle,
            "cuMemMap": self._map,
            "cuMemUnmap": self._unmap,
            "cuMemSetAccess": self._set_access,
            "cuMemAlloc_v2": self._alloc,
            "cuMemFree_v2": self._free,
            "cuMemsetD8_v2": self._set,
            "cuMemHostRegister_v2": self._register_host,
            "cuMemHostUnregister": self._unregister_host,
            "cuMemHostGetDevicePointer_v2": self._device_pointer,
        }
        functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._answering(name))
            for name, arguments in cuda._SIGNATURES.items()
        }
        self.library: Any = SimpleNamespace(**functions)

    @property
    def held(self) -> tuple[dict[int, Any], ...]:
        return self.reserved, self.created, self.mapped, self.plain

    def _answering(self, name: str) -> Callable[..., int]:
        act = self._acts.get(name)

        def answer(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            return int(act(*arguments) or 0) if act is not None else 0

        return answer

    def _device_get_count(self, found: Any) -> None:
        found[0] = 1

    def _device_get_attribute(self, found: Any, attribute: int, _: int) -> int:
        found[0] = self.attributes.get(attribute, 0)
        return 0 if attribute in self.attributes else INVALID_VALUE

    def _get_allocation_granularity(self, found: Any, properties: int, _: int) -> None:
        found[0] = self.granularity_bytes

    def _address_reserve(self, found: Any, length: int, alignment: int, hint: int, flags: int) -> int:
        self.lengths["cuMemAddressReserve"] = length
        if length % self.granularity_bytes or alignment or hint or flags:
            return INVALID_VALUE
        found[0] = FIRST_ADDRESS
        self.reserved[FIRST_ADDRESS] = length
        return 0

    def _address_free(self, address: int, length: int) -> int:
        if address in self.mapped or self.reserved.get(address) != length:
            return INVALID_VALUE
        del self.reserved[address]
        return 0

    def _create(self, found: Any, length: int, properties: int, flags: int) -> int:
        self.lengths["cuMemCreate"] = length
        ctypes.memmove(ctypes.byref(self.properties), properties, ctypes.sizeof(AllocationProperties))
        if length % self.granularity_bytes or flags:
            return INVALID_VALUE
        # A handle fills its 64 bits.
        found[0] = handle = (1 << 63) + 5
        self.created[handle] = length
        return 0

    def _release(self, handle: int) -> int:
        return 0 if self.created.pop(handle, None) is not None else INVALID_VALUE

    def _export_to_shareable_handle(self, handle_bytes: int, handle: int, kind: int, flags: int) -> int:
        ctypes.memset(handle_bytes, 1, 64)
        return 0 if handle in self.created and kind == 8 and not flags else INVALID_VALUE

    def _map(self, address: int, length: int, offset: int, handle: int, flags: int) -> int:
        self.lengths["cuMemMap"] = length
        if self.reserved.get(address) != length or self.created.get(handle) != length or offset or flags:
            return INVALID_VALUE
        self.mapped[address] = handle, length
        return 0

    def _unmap(self, address: int, length: int) -> int:
        if self.mapped.get(address, (0, 0))[1] != length:
            return INVALID_VALUE
        del self.mapped[address]
        return 0

    def _set_access(self, address: int, length: int, description: int, count: int) -> int:
        self.lengths["cuMemSetAccess"] = length
        access = AccessDescription.from_address(description)
        if (
            address not in self.mapped
            or count != 1
            or (access.location.type, access.location.id, access.flags)
            != (
                1,
                0,
                3,
            )
        ):
            return INVALID_VALUE
        self.accessible.add(address)
        return 0

    def _alloc(self, found: Any, length: int) -> None:
        found[0] = FIRST_ADDRESS
        self.plain[FIRST_ADDRESS] = length

    def _free(self, address: int) -> int:
        return 0 if self.plain.pop(address, None) is not None else INVALID_VALUE

    def _register_host(self, address: int, length: int, flags: int) -> int:
        end = address + length
        if any(first < end and address < first + there for first, there in self.host.items()) or flags != 3:
            return ALREADY_REGISTERED
        # The driver pins pages that exist: it fails on a range that is not mapped.
        ctypes.string_at(address, 1)
        ctypes.string_at(end - 1, 1)
        self.host[address] = length
        return 0

    def _unregister_host(self, address: int) -> int:
        return 0 if self.host.pop(address, None) is not None else INVALID_VALUE

    def _device_pointer(self, found: Any, address: int, flags: int) -> int:
        found[0] = address + self.host_shift
        return 0 if address in self.host and not flags else INVALID_VALUE

    def _set(self, address: int, value: int, length: int) -> int:
        self.lengths["cuMemsetD8_v2"] = length
        return 0 if address in self.plain or address in self.accessible else INVALID_VALUE
