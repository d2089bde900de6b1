"""A stream of a device and the small table that each launch on it reads: the slab's trailer and the page ids.

Called by the device launchers; a lane or a scatter thread owns one. Both travel to the device in one copy, from memory
that the device reads by itself, so that a launch costs the host one copy and one call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.device_grid import TRAILER_NUMBERS
from longshore_agent.kernels.slab import Pages
from longshore_wire.trailer import Trailer

# Launches whose page ids may wait in the host's memory before the next call blocks: a lane has one slab at a time, a scatter
# thread queues what has arrived.
_WAITING_LAUNCHES_MAX = 8


class CopyStream:
    """One stream; used by one thread at a time.

    Attributes:
        device: of the stream, with its index; "cpu" runs kernels in Triton's interpreter, at once.
        stream: None on a CPU.
        page_count_max: page ids of one launch.
    """

    def __init__(self, device: torch.device, page_count_max: int, stream: torch.cuda.Stream | None = None) -> None:
        """Make the tables, and a new stream unless one is given.

        Raises:
            ShapeError: a stream for a CPU, or of another device.
        """
        if stream is not None and stream.device != device:
            raise ShapeError(f"stream is of {stream.device}: pass one of {device}")
        self.page_count_max = page_count_max
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu and stream is None else stream  # type: ignore[no-untyped-call]
        numbers_max = TRAILER_NUMBERS + page_count_max
        waiting_max = _WAITING_LAUNCHES_MAX if on_gpu else 1
        self._host = torch.zeros((waiting_max, numbers_max), dtype=torch.int32, pin_memory=on_gpu)
        self._numbers = self._host.numpy()
        self._table = torch.zeros(numbers_max, dtype=torch.int32, device=device)
        self.device = self._table.device
        self._copied = [torch.cuda.Event() for _ in range(waiting_max if on_gpu else 0)]  # type: ignore[no-untyped-call]
        self._uploads_count = 0
        if self.stream is not None:
            # The table was zeroed on the stream that was current; nothing may be copied to it before.
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def entered(self) -> AbstractContextManager[object]:
        """Make the stream and its device current for launches."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def upload(self, pages: Pages, trailer: Trailer | None) -> torch.Tensor:
        """Put the trailer and `pages` on the device, in the stream's order; call it inside `entered`.

        Returns:
            [TRAILER_NUMBERS + pages or more] int32 on the device; valid for launches on this stream before the next call.
        Raises:
            ShapeError: `pages` has more than `page_count_max` ids.
        """
        if pages.size > self.page_count_max:
            raise ShapeError(f"pages has {pages.size} ids: this stream was made for {self.page_count_max}")
        slot = self._uploads_count % len(self._host)
        self._uploads_count += 1
        if self._copied:
            # The copy that last used this slot may still read it. An event that was never recorded is over.
            self._copied[slot].synchronize()
        length = TRAILER_NUMBERS + pages.size
        if trailer is not None:
            self._numbers[slot, :TRAILER_NUMBERS] = np.frombuffer(trailer.pack(), dtype=np.int32)
        self._numbers[slot, TRAILER_NUMBERS:length] = pages
        # One table on the device is enough: the stream runs this copy after the launch that reads the last one.
        self._table[:length].copy_(self._host[slot, :length], non_blocking=True)
        if self._copied:
            self._copied[slot].record()
        return self._table


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
