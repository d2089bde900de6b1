"""Queues deployments for reconciles, with at most one reconcile of each at a time. No I/O.

Urgent keys, such as those of a changed spec, come before all others, which are mostly counts of a rollout.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from longshore_operator.world import Key

# Backoff after failures, in seconds. The maximum is below the resync interval.
BACKOFFS_S = (0.2, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
# A rollout over many nodes changes counts many times a second. One reconcile after this pause covers all of them.
PAUSE_S = 1.0


class WorkQueue:
    """A FIFO queue of keys, urgent ones first.

    After a reconcile a key pauses for `PAUSE_S`. Events in that time cause one more reconcile when it ends. An urgent
    key, such as that of a changed spec, does not wait.
    """

    def __init__(self) -> None:
        self._urgent: deque[Key] = deque()
        self._others: deque[Key] = deque()
        # Counts the keys in both queues.
        self._count = asyncio.Semaphore(0)
        self._waiting: set[Key] = set()
        # Keys that are being reconciled, and whether to reconcile them again at once.
        self._working: dict[Key, bool] = {}
        self._again: set[Key] = set()
        self._resting: dict[Key, asyncio.TimerHandle] = {}
        self._faults: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    def add(self, keys: Iterable[Key], *, urgent: bool = False) -> None:
        """Queue these keys."""
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
        """Wait for the next key and return it. The caller must pass it to `done`."""
        await self._count.acquire()
        key = (self._urgent or self._others).popleft()
        self._waiting.discard(key)
        self._working[key] = False
        return key

    def done(self, key: Key, *, failed: bool = False, progress: bool = False, again_s: float | None = None) -> None:
        """Finish a key. A failed key is queued again after a backoff that grows with each failure.

        Args:
            progress: it made progress before it failed, so the backoff starts anew.
            again_s: queue it again after this many seconds.
        """
        urgent = self._working.pop(key)
        if progress:
            self._faults.pop(key, None)
        if failed:
            count = self._faults[key] = self._faults.get(key, 0) + 1
            if urgent:
                self._put(key, urgent=True)
                return
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
