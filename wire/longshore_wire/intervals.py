"""Tracks sets of tokens as disjoint half-open intervals of integers.

Called by `room` to track offered, sent and scattered tokens. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from longshore_wire.errors import Reason, RoomError


class Coverage:
    """A set of integers as disjoint intervals. Neighbours are merged, so that in-order growth stays one interval."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self._total = 0

    @property
    def total(self) -> int:
        """Number of covered integers."""
        return self._total

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """The covered intervals in order; no two touch."""
        return tuple(zip(self._firsts, self._ends, strict=True))

    def add(self, first: int, end: int) -> None:
        """Cover [first, end), which is not empty.

        Raises:
            RoomError: a part is covered already (TOKENS_OVERLAP; names the overlap). Nothing was added.
        """
        assert first < end, (first, end)
        at = bisect_right(self._ends, first)
        if at < len(self._firsts) and self._firsts[at] < end:
            overlap = max(first, self._firsts[at]), min(end, self._ends[at])
            raise RoomError(
                f"tokens [{first}, {end}): [{overlap[0]}, {overlap[1]}) are there already", reason=Reason.TOKENS_OVERLAP
            )
        self._total += end - first
        joins_before = at > 0 and self._ends[at - 1] == first
        joins_after = at < len(self._firsts) and self._firsts[at] == end
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends[at]
            del self._firsts[at], self._ends[at]
        elif joins_before:
            self._ends[at - 1] = end
        elif joins_after:
            self._firsts[at] = first
        else:
            self._firsts.insert(at, first)
            self._ends.insert(at, end)

    def covers(self, first: int, end: int) -> bool:
        """Whether all of [first, end) is covered; an empty interval always is."""
        if first >= end:
            return True
        at = bisect_right(self._firsts, first) - 1
        return at >= 0 and end <= self._ends[at]

    def overlaps(self, first: int, end: int) -> bool:
        """Whether any of [first, end) is covered."""
        at = bisect_right(self._ends, first)
        return at < len(self._firsts) and self._firsts[at] < end and first < end

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [first, end) that are not covered, in order."""
        gaps = []
        at = bisect_right(self._ends, first)
        while first < end and at < len(self._firsts) and self._firsts[at] < end:
            if first < self._firsts[at]:
                gaps.append((first, self._firsts[at]))
            first = self._ends[at]
            at += 1
        if first < end:
            gaps.append((first, end))
        return gaps

    def __contains__(self, token: int) -> bool:
        return self.covers(token, token + 1)

    def end_of_prefix(self, first: int) -> int:
        """Return the end of the covered interval that holds `first`, or `first` if it is not covered."""
        at = bisect_left(self._ends, first + 1)
        if at < len(self._firsts) and self._firsts[at] <= first:
            return self._ends[at]
        return first
