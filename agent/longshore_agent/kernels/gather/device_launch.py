"""Copy head slices of pages in a device's memory into one contiguous slab there: checks, grid and launch.

Called by the data path of a GPU's worker; the counterpart of `launch`, which serves CPUs and loads no tensor library.
"""

from __future__ import annotations

import struct

import torch

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.copy_stream import CopyStream, check_device_buffer, check_stream
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_kernel import BoundLaunch, DeviceKernel
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.gather.triton_kernel import gather_kernel
from longshore_agent.kernels.held_pages import HeldPages
from longshore_agent.kernels.view import payload_bytes
from longshore_wire.trailer import SealedTrailer, slab_bytes

_TRAILER_WORDS = struct.Struct("<8q")
_NO_TRAILER = (0,) * 8
_KERNEL = DeviceKernel(gather_kernel)
# The best of a sweep on an H200: benchmarks/gather_scatter_gpu.py --sweep.
TUNING = Tuning(tile_bytes=8192)


def gather_slices(
    device_pages: DevicePages,
    pages: HeldPages,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    target: torch.Tensor,
    trailer: SealedTrailer | None,
    stream: CopyStream,
    tuning: Tuning = TUNING,
) -> int:
    """Queue on `stream` the copy of tokens [first, end) from `pages` into `target`, packed, then its trailer.

    One launch; returns when it is queued. Pages, their list and target are in use until the stream has passed it.

    Args:
        pages: of the same pool, on the same device; must hold the pages of all tokens, may hold more.
        tokens, layers, heads, trailer: as of `launch.gather_slices`.
        target: [slab bytes or more] uint8, contiguous, on the pages' device; nothing behind the slab is touched.
        stream: of the pages' device.
    Returns:
        The payload's bytes.
    Raises:
        ShapeError: an argument breaks the above, named in the message; nothing was launched.
        DeviceError: the driver refuses the launch.
    """
    payload = payload_bytes(device_pages.pool, tokens, layers, heads)
    page_first = pages.index_of(tokens, unique=False)
    if trailer is not None and trailer.payload_bytes != payload:
        raise ShapeError(f"trailer.payload_bytes is {trailer.payload_bytes}: the payload has {payload} bytes")
    length = payload if trailer is None else slab_bytes(payload)
    check_device_buffer("target", target, device_pages.device, length)
    check_stream(stream, device_pages.device)
    grid = device_pages.grid(tokens, layers, heads, target.data_ptr(), payload, page_first, tuning)
    words = _NO_TRAILER if trailer is None else _TRAILER_WORDS.unpack(trailer.data)
    _KERNEL.launch(stream, grid, (device_pages.planes, pages.table, target), (length - payload, *words), tuning)
    return payload


def bind_gather(
    device_pages: DevicePages,
    table: torch.Tensor,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    target: torch.Tensor,
    stream: CopyStream,
) -> BoundLaunch:
    """Check and compile gathers of as many tokens from the same place of a page; queue them by `gather_words`.

    Args:
        table, target: as aligned as the page ids and slabs of all that are queued.
    Raises:
        ShapeError: as `gather_slices`.
    """
    payload = payload_bytes(device_pages.pool, tokens, layers, heads)
    grid = device_pages.grid(tokens, layers, heads, target.data_ptr(), payload, 0, TUNING)
    return _KERNEL.bind(stream, grid, (device_pages.planes, table, target), (0, *_NO_TRAILER), TUNING)


def gather_words(trailer: SealedTrailer) -> tuple[int, ...]:
    """Return the words of a gather that ends with a trailer."""
    return slab_bytes(trailer.payload_bytes) - trailer.payload_bytes, *_TRAILER_WORDS.unpack(trailer.data)
