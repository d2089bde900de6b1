"""A stream of a device, and the arguments of the launches on it.

Called by the device launchers; a lane or a scatter thread owns one. Nothing is made for a launch: its numbers are
written into memory that the driver reads during the call.
"""

from __future__ import annotations

import ctypes
import struct
from contextlib import AbstractContextManager, nullcontext

import torch

from longshore_agent.errors import DeviceError, ShapeError
from longshore_agent.memory import cuda

# Every argument has a place of as many bytes, whatever its type.
_PLACE_BYTES = 8
# Two addresses of scratch memory stand behind a kernel's own arguments; ours use none.
_SCRATCH_COUNT = 2


class CopyStream:
    """One stream; used by one thread at a time.

    Attributes:
        device: of the stream, with its index; "cpu" runs kernels in Triton's interpreter, at once.
        stream: None on a CPU.
        handle: of the stream, as the driver knows it; 0 on a CPU.
        context: the device as the driver knows it; None on a CPU.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Make a new stream unless one is given.

        Raises:
            ShapeError: a stream for a CPU, or of another device.
        """
        if stream is not None and stream.device != device:
            raise ShapeError(f"stream is of {stream.device}: pass one of {device}")
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu and stream is None else stream  # type: ignore[no-untyped-call]
        self.device = device if self.stream is None else self.stream.device
        self.handle: int = 0 if self.stream is None else self.stream.cuda_stream
        self.context = cuda.device_at(self.device.index) if on_gpu else None
        self._blocks: dict[tuple[int, int, int], ArgumentBlock] = {}

    def entered(self) -> AbstractContextManager[object]:
        """Make the stream and its device current for torch."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def arguments(self, addresses: tuple[int, ...], numbers: tuple[int, ...], words: tuple[int, ...]) -> cuda.Arguments:
        """Return the arguments of a kernel, valid until the next call: addresses, 32-bit numbers, then 64-bit ones."""
        key = (len(addresses), len(numbers), len(words))
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = ArgumentBlock(*key)
        return block.fill(*addresses, *numbers, *words)

    def passed(self) -> bool:
        """Whether the device has done what was queued here. Raises DeviceError if something of it failed."""
        if self.stream is None:
            return True
        try:
            return bool(self.stream.query())
        except RuntimeError as error:
            raise DeviceError(f"the stream's copies on {self.device} failed: {error}") from error

    def synchronize(self) -> None:
        """Wait until the device has done what was queued here."""
        if self.stream is not None:
            self.stream.synchronize()


class ArgumentBlock:
    """Memory of one kernel's arguments, all in places of 8 bytes."""

    def __init__(self, address_count: int, number_count: int, word_count: int) -> None:
        self._struct = struct.Struct(f"<{address_count}Q{'i4x' * number_count}{word_count}q")
        place_count = self._struct.size // _PLACE_BYTES + _SCRATCH_COUNT
        self._memory = ctypes.create_string_buffer(place_count * _PLACE_BYTES)
        first = ctypes.addressof(self._memory)
        places = [first + _PLACE_BYTES * index for index in range(place_count)]
        self._arguments = cuda.Arguments((ctypes.c_void_p * place_count)(*places))

    def fill(self, *values: int) -> cuda.Arguments:
        """Write all values; return where they are."""
        self._struct.pack_into(self._memory, 0, *values)
        return self._arguments


def check_device_buffer(name: str, buffer: torch.Tensor, device: torch.device, length_bytes: int) -> None:
    """Raise ShapeError unless `buffer` is contiguous uint8 of at least `length_bytes` on `device`."""
    if buffer.device != device:
        raise ShapeError(f"{name} is on {buffer.device}: the pages are on {device}")
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
        raise ShapeError(
            f"{name} is {buffer.dtype} {tuple(buffer.shape)}: pass contiguous bytes (uint8, one dimension)"
        )
    if buffer.numel() < length_bytes:
        raise ShapeError(f"{name} has {buffer.numel()} bytes: the slab takes {length_bytes}")


def check_stream(stream: CopyStream, device: torch.device) -> None:
    """Raise ShapeError unless `stream` is one of `device`."""
    if stream.device != device:
        raise ShapeError(f"stream is of {stream.device}: the pages are on {device}")
