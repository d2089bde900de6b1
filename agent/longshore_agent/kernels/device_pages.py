"""An engine's pages in a device's memory, as the device kernels see them: a table of planes, and what their steps allow.

Called by whoever registers a GPU engine's pool, and by the device launchers. Maps and owns no memory: whoever does must
keep the regions mapped until every stream has passed the last launch on them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch

from longshore_agent.errors import DeviceError, PoolError, ShapeError
from longshore_agent.kernels.device_grid import (
    GRID_MAX,
    TOKEN_BYTES_MAX,
    TOKEN_COUNT_MAX,
    Grid,
    Tuning,
    choose_tile,
    tile_count,
    unit_of,
)
from longshore_agent.memory.pools import KVPool


class DevicePages:
    """The pages of one pool in the memory of one device.

    Attributes:
        pool: their layout and geometry, already checked; its own mapping is not looked at.
        device: where the pages are, with its index; "cpu" for Triton's interpreter.
        planes: [planes, 4] int64 on the device: address, page stride, token stride, head stride of each.
        bits: bitwise or of all addresses, and of their steps.
        token_stride_max: of any plane, in bytes.
        heads_adjoin: heads of a token lie side by side in every plane.
    """

    def __init__(self, pool: KVPool, region_addresses: Sequence[int], device: torch.device) -> None:
        """Put the table of planes on the device.

        Args:
            region_addresses: of the first byte of each of the pool's regions, in the device's address space.
        Raises:
            PoolError: there are not as many addresses as regions.
            DeviceError: the device has no memory for the table.
        """
        geometry = pool.geometry
        if len(region_addresses) != len(geometry.region_bytes):
            raise PoolError(
                f"{len(region_addresses)} addresses for {len(geometry.region_bytes)} regions: pass one for each region"
            )
        self.pool = pool
        lines = [
            (region_addresses[plane.region] + plane.offset, plane.page_stride, plane.token_stride, plane.head_stride)
            for plane in geometry.planes
        ]
        try:
            self.planes = torch.tensor(lines, dtype=torch.int64, device=device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"the GPU has no memory left for a pool's table of {len(lines)} planes: leave the agent some of what its "
                "engine takes"
            ) from error
        self.device = self.planes.device
        # A step that is never made does not spoil the alignment. An address is always used.
        counts = (2, pool.page_count, pool.page_tokens, pool.head_count)
        steps = [step for line in lines for step, count in zip(line, counts, strict=True) if count > 1]
        self.bits = functools.reduce(operator.or_, steps, pool.row_bytes)
        self.token_stride_max = max(plane.token_stride for plane in geometry.planes)
        self.heads_adjoin = all(plane.head_stride == pool.row_bytes for plane in geometry.planes)

    def grid(
        self,
        tokens: tuple[int, int],
        layers: range,
        heads: range,
        slab: int,
        payload_bytes: int,
        page_first: int,
        tuning: Tuning,
    ) -> Grid:
        """Return the launch for a request that `slab.payload_bytes` has passed.

        Args:
            slab: the slab's address.
            payload_bytes: of the slab.
            page_first: which page id is that of the first token.
        Raises:
            ShapeError: more than the kernels can count; names the argument.
        """
        pool = self.pool
        own_heads, row = (1, len(heads) * pool.row_bytes) if self.heads_adjoin else (len(heads), pool.row_bytes)
        token_bytes = own_heads * row
        if token_bytes > TOKEN_BYTES_MAX:
            raise ShapeError(f"heads is {heads}: {token_bytes} bytes a token are above {TOKEN_BYTES_MAX}, choose fewer")
        plane_count = pool.kinds * len(layers)
        token_count = payload_bytes // (plane_count * token_bytes)
        slot_first = tokens[0] % pool.page_tokens
        unit = unit_of(self.bits | slab)
        tile = choose_tile(unit, row, max(self.token_stride_max, token_bytes), pool.page_tokens, tuning.tile_bytes)
        tiles = tile_count(tile, row, slot_first, token_count)
        programs = (tiles, own_heads, plane_count)
        all_tiles = tiles * own_heads * plane_count
        too_many = all_tiles > TOKEN_COUNT_MAX if tuning.programs_max else any(map(operator.gt, programs, GRID_MAX))
        if token_count > TOKEN_COUNT_MAX or too_many:
            raise ShapeError(f"tokens is {tokens}: more than one launch can copy, choose fewer")
        chosen = (layers.start, len(layers), pool.layer_count, heads.start)
        numbers = (*chosen, slot_first, token_count, row // unit, page_first, *programs)
        if tuning.programs_max:
            programs = (min(all_tiles, tuning.programs_max), 1, 1)
        return Grid(programs, numbers, tile)
