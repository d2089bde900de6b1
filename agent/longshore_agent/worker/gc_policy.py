"""When Python looks through a worker's objects for garbage in cycles: not while rooms wait.

Such a look stops every thread of the process. With torch loaded it goes through 200,000 objects and takes 100 ms or more,
which all rooms under way then take longer. Called by the worker's control thread; knows nothing of rooms but whether there are any.
"""

from __future__ import annotations

import gc

# Looks through what is young come first: after so many of the middle ones a look through everything would be worth it.
_LOOKS_DUE = 10
# The same where a worker never rests. What rooms leave is freed by counting references: garbage in cycles hardly grows.
_LOOKS_MAX = 1000
# So long without a room, the next is not likely to come while we look.
_REST_NS = 1_000_000_000


class GCPolicy:
    """See the module. One in a process."""

    def __init__(self, now_ns: int) -> None:
        self._busy_ns = now_ns

    def settle(self) -> None:
        """What has been loaded up to now stays for the process's life: no look goes through it any more.

        Takes as long as a look the first time, when no room is there, and then microseconds.
        """
        if not gc.get_freeze_count():
            gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _LOOKS_MAX)

    def rest(self, now_ns: int, *, busy: bool) -> None:
        """Look through everything that has come since, if that is due and no room has been open for a while."""
        if busy:
            self._busy_ns = now_ns
        elif now_ns - self._busy_ns >= _REST_NS and gc.get_count()[2] >= _LOOKS_DUE:
            gc.collect()
