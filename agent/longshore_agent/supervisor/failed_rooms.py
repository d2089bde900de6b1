"""Remembers the rooms that workers of an instance have failed, for workers of sibling ranks that start later.

Called by the supervisor, which tells a starting worker of them before the worker serves its engine. So the worker refuses a
repeated offer or claim of its engine with the first failure's reason.
"""

from __future__ import annotations

from collections import OrderedDict

from longshore_agent.control.node_link import SiblingFailed
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import RoomKey

# Remembered rooms of one instance, the newest: more than an engine has open at once.
FAILED_ROOMS_MAX = 16_384

Family = tuple[str, int]  # instance, DP rank


class FailedRooms:
    """See the module. Time is an argument."""

    def __init__(self, kept_s: float) -> None:
        """Remember each failure for `kept_s` seconds."""
        self._kept_s = kept_s
        self._families: dict[Family, OrderedDict[tuple[Half, RoomKey], tuple[SiblingFailed, float]]] = {}

    def add(self, family: Family, message: SiblingFailed, now_s: float) -> bool:
        """Note that a worker of a family has failed a room; return whether this is news to its siblings.

        Siblings that fail the room for that reason report it as well; the first message stays.
        """
        rooms = self._families.setdefault(family, OrderedDict())
        if (message.half, message.key) in rooms:
            return False
        rooms[message.half, message.key] = (message, now_s + self._kept_s)
        while len(rooms) > FAILED_ROOMS_MAX:
            rooms.popitem(last=False)
        return True

    def of(self, family: Family, now_s: float) -> list[SiblingFailed]:
        """Return the failures that a new worker of a family must hear."""
        rooms = self._families.get(family, OrderedDict())
        while rooms and next(iter(rooms.values()))[1] <= now_s:
            rooms.popitem(last=False)
        return [message for message, _ in rooms.values()]

    def forget(self, family: Family) -> None:
        """Forget a family without workers: its next engine may use the same room ids."""
        self._families.pop(family, None)
