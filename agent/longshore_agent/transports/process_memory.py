"""Writes into the memory of another process of this host, and checks whether that process still lives.

Called by the loopback transport only. The kernel copies and checks addresses: a wrong one is an error, not a crash.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from longshore_agent.errors import TransportError
from longshore_agent.transports.base import Addresses

# The kernel's limit of pieces per call, and a size below its limit of bytes per call (2 GiB less one page).
_PIECES_A_CALL = 1024
_BYTES_A_CALL = 1 << 30

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.process_vm_writev.restype = ctypes.c_ssize_t
_LIBC.process_vm_writev.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def start_time(pid: int) -> int:
    """Return when `pid` started, in ticks since boot; 0: no such process. Pid and start identify a process uniquely."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The program's name, in parentheses, may contain anything. Only numbers follow the last parenthesis.
    return int(text.rpartition(")")[2].split()[19])


class ProcessMemory:
    """The memory of one process while it lives.

    Args:
        pid, started: of the process; `started` is its own `start_time`.
    Raises:
        TransportError: the process has ended.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._users_count = 0
        self._closing = False
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise TransportError(f"process {pid} is gone: {error}") from error
        # The kernel reuses pids. A write into the next owner of this one would corrupt it.
        if start_time(pid) != started:
            self.close()
            raise TransportError(f"process {pid} is another one than the peer that gave this number")

    @property
    def lives(self) -> bool:
        """Whether the process still runs."""
        try:
            with self._kept() as pidfd:
                return _runs(pidfd)
        except TransportError:
            return False

    def write(self, sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
        """Copy n pieces from this process into that one. Raises TransportError; a part may have been copied."""
        sources, targets, lengths = _split(sources, targets, lengths)
        first = 0
        with self._kept() as pidfd:
            while first < len(lengths):
                if not _runs(pidfd):
                    raise TransportError(f"process {self.pid} is gone")
                totals = np.cumsum(lengths[first : first + _PIECES_A_CALL])
                end = first + max(1, int(np.searchsorted(totals, _BYTES_A_CALL, side="right")))
                self._write_batch(sources[first:end], targets[first:end], lengths[first:end])
                first = end

    def close(self) -> None:
        """Release the process, now or when the last write in another thread ends. Idempotent."""
        with self._lock:
            self._closing = True
            self._close_unused()

    @contextmanager
    def _kept(self) -> Iterator[int]:
        """Keep the pidfd open, even if another thread calls `close`. Raises TransportError if it is already closed."""
        with self._lock:
            if self._closing:
                raise TransportError(f"process {self.pid} was let go")
            self._users_count += 1
        try:
            yield self._pidfd
        finally:
            with self._lock:
                self._users_count -= 1
                self._close_unused()

    def _close_unused(self) -> None:
        if self._closing and self._users_count == 0 and self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _write_batch(self, sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
        local = np.ascontiguousarray(np.stack([sources, lengths], axis=1))
        remote = np.ascontiguousarray(np.stack([targets, lengths], axis=1))
        copied = _LIBC.process_vm_writev(self.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
        total = int(lengths.sum())
        if copied == total:
            return
        if copied >= 0:
            raise TransportError(f"process {self.pid} took {copied} of {total} bytes: the next address is not mapped")
        code = ctypes.get_errno()
        hint = ": allow ptrace between the two processes" if code == errno.EPERM else ""
        raise TransportError(f"process {self.pid} cannot be written: {os.strerror(code)}{hint}")


def _runs(pidfd: int) -> bool:
    """Whether a process has not ended. Unlike `select`, this works with every descriptor number."""
    watched = select.poll()
    watched.register(pidfd, select.POLLIN)
    return not watched.poll(0)


def _split(sources: Addresses, targets: Addresses, lengths: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Cut pieces that are longer than one call can copy. Others stay unchanged."""
    if int(lengths.max()) <= _BYTES_A_CALL:
        return sources, targets, lengths
    parts = [
        (int(source) + offset, int(target) + offset, min(_BYTES_A_CALL, int(length) - offset))
        for source, target, length in zip(sources, targets, lengths, strict=True)
        for offset in range(0, int(length), _BYTES_A_CALL)
    ]
    table = np.array(parts, dtype=np.uint64)
    return table[:, 0], table[:, 1], table[:, 2]
