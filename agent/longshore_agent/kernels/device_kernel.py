"""One Triton kernel, compiled once for each shape of tile and launched through the driver.

Called by the device launchers. Triton's own launch in Python looks every argument up and takes 30 us and more; here the
compiled function is kept, and a launch writes its numbers and makes one call.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from longshore_agent.kernels.copy_stream import CopyStream
from longshore_agent.kernels.device_grid import UNIT_BYTES_MAX, Grid, Tuning
from longshore_agent.kernels.device_rows import constants
from longshore_agent.memory import cuda

_WARP_THREADS = 32
# A number that Triton takes for one of 64 bits, whatever it stands for, and one that it takes for 32 bits.
_ANY_WORD = 1 << 40
_ANY_NUMBER = 3


class _Compiled(NamedTuple):
    function: int
    threads: int
    shared_bytes: int
    kept: Any  # the module goes when this does


class DeviceKernel:
    """A kernel whose arguments are addresses, then 32-bit numbers that never specialize, then 64-bit ones, then constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], _Compiled] = {}
        self._lock = threading.Lock()

    def launch(
        self, stream: CopyStream, grid: Grid, tensors: tuple[torch.Tensor, ...], words: tuple[int, ...], tuning: Tuning
    ) -> None:
        """Queue one launch on `stream`.

        Args:
            tensors: planes, page ids, slab; all are in use until the stream has passed the launch.
            words: 64-bit numbers behind the grid's.
        """
        if stream.context is None:
            self._kernel[grid.programs](
                *tensors, *grid.numbers, *words, **constants(grid.tile, tuning), num_warps=tuning.warps
            )
            return
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        key = (stream.context.index, grid.tile, tuning, *(address % UNIT_BYTES_MAX == 0 for address in addresses))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(key, stream, grid, tensors, words, tuning)
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

    def _compile(
        self,
        key: tuple[object, ...],
        stream: CopyStream,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        words: tuple[int, ...],
        tuning: Tuning,
    ) -> _Compiled:
        with self._lock, torch.cuda.device(stream.device):
            made = self._kernel.warmup(
                *tensors,
                *(_ANY_NUMBER for _ in grid.numbers),
                *(_ANY_WORD for _ in words),
                **constants(grid.tile, tuning),
                num_warps=tuning.warps,
                grid=(1,),
            )
            made._init_handles()  # noqa: SLF001 - loads the code; Triton does it at its own first launch otherwise
            found = _Compiled(made.function, _WARP_THREADS * tuning.warps, made.metadata.shared, made)
            self._compiled[key] = found
            return found
