"""Detects a device that hangs, from the times at which copies have ended. Pure: no device, no clock.

Called by `device_copier` for each copy that has not ended. Only a new process recovers from a device that hangs.
"""

from __future__ import annotations

from collections.abc import Iterable

from longshore_agent.errors import DeviceError
from longshore_agent.memory.pools import KVPool

# A copy takes some milliseconds even beside an engine that computes without pause, and a queued one sees others end. A
# device that ends no copy for hundreds of times as long is not just busy.
QUIET_LIMIT_S = 5.0
# The limit while an engine waits for its pages. A killed engine's pages must be free after 2 s. The rest of that is for
# the worker to notice, for its last messages, and for the driver to free the memory.
LEAVING_LIMIT_S = 0.8


class CopyProgress:
    """The progress of one stream."""

    __slots__ = ("_ended_s", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended_s = 0.0

    def ended(self, now_s: float) -> None:
        """Record that a copy has ended."""
        self._ended_s = now_s

    def check(self, now_s: float, queued_s: float, pools: Iterable[KVPool]) -> None:
        """Check a copy that has not ended.

        Args:
            now_s, queued_s: of one monotonic clock.
            pools: the pools that the copy holds.
        Raises:
            DeviceError: no copy of this stream has ended within the limit.
        """
        since_s = max(queued_s, self._ended_s)
        if now_s - since_s < LEAVING_LIMIT_S:
            return
        if now_s - since_s >= QUIET_LIMIT_S:
            raise DeviceError(f"{self._name} has ended no copy for {QUIET_LIMIT_S:g} s: it hangs")
        closed_s = min((pool.closed_s for pool in pools if pool.closed_s is not None), default=now_s)
        if now_s - max(since_s, closed_s) >= LEAVING_LIMIT_S:
            raise DeviceError(
                f"{self._name} has ended no copy for {LEAVING_LIMIT_S:g} s, and an engine waits for its pages: it hangs"
            )
