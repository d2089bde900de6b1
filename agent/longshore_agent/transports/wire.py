"""Names the wires. Apart from `base`, since settings name wires too and the supervisor loads no numpy."""

from __future__ import annotations

from enum import StrEnum

from longshore_wire.names import UNKNOWN_WIRE


class Wire(StrEnum):
    """The wire that really carries bytes between two workers, found by a probe write."""

    UNKNOWN = UNKNOWN_WIRE
    LOOPBACK = "Loopback"
    SHARED_MEMORY = "SharedMemory"
    TCP = "TCP"
    RDMA = "RDMA"
    CUDA_IPC = "CudaIPC"
    NVLINK = "NVLink"
