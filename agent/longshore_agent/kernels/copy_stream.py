"""Wraps a stream of a device, which executes queued work in order.

Called by `device_copier`, which has one for each kind of copy, and by `device_launch`. Streams are not ordered with
each other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from longshore_agent.errors import DeviceError, ShapeError
from longshore_agent.memory import cuda


class CopyStream:
    """One stream; used by one thread at a time.

    Attributes:
        device: of the stream, with its index; "cpu" runs kernels in Triton's interpreter, at once.
        stream: None on a CPU.
        handle: the driver's handle of the stream; 0 on a CPU.
        context: the driver's view of the device; None on a CPU.
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
