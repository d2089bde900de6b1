"""Which deployments are to be looked at, each at most once at a time and as often as something happened. No I/O.

What is urgent, such as a change of a spec, comes before everything else, which is mostly counts of a rollout.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from longshore_operator.world import Key

# After a fault: soon, then more and more seldom, and never less often than a resync comes by.
BACKOFFS_S = (0.2, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
# A rollout over many nodes changes counts many times a second: one look after a while covers all that happened meanwhile.
PAUSE_S = 1.0


class WorkQueue:
    """Keys in the order in which they came, urgent ones first.

    After a look a key rests for a while: what happens meanwhile makes one more look when that is over. An urgent one,
    such as a change of the spec, does not wait for it.
    """

    def __init__(self) -> None:
        self._urgent: deque[Key] = deque()
        self._others: deque[Key] = deque()
        # As many as keys wait in the two.
        self._count = asyncio.Semaphore(0)
        self._waiting: set[Key] = set()
        # Keys that are worked on, and whether they come again at once.
        self._working: dict[Key, bool] = {}
        self._again: set[Key] = set()
        self._resting: dict[Key, asyncio.TimerHandle] = {}
        self._faults: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    def add(self, keys: Iterable[Key], *, urgent: bool = False) -> None:
        """Have these looked at."""
        for key in keys:
            if key in self._working:
                self._again.add(key)
                self._working[key] |= urgent
            elif key in self._resting and not urgent:
                self._again.add(key)
            elif key not in self._waiting:
                self._put(key, urgent=urgent)
            elif urgent and key in self._others:
                self._others.remove(key)
                self._urgent.append(key)

    async def take(self) -> Key:
        """Return the next key; the caller must hand it to `done`."""
        await self._count.acquire()
        key = (self._urgent or self._others).popleft()
        self._waiting.discard(key)
        self._working[key] = False
        return key

    def done(self, key: Key, *, failed: bool = False, progress: bool = False, again_s: float | None = None) -> None:
        """Let go of a key. A failed one comes back after a rest that grows from fault to fault.

        Args:
            progress: it failed and yet did something: what it met next is a fault of its own.
            again_s: also look again after this.
        """
        urgent = self._working.pop(key)
        if progress:
            self._faults.pop(key, None)
        if failed:
            count = self._faults[key] = self._faults.get(key, 0) + 1
            self._again.add(key)
            self._rest(key, BACKOFFS_S[min(count, len(BACKOFFS_S)) - 1])
            return
        self._faults.pop(key, None)
        if urgent:
            self._put(key, urgent=True)
        elif again_s is not None and key not in self._again:
            self._again.add(key)
            self._rest(key, again_s)
        else:
            self._rest(key, PAUSE_S)

    def _put(self, key: Key, *, urgent: bool = False) -> None:
        if (timer := self._resting.pop(key, None)) is not None:
            timer.cancel()
        self._again.discard(key)
        self._waiting.add(key)
        (self._urgent if urgent else self._others).append(key)
        self._count.release()

    def _rest(self, key: Key, delay_s: float) -> None:
        self._resting[key] = asyncio.get_running_loop().call_later(delay_s, self._wake, key)

    def _wake(self, key: Key) -> None:
        del self._resting[key]
        if key in self._again:
            self._put(key)
