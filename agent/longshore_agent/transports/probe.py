"""Finds a wire by a probe write and the kernel's counters.

Called by the transports whose bytes the kernel counts; knows no library. The caller must not begin other writes during
the probe.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from longshore_agent.errors import TransportError
from longshore_agent.transports import wires
from longshore_agent.transports.base import Transport, Wire, Write, WriteState
from longshore_agent.transports.device_wire import find_device_wire

# The limit of `Transport.probe_wire`.
_LIMIT_NS = 5_000_000_000
_POLL_PAUSE_S = 0.0001


def find_wire(
    transport: Transport,
    begin: Callable[[], Write],
    is_any_open: Callable[[], bool],
    length_bytes: int,
    *,
    same_host: bool,
    devices: tuple[str, str] | None,
) -> Wire:
    """Wait until open writes have ended, write once alone, and return the wire that the kernel's counters show.

    For GPU memory, counters show only that nothing went over a network; then the speed decides.

    Args:
        begin: drafts and starts the write of `length_bytes`.
        is_any_open: drives the transport once, and returns whether a write is still open.
        same_host: whether the peer runs under this kernel.
        devices: for GPU memory, see `find_device_wire`; None: host memory.
    Returns:
        UNKNOWN if that takes too long, or if the counters prove nothing.
    Raises:
        TransportError: the write failed.
    """
    deadline_ns = time.monotonic_ns() + _LIMIT_NS
    if not _settle(is_any_open, deadline_ns):
        return Wire.UNKNOWN
    before = wires.count()
    write = begin()
    if not _settle(is_any_open, deadline_ns):
        return Wire.UNKNOWN
    done = transport.state(write) is WriteState.DONE
    transport.release(write)
    if not done:
        raise TransportError(f"{transport.backend} probe failed: {write.error}")
    wire = wires.carried(before, wires.count(), length_bytes, same_host=same_host)
    if devices is not None and wire is Wire.SHARED_MEMORY:
        return find_device_wire(transport, begin, length_bytes, devices)
    return wire


def _settle(is_any_open: Callable[[], bool], deadline_ns: int) -> bool:
    """Drive a transport until no write is open. Returns False if the deadline comes first."""
    while is_any_open():
        if time.monotonic_ns() >= deadline_ns:
            return False
        # The target may share this core. Without a pause it would run only after our time slice.
        time.sleep(_POLL_PAUSE_S)
    return True
