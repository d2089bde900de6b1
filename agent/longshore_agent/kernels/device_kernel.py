"""Compiles a kernel once for each shape of tile, and launches it on a stream through the driver.

Called by `device_launch` and `device_digest`. Triton's public launch inspects each argument in Python and takes 30 us
or more. This module keeps the compiled function, so that a launch writes its numbers and makes one call. The function's
name and the order of its arguments are internals of Triton, which only this file uses; with an untested version, it
uses the public launch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton

from longshore_agent.errors import DeviceError
from longshore_agent.kernels.copy_kernel import ARGUMENTS, constants, copy_kernel
from longshore_agent.kernels.device_grid import Grid, Tile, Tuning
from longshore_agent.memory import cuda
from longshore_wire.errors import Reason

_log = logging.getLogger(__name__)

# Kernels of 3.6 were launched through the driver on H200s. Kernels of 3.9 were only compiled; they take the same
# arguments (tests/agent/test_copy_kernel.py).
_TRIED_VERSIONS = ("3.6", "3.9")
_WARP_THREADS = 32
# Example of a value, for compilation. Every value has a type and none specializes, so one example serves all.
_ANY_VALUE = 3
# Bytes of each argument's place, for every type.
_PLACE_BYTES = 8
# Triton adds two addresses of scratch memory behind a kernel's own arguments; ours use none.
_SCRATCH_COUNT = 2
# Triton does not promise thread safety.
_TRITON = threading.Lock()


class CopyStream:
    """A stream of a device, which executes queued work in order; used by one thread at a time.

    Streams are not ordered with each other.

    Attributes:
        device: of the stream, with its index; "cpu" runs kernels in Triton's interpreter, at once.
        stream: None on a CPU.
        handle: the driver's handle of the stream; 0 on a CPU.
        context: the driver's view of the device; None on a CPU.
        ended_s: time.monotonic when the last copy was seen to have ended.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a new stream."""
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.device = device if self.stream is None else self.stream.device
        self.handle: int = 0 if self.stream is None else self.stream.cuda_stream
        self.context = cuda.device_at(self.device.index) if on_gpu else None
        self.ended_s = 0.0

    def entered(self) -> AbstractContextManager[object]:
        """Make the stream and its device current for torch."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def passed(self) -> bool:
        """Whether the device has done all work queued here. Raises DeviceError if some of it failed."""
        if self.stream is None:
            return True
        try:
            return bool(self.stream.query())
        except RuntimeError as error:
            raise DeviceError(f"the stream's copies on {self.device} failed: {error}") from error

    def synchronize(self) -> None:
        """Wait until the device has done all work queued here."""
        if self.stream is not None:
            self.stream.synchronize()


class _Compiled(NamedTuple):
    function: int
    threads: int
    shared_bytes: int
    kept: Any  # keeps the kernel's module loaded


# Queues a launch with these addresses, numbers and words. Raises DeviceError: nothing was queued.
Launch = Callable[..., None]


