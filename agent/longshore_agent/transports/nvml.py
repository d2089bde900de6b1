"""Asks NVIDIA's management library (NVML), through ctypes, which GPUs of this host are joined by NVLink.

Called only by `probe`, after a write between two GPUs has used CUDA IPC: a worker on a CPU never loads NVML.
Identifies GPUs by UUID. Raises nothing: without an answer, it reports no NVLink.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
# NVML_P2P_CAPS_INDEX_NVLINK of nvmlGpuP2PCapsIndex_t, and NVML_P2P_STATUS_OK of nvmlGpuP2PStatus_t.
_CAPS_INDEX_NVLINK = 2
_STATUS_OK = 0
# The form of NVML's UUIDs. A peer's UUID is untrusted.
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{36}")

_log = logging.getLogger(__name__)

_SIGNATURES = {
    "nvmlInit_v2": [],
    "nvmlDeviceGetHandleByUUID": [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)],
    "nvmlDeviceGetP2PStatus": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)],
}


class _NoAnswerError(Exception):
    """NVML is not installed, or refused a call; says which."""


def joined_by_nvlink(one: str, other: str) -> bool:
    """Whether two different GPUs write to each other over NVLink.

    Args:
        one, other: UUIDs in the form of `nvidia-smi -L`; empty: unknown.
    Returns:
        False also if NVML gives no answer; the log then has the reason.
    """
    if one == other or not (_UUID.fullmatch(one) and _UUID.fullmatch(other)):
        return False
    try:
        library = _library()
        handles = _handle(library, one), _handle(library, other)
        status = ctypes.c_int()
        _call(library, "nvmlDeviceGetP2PStatus", *handles, _CAPS_INDEX_NVLINK, ctypes.byref(status))
    except _NoAnswerError as error:
        _log.info("whether NVLink joins %s and %s is not known: %s", one, other, error)
        return False
    return status.value == _STATUS_OK


def _handle(library: Any, name: str) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    _call(library, "nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(found))
    return found


@functools.cache
def _library() -> Any:
    """Load and start NVML for the life of the process. A failure is not cached."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise _NoAnswerError(f"{_LIBRARY} cannot be used: {error}") from error
    _call(library, "nvmlInit_v2")
    return library


def _call(library: Any, name: str, *arguments: object) -> None:
    error = getattr(library, name)(*arguments)
    if error != _SUCCESS:
        raise _NoAnswerError(f"{name} says {error}")
