"""Caches values by the identity of the objects that they were made of, such as a page list's copy on a device.

Used by the copiers and `neighbour_pools`, in one thread or under a lock. Equal objects are different keys: comparing
lists would take as long as the cache saves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class IdentityCache(Generic[Made]):
    """The most recently used values, at most `count_max`."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # The cache keeps the objects, too, so that no other object gets their identity.
        self._values: OrderedDict[tuple[int, ...], tuple[tuple[object, ...], Made]] = OrderedDict()

    def get(self, make: Callable[[], Made], *origins: object) -> Made:
        """Return the value of these objects. If it is not cached, call `make` and pass on its errors."""
        key = tuple(map(id, origins))
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = (origins, make())
            if len(self._values) > self._count_max:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return found[1]
