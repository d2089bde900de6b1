"""A cache of values by the identity of the objects that they were made of, such as a page list's copy on a device.

Used in one thread or under a lock. Comparing lists would take as long as what is saved, so equal objects are not one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class IdentityCache(Generic[Made]):
    """The values that were asked for last, at most `count_max`."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # The objects are kept beside what was made of them: no other one gets their identity meanwhile.
        self._values: OrderedDict[tuple[int, ...], tuple[tuple[object, ...], Made]] = OrderedDict()

    def get(self, make: Callable[[], Made], *origins: object) -> Made:
        """Return what `make` returned for these very objects, by calling it if that is not kept; passes its errors on."""
        key = tuple(map(id, origins))
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = (origins, make())
            if len(self._values) > self._count_max:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return found[1]
