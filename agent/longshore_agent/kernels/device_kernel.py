"""One Triton kernel, compiled once for each shape of tile and launched through the driver.

Called by the device launchers. Triton's own launch in Python looks every argument up and takes 30 us and more; here the
compiled function is kept, and a launch writes its numbers and makes one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from longshore_agent.errors import DeviceError
from longshore_agent.kernels import device_rows
from longshore_agent.kernels.compiling import Compiling
from longshore_agent.kernels.copy_stream import ArgumentBlock, CopyStream
from longshore_agent.kernels.device_grid import PAGE_FIRST, UNIT_BYTES_MAX, Grid, Tile, Tuning
from longshore_agent.memory import cuda
from longshore_wire.errors import Reason

_WARP_THREADS = 32
# A number that Triton takes for one of 64 bits, whatever it stands for, and one that it takes for 32 bits.
_ANY_WORD = 1 << 40
_ANY_NUMBER = 3


# Triton is run by one thread at a time.
_TRITON = threading.Lock()
_COMPILING = Compiling()


class _Compiled(NamedTuple):
    function: int
    threads: int
    shared_bytes: int
    kept: Any  # the module goes when this does


class BoundKernel:
    """A launch of which all is known but the values of its arguments; see `DeviceKernel.bind_values`."""

    def __init__(
        self, stream: CopyStream, compiled: _Compiled, grid: Grid, address_count: int, word_count: int
    ) -> None:
        assert stream.context is not None
        self._stream = stream
        self._compiled = compiled
        self._programs = grid.programs
        self._block = ArgumentBlock(address_count, len(grid.numbers), word_count)

    def queue_values(self, *values: int) -> None:
        """Queue it with these arguments: addresses, numbers, words. Raises DeviceError: nothing was queued."""
        arguments = self._block.fill(*values)
        compiled, stream = self._compiled, self._stream
        assert stream.context is not None
        cuda.launch(
            stream.context,
            compiled.function,
            self._programs,
            compiled.threads,
            compiled.shared_bytes,
            stream.handle,
            arguments,
        )


class BoundLaunch(BoundKernel):
    """A launch of which all is known but where the slab and its page ids lie, and the 64-bit words; see `DeviceKernel.bind`."""

    def __init__(self, stream: CopyStream, compiled: _Compiled, grid: Grid, planes: int, word_count: int) -> None:
        super().__init__(stream, compiled, grid, 3, word_count)
        self._planes = planes
        self._before, self._after = grid.numbers[:PAGE_FIRST], grid.numbers[PAGE_FIRST + 1 :]

    def queue(self, table: int, page_first: int, slab: int, words: tuple[int, ...] = ()) -> None:
        """Queue it.

        Args:
            table, slab: addresses of page ids and slab, in use until the stream has passed the launch.
            page_first: which id is that of the first token's page.
        """
        assert table % UNIT_BYTES_MAX == slab % UNIT_BYTES_MAX == 0, (table, slab)
        self.queue_values(self._planes, table, slab, *self._before, page_first, *self._after, *words)


class DeviceKernel:
    """A kernel whose arguments are addresses, then 32-bit numbers that never specialize, then 64-bit ones, then constants."""

    def __init__(
        self, kernel: Any, constants: Callable[[Tile, Tuning], dict[str, object]] = device_rows.constants
    ) -> None:
        self._kernel = kernel
        self._constants = constants
        self._compiled: dict[tuple[object, ...], _Compiled] = {}

    def launch(
        self, stream: CopyStream, grid: Grid, tensors: tuple[torch.Tensor, ...], words: tuple[int, ...], tuning: Tuning
    ) -> None:
        """Queue one launch on `stream`.

        Args:
            tensors: planes, page ids, and what the kernel takes beside; all are in use until the stream has passed the launch.
            words: 64-bit numbers behind the grid's.
        """
        if stream.context is None:
            self._kernel[grid.programs](
                *tensors, *grid.numbers, *words, **self._constants(grid.tile, tuning), num_warps=tuning.warps
            )
            return
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        compiled = self._found(stream, grid, tensors, addresses, words, tuning)
        arguments = stream.arguments(addresses, grid.numbers, words)
        cuda.launch(
            stream.context,
            compiled.function,
            grid.programs,
            compiled.threads,
            compiled.shared_bytes,
            stream.handle,
            arguments,
        )

    def prepare(
        self, stream: CopyStream, grid: Grid, tensors: tuple[torch.Tensor, ...], words: tuple[int, ...], tuning: Tuning
    ) -> None:
        """Compile what `launch` would with these arguments, unless it is there; the interpreter compiles nothing.

        Args:
            tensors: examples: those of a launch must be aligned as they are.
        """
        if stream.context is not None:
            addresses = tuple(tensor.data_ptr() for tensor in tensors)
            self._found(stream, grid, tensors, addresses, words, tuning)

    def ready(
        self, stream: CopyStream, grid: Grid, tensors: tuple[torch.Tensor, ...], words: tuple[int, ...], tuning: Tuning
    ) -> bool:
        """Whether what `prepare` would compile is there; if it is not, it is compiled beside this thread from now on.

        Raises:
            DeviceError: it could not be compiled; the next question tries again.
        """
        if stream.context is None:
            return True
        key = _key(stream, grid, tuple(tensor.data_ptr() for tensor in tensors), tuning)
        if key in self._compiled:
            return True
        return _COMPILING.ended((self, key), lambda: self._compile(key, stream, grid, tensors, words, tuning))

    def bind(
        self, stream: CopyStream, grid: Grid, tensors: tuple[torch.Tensor, ...], words: tuple[int, ...], tuning: Tuning
    ) -> BoundLaunch:
        """Return a launch as `launch` does it, to be queued for other slabs, pages and words. Only on a GPU.

        Args:
            tensors: planes, page ids, slab; the last two are examples: those that are used must be aligned as they are.
            words: an example.
        """
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        compiled = self._found(stream, grid, tensors, addresses, words, tuning)
        return BoundLaunch(stream, compiled, grid, addresses[0], len(words))

    def bind_values(
        self, stream: CopyStream, grid: Grid, tensors: tuple[torch.Tensor, ...], tuning: Tuning
    ) -> BoundKernel:
        """Return a launch as `launch` does it, to be queued with other addresses and numbers. Only on a GPU.

        Args:
            grid: its numbers are an example.
            tensors: examples: those that are used must be aligned as they are.
        """
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        return BoundKernel(stream, self._found(stream, grid, tensors, addresses, (), tuning), grid, len(addresses), 0)

    def _found(
        self,
        stream: CopyStream,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        addresses: tuple[int, ...],
        words: tuple[int, ...],
        tuning: Tuning,
    ) -> _Compiled:
        assert stream.context is not None
        key = _key(stream, grid, addresses, tuning)
        return self._compiled.get(key) or self._compile(key, stream, grid, tensors, words, tuning)

    def _compile(
        self,
        key: tuple[object, ...],
        stream: CopyStream,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        words: tuple[int, ...],
        tuning: Tuning,
    ) -> _Compiled:
        with _TRITON, torch.cuda.device(stream.device):
            if (found := self._compiled.get(key)) is not None:
                return found
            try:
                made = self._kernel.warmup(
                    *tensors,
                    *(_ANY_NUMBER for _ in grid.numbers),
                    *(_ANY_WORD for _ in words),
                    **self._constants(grid.tile, tuning),
                    num_warps=tuning.warps,
                    grid=(1,),
                )
                made._init_handles()  # noqa: SLF001 - loads the code; Triton does it at its own first launch otherwise
            except Exception as error:
                # Triton has no class of error of its own: a missing C compiler is a RuntimeError, as is much else.
                raise DeviceError(
                    f"Triton cannot compile a kernel for {stream.device}: {error}; it needs a C compiler and a directory "
                    "that it may write",
                    reason=Reason.UNSUPPORTED,
                ) from error
            found = _Compiled(made.function, _WARP_THREADS * tuning.warps, made.metadata.shared, made)
            self._compiled[key] = found
            return found


def _key(stream: CopyStream, grid: Grid, addresses: tuple[int, ...], tuning: Tuning) -> tuple[object, ...]:
    """Return what launches have in common that one compiled kernel serves."""
    assert stream.context is not None
    return (stream.context.index, grid.tile, tuning, *(address % UNIT_BYTES_MAX == 0 for address in addresses))
