"""Receives, creates and maps file descriptors of shared memory. The only module that calls mmap.

Called by `pools` and `staging`, and by the engine link for descriptors attached to a message. Knows no layouts.
Mappings use libc instead of Python's `mmap`, because the latter keeps a duplicate of every descriptor
and refuses to unmap while a buffer is exported. An engine's memory would then outlive its registration.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
import os
import socket

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import PoolError
from longshore_agent.memory.guard import Guarded
from longshore_wire.errors import Reason

_MAP_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_LIBC.munmap.restype = ctypes.c_int
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.restype = ctypes.c_int
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """One mapped range of this process.

    Attributes:
        address: address of its first byte, a multiple of the system's page size.
        length_bytes: the requested size. The mapping ends at the next multiple of the system's page size.
        sealed: no process can truncate the mapped file, so accesses to the mapping never fault.
    """

    def __init__(self, descriptor: int | None, length_bytes: int) -> None:
        flags = mmap.MAP_SHARED if descriptor is not None else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        handle = -1 if descriptor is None else descriptor
        address = _LIBC.mmap(None, length_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, 0)
        if address is None or address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {length_bytes} bytes: {os.strerror(number)}")
        self.address: int = address
        self.length_bytes = length_bytes
        self.sealed = descriptor is None or _is_sealed(descriptor)
        self._guarded = None if descriptor is None else Guarded(address, length_bytes)
        self._mapped = True

    @property
    def torn(self) -> bool:
        """Whether the file was found truncated. Bytes copied from or to it since then may be invalid."""
        return self._guarded is not None and self._guarded.torn

    def bytes_view(self) -> npt.NDArray[np.uint8]:
        """Return a view, [length_bytes]. Drop it before `unmap`: an access after that ends the process."""
        assert self._mapped, "a view of an unmapped range"
        memory = (ctypes.c_uint8 * self.length_bytes).from_address(self.address)
        return np.frombuffer(memoryview(memory), dtype=np.uint8)

    def advise_huge_pages(self) -> bool:
        """Request huge pages for an anonymous mapping; return whether the kernel accepts the advice."""
        return bool(_LIBC.madvise(self.address, self.length_bytes, mmap.MADV_HUGEPAGE) == 0)

    def unmap(self) -> None:
        """Unmap the range at once, even if views exist. Idempotent."""
        if self._mapped:
            self._mapped = False
            if self._guarded is not None:
                self._guarded.end()
            if _LIBC.munmap(self.address, self.length_bytes) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"munmap of {self.length_bytes} bytes: {os.strerror(number)}")


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        # Only memory of memfd_create has seals; files on a disk, a network or /dev/shm have none.
        return False


def map_shared(descriptor: int, length_bytes: int) -> Mapping:
    """Map the first `length_bytes` of a file for reading and writing, shared with its other users.

    The descriptor stays the caller's and may be closed right after.

    Raises:
        PoolError: the file is shorter than `length_bytes` (an access would end this process), or cannot be mapped.
    """
    try:
        size_bytes = os.fstat(descriptor).st_size
        if length_bytes < 1 or size_bytes < length_bytes:
            raise PoolError(f"the file has {size_bytes} bytes, {length_bytes} were declared: pass a larger file")
        return Mapping(descriptor, length_bytes)
    except OSError as error:
        raise PoolError(f"the file cannot be mapped read and write: {error}") from error


def create_memfd(name: str, length_bytes: int) -> int:
    """Return a new descriptor of zeroed shared memory, closed on exec. Its name appears only in /proc."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, length_bytes)
    return descriptor


def receive_descriptors(link: socket.socket, message_bytes_max: int, count_max: int) -> tuple[bytes, list[int]]:
    """Receive one message of a SOCK_SEQPACKET link with its attached descriptors, which the caller owns.

    Returns:
        The message and descriptors; (b"", []) if the other end has closed.
    Raises:
        PoolError: the message or its descriptors exceed the limits; received descriptors are closed.
        OSError: from the socket, BlockingIOError included.
    """
    space = socket.CMSG_SPACE(count_max * array.array("i").itemsize)
    data, controls, flags, _ = link.recvmsg(message_bytes_max, space, socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for level, kind, payload in controls:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
    descriptors = received.tolist()
    # The buffer's alignment may leave space for one descriptor above the limit.
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(descriptors) > count_max:
        for descriptor in descriptors:
            os.close(descriptor)
        raise PoolError(
            f"a message above {message_bytes_max} bytes or with more than {count_max} descriptors: send less at once",
            reason=Reason.MALFORMED_MESSAGE,
        )
    return data, descriptors
