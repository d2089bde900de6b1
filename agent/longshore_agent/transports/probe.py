"""The probe write that finds out a wire, and what every transport asks of a notice.

Called by the transports that go through the kernel's counters; knows no library. While it runs, its caller keeps all
other posts away.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import TransportError
from longshore_agent.transports import wires
from longshore_agent.transports.base import NOTICE_BYTES_MAX, Transport, Wire, Write, WriteState

# What `Transport.probe_wire` may take.
_LIMIT_NS = 5_000_000_000


def find_wire(
    transport: Transport,
    begin: Callable[[], Write],
    settle_open: Callable[[int], bool],
    length_bytes: int,
    *,
    same_host: bool,
) -> Wire:
    """Bring open writes to their end, write once alone, and return what the kernel's counters say carried it.

    Args:
        begin: posts the write of `length_bytes`.
        settle_open: drives the transport until no write is open; False if the deadline (monotonic ns) came first.
        same_host: whether the peer runs under this kernel.
    Raises:
        TransportError: the write failed. Unknown is returned if all that takes too long, and for anything that
            the counters cannot prove.
    """
    deadline_ns = time.monotonic_ns() + _LIMIT_NS
    if not settle_open(deadline_ns):
        return Wire.UNKNOWN
    before = wires.count()
    write = begin()
    if not settle_open(deadline_ns):
        return Wire.UNKNOWN
    done = transport.state(write) is WriteState.DONE
    transport.release(write)
    if not done:
        raise TransportError(f"{transport.backend} probe failed: {write.error}")
    return wires.carried(before, wires.count(), length_bytes, same_host=same_host)


def row(value: int) -> npt.NDArray[np.uint64]:
    """Return one address or length as `post` takes it."""
    return np.array([value], dtype=np.uint64)


def check_notice(notice: bytes) -> None:
    """Raise TransportError if a notice is too long."""
    if len(notice) > NOTICE_BYTES_MAX:
        raise TransportError(f"notice takes {len(notice)} bytes: give at most {NOTICE_BYTES_MAX}")
