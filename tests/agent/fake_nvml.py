"""A fake of NVML's library: C functions for ctypes that answer from a table of links."""

from __future__ import annotations

import ctypes
import uuid
from types import SimpleNamespace
from typing import Any

NAMES = [f"GPU-{uuid.UUID(int=number + 1)}" for number in range(3)]
_NOT_FOUND = 6
_NOT_SUPPORTED_STATUS = 3  # NVML_P2P_STATUS_NOT_SUPPORTED; any value except 0 means the same here
_NVLINK = 2


class FakeNVML:
    """Three GPUs. `links` are pairs of indexes that NVLink joins; `fails` has error codes by name of the call."""

    def __init__(self, links: set[frozenset[int]]) -> None:
        self.links = links
        self.fails: dict[str, int] = {}
        self.asked: list[str] = []
        functions = {
            "nvmlInit_v2": ctypes.CFUNCTYPE(ctypes.c_int)(self._init),
            "nvmlDeviceGetHandleByUUID": ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
            )(self._handle),
            "nvmlDeviceGetP2PStatus": ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)
            )(self._status),
        }
        self.library: Any = SimpleNamespace(**functions)

    def load(self, name: str) -> Any:
        assert name == "libnvidia-ml.so.1"
        self.asked.append("load")
        return self.library

    def _init(self) -> int:
        self.asked.append("nvmlInit_v2")
        return self.fails.get("nvmlInit_v2", 0)

    def _handle(self, name: bytes, found: Any) -> int:
        self.asked.append("nvmlDeviceGetHandleByUUID")
        assert "nvmlInit_v2" in self.asked
        if name.decode() not in NAMES:
            return _NOT_FOUND
        # A handle is a pointer of more than 32 bits.
        found[0] = (NAMES.index(name.decode()) + 1) << 40
        return self.fails.get("nvmlDeviceGetHandleByUUID", 0)

    def _status(self, near: int, far: int, index: int, found: Any) -> int:
        self.asked.append("nvmlDeviceGetP2PStatus")
        assert index == _NVLINK
        pair = frozenset(((near >> 40) - 1, (far >> 40) - 1))
        found[0] = 0 if pair in self.links else _NOT_SUPPORTED_STATUS
        return self.fails.get("nvmlDeviceGetP2PStatus", 0)
