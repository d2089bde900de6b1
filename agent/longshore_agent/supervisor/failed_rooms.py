"""Keeps the rooms that workers of an instance have failed, for workers of sibling ranks that start later.

Called by the supervisor, which sends them to a starting worker before that serves its engine. The worker then refuses a
repeated offer or claim of its engine with the first failure's reason.
"""

from __future__ import annotations

from collections import OrderedDict

from longshore_agent.control.node_link import RoomFailed
from longshore_wire.effects import Replica
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import RoomKey

# Rooms kept for one instance, the newest ones: more than an engine has open concurrently.
FAILED_ROOMS_MAX = 16_384
# A room of one request, or of any.
_Name = tuple[Half, RoomKey, bytes | None]


class FailedRooms:
    """Failed rooms by replica. Time is an argument."""

    def __init__(self, kept_s: float) -> None:
        """Keep each failure for `kept_s` seconds."""
        self._kept_s = kept_s
        self._replicas: dict[Replica, OrderedDict[_Name, tuple[RoomFailed, float]]] = {}

    def add(self, replica: Replica, message: RoomFailed, now_s: float) -> bool:
        """Record that a worker of a replica has failed a room; return whether its siblings must be notified.

        Siblings that fail the room for this reason also report it; the first message is kept.
        """
        rooms = self._replicas.setdefault(replica, OrderedDict())
        name = (message.half, message.key, message.capability)
        if name in rooms:
            return False
        rooms[name] = (message, now_s + self._kept_s)
        while len(rooms) > FAILED_ROOMS_MAX:
            rooms.popitem(last=False)
        return True

    def of(self, replica: Replica, now_s: float) -> list[RoomFailed]:
        """Return the failures to send to a new worker of a replica."""
        rooms = self._replicas.get(replica, OrderedDict())
        while rooms and next(iter(rooms.values()))[1] <= now_s:
            rooms.popitem(last=False)
        return [message for message, _ in rooms.values()]

    def forget(self, replica: Replica) -> None:
        """Drop a replica without workers, since its next engine may use the same room ids."""
        self._replicas.pop(replica, None)
