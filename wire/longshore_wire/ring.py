"""The ring allocator of staging memory: arithmetic only, no memory.

Called by the target's flow control, which grants regions to writers, and by a source for its own staging memory. Regions are cut in first-in-first-out order
from a head that wraps, stepping over whatever is still occupied or held: one region that is never freed costs
its own bytes and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec

from longshore_wire.errors import Reason, RingError


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A piece of the ring. `length_bytes` is what it occupies: the request rounded up to the alignment."""

    offset_bytes: int
    length_bytes: int
    generation: int  # counts regions of this ring from 1 on, never reused


class Ring:
    """Allocates regions in [0, capacity_bytes). Used + held + free bytes always equal the capacity.

    A region is live from `allocate` until `free` or `hold`. A held region, which a writer of an ended room
    may still write, occupies its bytes until `release_held`.
    Cost: O(log n) in the number of free gaps, plus the gaps that are too small for the request.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int = 64) -> None:
        """Create a ring that is free.

        Args:
            capacity_bytes: size of the ring's memory, rounded down to the alignment.
            alignment_bytes: offsets and lengths of regions are multiples of this.
        Raises:
            RingError: the capacity is less than one alignment.
        """
        assert alignment_bytes > 0, alignment_bytes
        if capacity_bytes < alignment_bytes:
            raise RingError(f"a ring of {capacity_bytes} bytes cannot hold one alignment of {alignment_bytes} bytes")
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = capacity_bytes // alignment_bytes * alignment_bytes
        # Free gaps by offset; no two touch.
        self._gap_firsts = [0]
        self._gap_ends = [self.capacity_bytes]
        self._head_bytes = 0
        self._round = 0
        self._live: dict[int, Region] = {}
        self._held: dict[int, Region] = {}
        self._used_bytes = 0
        self._held_bytes = 0
        self._next_generation = 1

    @property
    def used_bytes(self) -> int:
        """Bytes of live regions."""
        return self._used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of held regions."""
        return self._held_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that no region occupies."""
        return self.capacity_bytes - self._used_bytes - self._held_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest region that `allocate` would return now."""
        return max((end - first for first, end in zip(self._gap_firsts, self._gap_ends, strict=True)), default=0)

    @property
    def rounds(self) -> int:
        """Number of times that the head has wrapped."""
        return self._round

    @property
    def region_count(self) -> int:
        """Number of live and held regions."""
        return len(self._live) + len(self._held)

    def allocate(self, length_bytes: int) -> Region | None:
        """Allocate the next region of at least `length_bytes`; return None if no gap is long enough now.

        Raises:
            RingError: the ring could never hold it.
        """
        assert length_bytes > 0, length_bytes
        length_bytes = -(-length_bytes // self.alignment_bytes) * self.alignment_bytes
        if length_bytes > self.capacity_bytes:
            raise RingError(f"{length_bytes} bytes asked of a ring of {self.capacity_bytes} bytes: enlarge the ring")
        if length_bytes > self.free_bytes:
            return None
        offset_bytes = self._cut_after_head(length_bytes)
        if offset_bytes is None:
            offset_bytes = self._cut_before_head(length_bytes)
            if offset_bytes is None:
                return None
            self._round += 1
        self._head_bytes = offset_bytes + length_bytes
        region = Region(offset_bytes, length_bytes, self._next_generation)
        self._next_generation += 1
        self._live[region.generation] = region
        self._used_bytes += length_bytes
        return region

    def free(self, region: Region) -> None:
        """Free a live region. Raises RingError if it is not live: freed twice, held, or of another ring."""
        self._take(self._live, region, "live")
        self._used_bytes -= region.length_bytes
        self._add_gap(region.offset_bytes, region.offset_bytes + region.length_bytes)

    def hold(self, region: Region) -> None:
        """Keep a live region occupied after its room has ended. Raises RingError if it is not live."""
        self._take(self._live, region, "live")
        self._held[region.generation] = region
        self._used_bytes -= region.length_bytes
        self._held_bytes += region.length_bytes

    def release_held(self, region: Region) -> None:
        """Free a held region. Raises RingError if it is not held."""
        self._take(self._held, region, "held")
        self._held_bytes -= region.length_bytes
        self._add_gap(region.offset_bytes, region.offset_bytes + region.length_bytes)

    @staticmethod
    def _take(regions: dict[int, Region], region: Region, state: str) -> None:
        if regions.get(region.generation) != region:
            raise RingError(f"{region} is not {state} in this ring", reason=Reason.INTERNAL)
        del regions[region.generation]

    def _cut_after_head(self, length_bytes: int) -> int | None:
        """Allocate from the first sufficient gap at or after the head; return the offset."""
        for index in range(bisect_right(self._gap_ends, self._head_bytes), len(self._gap_firsts)):
            first = max(self._gap_firsts[index], self._head_bytes)
            if first + length_bytes <= self._gap_ends[index]:
                self._cut(index, first, first + length_bytes)
                return first
        return None

    def _cut_before_head(self, length_bytes: int) -> int | None:
        """Allocate from the first sufficient gap that begins before the head and may reach across it; return the offset."""
        for index in range(bisect_left(self._gap_firsts, self._head_bytes)):
            first = self._gap_firsts[index]
            if first + length_bytes <= self._gap_ends[index]:
                self._cut(index, first, first + length_bytes)
                return first
        return None

    def _cut(self, index: int, first: int, end: int) -> None:
        """Remove [first, end) from gap `index`; keep the parts before and after it."""
        gap_first, gap_end = self._gap_firsts[index], self._gap_ends[index]
        if gap_first < first and end < gap_end:
            self._gap_ends[index] = first
            self._gap_firsts.insert(index + 1, end)
            self._gap_ends.insert(index + 1, gap_end)
        elif gap_first < first:
            self._gap_ends[index] = first
        elif end < gap_end:
            self._gap_firsts[index] = end
        else:
            del self._gap_firsts[index], self._gap_ends[index]

    def _add_gap(self, first: int, end: int) -> None:
        """Add the gap [first, end) and merge it with adjacent gaps."""
        index = bisect_left(self._gap_firsts, first)
        assert index == 0 or self._gap_ends[index - 1] <= first
        assert index == len(self._gap_firsts) or end <= self._gap_firsts[index]
        joins_before = index > 0 and self._gap_ends[index - 1] == first
        joins_after = index < len(self._gap_firsts) and self._gap_firsts[index] == end
        if joins_before and joins_after:
            self._gap_ends[index - 1] = self._gap_ends[index]
            del self._gap_firsts[index], self._gap_ends[index]
        elif joins_before:
            self._gap_ends[index - 1] = end
        elif joins_after:
            self._gap_firsts[index] = first
        else:
            self._gap_firsts.insert(index, first)
            self._gap_ends.insert(index, end)
