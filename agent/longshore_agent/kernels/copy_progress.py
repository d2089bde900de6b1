"""Whether a device still brings copies to their ends, by the times at which it was seen to. Pure: no device, no clock.

Asked by `device_copier` for each copy that is not over yet. A device that hangs is mended by the end of its process alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from longshore_agent.errors import DeviceError
from longshore_agent.memory.pools import KVPool

# A copy takes some milliseconds, also beside an engine that computes without pause, and one that waits for others sees them
# end. Hundreds of times as long is no load any more.
QUIET_LIMIT_S = 5.0
# The same while an engine waits for its pages. Those of one that was killed are to be free 2 s later: what is left of that is
# for the worker to hear of it, to say why it ends, and for the driver to take its memory.
LEAVING_LIMIT_S = 1.0


class CopyProgress:
    """That of one stream."""

    __slots__ = ("_ended_s", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended_s = 0.0

    def ended(self, now_s: float) -> None:
        """A copy is over."""
        self._ended_s = now_s

    def check(self, now_s: float, queued_s: float, pools: Iterable[KVPool]) -> None:
        """A copy is not over yet.

        Args:
            now_s, queued_s: of one monotonic clock.
            pools: that the copy holds.
        Raises:
            DeviceError: no copy of this stream has ended for so long that none will.
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
