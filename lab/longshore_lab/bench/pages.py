"""Engines' pages with known bytes: fills source pages, wipes target pages, and checks them after a transfer.

Called by `scene`. The pages are the test engine's, in shared memory or on a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np

from longshore_lab.bench.errors import BenchError
from longshore_lab.devices import CPU
from longshore_lab.test_engine.memory import HostMemory, Memory
from longshore_lab.test_engine.pages import Pages
from longshore_wire.layout import KVLayout

# All engines of a run have the same sequence.
_SEED = 1


class SequencePages(Pages):
    """One rank's pool and the pages in it that hold the sequence, in random order.

    Attributes:
        table: page ids of the sequence.
    """

    def __init__(
        self, layout: KVLayout, token_count: int, seed: int, allocate: Callable[[int], Memory] = HostMemory
    ) -> None:
        page_count = math.ceil(token_count / layout.page_size)
        super().__init__(layout, page_count, allocate)
        self.table = random.Random(seed).sample(range(page_count), page_count)

    def fill(self, token_count: int) -> None:
        """Write the known bytes of the first tokens."""
        for plane in range(len(self.geometry.planes)):
            self.scatter(plane, self.pages_of(token_count), self.sequence(plane, _SEED, token_count))

    def wipe(self, token_count: int) -> None:
        """Zero the pages of the first tokens."""
        for plane in range(len(self.geometry.planes)):
            self.scatter(plane, self.pages_of(token_count), 0)

    def check(self, token_count: int) -> None:
        """Raise BenchError unless all bytes of the first tokens are right and the rest of their pages is untouched."""
        for plane in range(len(self.geometry.planes)):
            moved = self.read(plane, 0, len(self.table))[self.pages_of(token_count)]
            wrong = np.argwhere(moved != self.sequence(plane, _SEED, token_count))
            if len(wrong):
                token = int(wrong[0, 0]) * self.layout.page_size + int(wrong[0, 1])
                raise BenchError(f"token {token} of plane {plane} differs: the bytes that arrived are wrong")

    def pages_of(self, token_count: int) -> list[int]:
        """Return the pages that hold the first tokens."""
        return self.table[: math.ceil(token_count / self.layout.page_size)]


def open_pages(layout: KVLayout, token_count: int, seed: int, device: str) -> SequencePages:
    """Return pages on a device. Raises EngineError: torch cannot use it, or it has too little memory."""
    if device == CPU:
        return SequencePages(layout, token_count, seed)
    # Imported here because it loads torch, which a run in host memory does not need.
    from longshore_lab.engine.device_memory import DeviceMemory

    return SequencePages(layout, token_count, seed, lambda length_bytes: DeviceMemory(length_bytes, device))
