"""The wire between two GPUs of one host, told by its speed: no counter of the kernel sees what a GPU copies by itself.

Called by the transports' `probe_wire` once counters have shown that nothing went over a network. Knows no backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from longshore_agent.transports.base import Transport, Wire, Write, WriteState

# Bytes that pass through the host's memory reach 3 GB/s here, those that a GPU writes to its peer by itself 30 and more.
_DIRECT_BYTES_PER_S_MIN = 10e9
# The first writes map memory; one fast write proves the wire, as many slow ones as these disprove it.
_TRIES = 8
_TRY_LIMIT_NS = 500_000_000


def find_device_wire(transport: Transport, begin: Callable[[], Write], length_bytes: int) -> Wire:
    """Write a few times and return CUDA_IPC if one write was faster than the host's memory allows, else UNKNOWN.

    Args:
        begin: posts the write of `length_bytes`, a megabyte or more.
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
            return Wire.CUDA_IPC
    return Wire.UNKNOWN
