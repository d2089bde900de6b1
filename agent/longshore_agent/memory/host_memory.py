"""Memory of a CPU worker: engines' shared memory, mapped by file descriptor, and the worker's own staging memory.

Called by `pools`, by the worker and by the pipeline; `device_memory` is the counterpart for a GPU. Knows no layouts. The
only module that calls mmap, by libc instead of Python's `mmap`, because the latter keeps a duplicate of every descriptor
and refuses to unmap while a buffer is exported. An engine's memory would then outlive its registration.

A worker survives when an engine truncates the file of shared memory that the worker has mapped. The kernel sends SIGBUS to
the thread that touches a page without memory behind it, in our loops as in a transport's library. Our handler maps private
zeros over the rest of that mapping, marks it as torn, and lets the thread go on. The copied bytes are then worthless, so the
caller of a copy checks `Mapping.torn` before it reports the copy as done. A fault elsewhere ends the process as before. The
guard costs nothing until a fault.

Staging memory is a lane's buffer or a rank's ring. It is allocated at the worker's start and never grows. It gives addresses
to transports and views to kernels; the ring decides on the use of the bytes.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import functools
import mmap
import os
import signal
import sys
import threading

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import PoolError, ShapeError
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

# Mapped files in one worker, its engine's and neighbours' regions: the rows of the handler's table.
MAPPINGS_MAX = 16_384
# The code of a SIGBUS without memory behind the address. A memory error has another code and ends the process.
_BUS_ADRERR = 2
# Map private zeros at exactly that address, even if little memory is left.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PRIVATE_ZEROS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
# Of Linux 5.14.
_MADV_POPULATE_WRITE = 23
# Of <linux/magic.h>. Memory of memfd_create is a file of one of these.
_TMPFS, _HUGETLBFS = 0x01021994, 0x958458F6
# Above any struct statfs, which begins with the type.
_STATFS_BYTES = 256
# In which stat counts allocated memory, on every filesystem.
_BLOCK_BYTES = 512
_SA_SIGINFO, _SA_NODEFER = 4, 0x40000000
_PAGE_BYTES = mmap.PAGESIZE

# A row: first address, end (0: the row is free), whether it is torn. Accesses of 8 bytes are atomic.
_FIRST, _END, _TORN = range(3)

# A signal handler may call only async-signal-safe functions: mmap and sigaction, by address.
_MODULE = """
define void @guard(i32 %signal, ptr %info, ptr %context) {{
entry:
  %code_at = getelementptr i8, ptr %info, i64 8
  %code = load i32, ptr %code_at
  %address_at = getelementptr i8, ptr %info, i64 16
  %address = load i64, ptr %address_at
  %no_memory = icmp eq i32 %code, {no_memory}
  br i1 %no_memory, label %row, label %other
row:
  %number = phi i64 [ 0, %entry ], [ %next, %further ]
  %words = mul i64 %number, 3
  %first_at = getelementptr i64, ptr inttoptr (i64 {table} to ptr), i64 %words
  %end_at = getelementptr i64, ptr %first_at, i64 1
  %torn_at = getelementptr i64, ptr %first_at, i64 2
  %end = load atomic i64, ptr %end_at acquire, align 8
  %first = load atomic i64, ptr %first_at acquire, align 8
  %before_end = icmp ult i64 %address, %end
  %from_first = icmp uge i64 %address, %first
  %inside = and i1 %before_end, %from_first
  br i1 %inside, label %tear, label %further
further:
  %next = add i64 %number, 1
  %more = icmp ult i64 %next, {rows}
  br i1 %more, label %row, label %other
tear:
  %page = and i64 %address, {page_mask}
  %length = sub i64 %end, %page
  %wanted = inttoptr i64 %page to ptr
  %got = call ptr inttoptr (i64 {mmap} to ptr)(ptr %wanted, i64 %length, i32 {protection}, i32 {flags}, i32 -1, i64 0)
  %placed = icmp eq ptr %got, %wanted
  br i1 %placed, label %note, label %other
note:
  store atomic i64 1, ptr %torn_at release, align 8
  %count = atomicrmw add ptr inttoptr (i64 {torn_count} to ptr), i64 1 release
  ret void
other:
  %put_back = call i32 inttoptr (i64 {sigaction} to ptr)(i32 %signal, ptr inttoptr (i64 {before} to ptr), ptr null)
  ret void
}}
"""
# Written by the handler. The array never grows, so its address is fixed.
_torn_count = array.array("q", [0])
# Size of one registration: below the transports' limits, and small enough for useful error messages.
EXTENT_BYTES = 64 << 20


class _Action(ctypes.Structure):
    """`struct sigaction` of libc."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def torn_count() -> int:
    """Return the number of faults in ranges of this process. Cheap, for callers that poll."""
    return _torn_count[0]


