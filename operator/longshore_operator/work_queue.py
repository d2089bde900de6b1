"""Which deployments are to be looked at, each at most once at a time and as often as something happened. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from longshore_operator.world import Key

# After a fault: soon, then more and more seldom, and never less often than a resync comes by.
BACKOFFS_S = (0.2, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
# A rollout over many nodes changes counts many times a second: one look covers all that happened meanwhile.
PAUSE_S = 0.25


class WorkQueue:
    """Keys in the order in which they came; a key that is added while it is worked on comes again afterwards."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._faults: dict[Key, int] = {}
        self._timers: set[asyncio.TimerHandle] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    def add(self, keys: Iterable[Key]) -> None:
        """Have these looked at as soon as a worker is free."""
        for key in keys:
            if key in self._working:
                self._again.add(key)
            elif key not in self._waiting:
                self._waiting.add(key)
                self._ready.put_nowait(key)

    async def take(self) -> Key:
        """Return the next key; the caller must hand it to `done`."""
        key = await self._ready.get()
        self._waiting.discard(key)
        self._working.add(key)
        return key

    def done(self, key: Key, *, failed: bool = False, again_s: float | None = None) -> None:
        """Let go of a key: a failed one comes back after a pause that grows, others if anything happened meanwhile.

        Args:
            again_s: also look again after this.
        """
        self._working.discard(key)
        happened = key in self._again
        self._again.discard(key)
        if failed:
            count = self._faults[key] = self._faults.get(key, 0) + 1
            self._later(key, BACKOFFS_S[min(count, len(BACKOFFS_S)) - 1])
            return
        self._faults.pop(key, None)
        if happened:
            self._later(key, PAUSE_S)
        elif again_s is not None:
            self._later(key, again_s)

    def _later(self, key: Key, delay_s: float) -> None:
        def come() -> None:
            self._timers.discard(handle)
            self.add([key])

        handle = asyncio.get_running_loop().call_later(delay_s, come)
        self._timers.add(handle)