class DeviceKernel:
    """A kernel, compiled for each shape of tile. It takes values, which never specialize, and then constants."""

    def __init__(
        self,
        kernel: Any = copy_kernel,
        arguments: tuple[int, int, int] = ARGUMENTS,
        constants_of: Callable[[Tile, Tuning], dict[str, object]] = constants,
    ) -> None:
        """Compile nothing.

        Args:
            arguments: number of the kernel's addresses, 32-bit numbers and 64-bit words, in this order.
            constants_of: returns the kernel's compile-time arguments.
        """
        self._kernel, self._arguments, self._constants_of = kernel, arguments, constants_of
        self._compiled: dict[tuple[object, ...], _Compiled] = {}

    def ready(self, stream: CopyStream, tile: Tile, tuning: Tuning) -> bool:
        """Whether the kernel of a tile is compiled. If it is not, begin to compile it in another thread.

        Raises:
            DeviceError: the compilation failed; the next call tries again.
        """
        key = _key(stream, tile, tuning)
        if stream.context is None or key in self._compiled:
            return True
        return _COMPILING.ended((self, key), lambda: self._compile(stream, tile, tuning))

    def bind(self, stream: CopyStream, grid: Grid, tuning: Tuning) -> Launch:
        """Return a launch on `stream`; compile its kernel if necessary. Raises DeviceError if that fails."""
        if stream.context is not None:
            compiled = self._compiled.get(_key(stream, grid.tile, tuning)) or self._compile(stream, grid.tile, tuning)
            if _is_tried(triton.__version__):
                return self._driver_launch(stream, compiled, grid.programs)
        return self._public_launch(stream, grid.programs, self._options(grid.tile, tuning))

    def _driver_launch(self, stream: CopyStream, compiled: _Compiled, programs: tuple[int, int, int]) -> Launch:
        """Return a launch that is one call of the driver."""
        block, device, handle = ArgumentBlock(*self._arguments), stream.context, stream.handle
        assert device is not None
        function, threads, shared_bytes, _ = compiled

        def launch(*values: int) -> None:
            cuda.launch(device, function, programs, threads, shared_bytes, handle, block.fill(*values))

        return launch

    def _public_launch(self, stream: CopyStream, programs: tuple[int, int, int], options: dict[str, object]) -> Launch:
        """Return a launch for an untested version of Triton, or for its interpreter."""

        def launch(*values: int) -> None:
            try:
                with _TRITON, stream.entered():
                    self._kernel[programs](*values, **options)
            except RuntimeError as error:
                raise DeviceError(f"Triton cannot launch a kernel on {stream.device}: {error}") from error

        return launch

    def _options(self, tile: Tile, tuning: Tuning) -> dict[str, object]:
        return {**self._constants_of(tile, tuning), "num_warps": tuning.warps}

    def _compile(self, stream: CopyStream, tile: Tile, tuning: Tuning) -> _Compiled:
        key = _key(stream, tile, tuning)
        with _TRITON, torch.cuda.device(stream.device):
            if (found := self._compiled.get(key)) is not None:
                return found
            try:
                values = (_ANY_VALUE,) * sum(self._arguments)
                made = self._kernel.warmup(*values, **self._options(tile, tuning), grid=(1,))
                found = _Compiled(0, 0, 0, made)
                if _is_tried(triton.__version__):
                    made._init_handles()  # noqa: SLF001 - loads the code; Triton does it at its own first launch otherwise
                    found = _Compiled(made.function, _WARP_THREADS * tuning.warps, made.metadata.shared, made)
            except Exception as error:
                # Triton has no error class of its own: a missing C compiler is a RuntimeError, like many other errors.
                raise DeviceError(
                    f"Triton cannot compile a kernel for {stream.device}: {error}; it needs a C compiler and a directory "
                    "that it may write",
                    reason=Reason.UNSUPPORTED,
                ) from error
            self._compiled[key] = found
            return found


class ArgumentBlock:
    """Memory for the arguments of one kernel, 8 bytes each."""

    def __init__(self, address_count: int, number_count: int, word_count: int) -> None:
        self._struct = struct.Struct(f"<{address_count}Q{'i4x' * number_count}{word_count}q")
        place_count = self._struct.size // _PLACE_BYTES + _SCRATCH_COUNT
        self._memory = ctypes.create_string_buffer(place_count * _PLACE_BYTES)
        first = ctypes.addressof(self._memory)
        places = [first + _PLACE_BYTES * index for index in range(place_count)]
        self._pointers = (ctypes.c_void_p * place_count)(*places)

    def fill(self, *values: int) -> ctypes.Array[ctypes.c_void_p]:
        """Write all values; return their addresses for the driver."""
        self._struct.pack_into(self._memory, 0, *values)
        return self._pointers


class Compiling:
    """Compiles kernels, a second each, in a thread of its own. Called by the thread that launches them.

    The compiling thread does nothing else: it uses no stream and touches no pages.
    """

    def __init__(self) -> None:
        # The executor starts its thread at the first use.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._under_way: dict[Hashable, Future[object]] = {}

    def ended(self, key: Hashable, compile_it: Callable[[], object]) -> bool:
        """Whether `compile_it` has returned for `key`. If it was not begun, begin it. Returns True once for each run.

        Raises:
            Exception: from `compile_it`, once; the next call begins again.
        """
        found = self._under_way.get(key)
        if found is None:
            self._under_way[key] = self._thread.submit(compile_it)
            return False
        if not found.done():
            return False
        del self._under_way[key]
        found.result()
        return True


_COMPILING = Compiling()


def _key(stream: CopyStream, tile: Tile, tuning: Tuning) -> tuple[object, ...]:
    """Return the key of the launches that one compiled kernel serves."""
    return (stream.context and stream.context.index, tile, tuning)


@functools.cache
def _is_tried(version: str) -> bool:
    """Whether kernels of this version of Triton may be launched through the driver. Logs once if they may not."""
    tried = ".".join(version.split(".")[:2]) in _TRIED_VERSIONS
    if not tried:
        _log.warning(
            "Triton %s was not tried with the driver's launch: each slab takes tens of microseconds more; tried are %s",
            version,
            ", ".join(_TRIED_VERSIONS),
        )
    return tried
