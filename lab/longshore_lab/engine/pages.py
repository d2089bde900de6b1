"""Allocates pages of a pool by a free list.

Called by an in-process rank and by the driver of rank processes. Pure; knows no memory.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from longshore_lab.engine.errors import EngineError, PagesExhaustedError


class PageAllocator:
    """A free list of page ids.

    Freed pages go to the end of the list, so that a stale id is not reused at once. With a
    `shuffle_seed` the ids of one sequence are neither contiguous nor ascending, as in a long-running engine.
    """

    def __init__(self, page_count: int, shuffle_seed: int | None = None) -> None:
        ids = list(range(page_count))
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(ids)
        self.page_count = page_count
        self._free = deque(ids)
        self._used: set[int] = set()

    @property
    def free_count(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages.

        Raises:
            PagesExhaustedError: fewer are free; none was allocated.
        """
        if count > len(self._free):
            raise PagesExhaustedError(f"{count} pages were asked for and {len(self._free)} are free: free some first")
        taken = [self._free.popleft() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Free pages.

        Raises:
            EngineError: a page is not in use or is repeated; none was freed.
        """
        wrong = sorted(set(pages) - self._used)
        if wrong or len(set(pages)) != len(pages):
            raise EngineError(f"pages to free are not in use or repeat: {wrong or sorted(pages)}")
        self._used.difference_update(pages)
        self._free.extend(pages)


def pages_for(tokens: int, page_size: int) -> int:
    """Return the number of pages for `tokens` tokens."""
    return -(-tokens // page_size)