class _Handler:
    """The process's handler and its table, which live as long as the process."""

    def __init__(self) -> None:
        self._table: npt.NDArray[np.int64] = np.zeros((MAPPINGS_MAX, 3), np.int64)
        self._lock = threading.Lock()
        self._free = list(range(MAPPINGS_MAX - 1, -1, -1))
        self._before = _Action()
        self._code = self._compile()
        action = _Action(handler=self._code, flags=_SA_SIGINFO | _SA_NODEFER)
        if _LIBC.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(self._before)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"no handler of SIGBUS can be set: {os.strerror(number)}")

    def torn(self, row: int) -> bool:
        return bool(self._table[row, _TORN])

    def enter(self, first: int, end: int) -> int:
        with self._lock:
            if not self._free:
                text = f"{MAPPINGS_MAX} regions are mapped in this worker: register pools of fewer regions"
                raise PoolError(text, reason=Reason.UNSUPPORTED)
            row = self._free.pop()
            # The end is written last, because it makes the row valid.
            self._table[row, _FIRST], self._table[row, _TORN] = first, 0
            self._table[row, _END] = end
            return row

    def leave(self, row: int) -> None:
        with self._lock:
            self._table[row, _END] = 0
            self._free.append(row)

    def _compile(self) -> int:
        from llvmlite import binding

        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        module = _MODULE.format(
            no_memory=_BUS_ADRERR,
            table=self._table.ctypes.data,
            torn_count=_torn_count.buffer_info()[0],
            rows=MAPPINGS_MAX,
            page_mask=-_PAGE_BYTES,
            mmap=ctypes.cast(_LIBC.mmap, ctypes.c_void_p).value,
            sigaction=ctypes.cast(_LIBC.sigaction, ctypes.c_void_p).value,
            protection=mmap.PROT_READ | mmap.PROT_WRITE,
            flags=_PRIVATE_ZEROS,
            before=ctypes.addressof(self._before),
        )
        machine = binding.Target.from_default_triple().create_target_machine(opt=1, jit=True)
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(module), machine)
        self._engine.finalize_object()
        return int(self._engine.get_function_address("guard"))


@functools.cache
def _handler() -> _Handler:
    return _Handler()


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
        self._row = None if descriptor is None else _handler().enter(address, address + length_bytes)
        self._mapped = True

    @property
    def torn(self) -> bool:
        """Whether the file was found truncated. Bytes copied from or to it since then may be invalid."""
        return self._row is not None and _handler().torn(self._row)

    def bytes_view(self) -> npt.NDArray[np.uint8]:
        """Return a view, [length_bytes]. Drop it before `unmap`: an access after that ends the process."""
        assert self._mapped, "a view of an unmapped range"
        memory = (ctypes.c_uint8 * self.length_bytes).from_address(self.address)
        return np.frombuffer(memoryview(memory), dtype=np.uint8)

    def advise_huge_pages(self) -> None:
        """Request huge pages for an anonymous mapping. The kernel may ignore that."""
        _LIBC.madvise(self.address, self.length_bytes, mmap.MADV_HUGEPAGE)

    def populate(self, offset_bytes: int, length_bytes: int) -> None:
        """Have the kernel allocate the pages of a part that begins at a page. It may ignore that."""
        _LIBC.madvise(self.address + offset_bytes, length_bytes, _MADV_POPULATE_WRITE)

    def unmap(self) -> None:
        """Unmap the range at once, even if views exist. Idempotent."""
        if self._mapped:
            self._mapped = False
            if self._row is not None:
                row, self._row = self._row, None
                _handler().leave(row)
            if _LIBC.munmap(self.address, self.length_bytes) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"munmap of {self.length_bytes} bytes: {os.strerror(number)}")


def _is_sealed(descriptor: int) -> bool:
    """Whether no access to the file can fault. Huge pages can be punched out, and then the kernel may have none left."""
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        # Only memory of memfd_create has seals; files on a disk, a network or /dev/shm have none.
        return False
    return bool(is_sealed) and _filesystem(descriptor) != _HUGETLBFS


