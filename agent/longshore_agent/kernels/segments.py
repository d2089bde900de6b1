"""Where tokens of a sequence lie in two sets of pages at once. Pure arithmetic; called by `direct` and by path.runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PageList:
    """Pages of a sequence on one side: `pages[i]` holds page number `first_page + i`."""

    page_size: int
    pages: npt.NDArray[np.int32]
    first_page: int


def between(source: PageList, target: PageList, tokens: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Cut tokens [first, end) where either side's page ends: [m, 5] of source page, slot, target page, slot, token count."""
    first, end = tokens
    cuts = {first, end}
    for side in (source, target):
        cuts.update(range((first // side.page_size + 1) * side.page_size, end, side.page_size))
    starts = np.array(sorted(cuts), dtype=np.int64)
    begin, counts = starts[:-1], np.diff(starts)
    columns = []
    for side in (source, target):
        columns += [side.pages[begin // side.page_size - side.first_page].astype(np.int64), begin % side.page_size]
    return np.stack([*columns, counts], axis=1)
