"""Handles SIGBUS, so that a worker survives when an engine truncates the file of shared memory that the worker has mapped.

Called by `ipc`, which guards each mapping of a file. The kernel sends SIGBUS to the thread that touches a page without memory
behind it, in our loops as in a transport's library. The handler maps private zeros over the rest of that mapping, marks it as
torn, and lets the thread go on. The copied bytes are then worthless, so the caller of a copy checks `Guarded.torn` before it
reports the copy as done. A fault elsewhere ends the process as before. The guard costs nothing until a fault.
"""

from __future__ import annotations

import array
import ctypes
import functools
import mmap
import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from longshore_agent.errors import PoolError
from longshore_wire.errors import Reason

# Mapped files in one worker, its engine's and neighbours' regions: the rows of the handler's table.
MAPPINGS_MAX = 16_384
# The code of a SIGBUS without memory behind the address. A memory error has another code and ends the process.
_BUS_ADRERR = 2
# Map private zeros at exactly that address, even if little memory is left.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PRIVATE_ZEROS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
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


class _Action(ctypes.Structure):
    """`struct sigaction` of libc."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Guarded:
    """One guarded range. Call `end` before you unmap it."""

    def __init__(self, address: int, length_bytes: int) -> None:
        """Start to guard the range. Raises PoolError if too many ranges are guarded."""
        self._handler = _handler()
        self._row: int | None = self._handler.enter(address, address + length_bytes)

    @property
    def torn(self) -> bool:
        """Whether a part was found missing. Bytes copied from or to it since then may be invalid."""
        return self._row is not None and self._handler.torn(self._row)

    def end(self) -> None:
        """Stop guarding it. Idempotent."""
        if self._row is not None:
            row, self._row = self._row, None
            self._handler.leave(row)


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
        if _libc().sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(self._before)) != 0:
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
        libc = _libc()
        module = _MODULE.format(
            no_memory=_BUS_ADRERR,
            table=self._table.ctypes.data,
            torn_count=_torn_count.buffer_info()[0],
            rows=MAPPINGS_MAX,
            page_mask=-_PAGE_BYTES,
            mmap=ctypes.cast(libc.mmap, ctypes.c_void_p).value,
            sigaction=ctypes.cast(libc.sigaction, ctypes.c_void_p).value,
            protection=mmap.PROT_READ | mmap.PROT_WRITE,
            flags=_PRIVATE_ZEROS,
            before=ctypes.addressof(self._before),
        )
        machine = binding.Target.from_default_triple().create_target_machine(opt=1, jit=True)
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(module), machine)
        self._engine.finalize_object()
        return int(self._engine.get_function_address("guard"))


# Written by the handler. The array never grows, so its address is fixed.
_torn_count = array.array("q", [0])
_libc: Callable[[], ctypes.CDLL] = functools.cache(lambda: ctypes.CDLL(None, use_errno=True))


@functools.cache
def _handler() -> _Handler:
    return _Handler()