def _filesystem(descriptor: int) -> int:
    """Return the type of the filesystem of a file, as <linux/magic.h> has it; 0 if it is not known."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    return int.from_bytes(found.raw[:4], sys.byteorder) if _LIBC.fstatfs(descriptor, found) == 0 else 0


def _check_allocated(descriptor: int, found: os.stat_result) -> None:
    """Raise PoolError if memory has holes: the pages of those would count as the agent's memory, which has a limit.

    All of the file counts, since the kernel does not tell which part of it is allocated.
    """
    kept_bytes = found.st_blocks * _BLOCK_BYTES
    if kept_bytes < found.st_size and _filesystem(descriptor) == _TMPFS:
        raise PoolError(
            f"{kept_bytes} of the memory's {found.st_size} bytes are allocated, and an agent that writes the others would pay for "
            "them: allocate all of it before register_pool (posix_fallocate), or use create_region or torch_region"
        )


def map_shared(descriptor: int, length_bytes: int) -> Mapping:
    """Map the first `length_bytes` of a file for reading and writing, shared with its other users.

    The descriptor stays the caller's and may be closed right after.

    Raises:
        PoolError: the file is shorter than `length_bytes` (an access would end this process), or cannot be mapped.
    """
    try:
        found = os.fstat(descriptor)
        if length_bytes < 1 or found.st_size < length_bytes:
            raise PoolError(f"the file has {found.st_size} bytes, {length_bytes} were declared: pass a larger file")
        _check_allocated(descriptor, found)
        return Mapping(descriptor, length_bytes)
    except OSError as error:
        raise PoolError(f"the file cannot be mapped read and write: {error}") from error


class StagingRange:
    """The address range of a buffer and its extents for registration, without its memory.

    Attributes:
        address: of the first byte.
        length_bytes: the requested size.
    """

    def __init__(self, address: int, length_bytes: int, extent_bytes: int) -> None:
        self.address = address
        self.length_bytes = length_bytes
        self._extent_bytes = extent_bytes

    def extents(self) -> list[tuple[int, int]]:
        """Return (address, length in bytes) of each extent to register, in order and without gaps; the last may be smaller."""
        return self.pieces(0, self.length_bytes)

    def pieces(self, offset_bytes: int, length_bytes: int) -> list[tuple[int, int]]:
        """Split a range at the ends of extents, for transports that write within one registration: (address, bytes) each."""
        self._check(offset_bytes, length_bytes)
        cuts = []
        end = offset_bytes + length_bytes
        while offset_bytes < end:
            extent_end = (offset_bytes // self._extent_bytes + 1) * self._extent_bytes
            piece = min(end, extent_end) - offset_bytes
            cuts.append((self.address + offset_bytes, piece))
            offset_bytes += piece
        return cuts

    def _check(self, offset_bytes: int, length_bytes: int) -> None:
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= self.length_bytes:
            raise ShapeError(
                f"offset_bytes {offset_bytes} and length_bytes {length_bytes}: the buffer has {self.length_bytes} bytes"
            )


class StagingBuffer(StagingRange):
    """Private memory whose pages are all touched before the first transfer, so that none faults during one.

    Attributes:
        address: of the first byte, a multiple of the system's page size.
        length_bytes: the requested size.
    """

    def __init__(self, length_bytes: int, *, extent_bytes: int = EXTENT_BYTES, huge_pages: bool = True) -> None:
        """Allocate and touch `length_bytes` (at least 1).

        Raises:
            ShapeError: a length is below 1.
            OSError: out of memory.
        """
        if length_bytes < 1 or extent_bytes < 1:
            raise ShapeError(f"length_bytes is {length_bytes} and extent_bytes is {extent_bytes}: give at least 1")
        self._mapping = Mapping(None, length_bytes)
        super().__init__(self._mapping.address, length_bytes, extent_bytes)
        if huge_pages:
            # They do not speed up copies, but allocation: see benchmarks/gather_scatter_cpu.py.
            self._mapping.advise_huge_pages()
        self._bytes: npt.NDArray[np.uint8] | None = self._mapping.bytes_view()
        # Only a write allocates a page; a read would map the shared zero page.
        self._bytes[:] = 0

    def view(self, offset_bytes: int, length_bytes: int) -> npt.NDArray[np.uint8]:
        """Return [length_bytes] at `offset_bytes`; valid until `close`. Raises ShapeError outside the buffer."""
        self._check(offset_bytes, length_bytes)
        assert self._bytes is not None, "a view of a closed staging buffer"
        return self._bytes[offset_bytes : offset_bytes + length_bytes]

    def bytes_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return a copy of a few bytes, such as a trailer. Raises ShapeError outside the buffer."""
        self._check(offset_bytes, length_bytes)
        assert self._bytes is not None, "a read of a closed staging buffer"
        return ctypes.string_at(self.address + offset_bytes, length_bytes)

    def close(self) -> None:
        """Free the memory. No view and no registration may be in use. Idempotent."""
        self._bytes = None
        self._mapping.unmap()
