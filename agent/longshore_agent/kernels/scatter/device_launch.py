"""Copy one contiguous slab in a device's memory into head slices of pages there: checks, grid and launch.

Called by the data path of a GPU's worker; the counterpart of `launch`, which serves CPUs and loads no tensor library.
"""

from __future__ import annotations

import torch

from longshore_agent.kernels.copy_stream import CopyStream, check_device_buffer, check_stream
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_kernel import BoundLaunch, DeviceKernel
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.held_pages import HeldPages
from longshore_agent.kernels.scatter.triton_kernel import scatter_kernel
from longshore_agent.kernels.view import payload_bytes

_KERNEL = DeviceKernel(scatter_kernel)
# The best of a sweep on an H200: benchmarks/gather_scatter_gpu.py --sweep.
TUNING = Tuning(tile_bytes=4096, warps=4)


def scatter_slices(
    device_pages: DevicePages,
    pages: HeldPages,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    source: torch.Tensor,
    stream: CopyStream,
    tuning: Tuning = TUNING,
) -> int:
    """Queue on `stream` the copy of a slab into tokens [first, end) of the sequence whose pages are `pages`.

    The inverse of `gather_slices`, with its arguments; `pages` may not repeat here. Tokens of the same pages outside
    [first, end), and other heads and layers, keep their bytes.

    Args:
        source: [payload bytes or more] uint8, contiguous, on the pages' device; what follows the payload is not read.
    Returns:
        The payload's bytes.
    Raises:
        ShapeError: an argument breaks its contract, named in the message; nothing was launched.
        LongshoreError: TOKENS_OVERLAP for a page that stands in the list twice; nothing was launched.
        DeviceError: the driver refuses the launch.
    """
    payload = payload_bytes(device_pages.pool, tokens, layers, heads)
    page_first = pages.index_of(tokens, unique=True)
    check_device_buffer("source", source, device_pages.device, payload)
    check_stream(stream, device_pages.device)
    grid = device_pages.grid(tokens, layers, heads, source.data_ptr(), payload, page_first, tuning)
    _KERNEL.launch(stream, grid, (device_pages.planes, pages.table, source), (), tuning)
    return payload


def bind_scatter(
    device_pages: DevicePages,
    table: torch.Tensor,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    source: torch.Tensor,
    stream: CopyStream,
) -> BoundLaunch:
    """Check and compile scatters of as many tokens to the same place of a page; see `gather.device_launch.bind_gather`."""
    payload = payload_bytes(device_pages.pool, tokens, layers, heads)
    grid = device_pages.grid(tokens, layers, heads, source.data_ptr(), payload, 0, TUNING)
    return _KERNEL.bind(stream, grid, (device_pages.planes, table, source), (), TUNING)
