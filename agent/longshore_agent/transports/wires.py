"""Reads the kernel's counters before and after a probe, and decides which wire they prove.

Called by `probe`, and by the transports for `host_identity`. Knows no backend and no configuration.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from longshore_agent.errors import TransportError
from longshore_agent.transports.base import Wire
from longshore_agent.transports.own_sockets import own_sockets, tcp_counts

_INFINIBAND_DIRECTORY = Path("/sys/class/infiniband")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")

# InfiniBand ports count data in words of four bytes.
_PORT_WORD_BYTES = 4


class Counters(msgspec.Struct, frozen=True):
    """Bytes that left this process by TCP (per socket inode, acknowledged), and this host by InfiniBand ports."""

    tcp_bytes: dict[int, int]
    infiniband_bytes: int


def count() -> Counters:
    """Read the counters now. A socket that closes meanwhile is left out.

    Raises:
        TransportError: no descriptor is left to read with.
    """
    try:
        return Counters(_tcp_bytes(), _infiniband_bytes())
    except OSError as error:
        raise TransportError(f"cannot read the counters that prove a wire: {error.strerror}") from error


def carried(before: Counters, after: Counters, length_bytes: int, *, same_host: bool) -> Wire:
    """Return the wire that must have carried `length_bytes` of host memory between two counts.

    A counter proves a wire only if it grew by at least `length_bytes`. No other write of this process may be open
    between the counts. Unchanged counters prove shared memory only if the peer is on the same host.
    """
    moved = sum(total - before.tcp_bytes.get(inode, 0) for inode, total in after.tcp_bytes.items())
    if moved >= length_bytes:
        return Wire.TCP
    if after.infiniband_bytes - before.infiniband_bytes >= length_bytes:
        return Wire.RDMA
    # If a counted wire carried a part, the bytes were spread over several wires, and no single name is true.
    if same_host and moved < length_bytes // 2:
        return Wire.SHARED_MEMORY
    return Wire.UNKNOWN


def host_identity() -> str:
    """Return an id that is equal exactly for processes under one kernel; empty if it cannot be read."""
    try:
        return _BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""


def _tcp_bytes() -> dict[int, int]:
    found = ((inode, tcp_counts(own)) for inode, own in own_sockets())
    return {inode: counts.acked_bytes for inode, counts in found if counts is not None}


def _infiniband_bytes() -> int:
    total = 0
    for counter in _INFINIBAND_DIRECTORY.glob("*/ports/*/counters/port_xmit_data"):
        try:
            total += int(counter.read_text()) * _PORT_WORD_BYTES
        except (OSError, ValueError):
            # A port that vanishes or does not count proves nothing. The others still do.
            continue
    return total
