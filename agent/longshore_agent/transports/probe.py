"""Finds the wire between two workers by a probe write.

Called by the transports whose bytes the kernel counts; knows no library and no configuration. The caller must not begin
other writes during the probe. The kernel's counters before and after the write prove a network's wire or shared memory. No
counter sees a GPU's own copies: if nothing went over a network, a fast write of GPU memory used CUDA IPC, and NVML tells
whether NVLink or PCIe carried it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from longshore_agent.errors import TransportError
from longshore_agent.transports import nvml
from longshore_agent.transports.base import Transport, Write, WriteState
from longshore_agent.transports.own_network import own_sockets, tcp_counts
from longshore_wire.names import Wire

# The limit of `Transport.probe_wire`.
_LIMIT_NS = 5_000_000_000
_POLL_PAUSE_S = 0.0001
_INFINIBAND_DIRECTORY = Path("/sys/class/infiniband")
# InfiniBand ports count data in words of four bytes.
_PORT_WORD_BYTES = 4
# Writes through the host's memory reach 3 GB/s here, direct writes of a GPU to its peer 30 GB/s and more.
_DIRECT_BYTES_PER_S_MIN = 10e9
# One fast write proves the wire. The first writes map memory, and processes that share a GPU wait milliseconds for their
# time slices, so only slow writes for this long disprove it.
_TRIES_LIMIT_NS = 1_000_000_000
_TRY_LIMIT_NS = 500_000_000
_TRY_PAUSE_S = 0.001


def find_wire(
    transport: Transport,
    begin: Callable[[], Write],
    is_any_open: Callable[[], bool],
    length_bytes: int,
    *,
    same_host: bool,
    devices: tuple[str, str] | None,
) -> Wire | None:
    """Wait until open writes have ended, write once alone, and return the wire that the kernel's counters show.

    For GPU memory, counters show only that nothing went over a network; then the speed decides.

    Args:
        begin: drafts and starts the write of `length_bytes`.
        is_any_open: drives the transport once, and returns whether a write is still open.
        same_host: whether the peer runs under this kernel.
        devices: for GPU memory, see `find_device_wire`; None: host memory.
    Returns:
        None if that takes too long, or if the counters prove nothing.
    Raises:
        TransportError: the write failed.
    """
    deadline_ns = time.monotonic_ns() + _LIMIT_NS
    if not _settle(is_any_open, deadline_ns):
        return None
    before = read_counters()
    write = begin()
    if not _settle(is_any_open, deadline_ns):
        return None
    done = transport.state(write) is WriteState.DONE
    transport.release(write)
    if not done:
        raise TransportError(f"{transport.backend} probe failed: {write.error}")
    wire = carried(before, read_counters(), length_bytes, same_host=same_host)
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


class Counters(msgspec.Struct, frozen=True):
    """Bytes that left this process by TCP (per socket inode, acknowledged), and this host by InfiniBand ports."""

    tcp_bytes: dict[int, int]
    infiniband_bytes: int


def read_counters() -> Counters:
    """Read the counters now. A socket that closes meanwhile is left out.

    Raises:
        TransportError: no descriptor is left to read with.
    """
    try:
        return Counters(_tcp_bytes(), _infiniband_bytes())
    except OSError as error:
        raise TransportError(f"cannot read the counters that prove a wire: {error.strerror}") from error


def carried(before: Counters, after: Counters, length_bytes: int, *, same_host: bool) -> Wire | None:
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
    return None


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


def find_device_wire(
    transport: Transport, begin: Callable[[], Write], length_bytes: int, devices: tuple[str, str]
) -> Wire | None:
    """Write for a second at most. Return NVLINK or CUDA_IPC once a write is faster than host memory allows, or None.

    Args:
        begin: drafts and starts the write of `length_bytes`, a megabyte or more.
        devices: UUIDs of the GPU here and of the peer's; empty: unknown. NVLINK only if NVML reports it between the
            two.
    """
    end_ns = time.perf_counter_ns() + _TRIES_LIMIT_NS
    while (start_ns := time.perf_counter_ns()) < end_ns:
        write = begin()
        while transport.state(write) is WriteState.OPEN and time.perf_counter_ns() - start_ns < _TRY_LIMIT_NS:
            pass
        taken_ns = time.perf_counter_ns() - start_ns
        done = transport.state(write) is WriteState.DONE
        transport.release(write)
        if done and length_bytes / taken_ns * 1e9 >= _DIRECT_BYTES_PER_S_MIN:
            return Wire.NVLINK if nvml.joined_by_nvlink(*devices) else Wire.CUDA_IPC
        time.sleep(_TRY_PAUSE_S)
    return None
