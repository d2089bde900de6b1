"""Finds the wire between two GPUs of one host by its speed, since no counter of the kernel sees a GPU's own copies.

A fast write used CUDA IPC. NVML tells whether NVLink or PCIe carried it.

Called by probe.py after counters have shown that nothing went over a network. Knows no backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from longshore_agent.transports import nvml
from longshore_agent.transports.base import Transport, Wire, Write, WriteState

# Writes through the host's memory reach 3 GB/s here, direct writes of a GPU to its peer 30 GB/s and more.
_DIRECT_BYTES_PER_S_MIN = 10e9
# The first writes map memory. One fast write proves the wire; this many slow ones disprove it.
_TRIES = 8
_TRY_LIMIT_NS = 500_000_000


def find_device_wire(
    transport: Transport, begin: Callable[[], Write], length_bytes: int, devices: tuple[str, str]
) -> Wire:
    """Write a few times. Return NVLINK or CUDA_IPC if one write is faster than host memory allows, otherwise UNKNOWN.

    Args:
        begin: drafts and starts the write of `length_bytes`, a megabyte or more.
        devices: UUIDs of the GPU here and of the peer's; empty: unknown. NVLINK only if NVML reports it between the
            two.
    """
    for _ in range(_TRIES):
        start_ns = time.perf_counter_ns()
        write = begin()
        while transport.state(write) is WriteState.OPEN and time.perf_counter_ns() - start_ns < _TRY_LIMIT_NS:
            pass
        taken_ns = time.perf_counter_ns() - start_ns
        done = transport.state(write) is WriteState.DONE
        transport.release(write)
        if done and length_bytes / taken_ns * 1e9 >= _DIRECT_BYTES_PER_S_MIN:
            return Wire.NVLINK if nvml.joined_by_nvlink(*devices) else Wire.CUDA_IPC
    return Wire.UNKNOWN
