"""Runs Python's full cyclic garbage collection only while no room is open.

Called by the worker's control thread. A full collection stops every thread of the process: with torch loaded it visits
200,000 objects, takes 100 ms or more, and delays every open room by that.
"""

from __future__ import annotations

import gc

# A full collection is due after this many collections of the middle generation.
_LOOKS_DUE = 10
# If a worker never rests, Python collects after this many. Reference counts free a room's objects: cycles hardly grow.
_LOOKS_MAX = 1000
# After this long without a room, the next one is unlikely to come during a collection.
_REST_NS = 1_000_000_000


class GCPolicy:
    """See the module. One in a process."""

    def __init__(self, now_ns: int) -> None:
        self._busy_ns = now_ns

    def settle(self) -> None:
        """Exclude all objects that exist now from later collections.

        The first call, when no room is open, takes as long as a full collection; later calls take microseconds.
        """
        if not gc.get_freeze_count():
            gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _LOOKS_MAX)

    def rest(self, now_ns: int, *, busy: bool) -> None:
        """Collect if a full collection is due and no room has been open for `_REST_NS`."""
        if busy:
            self._busy_ns = now_ns
        elif now_ns - self._busy_ns >= _REST_NS and gc.get_count()[2] >= _LOOKS_DUE:
            gc.collect()
