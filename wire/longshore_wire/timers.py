"""Deadlines by key, for the cores. Time is an argument; nothing here reads a clock."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """Holds at most one deadline for each key; a new one replaces it."""

    def __init__(self) -> None:
        self._due_ns: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._due_ns)

    def set(self, key: K, due_ns: int) -> None:
        """Set the deadline of `key` to `due_ns`."""
        self._due_ns[key] = due_ns
        self._sequence += 1
        heapq.heappush(self._heap, (due_ns, self._sequence, key))
        if len(self._heap) > 64 + 4 * len(self._due_ns):
            self._heap = [(due, n, k) for n, (k, due) in enumerate(self._due_ns.items(), self._sequence)]
            self._sequence += len(self._heap)
            heapq.heapify(self._heap)

    def clear(self, key: K) -> None:
        """Remove the deadline of `key`, if any."""
        self._due_ns.pop(key, None)

    def pop(self, now_ns: int) -> list[K]:
        """Return the due keys, earliest first, and remove their deadlines."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now_ns:
            due_ns, _, key = heapq.heappop(self._heap)
            if self._due_ns.get(key) == due_ns:
                del self._due_ns[key]
                due.append(key)
        return due

    def next_ns(self) -> int | None:
        """Return the earliest deadline, or None."""
        while self._heap and self._due_ns.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
