"""The deadlines of one protocol core, in one table. Used by the cores only. Time is an argument."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

from longshore_wire.effects import PairName, PeerId
from longshore_wire.peer_messages import RoomKey

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """Holds at most one deadline for each key; a new one replaces it.

    Most deadlines are put off before they are due. Then the heap keeps the earlier one, which leads to the later one when
    it is reached.
    """

    def __init__(self) -> None:
        self._due_ns: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._due_ns)

    def set(self, key: K, due_ns: int) -> None:
        """Set the deadline of `key` to `due_ns`."""
        before_ns = self._due_ns.get(key)
        self._due_ns[key] = due_ns
        if before_ns is not None and before_ns <= due_ns:
            return
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
        # The heap's first is never after the earliest deadline.
        while self._heap and self._heap[0][0] <= now_ns:
            next_ns = self.next_ns()
            if next_ns is None or next_ns > now_ns:
                break
            key = heapq.heappop(self._heap)[2]
            del self._due_ns[key]
            due.append(key)
        return due

    def next_ns(self) -> int | None:
        """Return the earliest deadline, or None."""
        while self._heap:
            due_ns, number, key = self._heap[0]
            current_ns = self._due_ns.get(key)
            if current_ns == due_ns:
                return due_ns
            if current_ns is None or current_ns < due_ns:
                heapq.heappop(self._heap)
            else:
                heapq.heapreplace(self._heap, (current_ns, number, key))
        return None


class Deadlines:
    """The table: when to repeat what, to look at which peer, and to end which room.

    Attributes:
        repeats: of the message about a pair of a room that a peer has not answered.
        peers: of the next heartbeat, or of the next check of a peer's silence.
        rooms: of the timeouts of rooms.
        absent_ns: total time in which the core's worker did not run. It counts neither as silence nor as idleness.
    """

    def __init__(self) -> None:
        self.repeats: Timers[tuple[RoomKey, PairName]] = Timers()
        self.peers: Timers[PeerId] = Timers()
        self.rooms: Timers[RoomKey] = Timers()
        self.absent_ns = 0

    def next_ns(self) -> int | None:
        """Return the earliest deadline, or None."""
        kinds = (self.repeats, self.peers, self.rooms)
        dues = [due_ns for timers in kinds if (due_ns := timers.next_ns()) is not None]
        return min(dues, default=None)
