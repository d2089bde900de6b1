"""Copy head slices of pages in a device's memory into one contiguous slab there: checks, grid and launch.

Called by the data path of a GPU's worker; the counterpart of `launch`, which serves CPUs and loads no tensor library.
"""

from __future__ import annotations

import torch

from longshore_agent.errors import ShapeError
from longshore_agent.kernels.copy_stream import CopyStream, check_device_buffer, check_stream
from longshore_agent.kernels.device_grid import Tuning
from longshore_agent.kernels.device_pages import DevicePages
from longshore_agent.kernels.device_rows import constants
from longshore_agent.kernels.gather.triton_kernel import gather_kernel
from longshore_agent.kernels.slab import Pages, check_request
from longshore_wire.trailer import Trailer, slab_bytes

# The best of a sweep on an H200: benchmarks/gather_scatter_gpu.py --sweep.
TUNING = Tuning(tile_bytes=8192)


def gather_slices(
    device_pages: DevicePages,
    pages: Pages,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    target: torch.Tensor,
    trailer: Trailer | None,
    stream: CopyStream,
    tuning: Tuning = TUNING,
) -> int:
    """Queue on `stream` the copy of tokens [first, end) from `pages` into `target`, packed, then its trailer.

    One launch, and one copy of the page ids; returns when both are queued. Pages and target are in use until the
    stream has passed them.

    Args:
        pages, tokens, layers, heads, trailer: as of `launch.gather_slices`; `pages` is in the host's memory, where its
            ids are checked, and may be changed when this returns.
        target: [slab bytes or more] uint8, contiguous, on the pages' device; nothing behind the slab is touched.
        stream: of the pages' device.
    Returns:
        The payload's bytes.
    Raises:
        ShapeError: an argument breaks the above, named in the message; nothing was launched.
        LongshoreError: PAGE_OUT_OF_RANGE, names the index; nothing was launched.
    """
    pool = device_pages.pool
    plane_bytes = check_request(pool, pages, tokens, layers, heads, unique=False)
    payload = pool.kinds * len(layers) * plane_bytes
    if trailer is not None and trailer.payload_bytes != payload:
        raise ShapeError(f"trailer.payload_bytes is {trailer.payload_bytes}: the payload has {payload} bytes")
    length = payload if trailer is None else slab_bytes(payload)
    check_device_buffer("target", target, device_pages.device, length)
    check_stream(stream, device_pages.device)
    grid = device_pages.grid(tokens, layers, heads, target.data_ptr(), plane_bytes, tuning)
    with stream.entered():
        request = stream.upload(pages, trailer)
        gather_kernel[grid.programs](
            device_pages.planes,
            request,
            target,
            *grid.numbers,
            length - payload,
            **constants(grid.tile, tuning),
            num_warps=tuning.warps,
        )
    return payload
