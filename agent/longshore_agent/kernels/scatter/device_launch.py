"""Copy one contiguous slab in a device's memory into head slices of pages there: checks, grid and launch.

Called by the data path of a GPU's worker; the counterpart of `launch`, which serves CPUs and loads no tensor library.
"""

from __future__ import annotations

import torch

from longshore_agent.kernels.copy_stream import CopyStream, check_device_buffer, check_stream
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.device_rows import constants
from longshore_agent.kernels.scatter.triton_kernel import scatter_kernel
from longshore_agent.kernels.slab import Pages, check_request

# The best of a sweep on an H200: benchmarks/gather_scatter_gpu.py --sweep.
TUNING = Tuning(tile_bytes=4096)


def scatter_slices(
    device_pages: DevicePages,
    pages: Pages,
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
        LongshoreError: PAGE_OUT_OF_RANGE, or TOKENS_OVERLAP for a repeated page; nothing was launched.
    """
    pool = device_pages.pool
    plane_bytes = check_request(pool, pages, tokens, layers, heads, unique=True)
    payload = pool.kinds * len(layers) * plane_bytes
    check_device_buffer("source", source, device_pages.device, payload)
    check_stream(stream, device_pages.device)
    grid = device_pages.grid(tokens, layers, heads, source.data_ptr(), plane_bytes, tuning)
    with stream.entered():
        request = stream.upload(pages, None)
        scatter_kernel[grid.programs](
            device_pages.planes,
            request,
            source,
            *grid.numbers,
            **constants(grid.tile, tuning),
            num_warps=tuning.warps,
        )
    return payload
