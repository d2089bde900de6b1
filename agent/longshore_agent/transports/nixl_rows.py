"""Pieces of memory as NIXL takes them: an address, a length and a device each, and the kind of memory. Pure.

Called by nixl.py only.
"""

from __future__ import annotations

import numpy as np

from longshore_agent.transports.base import Addresses


def kind_of(device_index: int) -> tuple[str, int]:
    """Return NIXL's name of the memory of a GPU, or of the host's (-1), and its number of the device."""
    return ("VRAM", device_index) if device_index >= 0 else ("DRAM", 0)


def rows_of(
    addresses: Addresses, lengths: Addresses, device_index: int
) -> tuple[Addresses | list[tuple[int, int, int]], str]:
    """Return [n, 3] pieces, as NIXL takes them, and the kind of memory that they are in."""
    kind, device = kind_of(device_index)
    if len(addresses) == 1:
        # Most writes of slabs are one piece, for which an array costs more than it saves.
        return [(int(addresses[0]), int(lengths[0]), device)], kind
    rows = np.full((len(addresses), 3), device, dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    return rows, kind
