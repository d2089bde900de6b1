"""Converts pieces of memory to NIXL's rows of address, length and device, and names the kind of memory. Pure.

Called by nixl.py only.
"""

from __future__ import annotations

import numpy as np

from longshore_agent.transports.base import Addresses


def kind_of(device_index: int) -> tuple[str, int]:
    """Return NIXL's name of a GPU's memory or of host memory (-1), and NIXL's number of the device."""
    return ("VRAM", device_index) if device_index >= 0 else ("DRAM", 0)


def rows_of(
    addresses: Addresses, lengths: Addresses, device_index: int
) -> tuple[Addresses | list[tuple[int, int, int]], str]:
    """Return the pieces as NIXL's rows [n, 3], and the kind of their memory."""
    kind, device = kind_of(device_index)
    if len(addresses) == 1:
        # Most writes of slabs have one piece, for which an array costs more than it saves.
        return [(int(addresses[0]), int(lengths[0]), device)], kind
    rows = np.full((len(addresses), 3), device, dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    return rows, kind
