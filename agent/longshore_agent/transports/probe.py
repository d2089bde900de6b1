"""The probe write that finds out a wire.

Called by the transports that go through the kernel's counters; knows no library. While it runs, its caller keeps all
other writes from beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from longshore_agent.errors import TransportError
from longshore_agent.transports import wires
from longshore_agent.transports.base import Transport, Wire, Write, WriteState
from longshore_agent.transports.device_wire import find_device_wire

# What `Transport.probe_wire` may take.
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
    """Bring open writes to their end, write once alone, and return what the kernel's counters say carried it.

    Of GPUs' memory they show only that nothing went over a network; then its speed tells.

    Args:
        begin: drafts and starts the write of `length_bytes`.
        is_any_open: drives the transport once, and tells whether a write is still open.
        same_host: whether the peer runs under this kernel.
        devices: of GPUs' memory, as of `find_device_wire`; None: it is the host's.
    Raises:
        TransportError: the write failed. Unknown is returned if all that takes too long, and for anything that
            the counters cannot prove.
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
    """Drive a transport until no write is open. False if the deadline came first."""
    while is_any_open():
        if time.monotonic_ns() >= deadline_ns:
            return False
        # The target may share this core; without a pause it would run only when our time slice ends.
        time.sleep(_POLL_PAUSE_S)
    return True
